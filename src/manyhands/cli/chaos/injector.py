"""Fault injector: breaks the processes of a run at their time, and puts right what only lasts.

    kill        SIGKILL
    pause       SIGSTOP, and after its duration SIGCONT
    slow        SIGSTOP and SIGCONT in turn
    cut         the signal at which a server drops its connections; of a lab's host, its link down
    full disk   a limit of 0 on the size of files, of all processes of the run: writes fail as on a
                full disk. Shared memory has the same limit, so servers are reached by sockets then

Only processes that the run's launcher has started, or those have, are ever touched, and the
launcher itself.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from manyhands.cli.chaos.faults import Fault, TimedFault
from manyhands.cli.chaos.rank_faults import SlowProcess, cut_host, lab_hosts
from manyhands.cli.chaos.rank_history import present_ranks
from manyhands.cli.chaos.run_processes import descendants, workers
from manyhands.cli.servers import read
from manyhands.errors import ManyhandsError
from manyhands.server.client.operator import Operator
from manyhands.server.network.cut_connections import SIGNAL as CUT

LOOK_S = 0.02
STATUS_S = 0.1
ANSWER_S = 2.0  # for the coordinator to answer


@dataclass
class Injected:
    """What became of one fault. `time_s` is None where it was not injected."""

    fault: Fault
    at_s: float  # when it was due, after training began
    time_s: float | None = None  # when it came, since 1970
    target: str = ""
    why: str = ""  # it was not injected
    lost: set[int] = field(default_factory=set)  # processes that it takes from the run


@dataclass
class Lasting:
    """A pause, a slow rank or a full disk: `until` it is put right by `undo`."""

    until: float
    undo: Callable[[], None]


@dataclass
class CoordinatorReport:
    """What the coordinators of a run have told, one after the other."""

    losses: list[tuple[int, str]] = field(default_factory=list)
    copies: list[tuple[int, int, float, int]] = field(default_factory=list)
    lost_shards: set[int] = field(default_factory=set)
    servers: list[dict[str, Any]] = field(default_factory=list)  # now, by number
    coordinator_pid: int | None = None

    def add(self, status: dict[str, Any]) -> None:
        for kind in ("losses", "copies"):
            known = getattr(self, kind)
            known += [tuple(each) for each in status[kind] if tuple(each) not in known]
        self.lost_shards |= set(status["lost_shards"])
        self.servers = sorted(status["servers"], key=lambda s: s["server"])
        self.coordinator_pid = status["coordinator_pid"]


class StatusWatch:
    """Asks the coordinator of a run again and again, in a thread: it may be dead or paused."""

    def __init__(self, run: Path):
        self.report, self._run = CoordinatorReport(), run
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="chaos status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(2 * ANSWER_S)

    def _watch(self) -> None:
        while not self._closing.wait(STATUS_S):
            # the run may not have begun, or be over; its coordinator may be dead
            with contextlib.suppress(ManyhandsError, OSError, KeyError):
                where = read(self._run)
                with Operator(where["coordinator"], where["token"], timeout_s=ANSWER_S) as asked:
                    while not self._closing.wait(STATUS_S):
                        self.report.add(asked.status())


class Injector:
    """`say` gets a line for each thing that is done. `follow` names the launcher; then `step` is
    called again and again."""

    def __init__(
        self,
        run: Path,
        faults: list[TimedFault],
        seed: int,
        say: Callable[[str], None],
    ):
        self._run, self._launcher, self._say = run, 0, say
        self._random = random.Random(seed)
        self.began_s: float | None = None  # training, since 1970
        self.faults = [Injected(timed.fault, timed.at_s) for timed in faults]
        self._todo = list(self.faults)
        self._lasting: list[Lasting] = []
        self._watch = StatusWatch(run)
        self.orphans: list[int] = []  # processes of a launcher that was killed

    def follow(self, launcher: int) -> None:
        """The run goes on under another launcher."""
        self._launcher, self.orphans = launcher, []

    @property
    def report(self) -> CoordinatorReport:
        return self._watch.report

    def step(self) -> None:
        if self.began_s is None:
            self.began_s = first_round(self._run)
            if self.began_s is not None and self._todo:
                self._say(f"training has begun; {len(self._todo)} faults are due")
        now = time.time()
        for each in [x for x in self._lasting if x.until <= now]:
            self._lasting.remove(each)
            each.undo()
        if self.began_s is None:
            return
        for injected in [x for x in self._todo if self.began_s + x.at_s <= now]:
            if self._inject(injected):
                self._todo.remove(injected)

    def release(self) -> None:
        """Nothing stays paused, whatever happened."""
        for each in self._lasting:
            each.undo()
        self._lasting.clear()

    def close(self) -> None:
        self.release()
        for injected in self._todo:
            injected.why = injected.why or "the run had ended before"
        self._watch.close()

    # -- one fault --

    def _inject(self, injected: Injected) -> bool:
        """False: its target is not there at the moment."""
        fault = injected.fault
        ours = {self._launcher, *descendants(self._launcher)}
        found = self._find(fault, ours)
        if found is None or not set(found[1]) <= ours:
            injected.why = f"there was no such {fault.target} until the run ended"
            return False
        injected.time_s, injected.why = time.time(), ""
        undo = self._break(fault, *found)
        if undo is None:
            injected.time_s, injected.why = None, f"{found[0]} could not be reached"
            return False
        name, pids = found
        if fault.kind == "kill" or fault.target == "host":
            injected.lost = {*pids, *self.orphans}
        one = fault.target not in ("", "host")
        injected.target = f"{name} (pid {pids[0]})" if one else name
        assert self.began_s is not None
        self._say(f"{injected.time_s - self.began_s:5.1f} s  {fault}: {injected.target}")
        if fault.duration_s or fault.target == "host":
            until = injected.time_s + fault.duration_s if fault.duration_s else float("inf")
            self._lasting.append(Lasting(until, undo))
        return True

    def _break(self, fault: Fault, name: str, pids: list[int]) -> Callable[[], None] | None:
        """What puts it right; None: it was not done."""
        if fault.kind == "full-disk":
            return fill_disk(self._launcher, pids)
        if fault.target == "host":
            return cut_host(next(host for host in lab_hosts() if host.name == name))
        if fault.kind == "slow":
            return SlowProcess(pids[0], fault.factor).close
        assert CUT is not None  # on Linux
        if fault.target == "launcher":
            self.orphans = descendants(self._launcher)
        sends = {"kill": signal.SIGKILL, "pause": signal.SIGSTOP, "cut": CUT}[fault.kind]
        return partial(_resume, pids[0]) if _send(pids[0], sends) else None

    def _find(self, fault: Fault, ours: set[int]) -> tuple[str, list[int]] | None:
        """Name and processes of a fault's target."""
        if fault.kind == "full-disk":
            return "all processes", sorted(ours)
        if fault.target == "launcher":
            return "launcher", [self._launcher]
        if fault.target == "worker":
            return self._one(fault, {f"rank {r}": pid for r, pid in self._ranks(ours).items()})
        if fault.target == "host":
            names = [h.name for h in lab_hosts()]
            names = names if fault.index is None else [names[fault.index - 1]]
            name = self._random.choice(names)
            parts = present_ranks(self._run).values()
            return name, [p.pid for p in parts if p.host == name and p.pid in ours]
        report = self.report
        if fault.target == "coordinator":
            pid = report.coordinator_pid
            return None if pid is None else ("coordinator", [pid])
        live = [s for s in report.servers if s["connected"]]
        if fault.index is not None:
            live = live[fault.index : fault.index + 1]
        if not live:
            return None
        server = self._random.choice(live)
        return f"server {server['server']}", [server["pid"]]

    def _ranks(self, ours: set[int]) -> dict[int, int]:
        """Rank -> pid. In an elastic run between ranks a process may become another rank; its
        round log says which it is."""
        logged = {rank: part.pid for rank, part in sorted(present_ranks(self._run).items())}
        found = logged or dict(sorted(workers(self._launcher).items()))
        return {rank: pid for rank, pid in found.items() if pid in ours}

    def _one(self, fault: Fault, known: dict[str, int]) -> tuple[str, list[int]] | None:
        found = [n for n in known if fault.index is None or n == f"rank {fault.index}"]
        if not found:
            return None
        name = self._random.choice(found)
        return name, [known[name]]


def _send(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _resume(pid: int) -> None:
    _send(pid, signal.SIGCONT)


def fill_disk(launcher: int, pids: list[int]) -> Callable[[], None]:
    """Let no process write a byte to a file; returns what allows it again, also to processes that
    these have started meanwhile."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(pid: int, nbytes: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (nbytes, most))

    for pid in pids:
        limit(pid, 0)

    def undo() -> None:
        for pid in {*pids, *descendants(launcher)}:
            limit(pid, before)

    return undo


class _Line(msgspec.Struct):
    time_s: float
    name: str


def first_round(run: Path) -> float | None:
    """When the first round of a run began; None: not yet."""
    return first_event(run, "round")


def first_event(run: Path, name: str) -> float | None:
    """When the first event of a name came from rank 0, since 1970; None: there is none yet."""
    try:
        with (run / "events" / "rank-0.jsonl").open("rb") as lines:
            for line in lines:
                with contextlib.suppress(msgspec.DecodeError):  # half a line: more is to come
                    event = msgspec.json.decode(line, type=_Line)
                    if event.name == name:
                        return event.time_s
    except FileNotFoundError:
        pass
    return None
