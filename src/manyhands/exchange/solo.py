"""Solo group: the group of a single rank. The sum over one rank is its own value; nothing moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from manyhands.core import (
    Finished,
    Group,
    Op,
    Tensors,
    Work,
)


class Ranked(Protocol):
    rank: int
    size: int


class SoloGroup(Group):
    rank: int = 0
    size: int = 1

    def all_reduce(self, values: Tensors, op: Op = "sum") -> Work:
        return Finished()

    def reduce_scatter(self, values: Tensors, op: Op = "sum") -> Work:
        return Finished()

    def all_gather(self, values: Tensors) -> Work:
        return Finished()

    def own(self, tensor: Tensor) -> list[slice]:
        return [slice(0, tensor.numel())]

    def broadcast(self, values: Tensors, source: int = 0) -> Work:
        check_source(self, source)
        return Finished()

    def barrier(self) -> None: ...

    def swap(self, values: Tensors, peers: Sequence[int]) -> list[Tensors]:
        if any(peers):
            raise ValueError(
                f"swap with ranks {list(peers)}, but rank 0 is alone; "
                "start more ranks or give peers=[]"
            )
        return [{k: v.detach().clone() for k, v in values.items()} for _ in peers]

    def transfer(
        self, give: Mapping[int, Tensor], into: Mapping[int, Tensor], name: str = ""
    ) -> Work:
        to_oneself(self, give, into)
        return Finished()

    def close(self) -> None: ...


def check_source(group: Ranked, source: int) -> None:
    """Refuse a broadcast from a rank that the group does not have."""
    if not 0 <= source < group.size:
        raise ValueError(f"broadcast from rank {source}, but ranks are 0 to {group.size - 1}")


def to_oneself(group: Ranked, give: Mapping[int, Tensor], into: Mapping[int, Tensor]) -> None:
    """Check the arguments of a transfer, and copy what a rank sends to itself."""
    for way, messages in (("to", give), ("from", into)):
        for r, tensor in messages.items():
            if not 0 <= r < group.size:
                ranks = f"ranks are 0 to {group.size - 1}" if group.size > 1 else "rank 0 is alone"
                raise ValueError(f"rank {group.rank} transfers {way} rank {r}, but {ranks}")
            if not tensor.is_contiguous():
                raise ValueError(
                    f"rank {group.rank} transfers a tensor {way} rank {r} that is not contiguous; "
                    "give x.contiguous()"
                )
    if (group.rank in give) != (group.rank in into):
        raise ValueError(
            f"rank {group.rank} transfers to itself; needed: both ends, give and into, "
            "in the same call"
        )
    if group.rank in give:
        into[group.rank].detach().copy_(give[group.rank].detach())
