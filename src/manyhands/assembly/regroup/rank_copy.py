"""Copy of a rank: its whole state as tensors and plain values, and back into another trainer.

    model/       parameters and buffers, as this rank holds them (its slices, where it is split)
    optimizer/   the optimizer's state
    state/       of the merge strategy
    codec/       error feedback and the like
    rng/         random number generators
    callback/    tensors of the state of callbacks

The trainer that takes it may belong to another number of replicas; a replica is split over ranks
as before. State that is a rank's own stays with the rank. What a codec's second stage keeps
belongs to shards that change with the number of ranks: it starts anew there.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from manyhands.assembly.callbacks.callback_state import CALLBACK
from manyhands.assembly.checkpointing import Checkpointing
from manyhands.core import Tensors
from manyhands.parallel.reshard.rank_state import RankState, WholeTensorState
from manyhands.recover.kept_rounds import KeptState
from manyhands.replica import state
from manyhands.train import Trainer
from manyhands.trainer_parts import Milestones

SECOND_STAGE = "second/"


@dataclass
class RankCopy:
    """Reads and writes the state of one trainer."""

    trainer: Trainer
    checkpointing: Checkpointing

    def __post_init__(self) -> None:
        parts = self.checkpointing
        # ranks that share the update have a part of the optimizer's state each: all of it is kept
        # by all, or it would be lost with a rank
        self._local: RankState = parts.local or WholeTensorState(
            parts.module,
            parts.replica.update,
            lambda values: parts.context.data_group.all_reduce(values).wait(),
        )

    def read(self) -> tuple[Tensors, dict[str, Any]]:
        """The tensors themselves, which training changes, and plain values. All ranks call it at
        the same boundary."""
        trainer, parts = self.trainer, self.checkpointing
        optimizer, numbers = self._local.optimizer()
        schedule, scaler = parts.replica.schedule, parts.replica.scaler
        active = trainer.active
        callbacks, theirs = parts.kept.read()
        kinds = {
            "model": self._local.model(),
            "optimizer": optimizer,
            "state": active.state,
            "codec": active.codec_state(),
            "rng": state.rng_state(parts.context.device),
        }
        at = trainer.position
        meta = {
            "position": [at.epoch, at.offset, at.steps],
            "global_batch": parts.global_batch,
            "optimizer": numbers,
            "schedule": None if schedule is None else state.to_plain(schedule.state_dict()),
            "scaler": None if scaler is None else scaler.state_dict(),
            "word": active.word,
            "callbacks": callbacks,
            "metrics": dict(trainer.metrics),
            "done": dataclasses.asdict(trainer.done),
            "pace": trainer.pace.state(),
            "data": parts.plan.layout.data,
            "measured": parts.context.measured,
        }
        mine = {f"{k}/{n}": v.detach() for k, ts in kinds.items() for n, v in ts.items()}
        return mine | theirs, meta

    def write(self, kept: KeptState, own: bool) -> None:
        """Go on from `kept`. `own`: it was kept by this rank, else by a peer that it copies."""
        trainer, parts, meta = self.trainer, self.checkpointing, kept.meta
        self._local.load_model(kept.of_kind("model"))
        self._local.load_optimizer(kept.of_kind("optimizer"), meta["optimizer"])
        replica = parts.replica
        if replica.schedule is not None:
            replica.schedule.load_state_dict(state.from_plain(meta["schedule"]))
        if replica.scaler is not None:
            replica.scaler.load_state_dict(meta["scaler"])
        active = trainer.active
        with torch.no_grad():
            for name, value in kept.of_kind("state").items():
                active.state[name].copy_(value)
        if own:  # what a peer has held back it will send itself
            same = meta["data"] == parts.plan.layout.data
            codec = kept.of_kind("codec")
            active.load_codec_state(
                {k: v for k, v in codec.items() if same or not k.startswith(SECOND_STAGE)}
            )
            state.load_rng(kept.of_kind("rng"), parts.context.device)
        theirs = {f"{CALLBACK}{k}": v.clone() for k, v in kept.of_kind("callback").items()}
        parts.kept.write(meta["callbacks"], theirs)
        trainer.metrics = dict(meta["metrics"])
        trainer.go_on_from(kept.round, Milestones(**meta["done"]), meta["pace"])
