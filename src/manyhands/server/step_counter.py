"""Step counter: asynchronous workers claim step numbers from it, and all stop at one sync point.

    shared:  one counter for all workers; every step goes to one of them
    own:     every worker counts 0, 1, 2, ... by itself; every step goes to every worker

A period lies between two sync points. It ends at one step for all workers: the limit, or where a
worker requests a sync before that, the next step of the shared counter, or the largest step that
any worker has claimed (own), up to which the others still go. From there every worker gets None
once, and is then in the next period: a sync requested in one period cannot end another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class _Period:
    base: int  # its first step
    next: int  # of the shared counter
    own: dict[int, int] = field(default_factory=dict)  # worker -> its next step
    sync_requested: bool = False
    stop: int | None = None  # of the own counts

    @property
    def unclaimed(self) -> int:
        """The smallest step that no worker has claimed."""
        return max(self.next, *self.own.values()) if self.own else self.next


@dataclass
class _Claims:
    """What one worker has claimed."""

    period: int = 0  # how often it got None
    last: tuple[int, int | None] | None = None  # request, answer
    at_tick: int | None = None  # its own count at its last tick
    gone: bool = False


class StepCounter:
    """Not thread-safe: the caller holds the clock's lock."""

    def __init__(self, size: int):
        self._claims = [_Claims() for _ in range(size)]
        self._periods = {0: _Period(0, 0)}

    def claim(
        self, worker: int, limit: int, shared: bool, request: int | None = None
    ) -> tuple[int | None, bool]:
        """The step (None: sync point), and whether it was claimed now; False: this request was
        repeated and gets the same answer.
        """
        claims = self._claims[worker]
        if request is not None and claims.last is not None and claims.last[0] == request:
            return claims.last[1], False
        step = self._next_step(worker, self._period_of(worker), limit, shared)
        if step is None:
            claims.period += 1
            claims.at_tick = None
            self._drop_old_periods()
        if request is not None:
            claims.last = request, step
        return step, True

    def state(self) -> dict[str, Any]:
        return {
            "claims": [asdict(claims) for claims in self._claims],
            "periods": [[number, asdict(period)] for number, period in self._periods.items()],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self._claims = [
            _Claims(**{**c, "last": None if c["last"] is None else tuple(c["last"])})
            for c in state["claims"]
        ]
        self._periods = {number: _Period(**period) for number, period in state["periods"]}

    def request_sync(self, worker: int) -> None:
        p = self._period_of(worker)
        p.sync_requested = True
        if p.stop is None:
            p.stop = max((n for w, n in p.own.items() if not self._claims[w].gone), default=p.base)

    def period(self, worker: int) -> int:
        return self._claims[worker].period

    def unclaimed(self) -> int:
        """The smallest step that no worker has claimed."""
        return max(p.unclaimed for p in self._periods.values())

    def ticked(self, worker: int) -> None:
        self._claims[worker].at_tick = self._period_of(worker).own.get(worker)

    def skip(self, worker: int, clocks: int) -> None:
        """The others did so many clocks without this worker: it continues where they are."""
        p, claims = self._period_of(worker), self._claims[worker]
        if (mine := p.own.get(worker)) is not None:
            per_clock = mine - (p.base if claims.at_tick is None else claims.at_tick)
            p.own[worker] = min(mine + per_clock * clocks, max(p.own.values()))

    def leave(self, worker: int) -> None:
        self._claims[worker].gone = True
        self._drop_old_periods()

    def join(self, worker: int, others: Sequence[int]) -> None:
        """A new process replaces `worker`: it starts where the slowest of the others are."""
        latest = max((c.period for c in self._claims if not c.gone), default=None)
        period = self._claims[worker].period if latest is None else latest
        claims = self._claims[worker] = _Claims(period)
        if others:
            claims.period = min(self._claims[o].period for o in others)
            p = self._period_of(worker)
            p.own.pop(worker, None)
            if p.own:
                p.own[worker] = min(p.own.values())

    def _next_step(self, worker: int, p: _Period, limit: int, shared: bool) -> int | None:
        if shared:
            if p.sync_requested or p.next >= limit:
                p.sync_requested = True  # the first None fixes the sync point for all
                return None
            p.next += 1
            return p.next - 1
        mine = p.own.setdefault(worker, p.base)
        if mine >= (limit if p.stop is None else min(limit, p.stop)):
            p.stop = mine if p.stop is None else p.stop
            return None
        p.own[worker] = mine + 1
        return mine

    def _period_of(self, worker: int) -> _Period:
        number = self._claims[worker].period
        if number not in self._periods:
            first = self._periods[max(self._periods)].unclaimed
            self._periods[number] = _Period(first, first)
        return self._periods[number]

    def _drop_old_periods(self) -> None:
        """Drop periods that no worker is in, except the last one, which knows the next step."""
        oldest = min((c.period for c in self._claims if not c.gone), default=0)
        for number in [n for n in self._periods if n < oldest and n != max(self._periods)]:
            del self._periods[number]
