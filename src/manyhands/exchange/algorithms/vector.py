"""Vector: the operations in which the algorithms are written, on one rank's copy of the values.

    v.send(r, part)        send that part to rank r             v.post(r, part)      without waiting
    v.receive(r, part)     replace that part by rank r's        v.expect(r, part)    without waiting
    v.reduce(r, part)      reduce rank r's into that part
    v.exchange(...)        send to one rank and receive from another at the same time
    v.among(ranks)         the same memory among fewer ranks, counted from 0 again
    v.within(part)         part of the memory

A part without elements is no message: both ends know that it is empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from manyhands.core import (
    Finished,
    Group,
    Op,
    Work,
)

Watch = Callable[[int, str, Tensor], None]  # (rank, what it has just done, its whole vector)


class Scratch:
    """Buffers for messages that are to be reduced: one per dtype and device, as long as the longest
    so far."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def like(self, part: Tensor) -> Tensor:
        key = (part.dtype, part.device)
        if (buffer := self._buffers.get(key)) is None or buffer.numel() < part.numel():
            buffer = self._buffers[key] = torch.empty_like(part)
        return buffer[: part.numel()]


class Vector:
    def __init__(
        self,
        values: Tensor,
        group: Group,
        op: Op = "sum",
        ranks: Sequence[int] | None = None,
        scratch: Scratch | None = None,
        watch: Watch | None = None,
    ):
        self.values, self.group, self.op = values, group, op
        self.ranks = list(range(group.size)) if ranks is None else list(ranks)
        self.rank, self.size = self.ranks.index(group.rank), len(self.ranks)
        self._scratch, self._watch = scratch or Scratch(), watch

    def __len__(self) -> int:
        return self.values.numel()

    @property
    def whole(self) -> slice:
        return slice(0, len(self))

    def cut(self, parts: int, part: slice | None = None) -> list[slice]:
        """`part`, or everything, in that many parts in order; lengths differ by at most one."""
        start, stop = (0, len(self)) if part is None else (part.start, part.stop)
        short, longer = divmod(stop - start, parts)
        edges = [start + i * short + min(i, longer) for i in range(parts + 1)]
        return [slice(a, b) for a, b in itertools.pairwise(edges)]

    def among(self, ranks: Sequence[int]) -> Vector:
        return Vector(
            self.values,
            self.group,
            self.op,
            [self.ranks[r] for r in ranks],
            self._scratch,
            self._watch,
        )

    def within(self, part: slice) -> Vector:
        return Vector(
            self.values[part], self.group, self.op, self.ranks, self._scratch, self._watch
        )

    def post(self, to: int, part: slice) -> Work:
        given = self.values[part]
        return self.group.transfer({self.ranks[to]: given}, {}) if given.numel() else Finished()

    def expect(self, source: int, part: slice) -> Work:
        taken = self.values[part]
        if not taken.numel():
            return Finished()
        work = self.group.transfer({}, {self.ranks[source]: taken})
        return (
            work
            if self._watch is None
            else _Noted(work, partial(self._note, f"= from {self.ranks[source]}"))
        )

    def send(self, to: int, part: slice) -> None:
        self.exchange(to, part)

    def receive(self, source: int, part: slice) -> None:
        self.exchange(source=source, take=part)

    def reduce(self, source: int, part: slice) -> None:
        self.exchange(source=source, take=part, reduce=True)

    def exchange(
        self,
        to: int | None = None,
        give: slice | None = None,
        source: int | None = None,
        take: slice | None = None,
        reduce: bool = False,
    ) -> None:
        """Send `give` to one rank and receive `take` from another (or the same); replace what is
        there, or reduce into it."""
        sent = {} if to is None or give is None else {self.ranks[to]: self.values[give]}
        mine = self.values[:0] if take is None else self.values[take]
        theirs = self._scratch.like(mine) if reduce else mine
        sent = {r: x for r, x in sent.items() if x.numel()}
        taken = {} if source is None or not mine.numel() else {self.ranks[source]: theirs}
        if not sent and not taken:
            return
        self.group.transfer(sent, taken).wait()
        if reduce and source is not None:
            # the lower rank's first, at both ends: the maximum of -0.0 and 0.0 depends on the order
            first, second = (theirs, mine) if source < self.rank else (mine, theirs)
            torch.maximum(first, second, out=mine) if self.op == "max" else torch.add(
                first, second, out=mine
            )
        self._note(
            *(f"to {r}" for r in sent), *(f"{'+' if reduce else '='} from {r}" for r in taken)
        )

    def _note(self, *words: str) -> None:
        if self._watch is not None:
            self._watch(self.group.rank, ", ".join(words), self.values)


class _Noted:
    def __init__(self, work: Work, note: Callable[[], None]):
        self._work, self._notes = work, [note]

    def wait(self) -> None:
        self._work.wait()
        while self._notes:
            self._notes.pop()()


def fold(v: Vector, run: Callable[[Vector], None]) -> None:
    """Run an algorithm for 2^k ranks on 2^k + r: of the first 2r ranks the even ones send their
    values to the odd ones, wait, and get the result."""
    power = 1 << (v.size.bit_length() - 1)
    extra = v.size - power
    paired, even = v.rank < 2 * extra, v.rank % 2 == 0
    if paired and even:
        v.send(v.rank + 1, v.whole)
        v.receive(v.rank + 1, v.whole)
        return
    if paired:
        v.reduce(v.rank - 1, v.whole)
    run(v.among([*range(1, 2 * extra, 2), *range(2 * extra, v.size)]))
    if paired:
        v.send(v.rank - 1, v.whole)
