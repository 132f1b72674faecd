"""Group wrapper: base of groups that add something to another group, such as `ObservedGroup`.

Every call goes to the wrapped `group`; a subclass overrides only the calls that it changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from manyhands.core import Group, Op, Tensors, Work


class GroupWrapper(Group):
    def __init__(self, group: Group):
        self.group, self.rank, self.size = group, group.rank, group.size

    def all_reduce(self, values: Tensors, op: Op = "sum") -> Work:
        return self.group.all_reduce(values, op)

    def reduce_scatter(self, values: Tensors, op: Op = "sum") -> Work:
        return self.group.reduce_scatter(values, op)

    def all_gather(self, values: Tensors) -> Work:
        return self.group.all_gather(values)

    def own(self, tensor: Tensor) -> list[slice]:
        return self.group.own(tensor)

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

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> Tensor:
        return self.group.allocate(numel, dtype, device)

    def clock(self) -> float:
        return self.group.clock()

    def close(self) -> None:
        self.group.close()


def unwrapped(group: Group) -> Group:
    """The group inside all wrappers."""
    while isinstance(group, GroupWrapper):
        group = group.group
    return group
