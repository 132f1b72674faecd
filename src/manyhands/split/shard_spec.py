"""Shard spec: which slice of a global tensor a rank holds.

    a dimension cut for 2 ranks in 3 groups:     [ q0 q1 | k0 k1 | v0 v1 ]
    the local tensor of rank 1:                  [ q1 k1 v1 ]

A fused matrix (q, k and v in one) is cut block by block, so that each rank holds a slice of every
block. Where a length does not divide, slices differ by one element at the most, larger ones first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def bounds(length: int, size: int) -> list[int]:
    """Where the `size` slices of `length` elements begin, and the end: larger slices first."""
    least, more = divmod(length, size)
    starts = [0]
    for i in range(size):
        starts.append(starts[-1] + least + (i < more))
    return starts


@dataclass(frozen=True)
class ShardSpec:
    """Shard spec of the global tensor `name`: all of it, or slice `index` of `size` along `dim`."""

    name: str
    shape: tuple[int, ...]  # of the global tensor
    dim: int | None = None  # None: replicated, every rank holds all of it
    size: int = 1
    index: int = 0
    groups: int = 1

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """(start, stop) of the runs that are held of dimension `dim`, in order."""
        assert self.dim is not None
        block = self.shape[self.dim] // self.groups
        cut = bounds(block, self.size)
        return [
            (g * block + cut[self.index], g * block + cut[self.index + 1])
            for g in range(self.groups)
        ]

    @property
    def local_shape(self) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        held = sum(stop - start for start, stop in self.ranges)
        return (*self.shape[: self.dim], held, *self.shape[self.dim + 1 :])

    def extract(self, full: Tensor) -> Tensor:
        """The local tensor, as a copy of its slice of the global tensor `full`."""
        if self.dim is None:
            return full.clone()
        return torch.cat(
            [full.narrow(self.dim, start, stop - start) for start, stop in self.ranges], self.dim
        )

    def insert(self, local: Tensor, full: Tensor) -> None:
        """Write the local tensor into its slice of the global tensor `full`."""
        if self.dim is None:
            full.copy_(local)
            return
        at = 0
        for start, stop in self.ranges:
            full.narrow(self.dim, start, stop - start).copy_(
                local.narrow(self.dim, at, stop - start)
            )
            at += stop - start
