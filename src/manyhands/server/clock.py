"""Who may go on: the only place where workers wait for each other. Servers never do.

    plain:  a worker that has done c clocks begins the next when  min_j c_j >= c - staleness   (over those who run)
    held:   when `quorum` of those who run have reported, and none of them would be left out of `delay` commits in a row,
            all who have reported are committed together: version <- version + 1

So a worker that runs is at most `staleness` clocks ahead of the slowest, and counts of done clocks differ by at most
staleness + 1. A report is late when a commit was made since its worker began: what it held is dropped, or with late="keep"
counts in the next commit. One that rests (`deal` gave None) or was evicted counts for nobody: quorums shrink, clocks move on.

Nothing here has a thread of its own or a socket. `post_tick` and `tick_answer` never block; `tick` is both, with a wait.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple

from manyhands.core import Late, Tick
from manyhands.errors import PeerLost, StoreError
from manyhands.server.step_counter import StepCounter

HISTORY = 4096  # commits that can still be asked for
OVER = "the coordinator ends: the run is over"
Commit = tuple[int, list[tuple[int, int]]]  # version, (worker, clock) in rank order


class Entered(NamedTuple):
    incarnation: int
    clock: int  # what the worker's first pushes belong to
    version: int  # commits made before it came


@dataclass(frozen=True)
class _Post:
    clock: int
    staleness: float
    quorum: int | None
    delay: int | None
    held: bool


@dataclass
class _Worker:
    rank: int
    incarnation: int = -1
    status: Literal["runs", "rests", "gone"] = "runs"
    clock: int = 0  # that it is in, as it knows it
    done: int = 0  # clocks, as the bound on staleness counts them
    began: int = 0  # the version at which it began this clock
    left_out: int = 0  # commits in a row without it
    asked: int | None = None  # the clock of its last tick
    post: _Post | None = None  # what it waits with
    answer: Tick | None = None  # to the tick before

    @property
    def active(self) -> bool:
        return self.status == "runs" or (self.status == "rests" and self.post is not None)


class Clock:
    """All `size` workers count as running from the start: the first clock waits for those who still have to come."""

    def __init__(self, size: int):
        if size < 1:
            raise StoreError(f"a clock for {size} workers; at least 1 is needed")
        self.size = size
        self.version = 0
        self._workers = [_Worker(r) for r in range(size)]
        self._commits: deque[Commit] = deque(maxlen=HISTORY)
        self._deals = StepCounter(size)
        self._made: set[str] = set()
        self._dropped = self._waited = 0
        self._over = False
        self._changed = threading.Condition()

    # -- who is there --

    def enter(self, worker: int, incarnation: int | None = None) -> Entered:
        """A process takes the place of `worker`. None: the next incarnation; the same again changes nothing."""
        with self._changed:
            w = self._at(worker)
            incarnation = w.incarnation + 1 if incarnation is None else incarnation
            if incarnation < w.incarnation or (incarnation == w.incarnation and w.status == "gone"):
                raise StoreError(
                    f"worker {worker} enters as incarnation {incarnation}, but incarnation {w.incarnation} "
                    f"{'was evicted' if w.status == 'gone' else 'took its place'}; enter with a larger number"
                )
            if incarnation > w.incarnation:
                if w.incarnation >= 0 or w.status == "gone":  # somebody stood here before
                    self._rejoin(w)
                w.incarnation, w.began = incarnation, self.version
                w.clock = max(w.clock, self.version)
                self._advance()
            return Entered(w.incarnation, w.clock, self.version)

    def evict(self, worker: int) -> None:
        """It is dead: nobody waits for it any longer."""
        with self._changed:
            w = self._at(worker)
            w.status, w.post, w.answer = "gone", None, None
            self._deals.leave(worker)
            self._advance()

    def close(self) -> None:
        """The run is over: whoever waits, or asks from now on, hears that, and not that it is at fault."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def alive(self) -> list[int]:
        with self._changed:
            return [w.rank for w in self._workers if w.status != "gone"]

    # -- ticks --

    def post_tick(
        self,
        worker: int,
        clock: int,
        staleness: float = math.inf,
        quorum: int | None = None,
        late: Late = "drop",
        delay: int | None = None,
        held: bool = False,
    ) -> None:
        """`worker` has done `clock`. The same again (an answer was lost) changes nothing."""
        held = (
            held or quorum is not None or delay is not None
        )  # one without samples takes part, with nothing
        _check(self.size, staleness, quorum, late, delay, held)
        with self._changed:
            w = self._present(worker)
            if clock == w.asked:
                return
            if clock != w.clock or w.post is not None:
                raise StoreError(
                    f"worker {worker} has done clock {clock}, but it is in clock {w.clock}; it ticks once a clock"
                )
            w.asked, w.answer = clock, None
            if held and late == "drop" and w.began < self.version:
                self._dropped += 1
                w.done += 1
                self._go_on(w, counted=False)
                return
            w.post = _Post(clock, staleness, quorum, delay, held)
            w.done += not held
            self._advance()
            self._waited += w.post is not None

    def tick_answer(self, worker: int) -> Tick | None:
        """What `worker` hears to the tick it posted last; None: it must wait."""
        with self._changed:
            w = self._present(worker)
            if w.post is None and w.answer is None:
                raise StoreError(f"worker {worker} has not ticked since it entered")
            return w.answer

    def tick(
        self,
        worker: int,
        clock: int,
        staleness: float = math.inf,
        quorum: int | None = None,
        late: Late = "drop",
        delay: int | None = None,
        held: bool = False,
        timeout_s: float | None = None,
    ) -> Tick:
        self.post_tick(worker, clock, staleness, quorum, late, delay, held)
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._present(worker).answer is not None, timeout_s
            ):
                behind = self._behind(worker)
                raise PeerLost(
                    f"worker {worker} has done clock {clock} and waited {timeout_s:g} s for workers {behind}, which run but have "
                    f"not come as far; if they are dead, evict them, if they are slow, give more timeout_s or staleness",
                    tuple(behind),
                )
            answer = self._present(worker).answer
            assert answer is not None
            return answer

    def behind(self, worker: int) -> list[int]:
        """Whom a worker that must wait waits for."""
        with self._changed:
            return self._behind(worker)

    def commits_since(self, version: int) -> list[Commit]:
        """Later commits, oldest first; every shard must hear of them in this order."""
        with self._changed:
            newer = min(self.version - version, len(self._commits))
            return list(self._commits)[len(self._commits) - newer :] if newer > 0 else []

    # -- deals --

    def deal(self, worker: int, limit: int, shared: bool, request: int | None = None) -> int | None:
        """See core.Store. `request` numbers a worker's deals: the last one asked again gives the same answer."""
        with self._changed:
            w = self._present(worker)
            number, fresh = self._deals.deal(worker, limit, shared, request)
            if fresh and number is None and w.status == "runs":
                w.status = "rests"
                self._advance()
            elif fresh and number is not None and w.status == "rests":
                self._resume(w)
            return number

    def start(self, worker: int, base: int) -> None:
        """The next number of this worker's period is `base`: all workers say the same before they deal."""
        with self._changed:
            self._present(worker)
            self._deals.start(worker, base)

    def call(self, worker: int) -> None:
        with self._changed:
            self._present(worker)
            self._deals.call(worker)

    def dealt(self) -> int:
        """The smallest number that nobody was dealt."""
        with self._changed:
            return self._deals.standing()

    # -- tables: rank 0 says what it made, the others wait for it --

    def made(self, name: str) -> None:
        with self._changed:
            self._made.add(name)
            self._changed.notify_all()

    def is_made(self, name: str) -> bool:
        with self._changed:
            return name in self._made

    def wait_made(self, name: str, timeout_s: float | None = None) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: name in self._made or self._over, timeout_s):
                raise PeerLost(
                    f"waited {timeout_s:g} s for rank 0 to create table {name!r}; every rank must create it",
                    (0,),
                )
            if name not in self._made:
                raise PeerLost(OVER)

    def stats(self) -> dict[str, float]:
        with self._changed:
            running = [w.done for w in self._workers if w.status == "runs"]
            spread = max(running) - min(running) if running else 0
            gauges = {"now/running": len(running), "now/spread": spread}
            return {
                "commits": self.version,
                "late_dropped": self._dropped,
                "ticks_waited": self._waited,
                **gauges,
            }

    # -- decisions: the lock is held --

    def _advance(self) -> None:
        """Let go on who may; called after every change."""
        while self._commit():
            pass
        slowest = min((w.done for w in self._workers if w.active), default=0)
        for w in self._workers:
            if w.post is not None and not w.post.held and slowest >= w.done - w.post.staleness:
                self._go_on(w)
        self._changed.notify_all()

    def _commit(self) -> bool:
        came = [(w, w.post) for w in self._workers if w.post is not None and w.post.held]
        if not came:
            return False
        # one that waits in a plain tick brings nothing to this commit, and may be waiting for it
        others = [w for w in self._workers if w.active and w.post is None]
        quorum = min(max(p.quorum or self.size for _, p in came), len(came) + len(others))
        delay = min((p.delay for _, p in came if p.delay is not None), default=math.inf)
        if len(came) < quorum or any(w.left_out + 1 >= delay for w in others):
            return False
        self.version += 1
        self._commits.append((self.version, [(w.rank, p.clock) for w, p in came]))
        for w in others:
            w.left_out += 1
        for w, _ in came:
            w.left_out = 0
            w.done += 1
            self._go_on(w)
        return True

    def _go_on(self, w: _Worker, counted: bool = True) -> None:
        """Begin the next clock, which is never behind the commits: where it jumps, so does the worker's own count of deals."""
        held, clock = not counted or (w.post is not None and w.post.held), w.clock + 1
        if held and self.version > clock:
            self._deals.skip(w.rank, self.version - clock)
            clock = self.version
        self._deals.ticked(w.rank)
        w.post, w.answer = None, Tick(clock, counted)
        w.clock, w.began = clock, self.version

    def _behind(self, worker: int) -> list[int]:
        w = self._workers[worker]
        if w.post is None:
            return []
        if w.post.held:
            return [o.rank for o in self._workers if o.active and o.post is None]
        return [o.rank for o in self._workers if o.active and o.done < w.done - w.post.staleness]

    def _resume(self, first: _Worker) -> None:
        """The meeting is over: all who rested with `first` run again, from one line, also before they have said so: a bound of
        0 must not let the first one back go alone."""
        done = min(
            (w.done for w in self._workers if w.active), default=max(w.done for w in self._workers)
        )
        period = self._deals.period(first.rank)
        for w in self._workers:
            if w.status == "rests" and w.post is None and self._deals.period(w.rank) == period:
                w.status, w.done, w.began, w.left_out = "runs", done, self.version, 0

    def _rejoin(self, w: _Worker) -> None:
        others = [o for o in self._workers if o.active and o is not w]
        w.status, w.asked, w.post, w.answer, w.left_out = "runs", None, None, None, 0
        w.done = min((o.done for o in others), default=w.done)
        w.clock += 1  # not one under which the process before may have held something
        self._deals.join(w.rank, [o.rank for o in others])

    def _at(self, worker: int) -> _Worker:
        if not 0 <= worker < self.size:
            raise StoreError(f"worker {worker}, but workers are 0 to {self.size - 1}")
        return self._workers[worker]

    def _present(self, worker: int) -> _Worker:
        w = self._at(worker)
        if self._over:
            raise PeerLost(OVER)
        if w.status == "gone":
            raise StoreError(
                f"worker {worker} was evicted: the others went on without it; it must enter again"
            )
        return w


def _check(
    size: int, staleness: float, quorum: int | None, late: Late, delay: int | None, held: bool
) -> None:
    if not staleness >= 0:
        raise StoreError(f"staleness={staleness}; 0 (lockstep) or more is needed, inf for no bound")
    if quorum is not None and not 1 <= quorum <= size:
        raise StoreError(f"quorum={quorum}, but there are {size} workers; 1 to {size} is needed")
    if late not in ("drop", "keep"):
        raise StoreError(f'late={late!r}; "drop" or "keep" is needed')
    if delay is not None and delay < 1:
        raise StoreError(f"delay={delay}; at least 1 commit is needed")
    if held and staleness not in (0, math.inf):
        raise StoreError(
            f"staleness={staleness:g} with held pushes, which a quorum commits; leave staleness out"
        )
