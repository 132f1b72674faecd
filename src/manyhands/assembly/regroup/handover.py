"""Handover: state from rank to rank, over the group of all ranks.

    hand_over        at the start of an epoch, ranks without state get it from those that have it
    copy_to_next     at a boundary, each rank of the only replica gives its state to the next one,
                     so that the death of one rank loses no part of the model

A state travels as three messages: the length of its description, the description (names, shapes,
plain values) and all tensors as bytes, one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from manyhands.assembly.rank_context import RankContext
from manyhands.core import Group, Tensors, Work
from manyhands.recover.kept_rounds import Boundary, Choice, KeptRounds, KeptState

DTYPES = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


def hand_over(context: RankContext, kept: KeptRounds, choice: Choice) -> KeptState:
    """This rank's state at the chosen boundary: its own, or that which another rank gives it."""
    rank, boundary = context.rank, choice.boundary
    for taker, giver in choice.sources.items():
        if rank == giver:
            mine = (kept.copies if taker in choice.copies else kept.states)[boundary]
            _Sent(context, mine).to(taker)
    if rank in choice.sources:
        return _receive(context, choice.sources[rank])
    return kept.states[boundary]


def copy_to_next(context: RankContext, kept: KeptRounds, boundary: Boundary) -> None:
    group = context.group
    before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    sent = _Sent(context, kept.states[boundary])
    works, length = sent.begin(group, after), torch.zeros(1, dtype=torch.int64)
    arrived = _receive(context, before, length.to(context.device))
    for work in works:
        work.wait()
    kept.keep_copy(boundary, before, arrived)


class _Sent:
    """A state, as it travels."""

    def __init__(self, context: RankContext, state: KeptState):
        self._context = context
        shapes = [(k, list(v.shape), str(v.dtype)) for k, v in state.tensors.items()]
        text = json.dumps([state.round, shapes, state.meta]).encode()
        device = context.device
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
        self._length = torch.tensor([len(text)], dtype=torch.int64, device=device)
        raw = [_bytes(v) for v in state.tensors.values() if v.numel()]
        self._raw = torch.cat([torch.zeros(1, dtype=torch.uint8), *raw]).to(device)

    def begin(self, group: Group, rank: int) -> list[Work]:
        return [group.transfer({rank: v}, {}) for v in (self._length, self._text, self._raw)]

    def to(self, rank: int) -> None:
        for work in self.begin(self._context.group, rank):
            work.wait()


def _receive(context: RankContext, source: int, length: Tensor | None = None) -> KeptState:
    group, device = context.group, context.device
    length = torch.zeros(1, dtype=torch.int64, device=device) if length is None else length
    group.transfer({}, {source: length}).wait()
    text = torch.zeros(int(length), dtype=torch.uint8, device=device)
    group.transfer({}, {source: text}).wait()
    round, shapes, meta = json.loads(text.cpu().numpy().tobytes())
    sizes = [_nbytes(shape, DTYPES[dtype]) for _, shape, dtype in shapes]
    raw = torch.zeros(1 + sum(sizes), dtype=torch.uint8, device=device)
    group.transfer({}, {source: raw}).wait()
    tensors: Tensors = {}
    at, raw = 1, raw.cpu()
    for (name, shape, dtype), size in zip(shapes, sizes, strict=True):
        # clone: a slice may start at any byte, a tensor may not
        tensors[name] = raw[at : at + size].clone().view(DTYPES[dtype]).view(shape)
        at += size
    return KeptState(round, tensors, meta)


def _nbytes(shape: list[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _bytes(value: Tensor) -> Tensor:
    flat: Any = value.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8)


def parts_of(context: RankContext) -> Mapping[str, int]:
    """Ranks of a replica, and which part of the model this one holds."""
    inner = context.process.size // context.plan.layout.data
    return {"inner": inner, "part": context.rank % inner}
