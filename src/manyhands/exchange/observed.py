"""Observed group: reports what every call of a group moved, and how long this rank waited in it.

    seconds of a call = time inside `all_reduce` + time inside its `wait`
                        (exchange that overlaps with compute costs nothing)

An event ends when the wait does and is as long as this rank was held up; the hidden part of the
exchange is not in it. Bytes are those that this rank gives: all values once in an all-reduce or by
the source of a broadcast, once per peer in a swap, what is given in a transfer, none in a barrier.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from manyhands.core import (
    Emit,
    Event,
    Group,
    Op,
    Tensors,
    Work,
)
from manyhands.exchange.activity import Activity
from manyhands.exchange.wrapper import GroupWrapper

Clock = Callable[[], float]


@dataclass
class TrafficTotals:
    """Running totals of what a rank exchanges, and its round: one object for all of its groups."""

    round: int = 0
    calls: int = 0
    nbytes: int = 0
    seconds: float = 0.0


class ObservedGroup(GroupWrapper):
    """`calls`, `nbytes` and `seconds` are running totals. The loop sets `round`; events are emitted
    only in rounds divisible by `every`, totals always counted. A group of fewer ranks `beside`
    another one shares its totals and its activity."""

    def __init__(
        self,
        group: Group,
        emit: Emit,
        clock: Clock = time.perf_counter,
        now: Clock = time.time,
        every: int = 1,
        beside: ObservedGroup | None = None,
    ):
        if every < 1:
            raise ValueError(f"every={every}; needed: 1 (events for all rounds) or more")
        super().__init__(group)
        self.every = every
        self.totals: TrafficTotals = TrafficTotals() if beside is None else beside.totals
        self.activity: Activity = Activity() if beside is None else beside.activity
        self._who = group.rank if beside is None else beside.rank
        self.emit, self._clock, self._now = emit, clock, now

    @property
    def round(self) -> int:
        return self.totals.round

    @round.setter
    def round(self, round: int) -> None:
        self.totals.round = round

    @property
    def calls(self) -> int:
        return self.totals.calls

    @property
    def nbytes(self) -> int:
        return self.totals.nbytes

    @property
    def seconds(self) -> float:
        return self.totals.seconds

    def all_reduce(self, values: Tensors, op: Op = "sum") -> Work:
        return self._watch("all_reduce", values.values(), lambda: self.group.all_reduce(values, op))

    def reduce_scatter(self, values: Tensors, op: Op = "sum") -> Work:
        return self._watch(
            "reduce_scatter", values.values(), lambda: self.group.reduce_scatter(values, op)
        )

    def all_gather(self, values: Tensors) -> Work:
        return self._watch("all_gather", values.values(), lambda: self.group.all_gather(values))

    def broadcast(self, values: Tensors, source: int = 0) -> Work:
        given = values.values() if source == self.rank else ()
        return self._watch("broadcast", given, lambda: self.group.broadcast(values, source))

    def barrier(self) -> None:
        start = self._clock()
        self.enter("barrier")
        self.group.barrier()
        self.count("barrier", 0, self._clock() - start)

    def swap(self, values: Tensors, peers: Sequence[int]) -> list[Tensors]:
        start = self._clock()
        self.enter("swap")
        got = self.group.swap(values, peers)
        seconds = self._clock() - start
        self.count("swap", len(peers) * sum(v.nbytes for v in values.values()), seconds)
        return got

    def transfer(
        self, give: Mapping[int, Tensor], into: Mapping[int, Tensor], name: str = ""
    ) -> Work:
        away = [v for r, v in give.items() if r != self.rank]
        return self._watch("transfer", away, lambda: self.group.transfer(give, into, name))

    def enter(self, name: str) -> None:
        """This rank waits in a call from here on, until `count`."""
        self.activity.enter(name)

    def count(self, name: str, nbytes: int, seconds: float, calls: int = 1) -> None:
        """Add what this rank exchanged with servers (`server.client.observed_store`)."""
        self.activity.leave()
        self.totals.calls += calls
        self.totals.nbytes += nbytes
        self.totals.seconds += seconds
        self._report(name, self.round, nbytes, seconds)

    def _watch(self, name: str, given: Iterable[Tensor], begin: Callable[[], Work]) -> Work:
        start, activity = self._clock(), self.activity
        activity.calls += 1  # as in `enter`, without the cost of a call
        activity.entered = start
        activity.call = name
        try:
            work = begin()
        finally:
            activity.call = ""
        seconds = self._clock() - start
        nbytes = sum(v.nbytes for v in given)
        self.totals.calls += 1
        self.totals.nbytes += nbytes
        self.totals.seconds += seconds
        return _Watched(self, name, work, nbytes, seconds)

    def _report(self, name: str, round: int, nbytes: int, seconds: float) -> None:
        if round % self.every == 0:
            self.emit(Event(self._now() - seconds, self._who, round, name, seconds, nbytes))


class _Watched:
    __slots__ = ("_done", "_group", "_name", "_nbytes", "_round", "_seconds", "_work")

    def __init__(self, group: ObservedGroup, name: str, work: Work, nbytes: int, seconds: float):
        self._group, self._name, self._work, self._nbytes, self._seconds = (
            group,
            name,
            work,
            nbytes,
            seconds,
        )
        self._round, self._done = group.round, False

    def wait(self) -> None:
        if self._done:
            return
        group = self._group
        start, activity = group._clock(), group.activity
        activity.entered = start
        activity.call = self._name
        try:
            self._work.wait()
        finally:
            activity.call = ""
        seconds = group._clock() - start
        self._done = True
        group.totals.seconds += seconds
        group._report(self._name, self._round, self._nbytes, self._seconds + seconds)
