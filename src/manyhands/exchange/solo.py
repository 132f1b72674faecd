"""The link of a rank that is alone: the sum over one rank is its own value, so nothing moves."""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.core import Finished, Op, Tensors, Work


class SoloGroup:
    rank: int = 0
    size: int = 1

    def all_reduce(self, values: Tensors, op: Op = "sum") -> Work:
        return Finished()

    def swap(self, values: Tensors, peers: Sequence[int]) -> list[Tensors]:
        if any(peers):
            raise ValueError(f"swap with ranks {list(peers)}, but rank 0 is alone; start more ranks or give peers=[]")
        return [{k: v.detach().clone() for k, v in values.items()} for _ in peers]

    def close(self) -> None: ...
