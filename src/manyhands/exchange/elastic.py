"""Elastic group: the live workers of a run whose members come and go.

    all_reduce, broadcast, barrier    every live worker brings its values, all get those of all and
                                      reduce them themselves, in rank order: bit-identical results

What brings and gets them is a function, `gather`: bytes of this rank in, bytes of every live rank
out. A rank that dies is left out, in the same call for all others. `members` are the ranks of the
last call: whoever divides work among them compares them before and after, and does it again where
one was lost in between.

For numbers at sync points, not for gradients: everything goes through one coordinator, in pieces.
Before a gather is given, and in a process that joins a run under way, a rank is alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from manyhands.core import Finished, Group, Op, Tensors, Work

Gather = Callable[[bytes], Mapping[int, bytes]]
PIECE_BYTES = 1 << 19  # of all members' answers together


class ElasticGroup(Group):
    """`size` is the largest number of members; ranks keep their numbers when others die."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self.gather: Gather | None = None
        self.members: tuple[int, ...] = tuple(range(size))

    @property
    def leads(self) -> bool:
        """Whether this rank writes and speaks for all: the first of the live ones."""
        return self.rank == min(self.members, default=0)

    def all_reduce(self, values: Tensors, op: Op = "sum") -> Work:
        for value in values.values():
            found = self._of_all(value)
            total = torch.stack(found)
            reduced = total.amax(0) if op == "max" else total.sum(0)
            if op == "mean":
                reduced = reduced / len(found)
            value.detach().copy_(reduced.to(value.dtype).view(value.shape))
        return Finished()

    def broadcast(self, values: Tensors, source: int = 0) -> Work:
        """From `source`, or where it is gone from the first that is not."""
        for value in values.values():
            found = self._of_all(value)
            at = self.members.index(source) if source in self.members else 0
            value.detach().copy_(found[at].view(value.shape))
        return Finished()

    def barrier(self) -> None:
        if self.gather is not None:
            self._know(self.gather(b""))

    def _of_all(self, value: Tensor) -> list[Tensor]:
        """The values of all members, in rank order, as vectors on the CPU."""
        mine = value.detach().to("cpu").contiguous().view(-1)
        if self.gather is None:
            return [mine.clone()]
        raw = mine.numpy().tobytes()
        step = max(1024, PIECE_BYTES // self.size)
        pieces: dict[int, list[bytes]] = {}
        for at in range(0, max(1, len(raw)), step):
            found = self.gather(raw[at : at + step])
            self._know(found)
            for rank, some in found.items():
                pieces.setdefault(rank, []).append(some)
        whole = {rank: b"".join(pieces[rank]) for rank in self.members}
        return [
            torch.frombuffer(bytearray(some), dtype=mine.dtype) if some else mine.clone()
            for some in whole.values()
        ]

    def _know(self, found: Mapping[int, bytes]) -> None:
        self.members = tuple(sorted(found))

    # -- not for members that come and go --

    def reduce_scatter(self, values: Tensors, op: Op = "sum") -> Work:
        self._refuse("reduce_scatter")

    def all_gather(self, values: Tensors) -> Work:
        self._refuse("all_gather")

    def own(self, tensor: Tensor) -> list[slice]:
        self._refuse("own")

    def swap(self, values: Tensors, peers: Sequence[int]) -> list[Tensors]:
        self._refuse("swap")

    def transfer(
        self, give: Mapping[int, Tensor], into: Mapping[int, Tensor], name: str = ""
    ) -> Work:
        self._refuse("transfer")

    def _refuse(self, what: str) -> NoReturn:
        raise NotImplementedError(
            f"{what} is between ranks that stay, and those of an elastic group may not; "
            "use all_reduce or broadcast"
        )

    def close(self) -> None: ...
