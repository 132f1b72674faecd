"""Top-k codec (Deep Gradient Compression): the largest values; the rest stays in a residual.

    u = mu u + g;   v = v + u;   send v where |v| is among the k = density n largest
    there v = 0, and with masking u = 0                         (Lin et al. 2018, arXiv:1712.01887)

With momentum=0, u is g and this is plain top-k with error feedback. Each rank has its own k
positions, so every rank sends its values to all others: (M - 1) 8k bytes, which grows with M.
With `momentum` the optimizer's own must be 0: it is applied here, before the selection, so that
what waited long does not arrive stale. `masking` stops the momentum of what was just sent. For
`warmup` steps the density falls from 25%, divided by 4 at each stage. Of equal magnitudes the
first ones are sent: exactly k, always.

NaN and infinity count as the largest of all: they are sent at once and do not stay.
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
from manyhands.kernels import codec_kernels

FIRST = 0.25  # density at the start of the warm-up
FEWER = 4  # times fewer at each stage of it


@dataclass(frozen=True)
class TopK:
    density: float = 0.01
    momentum: float = 0.0
    masking: bool = True
    warmup: int = 0

    carries: ClassVar[frozenset[Cargo]] = DIFFERENCES
    point_to_point: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise PlanError(
                f"compress.density={self.density}: more than 0 and at most 1 is needed; "
                "0.01 sends one value in a hundred"
            )
        if not 0 <= self.momentum < 1:
            raise PlanError(
                f"compress.momentum={self.momentum}: at least 0 and less than 1 is needed, "
                "and momentum=0 in the optimizer"
            )
        if not self.masking and self.momentum == 0:
            raise PlanError(
                "compress.masking=false has no effect without momentum; "
                "add compress.momentum=0.9 or leave it out"
            )
        if self.warmup < 0:
            raise PlanError(f"compress.warmup={self.warmup}: 0 or more steps are needed")
        if self.warmup and self.density >= FIRST:
            raise PlanError(
                f"compress.warmup={self.warmup} has no effect: the density would fall from "
                f"{FIRST} to compress.density={self.density}; leave it out"
            )

    def density_at(self, step: int) -> float:
        if step >= self.warmup:
            return self.density
        stages: list[float] = []
        while (now := FIRST / FEWER ** len(stages)) > self.density:
            stages.append(now)
        return stages[step * len(stages) // self.warmup]

    def count(self, numel: int, step: int) -> int:
        return max(1, min(numel, round(self.density_at(step) * numel)))

    def reduce(self, x: Tensor, op: Op, group: Group, memory: Memory) -> Iterator[Work]:
        mine = self.encode(x, memory)
        others = [r for r in range(group.size) if r != group.rank]
        arrived = memory.scratch(
            "arrived", len(others) * mine.numel(), torch.uint8, x.device
        ).split(mine.numel())
        yield group.transfer(dict.fromkeys(others, mine), dict(zip(others, arrived, strict=True)))

        x.zero_()
        for packed in (
            *arrived[: group.rank],
            mine,
            *arrived[group.rank :],
        ):  # in rank order: the same sums everywhere
            _add(packed, x)
        if op == "mean":
            x.div_(group.size)

    def encode(self, x: Tensor, memory: Memory) -> Tensor:
        k = self.count(x.numel(), memory.count())
        packed = memory.scratch("mine", 8 * k, torch.uint8, x.device)
        index, values = _parts(packed)
        velocity, v = None, memory.error(x)
        if self.momentum:
            velocity = memory.keep("velocity", x.numel(), v.dtype, x.device)
            self._accelerate(x, velocity, v)
        else:
            v.add_(x)
        select(v.to(torch.float32), index)
        _take(v, index, values)
        drop_nonfinite(v, values)
        if velocity is not None:
            if self.masking:
                velocity[index.long()] = 0
            drop_nonfinite(velocity, values)
        return packed

    def _accelerate(self, g: Tensor, u: Tensor, v: Tensor) -> None:
        if g.device.type == "cpu" and g.dtype == v.dtype == torch.float32:
            codec_kernels.accelerate(g.numpy(), u.numpy(), v.numpy(), self.momentum)
        else:
            v.add_(u.mul_(self.momentum).add_(g))

    def decode(self, packed: Tensor, into: Tensor, memory: Memory) -> None:
        into.zero_()
        _add(packed, into)


def select(x: Tensor, index: Tensor) -> None:
    """Fill `index` (int32) with where the largest magnitudes of `x` (float32) are."""
    if x.device.type == "cpu":
        codec_kernels.top(x.numpy(), index.numel(), index.numpy())
    else:  # torch selects by radix on a GPU; of equal values it takes any
        index.copy_(torch.topk(x.abs(), index.numel(), sorted=False).indices)


def _take(v: Tensor, index: Tensor, values: Tensor) -> None:
    """Move what is at `index` from v to `values`; what float32 cannot hold of it stays."""
    if v.device.type == "cpu" and v.dtype == torch.float32:
        codec_kernels.take(v.numpy(), index.numpy(), values.numpy())
        return
    at = index.long()
    values.copy_(v[at])
    v[at] = (v[at] - values).nan_to_num_(0.0, 0.0, 0.0)


def _add(packed: Tensor, out: Tensor) -> None:
    index, values = _parts(packed)
    if out.device.type == "cpu" and out.dtype == torch.float32:
        codec_kernels.scatter_add(out.numpy(), index.numpy(), values.numpy())
    else:
        out.index_add_(
            0, index, values.to(out.dtype)
        )  # of one rank all positions differ: no order to depend on


def _parts(packed: Tensor) -> tuple[Tensor, Tensor]:
    half = packed.numel() // 2
    return packed[:half].view(torch.int32), packed[half:].view(torch.float32)
