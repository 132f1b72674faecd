"""Group: symmetric exchange between ranks, which all make the same calls in the same order."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from manyhands.records import Tensors

Op = Literal["sum", "mean", "max"]
EXACT = "exact/"  # a tensor whose name starts with this is never compressed


class Work(Protocol):
    """An exchange in flight. Its tensors may be read and written again after `wait`."""

    def wait(self) -> None: ...


class Finished:
    """Work that is already complete."""

    def wait(self) -> None: ...


@runtime_checkable
class Group(Protocol):
    """Process group: ranks that exchange symmetrically, by the same calls in the same order.

    Groups inherit from this for what most of them share: `allocate` and `clock`.
    """

    rank: int
    size: int

    def all_reduce(self, values: Tensors, op: Op = "sum") -> Work: ...
    def reduce_scatter(self, values: Tensors, op: Op = "sum") -> Work:
        """The first half of an all-reduce: sum into the part that each rank owns.

        The rest of `values` keeps what it had. For contiguous vectors, in some groups only for
        those from `allocate`.
        """
        ...

    def all_gather(self, values: Tensors) -> Work:
        """The second half of an all-reduce: copy the part that each rank owns to all others."""
        ...

    def own(self, tensor: Tensor) -> list[slice]:
        """Which elements of a vector this rank owns in `reduce_scatter` and `all_gather`."""
        ...

    def broadcast(self, values: Tensors, source: int = 0) -> Work:
        """Copy the `values` of rank `source` into those of all other ranks.

        Names, shapes and dtypes are the same everywhere.
        """
        ...

    def barrier(self) -> None:
        """Return when every rank has called it."""
        ...

    def swap(self, values: Tensors, peers: Sequence[int]) -> list[Tensors]:
        """Send `values` to every peer and return theirs, in the order of `peers`.

        If a rank names another one as its peer, that one must name it too.
        """
        ...

    def transfer(
        self, give: Mapping[int, Tensor], into: Mapping[int, Tensor], name: str = ""
    ) -> Work:
        """Point to point: send `give[r]` to rank r and receive from rank r into `into[r]`.

        Tensors are contiguous, and both ends know length and dtype. Only the ranks named take part;
        messages from one rank to another arrive in order. Nothing given may change, and nothing
        received be read, before `wait`. A message with a `name` may be compressed.
        """
        ...

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> Tensor:
        """A zeroed vector on `device`, in memory that the group reduces without a copy, if it can.

        Every rank must allocate the same vectors in the same order.
        """
        return torch.zeros(numel, dtype=dtype, device=device)

    def clock(self) -> float:
        """Seconds on the clock that measures this group's calls: real time, or a simulation's."""
        return time.perf_counter()

    def close(self) -> None: ...
