"""Where what a rank holds of a tensor lies in the whole tensor: the words in which layouts speak to each other.

    whole dimension of n, cut for `size` ranks in `groups` blocks:      [ q0 q1 | k0 k1 | v0 v1 ]      3 groups, 2 ranks
    what rank 1 holds of it, one after the other:                       [ q1 k1 v1 ]

A fused matrix (q, k and v in one) is cut block by block, so that each rank holds a share of every block. Sizes that do not divide
are shared out as evenly as can be, larger shares first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def bounds(length: int, size: int) -> list[int]:
    """Where shares of `length` elements begin, and the end: sizes differ by one at the most, larger ones first."""
    least, more = divmod(length, size)
    starts = [0]
    for i in range(size):
        starts.append(starts[-1] + least + (i < more))
    return starts


@dataclass(frozen=True)
class ShardSpec:
    """What rank `index` of `size` holds of the tensor `name` of the whole model: all of it, or its share of one dimension."""

    name: str
    shape: tuple[int, ...]  # of the whole
    dim: int | None = None  # None: all of it
    size: int = 1
    index: int = 0
    groups: int = 1

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The runs of the dimension `dim` of the whole that are held, in order."""
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

    def take(self, whole: Tensor) -> Tensor:
        """A copy of what is held of `whole`."""
        if self.dim is None:
            return whole.clone()
        return torch.cat(
            [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges], self.dim
        )

    def put(self, held: Tensor, whole: Tensor) -> None:
        """Write what is held into its place in `whole`."""
        if self.dim is None:
            whole.copy_(held)
            return
        at = 0
        for start, stop in self.ranges:
            whole.narrow(self.dim, start, stop - start).copy_(
                held.narrow(self.dim, at, stop - start)
            )
            at += stop - start
