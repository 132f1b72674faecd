"""Handover: state for ranks that have none, from a peer, over the group of replicas.

The first replica that has kept the boundary gives. Each of its ranks sends to the ranks of other
replicas that hold the same part of the model. Names and shapes go through the rendezvous store,
the numbers through the group.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from manyhands.assembly.rank_context import RankContext
from manyhands.errors import PeerLost
from manyhands.exchange.interruption import Interruption, wait_for_keys
from manyhands.launch.replacements import tell
from manyhands.recover.kept_rounds import KeptState

DTYPES = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


def hand_over(
    context: RankContext,
    mine: KeptState | None,
    has: Mapping[int, bool],
    interruption: Interruption,
    read: Any,
) -> KeptState:
    """This rank's state: its own, or a copy of a peer's. `has`: which ranks hold the boundary.
    `read`: a signed value of the store."""
    group, inner = context.data_group, context.process.size // context.plan.layout.data
    part = context.rank % inner
    givers = [r for r in range(group.size) if all(has[r * inner + i] for i in range(inner))]
    if not givers:
        raise PeerLost("no replica is left that has all of its parts")
    source = givers[0]
    takers = [r for r in range(group.size) if not has[r * inner + part]]
    key = f"handover/{part}"
    if mine is not None and group.rank == source and takers:
        shapes = [(k, list(v.shape), str(v.dtype)) for k, v in mine.tensors.items()]
        tell(context.store, key, json.dumps([mine.round, shapes, mine.meta]))
        for value in mine.tensors.values():
            if value.numel():
                there = value.contiguous().to(context.device)
                group.transfer(dict.fromkeys(takers, there.view(-1)), {}).wait()
    if mine is not None:
        return mine
    wait_for_keys(context.store, [key], context.plan.timeout_s, interruption)
    round, shapes, meta = json.loads(read(context.store, key))
    tensors = {}
    for name, shape, dtype in shapes:
        value = torch.empty(shape, dtype=DTYPES[dtype], device=context.device)
        if value.numel():
            group.transfer({}, {source: value.view(-1)}).wait()
        tensors[name] = value.cpu()
    return KeptState(round, tensors, meta)
