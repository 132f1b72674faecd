"""Checkpoints of a run: from the trainer's parts to a `Snapshot`, and back.

Rank 0 writes what is equal on all ranks, once: model, optimizer, strategy state, tables. What is a
rank's own is saved once per rank (`own_state`). A model that is split over ranks is written by all
ranks together (`sharded_snapshot`).
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from manyhands.assembly.callbacks.callback_state import RAW, CallbackState, refuse_split
from manyhands.assembly.own_state import (
    OwnState,
    agreed,
    all_rng,
    ranks_per_replica,
    saved_layout,
)
from manyhands.assembly.rank_context import RankContext
from manyhands.assembly.sharded_snapshot import rank_snapshot, restore_slices
from manyhands.assembly.tables import RunTables
from manyhands.core import Plan, Snapshot, Tensors
from manyhands.data.batches import BatchIterator
from manyhands.embedding import server_optimizer
from manyhands.errors import CheckpointError, Diverged, StoreError
from manyhands.parallel.reshard.rank_state import RankState
from manyhands.parallel.reshard.resharding import Resharding
from manyhands.plan import words
from manyhands.recover import sharded_file
from manyhands.recover.checkpoint import RankSnapshot
from manyhands.recover.given_values import (
    check_optimizer,
    differences,
    given_values,
    in_force,
    other_data,
    saved_values,
)
from manyhands.recover.table_files import SavingTables
from manyhands.replica import state
from manyhands.replica.flat import FlatParameters
from manyhands.replica.module import ModuleReplica
from manyhands.replica.several_optimizers.named_optimizers import kind
from manyhands.trainer_parts import ActiveStrategy


@dataclass
class Checkpointing:
    """Takes, writes and restores snapshots of this rank's run."""

    context: RankContext
    plan: Plan
    module: nn.Module
    replica: ModuleReplica
    batches: BatchIterator
    global_batch: int
    order: dict[str, Any]
    tables: RunTables | None = None
    resharding: Resharding | None = None  # of a model that is split: where this rank's shards lie
    local: RankState | None = None  # what this rank holds of it, by local names
    kept: CallbackState = field(default_factory=lambda: CallbackState(()))
    total_steps: int | None = None  # that the schedule was told

    def __post_init__(self) -> None:
        self.consensus: Tensors | None = None  # the restored model, before each rank took its own
        self.own = OwnState(
            self.context, self.plan, self.module, self.replica, self.resharding, self.local
        )
        self._given = self._present_values()
        self._not_saved: list[str] = []
        self._saving: SavingTables | None = None  # the tables of the snapshot taken last
        self._no_tables: Exception | None = None  # why there are none
        # the rank that writes the last checkpoint, where this process took part; and whether it
        # is this one
        self._writer: int | None = None
        self._writes = False
        if self.resharding is not None and self.plan.save != "off":
            folder = self.context.checkpoints.folder
            sharded_file.check_common(folder, self.context.group, self.context.device)

    def _present_values(self) -> dict[str, Any]:
        optimizer, schedule = self.replica.optimizer, self.replica.schedule
        nothing: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
        return given_values(
            kind(optimizer),
            state.plain_groups(self.module, optimizer, nothing),
            None if schedule is None else type(schedule).__qualname__,
            None if schedule is None else state.to_plain(schedule.state_dict()),
        )

    # -- to disk --

    def take(self, round: int, active: ActiveStrategy, metrics: dict[str, float]) -> Snapshot:
        """Every rank calls it. Rank 0 gets the snapshot, the others an empty one; of a model that
        is split, each rank gets its `RankSnapshot`."""
        self.context.checkpoints.finish_last(round)
        elastic = self.context.elastic
        # as it is now: where that rank dies before it has written, nobody else has the snapshot
        self._writer = 0 if elastic is None else min(elastic.members)
        self._writes = self._writer == self.context.rank
        with self._phase():
            if self.resharding is None:
                snapshot = self._take_whole(round, active, metrics)
            else:
                snapshot = self._take_slices(self.resharding, round, active, metrics)
            if self.tables is not None:
                self._agree_on_tables()
        return snapshot

    def _phase(self) -> AbstractContextManager[None]:
        return self.context.group.activity.during("checkpoint")

    def save(self, snapshot: Snapshot, metrics: dict[str, float]) -> str:
        """Write in the background what `take` returned; every rank calls it. Returns the path."""
        checkpoints, group = self.context.checkpoints, self.context.group
        with self._phase():
            self.context.keep_directory()
            if isinstance(snapshot, RankSnapshot):
                checkpoints.save_together(snapshot, metrics, group, self.context.device)
            elif self._writes and self._no_tables is not None:
                checkpoints.refuse(snapshot.round, self._no_tables)
            elif self._writes:
                checkpoints.save(snapshot, metrics, self._saving)
        return str(checkpoints.path(snapshot.round))

    def last_good(self) -> str | None:
        checkpoints = self.context.checkpoints
        with self._phase():
            checkpoints.wait()
        if checkpoints.last_good is None and (found := checkpoints.all()):
            return str(found[-1])
        return None if checkpoints.last_good is None else str(checkpoints.last_good)

    def last_failure(self) -> str:
        with self._phase():
            self.context.checkpoints.wait()
        return self.context.checkpoints.failure

    def writer_lost(self) -> bool:
        """Whether the rank that was to write the last checkpoint has died since; the same on all
        ranks after an exchange."""
        elastic, writer = self.context.elastic, self._writer
        return elastic is not None and writer is not None and writer not in elastic.members

    def _take_whole(
        self, round: int, active: ActiveStrategy, metrics: dict[str, float]
    ) -> Snapshot:
        context, update = self.context, self.replica.update
        model = active.consensus(self.replica, context.group)
        rng, own = self._of_ranks(active, model is not None)
        empty = Snapshot(round, {}, {}, {}, self.batches.position)
        if not self._writes and not update.slice_only:
            return empty
        tensors, optimizer_meta = update.save(
            lambda values: context.group.all_reduce(values).wait()
        )
        if not self._writes:
            return empty
        served: Tensors = {}
        if self.tables is not None:
            moments = self.tables.dense_state(active.strategy)
            flat = self.replica.flat
            if moments and isinstance(flat, FlatParameters):
                tensors = server_optimizer.named_state(flat, self.replica.optimizer, moments)
                served = server_optimizer.named_compensation(flat, moments)
        meta = self._meta(active, metrics, optimizer_meta)
        meta["codec_kept"] = any("/codec/" in name for name in own)
        with self.replica.flat.holding(model):
            params = state.model_state(self.module)
        params, meta["callbacks"], more = self.kept.saved(params, self.module, self.replica.flat)
        own |= more
        merge_state = {k: v.detach().to("cpu", copy=True) for k, v in active.state.items()}
        position = self.batches.position
        self._begin_tables(round)
        return Snapshot(round, params, tensors, served | merge_state, position, rng, meta, own)

    def _begin_tables(self, round: int) -> None:
        """Let the servers begin to write their rows. What a disk refuses fails the save, and not
        the training."""
        self._saving, self._no_tables = None, None
        self.context.checkpoints.wait()
        try:
            if self.tables is not None and not self.context.checkpoints.not_finite:
                self.context.keep_directory()
                self._saving = self.tables.begin_snapshot(round)
        except (OSError, StoreError) as e:
            self._no_tables = e

    def _agree_on_tables(self) -> None:
        """All ranks go on when the servers know what to save: nobody pushes before. Rows that are
        NaN or infinite, which the last save has met, end the run: they are never saved."""
        why, device = self.context.checkpoints.not_finite, self.context.device
        bad = torch.tensor([float(bool(why))], device=device)
        self.context.group.all_reduce({"bad": bad}, op="max").wait()
        if float(bad) > 0:
            good = self.last_good()
            last = f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"
            raise Diverged(f"{why or 'rows of a table became NaN or infinite'}; {last}")

    def _of_ranks(self, active: ActiveStrategy, model_apart: bool) -> tuple[Tensors, Tensors]:
        """Random numbers and what else each rank has for itself. Of ranks that come and go nothing
        is kept: the one that has it may be gone."""
        if self.context.elastic is not None:
            return {}, {}
        return all_rng(self.context), self.own.gather(active, model_apart)

    def _take_slices(
        self,
        resharding: Resharding,
        round: int,
        active: ActiveStrategy,
        metrics: dict[str, float],
    ) -> RankSnapshot:
        context, local = self.context, self.local
        assert local is not None
        model = active.consensus(self.replica, context.data_group)
        own = self.own.for_sharded_file(active, model is not None)
        callbacks = self.kept.plain("a checkpoint of a model that is split over ranks")
        tensors, optimizer_meta = local.optimizer()
        for name in resharding.without_spec(tensors):
            del tensors[name]
            if name not in self._not_saved:
                self._not_saved.append(name)
                context.notice(
                    f"not saved: the optimizer's {name}; its shape is not its parameter's, so it "
                    "cannot be resharded"
                )
        rng = state.rng_state(context.device)
        own |= {f"rng/{context.rank}/{k}": v for k, v in rng.items()}
        with self.replica.flat.holding(model):
            params = local.model()
            if model is not None:
                params = {k: v.clone() for k, v in params.items()}
        return rank_snapshot(
            context,
            resharding,
            round,
            self.batches.position,
            params,
            (tensors, optimizer_meta),
            own,
            lambda optimizer: self._meta(active, metrics, optimizer) | {"callbacks": callbacks},
        )

    def _meta(
        self, active: ActiveStrategy, metrics: dict[str, float], optimizer_meta: dict[str, Any]
    ) -> dict[str, Any]:
        schedule, scaler = self.replica.schedule, self.replica.scaler
        return {
            "optimizer": optimizer_meta,
            "given": self._given,
            "schedule": None if schedule is None else state.to_plain(schedule.state_dict()),
            "total_steps": self.total_steps,
            "scaler": None if scaler is None else scaler.state_dict(),
            "global_batch": self.global_batch,
            "order": self.order,
            "plan": words.describe(self.plan),
            "metrics": metrics,
            "size": self.context.process.size,
            "layout": dataclasses.asdict(self.plan.layout),
            "strategy": active.name,
            "word": active.word,
        }

    # -- and back --

    def restore(self, saved: Snapshot, strategy_name: str, agree: bool) -> None:
        """Restore model, optimizer, schedule, scaler and random numbers. `agree`: replicas go on
        alike, also where they were saved with moments of their own."""
        replica = self.replica
        self._compare_given(saved)
        if self.resharding is None:
            state.load_model(self.module, saved.params)
        if self.tables is not None:
            self.consensus = {k: v.clone() for k, v in replica.flat.values.items()}
            self.tables.restore(saved)
        mine = self.own.of_this_rank(saved)
        self._restore_callbacks(saved, mine)
        moments = {k.partition("/")[2]: v for k, v in mine.items() if k.startswith("optimizer/")}
        if agree:
            moments = agreed(self.context, moments)
        if self.resharding is None:
            replica.update.load({**saved.optimizer, **moments}, saved.meta["optimizer"])
        else:
            assert self.local is not None
            meta = saved.meta["optimizer"]
            restore_slices(self.context, self.resharding, self.local, moments, meta)
        if saved.meta.get("strategy", strategy_name) == strategy_name:
            for key, values in replica.flat.values.items():
                if (own := mine.get(f"param/{key}")) is not None:
                    values.copy_(own)
        if replica.schedule is not None and saved.meta["schedule"] is not None:
            self._restore_schedule(replica.schedule, saved.meta["schedule"])
        if replica.scaler is not None and saved.meta["scaler"] is not None:
            replica.scaler.load_state_dict(saved.meta["scaler"])
            if (own := mine.get("scaler/scale")) is not None and not agree:
                replica.scaler.update(new_scale=float(own))
        self._restore_rng(saved)

    def _compare_given(self, saved: Snapshot) -> None:
        """Say what of the task does not hold in the resumed run, in one warning."""
        then, now = saved_values(saved), self._given
        check_optimizer(then, now)
        said = differences(then, now, saved.meta["optimizer"]["groups"])
        said += other_data(saved.meta.get("order", {}), self.order)
        if said:
            self.context.warn("; ".join(said))
        self._given = in_force(then, now)

    def _restore_callbacks(self, saved: Snapshot, mine: Tensors) -> None:
        if self.resharding is not None:
            refuse_split(any(k.startswith(f"*/{RAW}") for k in saved.ranks))
        plain = saved.meta.get("callbacks", {})
        gone = self.kept.restore(plain, mine, self.module, self.replica.flat)
        if gone:
            self.context.notice(f"callbacks that are no longer there: {', '.join(gone)}")

    def _restore_schedule(self, schedule: LRScheduler, saved: dict[str, Any]) -> None:
        try:
            schedule.load_state_dict(state.from_plain(saved))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as e:
            raise CheckpointError(
                f"the task's schedule {type(schedule).__qualname__} cannot go on from the "
                f"checkpoint's ({type(e).__name__}: {e}); resume with the schedule it was saved "
                "from, or start anew without resume"
            ) from e

    def _restore_rng(self, saved: Snapshot) -> None:
        context, prefix = self.context, f"{self.context.rank}/"
        rng = {k.removeprefix(prefix): v for k, v in saved.rng.items() if k.startswith(prefix)}
        of_all = all(f"{r}/torch" in saved.rng for r in range(context.process.size))
        then = saved_layout(saved)
        split = ranks_per_replica(then) > 1 or self.resharding is not None
        # in another layout, other ranks must draw the same numbers: those along the tensor axis
        if rng and (then == self.plan.layout if split else of_all):
            state.load_rng(rng, context.device)

    def restore_strategy(self, saved: Snapshot, active: ActiveStrategy) -> Tensors:
        """Restore the strategy's state in place and return that of its codec. A strategy that was
        not at work then starts anew from the model."""
        then = saved.meta.get("strategy", active.name)
        if then != active.name:
            self.context.notice(
                f"merge={active.name} from here on, {then} before: it starts from the model, with "
                "a state of its own"
            )
            return {}
        fits = self.own.fits(saved)
        mine, common = self.own.of_this_rank(saved), saved.state if fits else {}
        lost = []
        for key, value in active.state.items():
            of_ranks = f"0/state/{key}" in saved.ranks
            found = mine.get(f"state/{key}", None if of_ranks else common.get(key))
            if found is not None and found.shape == value.shape:
                value.copy_(found)
            else:
                lost.append(key)
        if not fits and (lost or saved.meta.get("codec_kept")):
            kept = [*lost, *(["error feedback"] if saved.meta.get("codec_kept") else [])]
            self.context.notice(
                "the model is split over ranks in another way than before, so state of "
                f"merge={active.name} starts anew: {', '.join(kept)}"
            )
        elif lost:
            self.context.notice(
                f"saved on {saved.meta['size']} ranks, resumed on another number: what each rank "
                f"kept for itself starts anew: {', '.join(lost)}"
            )
        return {k.partition("/")[2]: v for k, v in mine.items() if k.startswith("codec/")}
