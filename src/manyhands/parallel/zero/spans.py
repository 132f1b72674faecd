"""Spans: parameters one after the other in one vector, of which every rank owns 1/n.

span     entry | entry | ... | padding       each of n ranks owns one contiguous n-th of it
bucket   a span of about `bucket_bytes`, cut from the back: backward makes those gradients first
block    the spans of one block of the model (`zero.blocks`), gathered while the block runs
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

ALIGN_BYTES = 64
Named = tuple[int, str, nn.Parameter]  # index among those that train, name, parameter


@dataclass(frozen=True)
class SpanEntry:
    """One parameter's range in a span."""

    index: int  # among the parameters that train; -1: it is frozen
    name: str
    parameter: nn.Parameter
    shape: torch.Size
    start: int
    stop: int


def _empty() -> Tensor:
    return torch.empty(0)


@dataclass
class Span:
    """A vector of parameters, this rank's slice of it, and where its gradients are in this step."""

    key: str
    dtype: torch.dtype  # in which it is kept, summed and updated
    gather_dtype: torch.dtype  # in which it is gathered and computed with
    entries: list[SpanEntry]
    length: int
    own: slice
    value: Tensor = field(default_factory=_empty)  # this rank's slice
    grad: Tensor = field(default_factory=_empty)
    full: Tensor = field(default_factory=_empty)  # all values, while they are gathered
    buffer: Tensor | None = None  # gradients on their way into the sum over ranks
    pooled: Tensor | None = None  # the vector of the pool of which the buffer is the beginning
    filled: set[int] = field(default_factory=set)  # entries whose gradients are in the buffer
    seen: set[int] = field(default_factory=set)  # entries that got a gradient in this pass
    sent: bool = False  # in this backward pass
    summed: bool = False  # `grad` has gradients of this step

    @property
    def trains(self) -> bool:
        return self.entries[0].index >= 0

    def owned(self, entry: SpanEntry) -> tuple[int, int]:
        """Which elements of the parameter, row by row, this rank owns: from, to; the same number
        twice: none."""
        first = min(max(self.own.start, entry.start), entry.stop)
        return first - entry.start, max(first, min(self.own.stop, entry.stop)) - entry.start

    def own_slice(self, entry: SpanEntry) -> slice:
        """Where these elements are in `value` and `grad`."""
        start, stop = self.owned(entry)
        first = entry.start + start - self.own.start if start < stop else 0
        return slice(first, first + stop - start)

    def gaps(self) -> Iterator[slice]:
        """Padding, which stays zero."""
        ends = [0, *(e.stop for e in self.entries)]
        starts = [*(e.start for e in self.entries), self.length]
        return (slice(a, b) for a, b in zip(ends, starts, strict=True) if a < b)

    def view(self, vector: Tensor, entry: SpanEntry) -> Tensor:
        return vector[entry.start : entry.stop].view(entry.shape)


def span(key: str, named: list[Named], gather_dtype: torch.dtype, rank: int, size: int) -> Span:
    """The span of `named` parameters, each aligned, with a length that `size` ranks divide."""
    dtype = named[0][2].dtype
    align = max(1, ALIGN_BYTES // dtype.itemsize)
    entries, end = [], 0
    for index, name, p in named:
        entries.append(SpanEntry(index, name, p, p.shape, end, end + p.numel()))
        end += -(-p.numel() // align) * align
    length = -(-end // (align * size)) * align * size
    own = slice(length * rank // size, length * (rank + 1) // size)
    return Span(key, dtype, gather_dtype, entries, length, own)


def buckets(named: list[Named], bucket_bytes: int, rank: int, size: int) -> list[Span]:
    found: list[Span] = []
    for dtype in dict.fromkeys(p.dtype for _, _, p in named):
        key, nbytes = str(dtype).removeprefix("torch."), 0
        waiting: list[Named] = []
        for one in reversed([n for n in named if n[2].dtype == dtype]):
            waiting.insert(0, one)
            nbytes += one[2].nbytes
            if nbytes >= bucket_bytes:
                found.append(span(f"{key}[{len(found)}]", waiting, dtype, rank, size))
                waiting, nbytes = [], 0
        if waiting:
            found.append(span(f"{key}[{len(found)}]", waiting, dtype, rank, size))
    return found
