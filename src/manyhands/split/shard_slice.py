"""Shard slice: a range of elements of a shard, as ZeRO leaves it on a rank.

    global tensor, row by row:        0  1 | 2  3 | 4  5
    ShardSpec: column 1 of 2             1      3      5     runs (1, 1) (3, 1) (5, 1)
    ShardSlice: elements 1 to 3 of it           3      5     runs (3, 1) (5, 1)

A run is (first element, number of elements), in the order of the global tensor. Tensor and pipeline
layouts leave a `ShardSpec` on a rank, sharding (ZeRO) a `ShardSlice` of one. Both can `extract` the
local tensor from the global one, `insert` it, and list its runs, for code that writes files.
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
    """Shard slice: elements `start` to `stop` of the local tensor of `spec`, flattened."""

    spec: ShardSpec
    start: int
    stop: int

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the global tensor."""
        return self.spec.shape

    @property
    def local_shape(self) -> tuple[int, ...]:
        return (self.stop - self.start,)

    def extract(self, full: Tensor) -> Tensor:
        """The local tensor, as a copy of its elements of the global tensor `full`."""
        return self.spec.extract(full).reshape(-1)[self.start : self.stop].clone()

    def insert(self, local: Tensor, full: Tensor) -> None:
        """Write the local tensor into its elements of the contiguous global tensor `full`."""
        flat, at = full.view(-1), 0
        for start, length in runs(self):
            flat[start : start + length].copy_(local[at : at + length])
            at += length


AnyShardSpec = ShardSpec | ShardSlice


def renamed(spec: AnyShardSpec, name: str) -> AnyShardSpec:
    """The same slice of a tensor of another name: optimizer state is cut as its parameter is."""
    if isinstance(spec, ShardSlice):
        return dataclasses.replace(spec, spec=dataclasses.replace(spec.spec, name=name))
    return dataclasses.replace(spec, name=name)


def numel(spec: AnyShardSpec) -> int:
    """Elements of the local tensor."""
    return math.prod(spec.local_shape)


def cut_key(spec: AnyShardSpec) -> tuple[Any, ...]:
    """Equal for the specs of one cut.

    The specs of one cut cover the global tensor, and two of them overlap only where they are
    equal."""
    inner, sliced = (spec.spec, True) if isinstance(spec, ShardSlice) else (spec, False)
    return (sliced, inner.dim, inner.size, inner.groups)


def runs(spec: AnyShardSpec) -> Iterator[tuple[int, int]]:
    """(first element in the global tensor, how many), in the order of the local tensor; none is
    empty."""
    if isinstance(spec, ShardSpec):
        yield from _runs(spec)
        return
    at = 0  # in the local tensor of the inner spec
    for start, length in _runs(spec.spec):
        first, last = max(at, spec.start), min(at + length, spec.stop)
        if first < last:
            yield start + first - at, last - first
        at += length
        if at >= spec.stop:
            return


def _runs(spec: ShardSpec) -> Iterator[tuple[int, int]]:
    total = math.prod(spec.shape)
    if spec.dim is None or spec.size == 1:
        if total:
            yield 0, total
        return
    inner = math.prod(spec.shape[spec.dim + 1 :])
    row = spec.shape[spec.dim] * inner
    held = [(start * inner, (stop - start) * inner) for start, stop in spec.ranges if stop > start]
    for first in range(0, total, row) if row else ():
        for start, length in held:
            if length:
                yield first + start, length


def to_plain(spec: AnyShardSpec) -> list[Any]:
    """As a JSON list, without the name."""
    inner = spec.spec if isinstance(spec, ShardSlice) else spec
    plain = [list(inner.shape), inner.dim, inner.size, inner.index, inner.groups]
    return [*plain, spec.start, spec.stop] if isinstance(spec, ShardSlice) else plain


def from_plain(name: str, plain: list[Any]) -> AnyShardSpec:
    shape, dim, size, index, groups, *span = plain
    spec = ShardSpec(name, tuple(shape), dim, size, index, groups)
    return ShardSlice(spec, *span) if span else spec
