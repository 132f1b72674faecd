"""Clock of the workers: bounded staleness (SSP) and quorums. The only place where workers wait.

    plain:    a worker that has done c clocks begins the next when  min_j c_j >= c - staleness
              (over the running workers)
    pending:  when `quorum` of the running workers have ticked, and none of the others would be left
              out of `delay` commits in a row, the pending pushes of all that have ticked are
              committed together: version <- version + 1

So a running worker is at most `staleness` clocks ahead of the slowest, and counts of done clocks
differ by at most staleness + 1. A tick is late when a commit was made since its worker began the
clock: its pending pushes are dropped, or with late="keep" count in the next commit. A worker at a
sync point (`claim` returned None) or evicted counts for nobody: quorums shrink, clocks move on.

Nothing here has a thread or a socket of its own. `post_tick` and `tick_answer` never block; `tick`
is both, with a wait.

Papers: Ho et al. 2013 (SSP, NIPS); quorums: Chen et al. 2016 (arXiv:1604.00981), with a delay
Zhang and Kwok 2014 (ICML).
"""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple

from manyhands.core import Late, Tick
from manyhands.errors import Evicted, PeerLost, StoreError
from manyhands.server.elastic.members import ElasticMembers
from manyhands.server.step_counter import StepCounter

HISTORY = 4096  # commits that can still be asked for
OVER = "the coordinator is shutting down, so this call gets no answer; look for the first error"
REJOIN = "the other ranks went on without it; it must join again with a new store"
Commit = tuple[int, list[tuple[int, int]]]  # version, (worker, clock) in rank order


class Membership(NamedTuple):
    """What a worker is told when it joins."""

    incarnation: int
    clock: int  # of the worker's first pushes
    version: int  # commits made before it joined


@dataclass(frozen=True)
class WaitingTick:
    """A tick that has no answer yet."""

    clock: int
    staleness: float
    quorum: int | None
    delay: int | None
    pending: bool


@dataclass
class WorkerState:
    rank: int
    incarnation: int = -1
    status: Literal["running", "at_sync", "evicted"] = "running"
    clock: int = 0  # the clock that it is in, as the worker counts
    done: int = 0  # clocks done, as the staleness bound counts
    began: int = 0  # the version at which it began this clock
    left_out: int = 0  # commits in a row without it
    ticked: int | None = None  # the clock of its last tick
    waiting: WaitingTick | None = None
    answer: Tick | None = None  # to its last tick
    evicted_for: str = ""

    @property
    def active(self) -> bool:
        return self.status == "running" or (self.status == "at_sync" and self.waiting is not None)


class Clock:
    """Clocks of `size` workers. All count as running from the start: the first clock waits for
    those that have not joined yet.
    """

    def __init__(self, size: int):
        if size < 1:
            raise StoreError(f"a clock for {size} workers; at least 1 is needed")
        self.size = size
        self.version = 0
        self.workers = [WorkerState(r) for r in range(size)]
        self.commits: deque[Commit] = deque(maxlen=HISTORY)
        self.steps = StepCounter(size)
        self.created: set[str] = set()
        self._dropped = self._waited = 0
        self._over = False
        self.changed = threading.Condition()
        self.elastic = ElasticMembers(self)  # of workers that may be replaced

    # -- membership --

    def join(self, worker: int, incarnation: int | None = None) -> Membership:
        """A process joins as `worker`. None: the next incarnation; a repeated one is harmless."""
        with self.changed:
            w = self._state(worker)
            incarnation = w.incarnation + 1 if incarnation is None else incarnation
            if incarnation < w.incarnation or (
                incarnation == w.incarnation and w.status == "evicted"
            ):
                what = "was evicted" if w.status == "evicted" else "took its place"
                raise StoreError(
                    f"worker {worker} joins as incarnation {incarnation}, but incarnation "
                    f"{w.incarnation} {what}; join with a larger number"
                )
            if incarnation > w.incarnation:
                if w.incarnation >= 0 or w.status == "evicted":  # replaces a process
                    self._rejoin(w)
                w.incarnation, w.began = incarnation, self.version
                w.clock = max(w.clock, self.version)
                self._advance()
            return Membership(w.incarnation, w.clock, self.version)

    def evict(self, worker: int, reason: str = REJOIN) -> None:
        """Remove a worker: nobody waits for it any longer. It gets `reason` if it calls again."""
        with self.changed:
            w = self._state(worker)
            w.status, w.waiting, w.answer, w.evicted_for = "evicted", None, None, reason
            self.steps.leave(worker)
            self.elastic.left(worker, "" if reason is REJOIN else reason)
            self._advance()

    def close(self) -> None:
        """The run is over: workers that wait, or call from now on, get an error that says so."""
        with self.changed:
            self._over = True
            self.changed.notify_all()

    def alive(self) -> list[int]:
        with self.changed:
            return [w.rank for w in self.workers if w.status != "evicted"]

    # -- ticks --

    def post_tick(
        self,
        worker: int,
        clock: int,
        staleness: float = math.inf,
        quorum: int | None = None,
        late: Late = "drop",
        delay: int | None = None,
        pending: bool = False,
    ) -> None:
        """`worker` has done `clock`. A repeated tick (its answer was lost) changes nothing."""
        # a worker without samples takes part in a commit, with nothing
        pending = pending or quorum is not None or delay is not None
        _check(self.size, staleness, quorum, late, delay, pending)
        with self.changed:
            w = self._member(worker)
            if clock == w.ticked:
                return
            if clock != w.clock or w.waiting is not None:
                raise StoreError(
                    f"worker {worker} has done clock {clock}, but it is in clock {w.clock}; "
                    "a worker ticks once per clock"
                )
            w.ticked, w.answer = clock, None
            if pending and late == "drop" and w.began < self.version:
                self._dropped += 1
                w.done += 1
                self._begin_next(w, counted=False)
                return
            w.waiting = WaitingTick(clock, staleness, quorum, delay, pending)
            w.done += not pending
            self._advance()
            self._waited += w.waiting is not None

    def tick_answer(self, worker: int) -> Tick | None:
        """The answer to the last tick of `worker`; None: it must wait."""
        with self.changed:
            w = self._member(worker)
            if w.waiting is None and w.answer is None:
                raise StoreError(f"worker {worker} has not ticked since it joined")
            return w.answer

    def tick(
        self,
        worker: int,
        clock: int,
        staleness: float = math.inf,
        quorum: int | None = None,
        late: Late = "drop",
        delay: int | None = None,
        pending: bool = False,
        timeout_s: float | None = None,
    ) -> Tick:
        self.post_tick(worker, clock, staleness, quorum, late, delay, pending)
        with self.changed:
            if not self.changed.wait_for(
                lambda: self._member(worker).answer is not None, timeout_s
            ):
                behind = self._behind(worker)
                raise PeerLost(
                    f"worker {worker} has done clock {clock} and waited {timeout_s:g} s for "
                    f"workers {behind}, which are running but behind; if they are slow, raise "
                    "timeout_s or staleness; if they are dead, look at their logs",
                    tuple(behind),
                )
            answer = self._member(worker).answer
            assert answer is not None
            return answer

    def behind(self, worker: int) -> list[int]:
        """The workers that a waiting worker waits for."""
        with self.changed:
            return self._behind(worker)

    def commits_since(self, version: int) -> list[Commit]:
        """Later commits, oldest first; every shard must apply them in this order."""
        with self.changed:
            newer = min(self.version - version, len(self.commits))
            return list(self.commits)[len(self.commits) - newer :] if newer > 0 else []

    # -- steps --

    def claim(
        self, worker: int, limit: int, shared: bool, request: int | None = None
    ) -> int | None:
        """See core.Store.claim_step. `request` numbers a worker's claims: the last one, repeated,
        gets the same answer.
        """
        with self.changed:
            w = self._member(worker)
            step, fresh = self.steps.claim(worker, limit, shared, request)
            if fresh and step is None and w.status == "running":
                w.status = "at_sync"
                self._advance()
            elif fresh and step is not None and w.status == "at_sync":
                self._resume(w)
            return step

    def request_sync(self, worker: int) -> None:
        with self.changed:
            self._member(worker)
            self.steps.request_sync(worker)

    def unclaimed(self) -> int:
        """The smallest step that no worker has claimed."""
        with self.changed:
            return self.steps.unclaimed()

    # -- tables: rank 0 creates them, the others wait for it --

    def table_created(self, name: str) -> None:
        with self.changed:
            self.created.add(name)
            self.changed.notify_all()

    def has_table(self, name: str) -> bool:
        with self.changed:
            return name in self.created

    def wait_for_table(self, name: str, timeout_s: float | None = None) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: name in self.created or self._over, timeout_s):
                raise PeerLost(
                    f"waited {timeout_s:g} s for rank 0 to create table {name!r}; "
                    "every rank must create it",
                    (0,),
                )
            if name not in self.created:
                raise PeerLost(OVER)

    def stats(self) -> dict[str, float]:
        with self.changed:
            running = [w.done for w in self.workers if w.status == "running"]
            spread = max(running) - min(running) if running else 0
            gauges = {"now/running": len(running), "now/spread": spread}
            return {
                "commits": self.version,
                "late_dropped": self._dropped,
                "ticks_waited": self._waited,
                **gauges,
            }

    # -- decisions: the caller holds the lock --

    def _advance(self) -> None:
        """Commit and answer ticks where that is now possible; called after every change."""
        while self._commit():
            pass
        slowest = min((w.done for w in self.workers if w.active), default=0)
        for w in self.workers:
            if (
                w.waiting is not None
                and not w.waiting.pending
                and slowest >= w.done - w.waiting.staleness
            ):
                self._begin_next(w)
        self.changed.notify_all()

    def _commit(self) -> bool:
        ready = [
            (w, w.waiting) for w in self.workers if w.waiting is not None and w.waiting.pending
        ]
        if not ready:
            return False
        # a worker that waits in a plain tick has nothing for this commit, and may wait for it
        others = [w for w in self.workers if w.active and w.waiting is None]
        quorum = min(max(p.quorum or self.size for _, p in ready), len(ready) + len(others))
        delay = min((p.delay for _, p in ready if p.delay is not None), default=math.inf)
        if len(ready) < quorum or any(w.left_out + 1 >= delay for w in others):
            return False
        self.version += 1
        self.commits.append((self.version, [(w.rank, p.clock) for w, p in ready]))
        for w in others:
            w.left_out += 1
        for w, _ in ready:
            w.left_out = 0
            w.done += 1
            self._begin_next(w)
        return True

    def _begin_next(self, w: WorkerState, counted: bool = True) -> None:
        """Begin the next clock, which is never behind the commits; where it jumps, the worker's own
        step count jumps with it.
        """
        pending, clock = not counted or (w.waiting is not None and w.waiting.pending), w.clock + 1
        if pending and self.version > clock:
            self.steps.skip(w.rank, self.version - clock)
            clock = self.version
        self.steps.ticked(w.rank)
        if pending:
            self.elastic.committed(w.rank)
        w.waiting, w.answer = None, Tick(clock, counted)
        w.clock, w.began = clock, self.version

    def _behind(self, worker: int) -> list[int]:
        w = self.workers[worker]
        if w.waiting is None:
            return []
        if w.waiting.pending:
            return [o.rank for o in self.workers if o.active and o.waiting is None]
        return [o.rank for o in self.workers if o.active and o.done < w.done - w.waiting.staleness]

    def _resume(self, first: WorkerState) -> None:
        """The sync point is over: all workers that were at it run again, with equal counts, also
        those that have not claimed a step yet: staleness 0 must not let `first` run alone.
        """
        done = min(
            (w.done for w in self.workers if w.active), default=max(w.done for w in self.workers)
        )
        period = self.steps.period(first.rank)
        for w in self.workers:
            if w.status == "at_sync" and w.waiting is None and self.steps.period(w.rank) == period:
                w.status, w.done, w.began, w.left_out = "running", done, self.version, 0

    def _rejoin(self, w: WorkerState) -> None:
        others, noticed = (
            [o for o in self.workers if o.active and o is not w],
            w.status == "evicted",
        )
        w.status, w.ticked, w.waiting, w.answer, w.left_out = "running", None, None, None, 0
        w.done = min((o.done for o in others), default=w.done)
        w.clock += 1  # the replaced process may have pending pushes of the clock before
        self.steps.join(w.rank, [o.rank for o in others])
        self.elastic.joined(w, noticed)

    def _state(self, worker: int) -> WorkerState:
        if not 0 <= worker < self.size:
            raise StoreError(f"worker {worker}, but workers are 0 to {self.size - 1}")
        return self.workers[worker]

    def _member(self, worker: int) -> WorkerState:
        w = self._state(worker)
        if self._over:
            raise PeerLost(OVER)
        if w.status == "evicted":
            raise Evicted(f"worker {worker} was evicted: {w.evicted_for}")
        return w


def _check(
    size: int, staleness: float, quorum: int | None, late: Late, delay: int | None, pending: bool
) -> None:
    if not staleness >= 0:
        raise StoreError(f"staleness={staleness}; 0 (lockstep) or more is needed, inf for no bound")
    if quorum is not None and not 1 <= quorum <= size:
        raise StoreError(f"quorum={quorum}, but there are {size} workers; 1 to {size} is needed")
    if late not in ("drop", "keep"):
        raise StoreError(f'late={late!r}; "drop" or "keep" is needed')
    if delay is not None and delay < 1:
        raise StoreError(f"delay={delay}; at least 1 commit is needed")
    if pending and staleness not in (0, math.inf):
        raise StoreError(
            f"staleness={staleness:g} with pending pushes, which a quorum commits; "
            "leave staleness out"
        )
