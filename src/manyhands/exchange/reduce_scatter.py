"""Reduce-scatter and all-gather over messages: the two halves of an all-reduce.

    reduce-scatter    part j of every rank goes to rank j, which adds them up  n - 1 messages of 1/n
    all-gather        rank j sends its part to all                             n - 1 messages of 1/n

For groups that have none of their own. Every rank owns an equal, contiguous part of each vector.
The owner adds its own part and then those of the others by rank, so a sum has the same bits in
every run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.core import Finished, Group, Op, Tensors, Work


def equal_part(numel: int, rank: int, size: int) -> slice:
    """The elements of a vector that `rank` owns."""
    return slice(numel * rank // size, numel * (rank + 1) // size)


def reduce_scatter(group: Group, values: Tensors, op: Op = "sum") -> Work:
    works = [_Sum(group, name, value, op) for name, value in values.items()]
    return _All(works) if group.size > 1 else Finished()


def all_gather(group: Group, values: Tensors) -> Work:
    if group.size == 1:
        return Finished()
    works = []
    for name, value in values.items():
        flat = _vector(value)
        mine = flat[equal_part(flat.numel(), group.rank, group.size)]
        others = [r for r in range(group.size) if r != group.rank]
        works.append(
            group.transfer(
                dict.fromkeys(others, mine),
                {r: flat[equal_part(flat.numel(), r, group.size)] for r in others},
                f"{name}/gather",
            )
        )
    return _All(works)


class _Sum:
    def __init__(self, group: Group, name: str, value: Tensor, op: Op):
        flat, n = _vector(value), value.numel()
        self._own = flat[equal_part(n, group.rank, group.size)]
        self._op, self._size = op, group.size
        others = [r for r in range(group.size) if r != group.rank]
        self._got = {r: torch.empty_like(self._own) for r in others}
        give = {r: flat[equal_part(n, r, group.size)] for r in others}
        self._work: Work | None = (
            group.transfer(give, self._got, f"{name}/scatter") if others else None
        )

    def wait(self) -> None:
        if self._work is None:
            return
        self._work.wait()
        self._work = None  # a second wait adds nothing
        own = self._own
        for theirs in self._got.values():
            if self._op == "max":
                torch.maximum(own, theirs, out=own)
            else:
                own.add_(theirs)
        if self._op == "mean":
            own.div_(self._size) if own.is_floating_point() else own.floor_divide_(self._size)
        self._got = {}


class _All:
    def __init__(self, works: Sequence[Work]):
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = ()


def _vector(value: Tensor) -> Tensor:
    if not value.is_contiguous():
        raise ValueError("only a contiguous vector has equal parts; give x.contiguous()")
    return value.detach().view(-1)
