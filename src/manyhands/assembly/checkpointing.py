"""All of a run as a `Snapshot`, and back: what is common to all ranks once, what is a rank's own once a rank.

Nobody declares what differs: every rank's checksums are compared, and only tensors that are not the same everywhere travel to
rank 0, which writes. On as many ranks as before each takes its own back, bit for bit. On another number, all start from the one
model that the ranks stood for; error feedback is shared out evenly, so that nothing held back is lost.

Where the model is split over ranks nobody holds all of it: every rank adds its `RankSnapshot`, the ranks write one file together, and
each reads from a file only the regions that are its own, whatever layout has written it.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.assembly.rank_context import RankContext
from manyhands.assembly.tables import RunTables
from manyhands.core import (
    Layout,
    Plan,
    Snapshot,
    Tensors,
)
from manyhands.data.batches import BatchIterator
from manyhands.embedding import server_optimizer
from manyhands.errors import CheckpointError
from manyhands.parallel.reshard.rank_state import RankState
from manyhands.parallel.reshard.resharding import LocalTensor, Resharding
from manyhands.plan import words
from manyhands.recover import sharded_file
from manyhands.recover.checkpoint import RankSnapshot
from manyhands.replica import state
from manyhands.replica.flat import FlatParameters
from manyhands.replica.module import ModuleReplica
from manyhands.replica.update import prime
from manyhands.split.shard_slice import renamed
from manyhands.split.shard_spec import ShardSpec
from manyhands.trainer_parts import ActiveStrategy


@dataclass
class Checkpointing:
    """What a snapshot of this rank's run is made of."""

    context: RankContext
    plan: Plan
    module: nn.Module
    replica: ModuleReplica
    walk: BatchIterator
    global_batch: int
    order: dict[str, Any]
    serving: RunTables | None = None
    consensus: Tensors | None = (
        None  # the model that was restored, before each rank took its own back
    )
    parts: Resharding | None = (
        None  # where the model is split over ranks: how what this rank holds lies in the whole
    )
    local: RankState | None = None  # what it holds, by its own names

    def __post_init__(self) -> None:
        self._same_division: bool | None = None
        self._left_out: list[str] = []
        if self.parts is not None and self.plan.save != "off":
            sharded_file.check_common(
                self.context.checkpoints.folder, self.context.link, self.context.device
            )

    def take(self, round: int, rule: ActiveStrategy, metrics: dict[str, float]) -> Snapshot:
        """Every rank calls it. Rank 0 gets the snapshot, the others an empty one; of a model that is split each gets its `RankSnapshot`."""
        if self.parts is not None:
            assert self.local is not None
            return self._share(self.parts, self.local, round, rule, metrics)
        context, update = self.context, self.replica.update
        rng = _all_rng(context)
        model = rule.consensus(self.replica, context.link)
        own = self._own(rule, model is not None)
        empty = Snapshot(round, {}, {}, {}, self.walk.position)
        if context.rank != 0 and not update.part_only:
            return empty
        tensors, optimizer_meta = update.save(lambda values: context.link.all_reduce(values).wait())
        if context.rank != 0:
            return empty
        rows: Tensors = {}
        if self.serving is not None:
            rows, moments = self.serving.dump(rule.strategy)
            if moments and isinstance(self.replica.flat, FlatParameters):
                tensors = server_optimizer.named_state(
                    self.replica.flat, self.replica.optimizer, moments
                )
                rows |= server_optimizer.named_compensation(self.replica.flat, moments)
        meta = self._meta(rule, metrics, optimizer_meta)
        meta["wire_kept"] = any("/wire/" in name for name in own)
        with self.replica.flat.holding(model):
            params = state.model_state(self.module)
        merge_state = rows | {k: v.detach().to("cpu", copy=True) for k, v in rule.state.items()}
        return Snapshot(round, params, tensors, merge_state, self.walk.position, rng, meta, own)

    def save(self, snapshot: Snapshot, metrics: dict[str, float]) -> None:
        """Every rank calls it, with what `take` has given it."""
        if isinstance(snapshot, RankSnapshot):
            self.context.checkpoints.save_together(
                snapshot, metrics, self.context.link, self.context.device
            )
        elif self.context.rank == 0:
            self.context.checkpoints.save(snapshot, metrics)

    def _meta(
        self, rule: ActiveStrategy, metrics: dict[str, float], optimizer_meta: dict[str, Any]
    ) -> dict[str, Any]:
        schedule, scaler = self.replica.schedule, self.replica.scaler
        return {
            "optimizer": optimizer_meta,
            "schedule": None if schedule is None else state.to_plain(schedule.state_dict()),
            "scaler": None if scaler is None else scaler.state_dict(),
            "global_batch": self.global_batch,
            "order": self.order,
            "plan": words.describe(self.plan),
            "metrics": metrics,
            "size": self.context.process.size,
            "layout": dataclasses.asdict(self.plan.layout),
            "rule": rule.name,
            "part": rule.part,
        }

    def _share(
        self,
        parts: Resharding,
        local: RankState,
        round: int,
        rule: ActiveStrategy,
        metrics: dict[str, float],
    ) -> RankSnapshot:
        """What this rank adds: its regions of model and optimizer where it is the first to hold them, and what is its own."""
        context = self.context
        model = rule.consensus(self.replica, context.merging)
        own = self._own_share(rule, model is not None)
        tensors, optimizer_meta = local.optimizer()
        for name in parts.without_spec(tensors):
            del tensors[name]
            if name not in self._left_out:
                self._left_out.append(name)
                context.notice(
                    f"not saved, since its place in the whole is not known: the optimizer's {name}"
                )
        own |= {f"rng/{context.rank}/{k}": v for k, v in state.rng_state(context.device).items()}
        with self.replica.flat.holding(model):
            params = (
                local.model() if model is None else {k: v.clone() for k, v in local.model().items()}
            )
        held = [_under("model", h) for h in parts.local_tensors(params)] + [
            _under("optimizer", h) for h in parts.local_tensors(tensors)
        ]
        held += [LocalTensor(ShardSpec(name, tuple(v.shape)), v) for name, v in own.items()]
        note = {
            "optimizer": _renamed(optimizer_meta, parts.global_name),
            "parts": parts.signature(params),
        }
        survey = parts.survey(held, note)
        meta = {}
        if context.rank == 0:
            meta = self._meta(rule, metrics, _joined([n["optimizer"] for n in survey.notes]))
            meta["parts"] = [n["parts"] for n in survey.notes]
            meta["wire_kept"] = any(
                "/wire/" in name for name in survey.tensors if name.startswith("ranks/")
            )
        return RankSnapshot(
            round,
            {},
            {},
            {},
            self.walk.position,
            meta=meta,
            tensors=survey.tensors,
            mine=list(survey.mine),
        )

    def _own_share(self, rule: ActiveStrategy, model_apart: bool) -> Tensors:
        """By its name in the file: what is not the same on all ranks that hold the same of the model; what is, from the first of them."""
        inner, rank = _inner(self.plan.layout), self.context.rank
        mine = self._kept(rule) | {f"state/{k}": v for k, v in rule.state.items()}
        differing = _differing(self.context, mine)
        own = {f"ranks/{rank}/{k}": mine[k] for k in differing}
        if rank < inner:
            apart = ("wire/", "state/", "param/") if model_apart else ("wire/", "state/")
            own |= {
                f"ranks/*{rank}/{k}": v
                for k, v in mine.items()
                if k not in differing and k.startswith(apart)
            }
        return {k: v.detach() for k, v in own.items()}

    def _own(self, rule: ActiveStrategy, model_apart: bool) -> Tensors:
        """What is not the same on all ranks, of all of them; and what no other part of the snapshot holds. On rank 0."""
        mine = self._kept(rule)
        differing = _differing(self.context, mine)
        found = _gathered(self.context, {k: mine[k] for k in differing})
        apart = ("wire/", "param/") if model_apart else ("wire/",)
        once = [k for k in mine if k not in differing and k.startswith(apart)]
        return {**found, **{f"*/{k}": mine[k].detach().to("cpu", copy=True) for k in once}}

    def _kept(self, rule: ActiveStrategy) -> Tensors:
        """What may be a rank's own, by kind and name."""
        mine = {f"wire/{k}": v for k, v in rule.wire_state().items()}
        if not rule.strategy.replicas_agree:
            flat, optimizer = self.replica.flat, self.replica.optimizer
            new = prime(
                optimizer
            )  # for the time of saving: ranks must name the same, also one that has had no samples yet
            mine |= {f"param/{k}": v for k, v in flat.values.items()}
            kept = (
                state.optimizer_state(self.module, optimizer)
                if self.local is None
                else self.local.optimizer()
            )
            mine |= {f"optimizer/{k}": v for k, v in kept[0].items()}
            mine |= {f"state/{k}": v for k, v in rule.state.items()}
            if self.replica.scaler is not None:
                mine["scaler/scale"] = torch.tensor(
                    [self.replica.scaler.get_scale()], dtype=torch.float64
                )
            for p in new:
                del optimizer.state[p]
        return mine

    # -- and back --

    def restore(self, saved: Snapshot, rule_name: str) -> None:
        """Model, optimizer, schedule, scaler and random numbers."""
        replica, context = self.replica, self.context
        if self.parts is None:
            state.load_model(self.module, saved.params)
        if self.serving is not None:
            self.consensus = {k: v.clone() for k, v in replica.flat.values.items()}
            self.serving.restore(saved)
        mine = self._mine(saved)
        optimizer = {k.partition("/")[2]: v for k, v in mine.items() if k.startswith("optimizer/")}
        if self.parts is None:
            replica.update.load({**saved.optimizer, **optimizer}, saved.meta["optimizer"])
        else:
            assert self.local is not None
            self._restore_share(self.parts, self.local, optimizer, saved.meta["optimizer"])
        if saved.meta.get("rule", rule_name) == rule_name:
            for key, values in replica.flat.values.items():
                if (own := mine.get(f"param/{key}")) is not None:
                    values.copy_(own)
        if replica.schedule is not None and saved.meta["schedule"] is not None:
            replica.schedule.load_state_dict(state.from_plain(saved.meta["schedule"]))
        if replica.scaler is not None and saved.meta["scaler"] is not None:
            replica.scaler.load_state_dict(saved.meta["scaler"])
            if (own := mine.get("scaler/scale")) is not None:
                replica.scaler.update(new_scale=float(own))
        rng = {
            k.partition("/")[2]: v
            for k, v in saved.rng.items()
            if k.partition("/")[0] == str(context.rank)
        }
        of_all = all(f"{r}/torch" in saved.rng for r in range(context.process.size))
        split = _inner(_layout(saved)) > 1 or self.parts is not None
        # in another layout ranks have other parts to play: those that split matrices among them must draw the same numbers
        if rng and (_layout(saved) == self.plan.layout if split else of_all):
            state.load_rng(rng, context.device)

    def _restore_share(
        self, parts: Resharding, local: RankState, own: Tensors, meta: dict[str, Any]
    ) -> None:
        """Read this rank's part of the model and of the optimizer's state; what is its `own` comes instead of what is common."""
        context = self.context
        with context.checkpoints.reader() as reader:
            here = local.model()
            shapes = _shapes(reader, "model/")
            wanted = {k: r for k, r in parts.wanted_specs(shapes, here).items() if k in here}
            wrong = [f"{k} is not in the checkpoint" for k in here if k not in wanted]
            wrong += [
                f"{k} is {r.shape}, in the checkpoint {shapes[r.name]}"
                for k, r in wanted.items()
                if shapes[r.name] != r.shape
            ]
            names = {parts.first_name(r.name) for r in wanted.values()}
            claimed = torch.tensor(
                [int(parts.first_name(k) in names) for k in shapes],
                dtype=torch.int64,
                device=context.device,
            )
            context.link.all_reduce({"claimed": claimed}, op="max").wait()
            wrong += [
                f"{k} is only in the checkpoint"
                for k, is_ in zip(shapes, claimed.tolist(), strict=True)
                if not is_
            ]
            said = f"the checkpoint is of another model: {'; '.join(wrong)}. Resume with the model it was saved from, or start anew"
            sharded_file.agree(context.link, said if wrong else "", context.device)
            model = {k: reader.read(f"model/{r.name}", r) for k, r in wanted.items()}
            local.load_model(model)
            del model
            wanted = {
                k: r
                for k, r in parts.wanted_specs(_shapes(reader, "optimizer/"), here).items()
                if k.rpartition("/")[0] in here
            }
            moments = {k: reader.read(f"optimizer/{r.name}", r) for k, r in wanted.items()}
        numbers = {
            k: meta["numbers"][first]
            for k in here
            if (first := parts.global_name(k)) in meta["numbers"]
        }
        local.load_optimizer({**moments, **own}, {**meta, "numbers": numbers})

    def restore_rule(self, saved: Snapshot, rule: ActiveStrategy) -> Tensors:
        """The rule's state, in place; returns that of its wire. A rule that was not at work then starts anew from the model."""
        then = saved.meta.get("rule", rule.name)
        if then != rule.name:
            self.context.notice(
                f"merge={rule.name} from here on, {then} before: it starts from the model, with a state of its own"
            )
            return {}
        mine, common = self._mine(saved), saved.state if self._fits(saved) else {}
        lost = []
        for key, value in rule.state.items():
            of_ranks = f"0/state/{key}" in saved.ranks
            found = mine.get(f"state/{key}", None if of_ranks else common.get(key))
            if found is not None and found.shape == value.shape:
                value.copy_(found)
            else:
                lost.append(key)
        if not self._fits(saved) and (lost or saved.meta.get("wire_kept")):
            kept = ", ".join(
                [*lost, *(["what wires held back"] if saved.meta.get("wire_kept") else [])]
            )
            self.context.notice(
                f"the model is split over ranks in another way than before: what {rule.name} kept starts anew ({kept})"
            )
        elif lost:
            self.context.notice(
                f"what each of {saved.meta['size']} ranks kept for itself starts anew here: {', '.join(lost)}"
            )
        return {k.partition("/")[2]: v for k, v in mine.items() if k.startswith("wire/")}

    def _mine(self, saved: Snapshot) -> Tensors:
        """This rank's share of what ranks had for themselves: its own, or on another number of replicas what can be shared out."""
        if not self._fits(saved):
            return {}
        inner, before, now = _inner(self.plan.layout), _layout(saved).data, self.plan.layout.data
        at = self.context.rank % inner  # which part of the model this rank holds
        common, own = f"*{at if inner > 1 else ''}/", f"{self.context.rank}/"
        mine = {k.removeprefix(common): v for k, v in saved.ranks.items() if k.startswith(common)}
        if before == now:
            return {
                **mine,
                **{k.removeprefix(own): v for k, v in saved.ranks.items() if k.startswith(own)},
            }
        held_back = [k.partition("/")[2] for k in saved.ranks if k.startswith(f"{at}/wire/")]
        for key in (
            k for k in held_back if not k.startswith("wire/second/")
        ):  # what owners of shards lost has no place any more
            mine[key] = (
                torch.stack([saved.ranks[f"{r * inner + at}/{key}"] for r in range(before)]).sum(0)
                / now
            )
        return mine

    def _fits(self, saved: Snapshot) -> bool:
        """Whether every rank holds the same part of the model as ranks did then; the number of replicas may be another. Of a
        model that is split every rank calls it."""
        then, now = _layout(saved), self.plan.layout
        if self._same_division is None:
            self._same_division = dataclasses.replace(then, data=1) == dataclasses.replace(
                now, data=1
            )
            if self.parts is not None and self.local is not None:
                signatures = saved.meta.get("parts", [])
                same = self._same_division and signatures[
                    self.context.rank % _inner(now)
                ] == self.parts.signature(self.local.model())
                other = torch.tensor([int(not same)], dtype=torch.int64, device=self.context.device)
                self.context.link.all_reduce({"other": other}, op="max").wait()
                self._same_division = not int(other)
        return self._same_division


def found(context: RankContext, order: dict[str, Any]) -> Snapshot | None:
    """What to go on from: the same on every rank, or an error."""
    saved = _found_by_first(context) if context.divided else context.checkpoints.latest()
    here = torch.tensor(
        [-1 if saved is None else saved.round], dtype=torch.int64, device=context.device
    )
    span = torch.cat([here, -here])
    context.link.all_reduce({"round": span}, op="max").wait()
    if span[0] != -span[1]:
        raise CheckpointError(
            f"ranks see different checkpoints in {context.directory} (rounds {-int(span[1])} to {int(span[0])}; -1: none); "
            "all ranks must see the same directory: put it on a shared disk"
        )
    if saved is None:
        context.notice(
            f"nothing to resume in {context.directory}: no checkpoint yet; starting from the beginning"
        )
    elif saved.position.offset and (then := saved.meta["order"]) != order:
        changed = ", ".join(f"{k} {then[k]} -> {order[k]}" for k in order if then[k] != order[k])
        context.notice(
            f"the order of samples is another one than before ({changed}): in this epoch some may come twice or not at all"
        )
    return saved


def _found_by_first(context: RankContext) -> Snapshot | None:
    """Rank 0 finds the newest that is whole; all read of it only what is not a region of the model: that comes later."""
    inner, rank = _inner(context.plan.layout), context.rank

    def only(name: str) -> bool:
        kind, whose, *_ = name.split("/")
        mine = whose == f"*{rank % inner}" or (
            whose.isdigit() and int(whose) % inner == rank % inner
        )
        return (
            kind == "state" or (kind == "rng" and whose == str(rank)) or (kind == "ranks" and mine)
        )

    def tried(read: Callable[[], Snapshot | None]) -> Snapshot | None:
        saved, wrong = None, ""
        try:
            saved = read()
        except CheckpointError as e:
            wrong = str(e)
        sharded_file.agree(context.link, wrong, context.device)
        return saved

    saved = tried(lambda: context.checkpoints.latest(only) if rank == 0 else None)
    round = torch.tensor(
        [-1 if saved is None else saved.round], dtype=torch.int64, device=context.device
    )
    context.link.all_reduce({"round": round}, op="max").wait()
    if int(round) < 0:
        return None
    return tried(lambda: context.checkpoints.at(int(round), only) if rank else saved)


def _layout(saved: Snapshot) -> Layout:
    """Checkpoints from before there was more than one axis know only how many ranks there were."""
    axes = saved.meta.get("layout")
    return Layout(data=saved.meta.get("size") or 1) if axes is None else Layout(**axes)


def _inner(layout: Layout) -> int:
    """How many ranks hold one copy of the model together."""
    return layout.size // layout.data


def _under(kind: str, held: LocalTensor) -> LocalTensor:
    return LocalTensor(renamed(held.spec, f"{kind}/{held.name}"), held.tensor)


def _shapes(reader: sharded_file.Reader, kind: str) -> dict[str, tuple[int, ...]]:
    return {
        name.removeprefix(kind): reader.shape(name)
        for name in reader.names
        if name.startswith(kind)
    }


def _renamed(meta: dict[str, Any], name: Callable[[str], str]) -> dict[str, Any]:
    """An optimizer's plain values under names of the whole model."""
    groups = [{**g, "params": [name(n) for n in g["params"]]} for g in meta["groups"]]
    return {"groups": groups, "numbers": {name(n): v for n, v in meta["numbers"].items()}}


def _joined(metas: list[dict[str, Any]]) -> dict[str, Any]:
    """Those of all ranks: each knows its own parameters."""
    groups = [dict(g) for g in metas[0]["groups"]]
    for i, group in enumerate(groups):
        of_all = [n for m in metas if i < len(m["groups"]) for n in m["groups"][i]["params"]]
        group["params"] = list(dict.fromkeys(of_all))
    return {
        "groups": groups,
        "numbers": {n: v for m in reversed(metas) for n, v in m["numbers"].items()},
    }


def _all_rng(context: RankContext) -> Tensors:
    """Every rank's generators, on rank 0."""
    mine = state.rng_state(context.device)
    rows = {
        k: torch.zeros(context.process.size, v.numel(), dtype=torch.int32) for k, v in mine.items()
    }
    for k, v in mine.items():
        rows[k][context.rank] = v.to(torch.int32)
    rows = (
        {k: v.to(context.device) for k, v in rows.items()}
        if context.device.type == "cuda"
        else rows
    )
    context.link.all_reduce(rows).wait()
    return {
        f"{r}/{k}": v[r].to("cpu", torch.uint8)
        for k, v in rows.items()
        for r in range(context.process.size)
    }


def _differing(context: RankContext, mine: Tensors) -> list[str]:
    """The names of tensors that are not the same, to the bit, on all ranks that hold the same part of the model."""
    if context.merging.size == 1 or not mine:
        return []
    sums = []
    for value in mine.values():
        raw = _bytes(value).cpu().numpy().tobytes()
        sums.append(zlib.crc32(raw) << 31 | zlib.adler32(raw) >> 1)
    here = torch.tensor(sums, dtype=torch.int64, device=context.device)
    span = torch.cat([here, -here])
    context.merging.all_reduce({"checksums": span}, op="max").wait()
    same = (span[: len(sums)] == -span[len(sums) :]).tolist()
    return [k for k, alike in zip(mine, same, strict=True) if not alike]


def _gathered(context: RankContext, mine: Tensors) -> Tensors:
    """Everybody's tensors on rank 0, under "<rank>/<name>"; nothing elsewhere. A vector may be of another length elsewhere."""
    if not mine:
        return {}
    lengths = torch.zeros(context.process.size, len(mine), dtype=torch.int64, device=context.device)
    lengths[context.rank] = torch.tensor([v.numel() for v in mine.values()])
    context.link.all_reduce({"lengths": lengths}).wait()
    packed = torch.cat([_bytes(v) for v in mine.values()]).to(context.device)
    if context.rank != 0:
        context.link.transfer({0: packed}, {}).wait()
        return {}
    sizes = torch.tensor([v.element_size() for v in mine.values()])
    others = {
        r: torch.empty(int(lengths[r].cpu() @ sizes), dtype=torch.uint8, device=context.device)
        for r in range(1, context.process.size)
    }
    context.link.transfer({}, others).wait()
    found: Tensors = {}
    for rank, raw in {0: packed, **others}.items():
        at = 0
        for (name, value), length in zip(mine.items(), lengths[rank].tolist(), strict=True):
            piece = (
                raw[at : at + length * value.element_size()].cpu().clone()
            )  # a slice may start at any byte
            found[f"{rank}/{name}"] = piece.view(value.dtype).view(
                value.shape if length == value.numel() else length
            )
            at += piece.numel()
    return found


def _bytes(value: Tensor) -> Tensor:
    flat: Any = value.detach().contiguous().view(-1)
    return flat.view(torch.uint8)
