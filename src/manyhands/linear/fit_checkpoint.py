"""Checkpoints of a fit: theta, the solver's state of every rank, and what they belong to.

    model/theta         w with the intercept behind it, of all columns
    ranks/<r>/state     the solver's state of rank r, as the bytes of a safetensors file
    meta                the fitted model, digests of the data, and how far the run is

A run that goes on from one does what it would have done without the stop, to the last bit, where
the ranks are as many as before and each has one thread.
"""

from __future__ import annotations

import dataclasses
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load as from_bytes
from safetensors.numpy import save as to_bytes

from manyhands.assembly.rank_context import RankContext
from manyhands.core import Group, Position, Snapshot
from manyhands.errors import CheckpointError, PlanError
from manyhands.linear.certificate import Certificate
from manyhands.linear.data.shards import RowShards
from manyhands.linear.fit_data import FitData
from manyhands.linear.minimise import FitRound, Standing, State
from manyhands.linear.passes.rows import Array
from manyhands.linear.spec import FitSpec
from manyhands.recover.checkpoint import find
from manyhands.split.data import rank_range

# of a FitSpec: not part of what is minimised, or free to change when a run goes on
FREE = ("solver", "stopping", "threads")
WHAT = {
    "rows": "the rows (X) are others",
    "labels": "the labels (y) are others",
    "weights": "the weights (C, class_weight, sample_weight) are others",
}


def digests(data: FitData) -> dict[str, int]:
    """CRC-32 of rows, labels and weights; of shards, of the checksums in their manifest."""
    source = data.source
    if isinstance(source, RowShards):
        parts: list[Any] = [np.array([shard.crc32 for shard in source.shards])]
    else:
        parts = [source.indptr, source.indices, source.values]
    rows = zlib.crc32(np.array([data.columns, data.nonzeros, len(data.y)]).data)
    for part in parts:
        rows = zlib.crc32(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data, rows)
    crc = lambda array: zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data)
    return {"rows": rows, "labels": crc(data.y), "weights": crc(data.c)}


def model_of(spec: FitSpec) -> dict[str, Any]:
    """What is minimised, as plain values."""
    fields = [f.name for f in dataclasses.fields(spec) if f.name not in FREE]
    return {name: getattr(spec, name) for name in fields}


@dataclass(frozen=True)
class FitIdentity:
    """What a checkpoint belongs to."""

    spec: FitSpec
    digests: dict[str, int]
    columns: int
    by_feature: bool  # columns are split over ranks

    def own_slice(self, group: Group) -> slice:
        """This rank's columns."""
        if not self.by_feature:
            return slice(0, self.columns)
        mine = rank_range(self.columns, group.rank, group.size)
        return slice(mine.start, mine.stop)

    def own_part(self, theta: Array, group: Group) -> Array:
        """Of a theta of all columns, this rank's: its columns and the intercept."""
        if not self.by_feature:
            return theta
        return np.concatenate((theta[self.own_slice(group)], theta[self.columns :]))

    def whole(self, theta: Array, group: Group) -> Array:
        """theta of all columns, on every rank."""
        if not self.by_feature or group.size == 1:
            return theta.copy()
        own = self.own_slice(group)
        tail = theta[own.stop - own.start :]
        found = np.zeros(self.columns + len(tail))
        found[own] = theta[: own.stop - own.start]
        if group.rank == 0:
            found[self.columns :] = tail
        group.all_reduce({"theta": torch.from_numpy(found)}).wait()
        return found


def save(context: RankContext, identity: FitIdentity, at: Standing, state: State) -> None:
    """Every rank calls it with its state; rank 0 writes, in the background."""
    group = context.group
    whole = identity.whole(at.theta, group)
    states = _gathered(to_bytes({k: np.ascontiguousarray(v) for k, v in state.items()}), group)
    if group.rank:
        return
    found = at.certificate
    meta = {
        "linear": 1,
        "ranks": group.size,
        "solver": repr(identity.spec.solver),
        "model": model_of(identity.spec),
        "data": identity.digests,
        "standing": {
            "rounds": at.rounds,
            "seconds": at.seconds,
            "nbytes": at.nbytes,
            "estimate": at.estimate,
            "objective": found.objective,
            "dual": found.dual,
            "history": [dataclasses.astuple(record) for record in at.history],
        },
    }
    ranks = {f"{r}/state": state for r, state in enumerate(states)}
    position = Position(at.rounds, 0, at.rounds)
    params = {"theta": torch.from_numpy(whole)}
    snapshot = Snapshot(at.rounds, params, {}, {}, position, {}, meta, ranks)
    context.checkpoints.save(snapshot, {"objective": found.objective})


def _gathered(own: bytes, group: Group) -> list[torch.Tensor]:
    """Rank 0: the bytes of every rank."""
    mine = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    if group.size == 1:
        return [mine]
    lengths = torch.zeros(group.size, dtype=torch.int64)
    lengths[group.rank] = len(mine)
    group.all_reduce({"lengths": lengths}).wait()
    if group.rank:
        group.transfer({0: mine}, {}).wait()
        return []
    found = [mine]
    for r in range(1, group.size):
        found.append(torch.empty(int(lengths[r]), dtype=torch.uint8))
        group.transfer({}, {r: found[-1]}).wait()
    return found


def restore(context: RankContext, identity: FitIdentity) -> Standing:
    """How far the run of this directory was. Refuses another model, other data, another solver."""
    path, saved = find(context.directory)
    if "linear" not in saved.meta:
        raise CheckpointError(
            f"{path} is no checkpoint of a linear model; give the directory of one"
        )
    _refuse_others(context, identity, saved.meta)
    group, told = context.group, saved.meta["standing"]
    theta = identity.own_part(saved.params["theta"].numpy(), group).copy()
    state = None
    if saved.meta["ranks"] == group.size:
        state = from_bytes(saved.ranks[f"{group.rank}/state"].numpy().tobytes())
        state = {name: value.copy() for name, value in state.items()}  # read-only before
    else:
        context.warn(
            f"saved by {saved.meta['ranks']} ranks, and these are {group.size}: coefficients go "
            "on, the solver's state starts anew"
        )
    return Standing(
        theta,
        state,
        told["rounds"],
        told["seconds"],
        told["nbytes"],
        Certificate(told["objective"], told["dual"]),
        told["estimate"],
        history=[FitRound(*record) for record in told["history"]],
    )


def _refuse_others(context: RankContext, identity: FitIdentity, meta: dict[str, Any]) -> None:
    model, others = model_of(identity.spec), []
    for name, value in meta["model"].items():
        if model[name] != value:
            others.append(f"{name} was {value!r} and is {model[name]!r}")
    others += [WHAT[k] for k, crc in meta["data"].items() if identity.digests[k] != crc]
    if meta["solver"] != repr(identity.spec.solver):
        others.append(f"solver was {meta['solver']} and is {identity.spec.solver!r}")
    if others:
        raise PlanError(
            f"the run in {context.directory} minimised something else: {'; '.join(others)}; give "
            "what it had, or another directory without resume"
        )
