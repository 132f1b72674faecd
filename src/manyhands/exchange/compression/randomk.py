"""Random-k codec: a random subset of the values, the same on all ranks, in a plain all-reduce.

    with feedback     p = g + e;   send p at k random positions;   e = p elsewhere
    without           send (n/k) g at k random positions: unbiased, variance (n/k - 1) g^2

No positions need to be sent. The vector is cut into k cells and one element is drawn from each, by
`seed`, tensor and step: every element has probability k/n, none is drawn twice, and drawing costs
k, not n. The cheapest sparse codec to compute; unlike top-k, what is sent does not grow with the
number of ranks. But it sends small values as readily as large ones. NaN anywhere makes all values
sent NaN.

Papers: Stich et al. 2018 (arXiv:1809.07599); without feedback: Konečný et al. 2016
(arXiv:1610.05492).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manyhands.core import (
    Cargo,
    Group,
    Op,
    Work,
)
from manyhands.errors import PlanError
from manyhands.exchange.compression.codec import DIFFERENCES, Memory, drop_nonfinite


@dataclass(frozen=True)
class RandomK:
    density: float = 0.01
    seed: int = 0
    feedback: bool = True

    carries: ClassVar[frozenset[Cargo]] = DIFFERENCES
    point_to_point: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise PlanError(
                f"compress.density={self.density}: more than 0 and at most 1 is needed; "
                "0.01 sends one value in a hundred"
            )

    def reduce(self, x: Tensor, op: Op, group: Group, memory: Memory) -> Iterator[Work]:
        values = self._draw(x, memory)
        yield group.all_reduce({memory.name: values}, op)

        self._spread(values, x, memory)

    def encode(self, x: Tensor, memory: Memory) -> Tensor:
        return self._draw(x, memory).view(torch.uint8)

    def decode(self, packed: Tensor, into: Tensor, memory: Memory) -> None:
        self._spread(packed.view(torch.promote_types(into.dtype, torch.float32)), into, memory)

    def positions(self, numel: int, seed: int) -> tuple[Tensor, Tensor]:
        """One random position in each of the k cells, and the cells' lengths. Drawn on the CPU,
        so on all devices the same."""
        k = max(1, min(numel, round(self.density * numel)))
        bounds = torch.arange(k + 1) * numel // k
        lengths = bounds.diff()
        chance = torch.rand(k, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        return bounds[:-1] + (chance * lengths).long(), lengths

    def _draw(self, x: Tensor, memory: Memory) -> Tensor:
        index, lengths = self._positions(x, memory, memory.count())
        if not self.feedback:
            values = x[index].to(torch.promote_types(x.dtype, torch.float32)) * lengths
            return values.add_(x.sum() * 0)  # 0, or NaN if anything is
        p = memory.error(x).add_(x)
        values = p[index].add_(p.sum() * 0)
        p[index] = 0
        drop_nonfinite(p, values)
        return values

    def _spread(self, values: Tensor, x: Tensor, memory: Memory) -> None:
        x.zero_()
        x[self._positions(x, memory, memory.latest)[0]] = values.to(x.dtype)

    def _positions(self, x: Tensor, memory: Memory, step: int) -> tuple[Tensor, Tensor]:
        index, lengths = self.positions(x.numel(), memory.seed(self.seed, step))
        return index.to(x.device), lengths.to(x.device)
