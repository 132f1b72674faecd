"""Quantising codecs: base of fp16, bf16, int8 and 1-bit, with their two-stage all-reduce.

    stage 1    each rank encodes shard r of its vector for rank r, which decodes and sums in float32
    stage 2    rank r encodes the sum and sends it to all; all ranks, r too, decode the same bytes

Every value is encoded twice, however many ranks there are (a ring would do it M - 1 times), so the
error of the mean does not grow with M, and all ranks hold the same bits. A rank's own shard enters
the sum uncompressed. Each rank sends 2 (M - 1)/M of the encoded size. With error feedback both
stages keep what they lost: the sender that of its vector, the owner that of its sum.

Error feedback: Karimireddy et al. 2019 (arXiv:1901.09847).
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from manyhands.core import (
    Cargo,
    Group,
    Op,
    Work,
)
from manyhands.exchange.compression.codec import EVERYTHING, Memory

ALIGN_BYTES = 64


class Quantised(ABC):
    """A codec that encodes each value, or block of values, by itself."""

    carries: ClassVar[frozenset[Cargo]] = EVERYTHING
    point_to_point: ClassVar[bool] = True

    @abstractmethod
    def nbytes(self, numel: int) -> int: ...
    @abstractmethod
    def pack(self, x: Tensor, into: Tensor, error: Tensor | None, seed: int) -> None:
        """Encode x (+ error) into bytes; `error` becomes what was lost. All values are float32."""

    @abstractmethod
    def unpack(self, packed: Tensor, into: Tensor) -> None: ...
    @abstractmethod
    def unpack_add(self, packed: Tensor, total: Tensor) -> None: ...

    def uses_error_feedback(self, sends: Cargo) -> bool:
        return False

    def rounds_stochastically(self) -> bool:
        return False

    def reduce(self, x: Tensor, op: Op, group: Group, memory: Memory) -> Iterator[Work]:
        shards, rank = cut(x.numel(), group.size), group.rank
        others = [r for r in range(group.size) if r != rank]
        buffers = self._buffers("encoded", [s.stop - s.start for s in shards], x.device, memory)
        error = memory.error(x) if self.uses_error_feedback(memory.sends) else None
        step = memory.count() if self.rounds_stochastically() else 0

        for r in others:
            part = shards[r]
            self._encode(
                x[part],
                buffers[r],
                None if error is None else error[part],
                memory.seed(rank, step, r),
            )
        mine = shards[rank]
        length = mine.stop - mine.start
        arrived = self._buffers("arrived", [length] * len(others), x.device, memory)
        yield _transfer(
            group, {r: buffers[r] for r in others}, dict(zip(others, arrived, strict=True))
        )

        total = memory.scratch("total", length, torch.float32, x.device)
        if error is None:
            total.copy_(x[mine])
        else:
            own = error[mine].add_(x[mine])
            total.copy_(own)
            own.sub_(total).nan_to_num_(0.0, 0.0, 0.0)  # zero, except what float32 cannot hold
        for packed in arrived:
            self.unpack_add(packed, total)
        if op == "mean":
            total.div_(group.size)
        lost = None
        if error is not None:
            # a run with another number of ranks has other shards, and starts from nothing lost
            lost = memory.keep("second", length, torch.float32, x.device, may_vanish=True)
        self.pack(total, buffers[rank], lost, memory.seed(rank, step, "sum"))
        # where shard r was sent from, the sum of shard r arrives: they are equally long
        yield _transfer(group, {r: buffers[rank] for r in others}, {r: buffers[r] for r in others})

        for part, packed in zip(shards, buffers, strict=True):
            self._decode(packed, x[part])

    def encode(self, x: Tensor, memory: Memory) -> Tensor:
        packed = memory.scratch("encoded", self.nbytes(x.numel()), torch.uint8, x.device)
        step = memory.count() if self.rounds_stochastically() else 0
        self._encode(
            x,
            packed,
            memory.error(x) if self.uses_error_feedback(memory.sends) else None,
            memory.seed(memory.rank, step),
        )
        return packed

    def decode(self, packed: Tensor, into: Tensor, memory: Memory) -> None:
        self._decode(packed, into)

    def _encode(self, x: Tensor, into: Tensor, error: Tensor | None, seed: int) -> None:
        if error is None or error.dtype == torch.float32:
            self.pack(x.to(torch.float32), into, error, seed)
            return
        p = error.add_(x).to(torch.float32)
        self.pack(p, into, None, seed)
        self.unpack(into, p)
        error.sub_(p).nan_to_num_(0.0, 0.0, 0.0)

    def _decode(self, packed: Tensor, into: Tensor) -> None:
        if into.dtype == torch.float32:
            self.unpack(packed, into)
        else:
            values = torch.empty(into.numel(), dtype=torch.float32, device=into.device)
            self.unpack(packed, values)
            into.copy_(values)

    def _buffers(
        self, kind: str, numels: list[int], device: torch.device, memory: Memory
    ) -> list[Tensor]:
        """A buffer for each encoded shard, all in one allocation, each aligned for its dtype."""
        sizes = [self.nbytes(n) for n in numels]
        steps = [-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes]
        whole = memory.scratch(kind, sum(steps), torch.uint8, device)
        return [buffer[:size] for buffer, size in zip(whole.split(steps), sizes, strict=True)]


def cut(numel: int, size: int) -> list[slice]:
    """The shard of a vector that each rank sums: as even as possible."""
    bounds = [numel * r // size for r in range(size + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]


def _transfer(group: Group, give: dict[int, Tensor], into: dict[int, Tensor]) -> Work:
    """Transfer all shards that have elements; both ends know which."""
    return group.transfer(
        {r: t for r, t in give.items() if t.numel()}, {r: t for r, t in into.items() if t.numel()}
    )
