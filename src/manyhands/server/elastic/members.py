"""Elastic members: leases, gatherings and notes of workers that may die and be replaced.

    note    the state that all workers have in common since the last sync point: position in the
            data, round, metrics. Each sends it with its first request after a sync point; a process
            that replaces a dead one gets it, and so knows what a step number means.
    news    who was lost, and who joined, as sentences

It uses the clock's lock and its members. A worker that waits for a step, or has joined and not
asked for one, counts for nobody: clocks and quorums go on without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from manyhands.errors import Evicted, PeerLost
from manyhands.server.elastic.gatherings import Gatherings, Key
from manyhands.server.elastic.step_ledger import Lease, StepLedger

if TYPE_CHECKING:
    from manyhands.server.clock import Clock, WorkerState

T = TypeVar("T")
NOBODY = (
    "all workers that knew how far the run was are gone; "
    "resume it from its last checkpoint (--resume)"
)


class ElasticMembers:
    def __init__(self, clock: Clock):
        self._clock = clock
        self.ledger, self.gatherings = StepLedger(clock.size), Gatherings(clock.size)
        # kind (lost, joined), rank/incarnation, sentence
        self.news: list[tuple[str, str, str]] = []
        self.notes: dict[int, bytes] = {}  # by period
        self.heard: dict[int, int] = {}  # of a worker that joined: how much news came before
        self.entering: set[int] = set()  # have joined, and have no note yet
        self.used = False  # by a run whose workers lease steps; before the first one joins

    # -- what the clock tells; the caller holds its lock --

    def left(self, worker: int, why: str) -> None:
        """`why`: it died; "": it left by itself."""
        if not self.used:
            return
        self.entering.discard(worker)
        back = self.ledger.leave(worker)
        if why:
            steps = f"; its steps go to the others: {', '.join(map(str, back))}" if back else ""
            text = f"rank {worker} is lost: {why.partition(',')[0]}{steps}"
            self.news.append(("lost", self._who(worker), text))

    def joined(self, w: WorkerState, noticed: bool) -> None:
        """A new process takes the place of a worker; not `noticed`: it is here before the end of
        the other was."""
        if self.used:
            if not noticed:
                self.left(w.rank, "another process has taken its place")
            self.ledger.leave(w.rank)
            self.entering.add(w.rank)  # nobody waits for it while it makes its model
            w.status = "at_sync"  # until its first step

    def committed(self, worker: int) -> None:
        """A commit has taken the pending push of a worker, or left it out."""
        self.ledger.finish(worker)

    # -- steps --

    def try_lease(
        self,
        worker: int,
        limit: int,
        done: Sequence[int] = (),
        note: bytes | None = None,
        request: int | None = None,
    ) -> Lease | None:
        """See `StepLedger.lease`; None: it must wait."""
        clock = self._clock
        with clock.changed:
            w, holds = clock._member(worker), self.ledger.holds(worker)
            known = self._keep_note(worker, note)
            lease = self.ledger.lease(worker, limit, done, request)
            if lease is not None and lease.step is not None:
                self._run(w)
            elif (lease is None or lease.sync_at is not None) and w.status == "running":
                w.status = "at_sync"
                clock._advance()
            if lease is not None or not known or self.ledger.holds(worker) < holds:
                clock.changed.notify_all()  # not else: those that wait would wake each other
            return lease

    def _keep_note(self, worker: int, note: bytes | None) -> bool:
        """Whether this note was known; the first one of a period counts."""
        period = self.ledger.period(worker)
        if note is None or period in self.notes:
            return True
        self.notes = {p: n for p, n in self.notes.items() if p >= period - 1} | {period: note}
        return False

    def lease(
        self,
        worker: int,
        limit: int,
        done: Sequence[int] = (),
        note: bytes | None = None,
        request: int | None = None,
        timeout_s: float | None = None,
    ) -> Lease:
        ask = lambda: self.try_lease(worker, limit, done, note, request)
        return self._wait(
            worker, ask, timeout_s, "for steps that others hold", lambda: list(self.ledger.open())
        )

    def _run(self, w: WorkerState) -> None:
        """A worker has a step, so the others' clocks wait for it. With the first one after a sync
        point run all that were at it: staleness 0 must not let the first run alone.
        """
        workers = self._clock.workers
        active = [o.done for o in workers if o.active]
        least = min(active, default=max(o.done for o in workers))
        for o in workers:
            if o.status == "at_sync" and (o is w or self.ledger.coming(o.rank)):
                o.status, o.done = "running", max(o.done, least)
                o.began, o.left_out = self._clock.version, 0

    def request_sync(self, worker: int) -> None:
        with self._clock.changed:
            self._clock._member(worker)
            self.ledger.request_sync(worker)

    # -- what workers agree on --

    def try_gather(self, worker: int, key: Key, payload: bytes) -> dict[int, bytes] | None:
        clock = self._clock
        with clock.changed:
            clock._member(worker)
            self.gatherings.bring(worker, key, payload)
            fixed = self.gatherings.fixed(key)
            answer = self.gatherings.answer(key, self._members())
            if answer is not None and not fixed:
                clock.changed.notify_all()
            return answer

    def gather(
        self, worker: int, key: Key, payload: bytes, timeout_s: float | None = None
    ) -> dict[int, bytes]:
        ask = lambda: self.try_gather(worker, key, payload)
        absent = lambda: self.gatherings.absent(key, self._members())
        return self._wait(worker, ask, timeout_s, "at a sync point", absent)

    def note(self, worker: int, timeout_s: float | None = None) -> tuple[int, int, bytes]:
        """For a process that has joined: the period it is in, how much of the news is from before
        it, and the note of the period."""
        ask = lambda: self._note(worker)
        return self._wait(worker, ask, timeout_s, "for the state of the run", self._members)

    def _note(self, worker: int) -> tuple[int, int, bytes] | None:
        self._clock._member(worker)
        period = self.ledger.periods if worker in self.entering else self.ledger.period(worker)
        found = self.notes.get(period)
        if found is None and not self._members():
            raise PeerLost(NOBODY)
        if found is not None and worker in self.entering:
            self.entering.discard(worker)
            self.ledger.join(worker)
            self.gatherings.join(worker, period)
            text = f"rank {worker} has joined: a new process in its place"
            self.news.append(("joined", self._who(worker), text))
            self.heard[worker] = len(self.news) - 1
        return None if found is None else (period, self.heard.get(worker, 0), found)

    def running(self) -> list[int]:
        """The live workers that know how far the run is."""
        with self._clock.changed:
            return self._members()

    def _who(self, worker: int) -> str:
        return f"{worker}/{self._clock.workers[worker].incarnation}"

    def _members(self) -> list[int]:
        workers = self._clock.workers
        return [w.rank for w in workers if w.status != "evicted" and w.rank not in self.entering]

    def _wait(
        self,
        worker: int,
        ask: Callable[[], T | None],
        timeout_s: float | None,
        what: str,
        absent: Callable[[], list[int]],
    ) -> T:
        found: list[T] = []
        incarnation = self._clock._state(worker).incarnation

        def ready() -> bool:
            if self._clock._state(worker).incarnation != incarnation:
                raise Evicted(f"worker {worker} was replaced by another process while it waited")
            if (answer := ask()) is not None:
                found.append(answer)
            return bool(found)

        with self._clock.changed:
            if not self._clock.changed.wait_for(ready, timeout_s):
                others = [w for w in absent() if w != worker]
                raise PeerLost(
                    f"worker {worker} waited {timeout_s:g} s {what}, of workers {others}; if they "
                    "are slow, raise timeout_s; if they are dead, look at their logs",
                    tuple(others),
                )
            return found[0]
