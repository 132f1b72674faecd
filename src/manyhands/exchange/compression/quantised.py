"""All-reduce of encoded values in two stages over point-to-point; what fp16, bf16, int8 and one bit have in common.

    stage 1    each rank encodes shard r of its vector and sends it to rank r, who decodes and sums in float32
    stage 2    rank r encodes the sum and sends it to all; everybody, rank r too, decodes the same bytes

Every value is encoded twice, however many ranks there are (a ring would do it M - 1 times), so the error of the mean does
not grow with M, and all ranks hold the same bits. The own shard enters the sum as it is. Each rank sends 2 (M - 1)/M of the
encoded size. With error feedback both stages keep what they lost: the sender its vector's, the owner its sum's.
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
    """A wire that encodes each value, or block of values, by itself."""

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

    def feeds_back(self, sends: Cargo) -> bool:
        return False

    def rounds_by_chance(self) -> bool:
        return False

    def reduce(self, x: Tensor, op: Op, link: Group, memory: Memory) -> Iterator[Work]:
        shards, rank = cut(x.numel(), link.size), link.rank
        others = [r for r in range(link.size) if r != rank]
        boxes = self._boxes("mail", [s.stop - s.start for s in shards], x.device, memory)
        error = memory.error(x) if self.feeds_back(memory.sends) else None
        step = memory.count() if self.rounds_by_chance() else 0

        for r in others:
            part = shards[r]
            self._encode(
                x[part],
                boxes[r],
                None if error is None else error[part],
                memory.seed(rank, step, r),
            )
        mine = shards[rank]
        length = mine.stop - mine.start
        arrived = self._boxes("arrived", [length] * len(others), x.device, memory)
        yield _transfer(
            link, {r: boxes[r] for r in others}, dict(zip(others, arrived, strict=True))
        )

        total = memory.scratch("total", length, torch.float32, x.device)
        if error is None:
            total.copy_(x[mine])
        else:
            own = error[mine].add_(x[mine])
            total.copy_(own)
            own.sub_(total).nan_to_num_(0.0, 0.0, 0.0)  # nothing, but for what float32 cannot hold
        for packed in arrived:
            self.unpack_add(packed, total)
        if op == "mean":
            total.div_(link.size)
        lost = None
        if (
            error is not None
        ):  # a run with another number of ranks has other shards, and starts from nothing lost
            lost = memory.keep("second", length, torch.float32, x.device, may_vanish=True)
        self.pack(total, boxes[rank], lost, memory.seed(rank, step, "sum"))
        # where shard r was sent from, the sum of shard r arrives: they are equally long
        yield _transfer(link, {r: boxes[rank] for r in others}, {r: boxes[r] for r in others})

        for part, packed in zip(shards, boxes, strict=True):
            self._decode(packed, x[part])

    def encode(self, x: Tensor, memory: Memory) -> Tensor:
        packed = memory.scratch("mail", self.nbytes(x.numel()), torch.uint8, x.device)
        step = memory.count() if self.rounds_by_chance() else 0
        self._encode(
            x,
            packed,
            memory.error(x) if self.feeds_back(memory.sends) else None,
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

    def _boxes(
        self, kind: str, numels: list[int], device: torch.device, memory: Memory
    ) -> list[Tensor]:
        """A place for each encoded part, in one piece of memory, each aligned for what it holds."""
        sizes = [self.nbytes(n) for n in numels]
        steps = [-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes]
        whole = memory.scratch(kind, sum(steps), torch.uint8, device)
        return [box[:size] for box, size in zip(whole.split(steps), sizes, strict=True)]


def cut(numel: int, size: int) -> list[slice]:
    """Which part of a vector belongs to which rank: as even as can be."""
    bounds = [numel * r // size for r in range(size + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]


def _transfer(link: Group, give: dict[int, Tensor], into: dict[int, Tensor]) -> Work:
    """Nothing is sent for a shard without elements; both ends know which."""
    return link.transfer(
        {r: t for r, t in give.items() if t.numel()}, {r: t for r, t in into.items() if t.numel()}
    )
