"""Group wrapper: base of the groups that add something to another group, such as `ObservedGroup` and `CompressedGroup`.

Every call goes to the wrapped `group`; a subclass overrides only the calls that it changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from manyhands.core import Group, Op, Tensors, Work


class GroupWrapper:
    def __init__(self, group: Group):
        self.group, self.rank, self.size = group, group.rank, group.size

    def all_reduce(self, values: Tensors, op: Op = "sum") -> Work:
        return self.group.all_reduce(values, op)

    def broadcast(self, values: Tensors, source: int = 0) -> Work:
        return self.group.broadcast(values, source)

    def barrier(self) -> None:
        self.group.barrier()

    def swap(self, values: Tensors, peers: Sequence[int]) -> list[Tensors]:
        return self.group.swap(values, peers)

    def transfer(
        self, give: Mapping[int, Tensor], into: Mapping[int, Tensor], name: str = ""
    ) -> Work:
        return self.group.transfer(give, into, name)

    def close(self) -> None:
        self.group.close()
