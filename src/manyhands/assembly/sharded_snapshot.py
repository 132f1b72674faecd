"""Snapshot of a model that is split over ranks: each rank writes and reads its slices of one file.

No rank holds the whole model. Every rank adds its `RankSnapshot`, the ranks write one file
together, and each reads only its own slices, whatever layout wrote the file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from manyhands.assembly.rank_context import RankContext
from manyhands.core import Position, Tensors
from manyhands.parallel.reshard.rank_state import RankState
from manyhands.parallel.reshard.resharding import LocalTensor, Resharding
from manyhands.recover import sharded_file
from manyhands.recover.checkpoint import RankSnapshot
from manyhands.split.shard_slice import renamed
from manyhands.split.shard_spec import ShardSpec

MakeMeta = Callable[[dict[str, Any]], dict[str, Any]]  # from the optimizer's plain values


def rank_snapshot(
    context: RankContext,
    resharding: Resharding,
    round: int,
    position: Position,
    params: Tensors,
    optimizer: tuple[Tensors, dict[str, Any]],
    own: Tensors,
    make_meta: MakeMeta,
) -> RankSnapshot:
    """What this rank adds: slices of model and optimizer that it is the first to hold, and its own
    tensors."""
    tensors, optimizer_meta = optimizer
    held = [_under("model", h) for h in resharding.local_tensors(params)]
    held += [_under("optimizer", h) for h in resharding.local_tensors(tensors)]
    held += [LocalTensor(ShardSpec(name, tuple(v.shape)), v) for name, v in own.items()]
    note = {
        "optimizer": _renamed(optimizer_meta, resharding.global_name),
        "parts": resharding.signature(params),
    }
    survey = resharding.survey(held, note)
    meta = {}
    if context.rank == 0:
        meta = make_meta(_joined([n["optimizer"] for n in survey.notes]))
        meta["parts"] = [n["parts"] for n in survey.notes]
        ranks = [name for name in survey.tensors if name.startswith("ranks/")]
        meta["codec_kept"] = any("/codec/" in name for name in ranks)
    return RankSnapshot(
        round,
        {},
        {},
        {},
        position,
        meta=meta,
        tensors=survey.tensors,
        mine=list(survey.mine),
    )


def restore_slices(
    context: RankContext,
    resharding: Resharding,
    local: RankState,
    own: Tensors,
    meta: dict[str, Any],
) -> None:
    """Read this rank's slices of the model and of the optimizer's state; its `own` tensors replace
    those that all replicas share."""
    with context.checkpoints.reader() as reader:
        here = local.model()
        shapes = _shapes(reader, "model/")
        wanted = {k: r for k, r in resharding.wanted_specs(shapes, here).items() if k in here}
        wrong = [f"{k} is not in the checkpoint" for k in here if k not in wanted]
        wrong += [
            f"{k} is {r.shape}, in the checkpoint {shapes[r.name]}"
            for k, r in wanted.items()
            if shapes[r.name] != r.shape
        ]
        names = {resharding.first_name(r.name) for r in wanted.values()}
        claimed = torch.tensor(
            [int(resharding.first_name(k) in names) for k in shapes],
            dtype=torch.int64,
            device=context.device,
        )
        context.group.all_reduce({"claimed": claimed}, op="max").wait()
        known = zip(shapes, claimed.tolist(), strict=True)
        wrong += [f"{k} is only in the checkpoint" for k, is_known in known if not is_known]
        error = (
            f"the checkpoint is of another model: {'; '.join(wrong)}. "
            "Resume with the model it was saved from, or start anew"
        )
        sharded_file.agree(context.group, error if wrong else "", context.device)
        model = {k: reader.read(f"model/{r.name}", r) for k, r in wanted.items()}
        local.load_model(model)
        del model
        of_optimizer = resharding.wanted_specs(_shapes(reader, "optimizer/"), here)
        moments = {
            k: reader.read(f"optimizer/{r.name}", r)
            for k, r in of_optimizer.items()
            if k.rpartition("/")[0] in here
        }
    numbers = {
        k: meta["numbers"][first]
        for k in here
        if (first := resharding.global_name(k)) in meta["numbers"]
    }
    local.load_optimizer({**moments, **own}, {**meta, "numbers": numbers})


def _under(kind: str, held: LocalTensor) -> LocalTensor:
    return LocalTensor(renamed(held.spec, f"{kind}/{held.name}"), held.tensor)


def _shapes(reader: sharded_file.Reader, kind: str) -> dict[str, tuple[int, ...]]:
    names = [name for name in reader.names if name.startswith(kind)]
    return {name.removeprefix(kind): reader.shape(name) for name in names}


def _renamed(meta: dict[str, Any], name: Callable[[str], str]) -> dict[str, Any]:
    """An optimizer's plain values under the names of the whole model."""
    groups = [{**g, "params": [name(n) for n in g["params"]]} for g in meta["groups"]]
    return {"groups": groups, "numbers": {name(n): v for n, v in meta["numbers"].items()}}


def _joined(metas: list[dict[str, Any]]) -> dict[str, Any]:
    """The plain values of all ranks' optimizers: each knows its own parameters."""
    groups = [dict(g) for g in metas[0]["groups"]]
    for i, group in enumerate(groups):
        of_all = [n for m in metas if i < len(m["groups"]) for n in m["groups"][i]["params"]]
        group["params"] = list(dict.fromkeys(of_all))
    numbers = {n: v for m in reversed(metas) for n, v in m["numbers"].items()}
    return {"groups": groups, "numbers": numbers}
