"""Activity of a rank: what its training thread is in, for the thread that watches it.

    phase     start-up (to the end of the first round), rounds, evaluation, checkpoint, script: a
              user's own loop between two epochs
    call      the exchange that this rank waits in; "": none

The training thread writes, in every exchange and every round; another thread reads, about once a
second. So these are plain attributes: no lock, and no harm where the reader sees one of them old.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

START, ROUNDS, SCRIPT = "start-up", "rounds", "script"
RECENT = 32  # rounds whose lengths are kept


class Activity:
    """One object for all groups of a rank. Times are of `time.perf_counter`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.phase, self.since = START, clock()  # `since`: the last phase or round ended
        self.longest: dict[str, float] = {}  # seconds, by phase
        self.call, self.calls, self.entered = "", 0, 0.0
        self.round = 0  # the last one that ended
        # sums over rounds without another phase among them; they only grow
        self.rounds, self.rounds_s, self.waited_s = 0, 0.0, 0.0
        self.recent: deque[float] = deque(maxlen=RECENT)  # seconds of whole rounds
        self._phases, self._counted, self._waited = 0, -1, 0.0

    def enter(self, call: str) -> None:
        self.calls += 1
        self.entered = self._clock()
        self.call = call

    def leave(self) -> None:
        self.call = ""

    def change(self, phase: str) -> None:
        """Another phase from here on, which may be longer than a round usually is."""
        now = self._clock()
        if self.phase not in (START, ROUNDS):
            self.longest[self.phase] = max(self.longest.get(self.phase, 0.0), now - self.since)
        self.phase, self.since = phase, now
        self._phases += 1

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before = self.phase
        self.change(phase)
        try:
            yield
        finally:
            self.change(before)

    def end_round(self, round: int, waited_s: float) -> None:
        """`waited_s`: seconds in exchanges since the start of the run."""
        now = self._clock()
        if self.phase not in (START, ROUNDS):
            self.change(ROUNDS)
        if self._counted == self._phases:  # else other work lies between the two rounds
            seconds = now - self.since
            self.longest[ROUNDS] = max(self.longest.get(ROUNDS, 0.0), seconds)
            self.recent.append(seconds)
            self.rounds += 1
            self.rounds_s += seconds
            self.waited_s += min(seconds, waited_s - self._waited)
        self.phase, self.since, self.round = ROUNDS, now, round
        self._counted, self._waited = self._phases, waited_s
