"""Which elements of a whole tensor a rank holds: a share of one dimension, or a slice of such a share laid out as a vector.

    whole, row by row:            0  1 | 2  3 | 4  5        a run is (first element, how many), in the order of the whole
    columns of rank 1 of 2:          1      3      5        runs (1, 1) (3, 1) (5, 1)
    Slice of them from 1 to 3:              3      5        runs (3, 1) (5, 1)

A `ShardSpec` is what tensor and pipeline layouts leave on a rank, a `ShardSlice` of it what sharding does. Both say the same three
things: `take` it out of the whole, `put` it back, and where its runs lie, for who writes files.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from manyhands.split.shard_spec import ShardSpec


@dataclass(frozen=True)
class ShardSlice:
    """The elements `start` to `stop` of what `part` holds, row by row, as one vector."""

    part: ShardSpec
    start: int
    stop: int

    @property
    def name(self) -> str:
        return self.part.name

    @property
    def shape(self) -> tuple[int, ...]:  # of the whole
        return self.part.shape

    @property
    def local_shape(self) -> tuple[int, ...]:
        return (self.stop - self.start,)

    def take(self, whole: Tensor) -> Tensor:
        """A copy of what is held of `whole`."""
        return self.part.take(whole).reshape(-1)[self.start : self.stop].clone()

    def put(self, held: Tensor, whole: Tensor) -> None:
        """Write what is held into its place in `whole`, which is contiguous."""
        flat, at = whole.view(-1), 0
        for start, length in runs(self):
            flat[start : start + length].copy_(held[at : at + length])
            at += length


Region = ShardSpec | ShardSlice


def renamed(region: Region, name: str) -> Region:
    """The same place in a tensor of another name: an optimizer's average lies where its parameter does."""
    if isinstance(region, ShardSlice):
        return dataclasses.replace(region, part=dataclasses.replace(region.part, name=name))
    return dataclasses.replace(region, name=name)


def numel(region: Region) -> int:
    return math.prod(region.local_shape)


def family(region: Region) -> tuple[Any, ...]:
    """Alike for regions that one cut has made: together they are the whole, and two of them overlap only where they are equal."""
    part, sliced = (region.part, True) if isinstance(region, ShardSlice) else (region, False)
    return (sliced, part.dim, part.size, part.groups)


def runs(region: Region) -> Iterator[tuple[int, int]]:
    """(first element in the whole, how many), in the order in which the held tensor has them; none is empty."""
    if isinstance(region, ShardSpec):
        yield from _runs(region)
        return
    at = 0  # in what the part holds
    for start, length in _runs(region.part):
        first, last = max(at, region.start), min(at + length, region.stop)
        if first < last:
            yield start + first - at, last - first
        at += length
        if at >= region.stop:
            return


def _runs(part: ShardSpec) -> Iterator[tuple[int, int]]:
    whole = math.prod(part.shape)
    if part.dim is None or part.size == 1:
        if whole:
            yield 0, whole
        return
    inner = math.prod(part.shape[part.dim + 1 :])
    row = part.shape[part.dim] * inner
    held = [(start * inner, (stop - start) * inner) for start, stop in part.ranges if stop > start]
    for first in range(0, whole, row) if row else ():
        for start, length in held:
            if length:
                yield first + start, length


def to_plain(region: Region) -> list[Any]:
    """As JSON has it, without the name."""
    part = region.part if isinstance(region, ShardSlice) else region
    plain = [list(part.shape), part.dim, part.size, part.index, part.groups]
    return [*plain, region.start, region.stop] if isinstance(region, ShardSlice) else plain


def from_plain(name: str, plain: list[Any]) -> Region:
    shape, dim, size, index, groups, *span = plain
    part = ShardSpec(name, tuple(shape), dim, size, index, groups)
    return ShardSlice(part, *span) if span else part
