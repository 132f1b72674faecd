"""Run registry: the runs and the single clients that one coordinator serves, each in a namespace.

    namespace   a name; tables of two namespaces never meet, since clients put it before the names
                of their tables (`namespaced_store`)
    run         the workers that have joined one namespace: one clock, and one number n
    worker      rank r of run n is worker n * 2^20 + r to all servers, so their dedup marks and
                pending pushes are its own; run 0, of the namespace "", has its ranks' own numbers
    guest       a client without a rank, as `mh.Store` is: it has a worker number and no clock, so
                nobody ever waits for it

When all workers of a run have left, the next to join begin another run in that namespace. It has
the number, and so the worker numbers, of the run before: its incarnations and its commits go on
from there, so that no server takes them for those it has seen.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from manyhands.core import Tick
from manyhands.errors import StoreError
from manyhands.server.clock import Clock, Commit, Membership
from manyhands.server.namespaces.clock_state import clock_of, clock_state
from manyhands.server.protocol import messages as m
from manyhands.server.protocol.messages import RUN_BITS
from manyhands.server.validate import check_namespace

RANK = (1 << RUN_BITS) - 1
GUEST_RUN = 1 << 20  # number of the run that guests count as; other runs have smaller ones
# a guest that vanished may only be paused, or behind a broken network: its number waits for it
GUEST_RETURNS_S = 3600.0


@dataclass
class RunState:
    """The run of a namespace. `earlier` and `committed`: incarnations and commits of the runs that
    the namespace had before."""

    number: int
    namespace: str
    clock: Clock
    earlier: int = 0
    committed: int = 0
    joined: set[int] = field(default_factory=set)  # ranks
    latest: int = -1  # incarnation, of this run
    died: bool = False  # one of them, without leaving
    tables: set[str] = field(default_factory=set)  # that it has begun to create
    left_tables: set[str] = field(default_factory=set)  # that runs before made

    @property
    def over(self) -> bool:
        return len(self.joined) == self.clock.size and not self.clock.alive()

    @property
    def ended(self) -> bool:
        """Over, or given up before all had joined: those that had are gone, and not all of them as
        who has finished goes."""
        gone = bool(self.joined) and not self.joined & set(self.clock.alive())
        return self.over or (gone and self.died)

    def begin_again(self, size: int) -> None:
        """Another run takes the place of one that is over."""
        self.earlier += self.latest + 1
        self.committed += self.clock.version
        self.left_tables |= self.tables
        self.clock, self.joined, self.latest, self.died = Clock(size), set(), -1, False
        self.tables = set()

    def join(self, rank: int, incarnation: int | None) -> Membership:
        joined = self.clock.join(rank, None if incarnation is None else incarnation - self.earlier)
        self.joined.add(rank)
        self.latest = max(self.latest, joined.incarnation)
        return Membership(
            joined.incarnation + self.earlier, joined.clock, joined.version + self.committed
        )

    def start_table(self, name: str, there: bool) -> int:
        """The answer to a `StartTable`; the table is this run's from now on, unless it is there and
        no run's."""
        known = 1 if name in self.tables else 2 * (name in self.left_tables)
        if known or not there:
            self.tables.add(name)
        return known

    def tick(self, rank: int, x: m.TickClock) -> tuple[Tick, list[Commit]]:
        """The answer to a tick, and the commits that its worker does not know, in the numbers that
        servers use."""
        tick = self.clock.tick(
            rank, x.clock, x.staleness, x.quorum, x.late, x.delay, x.pending, x.timeout_s
        )
        return tick, self.commits_since(x.version)

    def commits_since(self, version: int) -> list[Commit]:
        """Later commits, in the numbers that servers use."""
        base = self.number << RUN_BITS
        return [
            (version + self.committed, [(base + member, clock) for member, clock in members])
            for version, members in self.clock.commits_since(version - self.committed)
        ]


class _Vanished(NamedTuple):
    since: float
    guest: int


class RunRegistry:
    """`workers`: of the run without a namespace; None: as many as the first one says, as it is of
    all other runs. `keep`: the server goes on when all runs are over."""

    def __init__(self, workers: int | None = None, keep: bool = False):
        self.keep = keep
        self._by_name: dict[str, RunState] = {}
        self._by_number: dict[int, RunState] = {}
        self._guests: dict[int, int] = {}  # -> incarnation
        self._of_guest: dict[int, str] = {}  # -> namespace
        self._free: list[int] = []  # guests whose numbers can be given again
        self._vanished: deque[_Vanished] = deque()
        self._closed = False
        self._lock = threading.Lock()
        if workers is not None:
            self._add("", Clock(workers))

    # -- runs --

    def clock_of(self, namespace: str) -> Clock | None:
        with self._lock:
            run = self._by_name.get(namespace)
            return None if run is None else run.clock

    def number_of(self, namespace: str, rank: int) -> int:
        """The worker number of a rank; of a namespace without a run, a number of nobody."""
        with self._lock:
            run = self._by_name.get(namespace)
            return -1 if run is None else (run.number << RUN_BITS) + rank

    def join(self, rank: int, message: m.Join) -> tuple[int, Membership]:
        """A worker joins the run of its namespace; returns its worker number too."""
        check_namespace(message.namespace)
        with self._lock:
            if message.guest:
                return self._welcome(message.namespace)
            run = self._by_name.get(message.namespace)
            if run is None:
                run = self._add(message.namespace, Clock(message.size))
            elif self.keep and run.ended:
                run.begin_again(message.size)
            if message.size != run.clock.size:
                raise StoreError(
                    f"worker {rank} expects {message.size} workers, but {_the_run(run)} for "
                    f"{run.clock.size}; give both the same number"
                )
            if message.elastic and self.keep:
                raise StoreError(
                    "elastic= on servers that other runs use too (--keep): steps of two runs could "
                    "be taken for each other; let the run start its own servers"
                )
            run.clock.elastic.used |= message.elastic
            joined = run.join(rank, message.incarnation)
            return (run.number << RUN_BITS) + rank, joined

    def run_of(self, worker: int) -> tuple[RunState | None, int]:
        """The run of a worker and its rank there; of a guest, None."""
        with self._lock:
            return self._by_number.get(worker >> RUN_BITS), worker & RANK

    def evict(self, worker: int, *reason: str) -> None:
        """A worker is gone: nobody waits for it any longer."""
        run, rank = self.run_of(worker)
        if run is not None:
            run.died = run.died or bool(reason)
            run.clock.evict(rank, *reason)
            return
        self.came_back(worker)
        with self._lock:
            if reason:
                self._vanished.append(_Vanished(time.monotonic(), worker))
            elif worker not in self._free:
                self._free.append(worker)

    @property
    def over(self) -> bool:
        """Whether there was a run, and all runs are over; never where the server is kept."""
        with self._lock:
            runs = [run for run in self._by_name.values() if run.joined]
        return not self.keep and bool(runs) and all(run.over for run in runs)

    def stats(self) -> dict[str, float]:
        """Of all runs together."""
        with self._lock:
            clocks = [run.clock for run in self._by_name.values()]
        found: dict[str, float] = {"now/guests": self.guests()} if self.keep else {}
        for clock in clocks:
            for name, n in clock.stats().items():
                before = found.get(name, 0)
                found[name] = max(before, n) if name == "now/spread" else before + n
        return found

    # -- state that outlives this process --

    def state(self) -> dict[str, Any]:
        """What a registry that goes on in another process needs."""
        with self._lock:
            return {
                "runs": [
                    [
                        *(
                            run.number,
                            run.namespace,
                            clock_state(run.clock),
                            run.earlier,
                            run.committed,
                        ),
                        *(sorted(run.joined), run.latest, run.died),
                        *(sorted(run.tables), sorted(run.left_tables)),
                    ]
                    for run in self._by_name.values()
                ],
                "guests": [[g, i, self._of_guest[g]] for g, i in self._guests.items()],
                "free": list(self._free),
            }

    def load(self, state: Mapping[str, Any]) -> None:
        for number, name, clock, earlier, committed, *rest in state["runs"]:
            joined, latest, died, tables, left = rest
            run = RunState(number, name, clock_of(clock), earlier, committed, set(joined), latest)
            run.died, run.tables, run.left_tables = died, set(tables), set(left)
            self._by_name[name] = self._by_number[number] = run
        self._guests = {guest: incarnation for guest, incarnation, _ in state["guests"]}
        self._of_guest = {guest: namespace for guest, _, namespace in state["guests"]}
        self._free = list(state["free"])

    def close(self) -> None:
        with self._lock:
            self._closed, runs = True, list(self._by_name.values())
        for run in runs:
            run.clock.close()

    def _add(self, namespace: str, clock: Clock) -> RunState:
        number = 0 if not namespace else 1 + sum(bool(name) for name in self._by_name)
        run = RunState(number, namespace, clock)
        self._by_name[namespace] = self._by_number[number] = run
        if self._closed:
            clock.close()
        return run

    # -- guests --

    def guests(self) -> int:
        """How many guests are there."""
        with self._lock:
            return len(self._guests) - len(self._free) - len(self._vanished)

    def namespace_of(self, guest: int) -> str:
        with self._lock:
            return self._of_guest.get(guest, "")

    def came_back(self, worker: int) -> None:
        """A guest that had vanished is there again."""
        with self._lock:
            self._vanished = deque(v for v in self._vanished if v.guest != worker)

    def _welcome(self, namespace: str) -> tuple[int, Membership]:
        if self._vanished and time.monotonic() - self._vanished[0].since > GUEST_RETURNS_S:
            self._free.append(self._vanished.popleft().guest)
        worker = self._free.pop() if self._free else (GUEST_RUN << RUN_BITS) + len(self._guests)
        incarnation = self._guests[worker] = self._guests.get(worker, -1) + 1
        self._of_guest[worker] = namespace
        return worker, Membership(incarnation, 0, 0)


def _the_run(run: RunState) -> str:
    named = f"the run in namespace {run.namespace!r} is"
    return named if run.namespace else "the coordinator was started"
