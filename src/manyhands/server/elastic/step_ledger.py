"""Step ledger: leases steps to workers, and gives those of a dead worker out again.

    lease      the next step goes to the worker that asks; it holds it until it reports it done
    eviction   what the worker held and had not reported goes back, and is given out first
    sync       only when every step before it is done: until then whoever asks waits, since a
               worker that dies now leaves steps to the others

So of every step below a sync point exactly one lease ends as done. That alone does not make its
push count once: a worker may die between its push and its report. Therefore the push carries the
number of its step, and each shard applies a step once (`step_marks`): a step that is leased again
and was applied there already is skipped.

A step that is leased again is pushed alone (`again`): a dead worker may have pushed several steps
as one sum, to some of the shards, and only single steps can be told apart from that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class Lease(NamedTuple):
    """Answer to a request for a step."""

    step: int | None  # to compute; None: none now
    again: bool = False  # another worker held it before: push it alone
    # without a step: all steps below are done and this is a sync point; None: push what you have
    # computed, then ask again
    sync_at: int | None = None


@dataclass
class Held:
    """What one worker holds."""

    steps: set[int] = field(default_factory=set)
    period: int = 0  # sync points it was told of
    last: tuple[int, Lease] | None = None  # request, answer
    coming: bool = False  # from a sync point: it has not asked since


class StepLedger:
    """Not thread-safe: the caller holds the clock's lock."""

    def __init__(self, size: int):
        self.held = [Held() for _ in range(size)]
        self.next = 0
        self.returned: list[int] = []  # of evicted workers
        self.ends: list[int] = []  # of each period: the step it ended at
        self.sync_requested = False
        self.leased_again = 0

    @property
    def periods(self) -> int:
        """Sync points so far; the number of the period that runs now."""
        return len(self.ends)

    def period(self, worker: int) -> int:
        return self.held[worker].period

    def coming(self, worker: int) -> bool:
        """Whether a worker comes from the last sync point and has not asked for a step since."""
        held = self.held[worker]
        return held.coming and held.period == self.periods

    def holds(self, worker: int) -> int:
        """How many steps a worker holds."""
        return len(self.held[worker].steps)

    def open(self) -> dict[int, list[int]]:
        """By worker: the steps that it holds."""
        return {w: sorted(held.steps) for w, held in enumerate(self.held) if held.steps}

    def lease(
        self, worker: int, limit: int, done: Iterable[int] = (), request: int | None = None
    ) -> Lease | None:
        """The worker reports steps as done, and asks for one below `limit`. None: it must wait. A
        request that is repeated gets the same answer.
        """
        held = self.held[worker]
        if request is not None and held.last is not None and held.last[0] == request:
            return held.last[1]
        held.steps.difference_update(done)
        held.coming = False
        found = self._find(held, limit)
        if found is not None and request is not None:
            held.last = request, found
        return found

    def _find(self, held: Held, limit: int) -> Lease | None:
        if held.period < self.periods:  # this period has ended for the others already
            return self._sync(held)
        if self.returned and self.returned[0] < limit:
            step = self.returned.pop(0)
            held.steps.add(step)
            self.leased_again += 1
            return Lease(step, again=True)
        if not self.sync_requested and self.next < limit:
            self.next += 1
            held.steps.add(self.next - 1)
            return Lease(self.next - 1)
        if held.steps:
            return Lease(None)
        if self.returned or any(other.steps for other in self.held):
            return None
        self.ends.append(self.next)
        self.sync_requested = False
        return self._sync(held)

    def _sync(self, held: Held) -> Lease:
        held.period += 1
        held.coming = True
        return Lease(None, sync_at=self.ends[held.period - 1])

    def request_sync(self, worker: int) -> None:
        if self.held[worker].period == self.periods:
            self.sync_requested = True

    def finish(self, worker: int) -> None:
        """All that a worker holds is done: a commit has taken its pending push, or left it out."""
        self.held[worker].steps.clear()

    def leave(self, worker: int) -> list[int]:
        """A worker is gone. Returns the steps that go to the others."""
        held = self.held[worker]
        back, held.steps = sorted(held.steps), set()
        held.coming = False
        self.returned = sorted([*self.returned, *back])
        return back

    def join(self, worker: int) -> None:
        """A new process takes a worker's place, in the period that runs now."""
        self.held[worker] = Held(period=self.periods)
