"""Numbers of steps, dealt to workers, and where they all stop to meet.

    shared:  one counter for all: every number goes to one worker
    own:     every worker counts 0, 1, 2, ... by itself: every number goes to every worker

Between two meetings lies a period. It ends at one number for all: the limit, or where somebody calls before that, at the
number that stands (shared), or the largest that anybody was dealt (own), up to which the others still go. From there
everybody gets None, once, and is in the next period: a call made in one cannot end another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from manyhands.errors import StoreError


@dataclass
class _Period:
    base: int  # its first number
    next: int  # of the shared counter
    own: dict[int, int] = field(default_factory=dict)  # worker -> its next number
    called: bool = False
    stop: int | None = None  # of the own counts

    @property
    def standing(self) -> int:
        return max(self.next, *self.own.values()) if self.own else self.next


@dataclass
class _Hand:
    period: int = 0  # as many times it was dealt None
    last: tuple[int, int | None] | None = None  # request, answer
    before: int | None = None  # its own count when it ticked last
    gone: bool = False


class StepCounter:
    """Not thread-safe: whoever holds the clock's lock calls it."""

    def __init__(self, size: int):
        self._hands = [_Hand() for _ in range(size)]
        self._periods = {0: _Period(0, 0)}

    def deal(
        self, worker: int, limit: int, shared: bool, request: int | None = None
    ) -> tuple[int | None, bool]:
        """The number, and whether it was dealt now, not when the same request came before."""
        hand = self._hands[worker]
        if request is not None and hand.last is not None and hand.last[0] == request:
            return hand.last[1], False
        number = self._draw(worker, self._period_of(worker), limit, shared)
        if number is None:
            hand.period += 1
            hand.before = None
            self._forget()
        if request is not None:
            hand.last = request, number
        return number, True

    def start(self, worker: int, base: int) -> None:
        p = self._period_of(worker)
        if p.next == p.base and not p.own:
            p.base = p.next = base
        elif p.base != base:
            raise StoreError(
                f"worker {worker} starts at number {base}, but this period started at {p.base} and stands at {p.standing}; "
                "all workers must start at the same number, before they are dealt any"
            )

    def call(self, worker: int) -> None:
        p = self._period_of(worker)
        p.called = True
        if p.stop is None:
            p.stop = max((n for w, n in p.own.items() if not self._hands[w].gone), default=p.base)

    def period(self, worker: int) -> int:
        return self._hands[worker].period

    def standing(self) -> int:
        return max(p.standing for p in self._periods.values())

    def ticked(self, worker: int) -> None:
        self._hands[worker].before = self._period_of(worker).own.get(worker)

    def skip(self, worker: int, clocks: int) -> None:
        """The others made so many clocks without this worker: it goes on where they are, not where it was."""
        p, hand = self._period_of(worker), self._hands[worker]
        if (mine := p.own.get(worker)) is not None:
            a_clock = mine - (p.base if hand.before is None else hand.before)
            p.own[worker] = min(mine + a_clock * clocks, max(p.own.values()))

    def leave(self, worker: int) -> None:
        self._hands[worker].gone = True
        self._forget()

    def join(self, worker: int, others: Sequence[int]) -> None:
        """Another process in the place of `worker`: it is where the last of the others are."""
        hand = self._hands[worker] = _Hand(
            max((h.period for h in self._hands if not h.gone), default=self._hands[worker].period)
        )
        if others:
            hand.period = min(self._hands[o].period for o in others)
            p = self._period_of(worker)
            p.own.pop(worker, None)
            if p.own:
                p.own[worker] = min(p.own.values())

    def _draw(self, worker: int, p: _Period, limit: int, shared: bool) -> int | None:
        if shared:
            if p.called or p.next >= limit:
                p.called = True  # the first None fixes the number for all
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
        number = self._hands[worker].period
        if number not in self._periods:
            stands = self._periods[max(self._periods)].standing
            self._periods[number] = _Period(stands, stands)
        return self._periods[number]

    def _forget(self) -> None:
        """Periods that nobody can be in any more, but for the last one, which knows where the count stands."""
        oldest = min((h.period for h in self._hands if not h.gone), default=0)
        for number in [n for n in self._periods if n < oldest and n != max(self._periods)]:
            del self._periods[number]
