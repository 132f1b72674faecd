"""Calls of in-process ranks: how the same call of several ranks is matched, and how values move.

    RankCall         what one rank brings to its n-th collective call or swap
    MatchedCall      the n-th call of all ranks
    InprocMessage    a transfer from one rank to another

Values move when the last rank they depend on has come. Until then their owners wait in `swap`, or
have promised not to touch them before `wait`, so that nothing needs a copy to be safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from manyhands.core import Op, Tensors
from manyhands.errors import Deadlock


@dataclass
class RankCall:
    """What one rank brings to a call."""

    what: Literal["all_reduce", "broadcast", "barrier", "swap"]
    values: Tensors
    time: float
    op: Op = "sum"
    source: int = 0
    peers: tuple[int, ...] = ()
    inbox: dict[int, Tensors] = field(default_factory=dict)  # index in `peers` -> what it gave

    @property
    def is_collective(self) -> bool:
        """Whether all ranks take part, with tensors of the same names, shapes and dtypes."""
        return self.what != "swap"

    @property
    def nbytes(self) -> int:
        return sum(v.nbytes for v in self.values.values())

    def receive(self, rank: int, theirs: RankCall) -> None:
        """Copy what `rank` gives, once for every time that it is named as a peer."""
        for i, peer in enumerate(self.peers):
            if peer == rank:
                self.inbox[i] = {k: v.detach().clone() for k, v in theirs.values.items()}

    def clash(self, rank: int, theirs: RankCall, other: int) -> str:
        """Why this call of `rank` does not match `theirs` of `other`; empty: it does."""
        if self.what != theirs.what:
            return "different calls"
        if self.op != theirs.op:
            return "different ops"
        if self.source != theirs.source:
            return "different sources"
        if self.peers.count(other) != theirs.peers.count(rank):
            return "one names the other as its peer more often than it is named itself"
        compared = self.is_collective or other in self.peers
        if compared and _shapes(self.values) != _shapes(theirs.values):
            return "different names, shapes or dtypes"
        return ""

    def __str__(self) -> str:
        if self.what == "barrier":
            return self.what
        shown = [
            f"{name} {list(shape)} {str(dtype).removeprefix('torch.')}"
            for name, shape, dtype in _shapes(self.values)
        ]
        rest = f" and {len(shown) - 6} more" if len(shown) > 6 else ""
        how = {
            "all_reduce": f"({self.op})",
            "broadcast": f" from rank {self.source}",
            "swap": f" with {ranks_text(self.peers)}",
        }[self.what]
        return f"{self.what}{how} of {', '.join(shown[:6]) or 'nothing'}{rest}"


class MatchedCall:
    """The n-th call of every rank."""

    def __init__(self, number: int, size: int):
        self.number, self.size = number, size
        self.calls: dict[int, RankCall] = {}
        self.latest = self.finish = 0.0

    @property
    def complete(self) -> bool:
        return len(self.calls) == self.size

    def add(self, rank: int, call: RankCall) -> None:
        """Match this rank's call with those of the others; raise Deadlock if it is another one."""
        # A collective call must equal the first one, which equals all that came since. A swap is
        # compared with all others: it may differ between ranks that are no peers.
        for other, theirs in list(self.calls.items())[: 1 if call.is_collective else None]:
            if reason := call.clash(rank, theirs, other):
                raise Deadlock(
                    f"call #{self.number} does not match: rank {other} came with {theirs}, "
                    f"rank {rank} with {call}: {reason}. "
                    "Every rank must make the same calls in the same order"
                )
        self.calls[rank] = call
        self.latest = max(self.latest, call.time)
        if call.is_collective:
            if self.complete:
                self._exchange(call)
            return
        for other, theirs in self.calls.items():
            call.receive(other, theirs)
            if other != rank:
                theirs.receive(rank, call)

    def _exchange(self, call: RankCall) -> None:
        everyone = [self.calls[r].values for r in range(self.size)]
        if call.what == "all_reduce":
            _reduce(everyone, call.op)
        elif call.what == "broadcast":
            _copy_from(everyone.pop(call.source), everyone)

    def all_came_at(self) -> float | None:
        return self.latest if self.complete else None

    def came_at(self, ranks: Sequence[int]) -> float | None:
        """When the last of `ranks` came; None: one has not come yet."""
        if all(r in self.calls for r in ranks):
            return max(self.calls[r].time for r in ranks)
        return None

    def absent(self, ranks: Sequence[int]) -> list[int]:
        return sorted({r for r in ranks if r not in self.calls})


@dataclass
class InprocMessage:
    """A transfer from one rank to another. It moves when both ends have posted it."""

    source: int
    sink: int
    given: Tensor | None = None
    into: Tensor | None = None
    latest: float = 0.0  # when the second of the two ends came
    finish: float = 0.0
    moved: bool = False

    def move(self) -> None:
        if self.given is None or self.into is None:
            return
        if (self.given.numel(), self.given.dtype) != (self.into.numel(), self.into.dtype):
            raise Deadlock(
                f"a transfer does not match: rank {self.source} gives {_length(self.given)}, "
                f"rank {self.sink} waits for {_length(self.into)}. "
                "Both ends of every message must know its length and dtype"
            )
        self.into.view(-1).copy_(self.given.view(-1))
        self.given = self.into = None  # a message kept by one end would keep the other's memory
        self.moved = True


def _reduce(everyone: list[Tensors], op: Op) -> None:
    """Reduce in rank order and give every rank the same bits."""
    for name in everyone[0]:
        total, *others = (values[name].detach() for values in everyone)
        total = total.clone()
        for other in others:
            if op == "max":
                torch.maximum(total, other, out=total)
            else:
                total.add_(other)
        if op == "mean":
            total.div_(len(everyone)) if total.is_floating_point() else total.floor_divide_(
                len(everyone)
            )
        for values in everyone:
            values[name].detach().copy_(total)


def _copy_from(source: Tensors, others: list[Tensors]) -> None:
    for name, value in source.items():
        for values in others:
            values[name].detach().copy_(value.detach())


def _length(tensor: Tensor) -> str:
    return f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"


def _shapes(values: Tensors) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(k, v.shape, v.dtype) for k, v in values.items()]


def ranks_text(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"
