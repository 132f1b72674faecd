"""An all-reduce in two halves over any link: every rank owns an equal, contiguous part of each vector.

    reduce-scatter    part j of every rank goes to rank j, which adds them up           n - 1 messages of 1/n each
    all-gather        rank j gives its part to all                                      n - 1 messages of 1/n each

What a link cannot do itself is made of its point-to-point messages. The owner adds its own part and then those of the others by
rank, so a sum has the same bits in every run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from manyhands.core import (
    Finished,
    Group,
    Op,
    ReduceScatterGroup,
    Tensors,
    Work,
)
from manyhands.exchange.shared import SharedGroup
from manyhands.exchange.wrapper import GroupWrapper

Allocate = Callable[[int, torch.dtype], Tensor]


def part(numel: int, rank: int, size: int) -> slice:
    """The elements of a vector that `rank` owns."""
    return slice(numel * rank // size, numel * (rank + 1) // size)


def reduce_scatter(group: Group, values: Tensors, op: Op = "sum") -> Work:
    """Sum into the owner's part; the rest keeps what it had."""
    works = [_Sum(group, name, value, op) for name, value in values.items()]
    return _All(works) if group.size > 1 else Finished()


def all_gather(group: Group, values: Tensors) -> Work:
    """Give everybody the owners' parts."""
    if group.size == 1:
        return Finished()
    works = []
    for name, value in values.items():
        flat = _vector(value)
        mine = flat[part(flat.numel(), group.rank, group.size)]
        others = [r for r in range(group.size) if r != group.rank]
        works.append(
            group.transfer(
                dict.fromkeys(others, mine),
                {r: flat[part(flat.numel(), r, group.size)] for r in others},
                f"{name}/gather",
            )
        )
    return _All(works)


class PartedGroup(GroupWrapper):
    """A link with both halves, whatever `group` has; everything else goes through to it."""

    def own(self, tensor: Tensor) -> list[slice]:
        return [part(tensor.numel(), self.rank, self.size)]

    def reduce_scatter(self, values: Tensors, op: Op = "sum") -> Work:
        return reduce_scatter(self.group, values, op)

    def all_gather(self, values: Tensors) -> Work:
        return all_gather(self.group, values)


def parted(
    group: Group, device: torch.device | None = None
) -> tuple[ReduceScatterGroup, Allocate, Allocate | None]:
    """`group` with equal parts, where to make vectors that it reduces in place, and where it has such memory, vectors that all
    ranks have in common. For a link in shared memory every rank must make the same ones, in the same order."""

    def private(numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    inner = getattr(group, "group", group)  # behind one that observes
    if isinstance(inner, SharedGroup) and inner.size > 1:
        even = functools.partial(inner.allocate, even=True)
        return cast(ReduceScatterGroup, group), even, functools.partial(even, common=True)
    native = all(
        hasattr(inner, name) for name in ("own", "reduce_scatter", "all_gather")
    ) and not isinstance(inner, SharedGroup)
    return (cast(ReduceScatterGroup, group) if native else PartedGroup(group)), private, None


class _Sum:
    def __init__(self, group: Group, name: str, value: Tensor, op: Op):
        flat, n = _vector(value), value.numel()
        self._own, self._op, self._size = flat[part(n, group.rank, group.size)], op, group.size
        others = [r for r in range(group.size) if r != group.rank]
        self._got = {r: torch.empty_like(self._own) for r in others}
        give = {r: flat[part(n, r, group.size)] for r in others}
        self._work: Work | None = (
            group.transfer(give, self._got, f"{name}/scatter") if others else None
        )

    def wait(self) -> None:
        if self._work is None:
            return
        self._work.wait()
        self._work = None  # a second wait adds nothing
        for theirs in self._got.values():
            if self._op == "max":
                torch.maximum(self._own, theirs, out=self._own)
            else:
                self._own.add_(theirs)
        if self._op == "mean":
            self._own.div_(
                self._size
            ) if self._own.is_floating_point() else self._own.floor_divide_(self._size)
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
        raise ValueError("only a vector that lies in one piece has parts; give x.contiguous()")
    return value.detach().view(-1)
