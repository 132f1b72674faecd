"""Replacement of dead ranks: a new process for one that died, while enough others are at work.

lost          killed by a signal, ended without a report, or taken for dead and refused since
at work       a process of the first start, or one that has joined the run in place of another
the end       fewer than `least` are at work; or a rank at work reports an error of its own,
              which a new process would meet again
restarts      within a budget (`restart_budget`): the first at once, those of a rank that dies
              again and again after ever longer pauses
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist

from manyhands.core import ElasticJob
from manyhands.launch import environment, run_token
from manyhands.launch.restart_budget import Failure, RestartBudget

REFUSED = "Evicted"  # kind of the error of a rank that was taken for dead
END_S = 20.0  # for the others to end, when the first has done everything


class Process(Protocol):
    """One worker of the launcher."""

    rank: int
    process: Any


@dataclass
class Replacements:
    """`restart(rank, starts)` starts a process; `reported(rank)` is its error, if it told one."""

    job: ElasticJob
    restart: Callable[[int, int], Any]
    reported: Callable[[int], dict[str, Any] | None]
    store: dist.Store  # what ranks `tell`
    token: str
    starts: dict[int, int] = field(default_factory=dict)  # by rank, beyond the first
    lost: list[Any] = field(default_factory=list)  # processes that died, and what they left
    hung: list[Any] = field(default_factory=list)  # of these: taken for dead, and killed
    ended_s: float | None = None  # when the first of all had done everything
    failure: str = ""  # why the run cannot go on
    clock: Callable[[], float] = time.monotonic
    _due: dict[int, float] = field(default_factory=dict)  # by rank, when its next process starts
    _heard: dict[int, Any] = field(default_factory=dict)  # by rank, the report that is dealt with

    def __post_init__(self) -> None:
        job = self.job
        self.budget = RestartBudget(job.respawns, job.window_s, first_s=0.0, clock=self.clock)

    def replace(self, workers: list[Any], stopping: bool) -> bool:
        """Replace the workers that died, or where the run is `stopping` or over leave them out.
        False: the run cannot go on."""
        for w in [w for w in workers if w.process.poll() not in (None, 0)]:
            said = self._report(w.rank)
            over = stopping or any(o.process.poll() == 0 for o in workers)
            if said is not None and said["kind"] != REFUSED and not self.joining(w):
                return False
            workers.remove(w)
            self.lost.append(w)
            at_work = [o.rank for o in workers if o.process.poll() is None and not self.joining(o)]
            fate = f"rank {w.rank} (pid {w.process.pid}) {_fate(w, said, w in self.hung)}"
            if over:
                continue
            if len(at_work) < self.job.least:
                self.failure = (
                    f"{fate}: {len(at_work)} at work, but elastic={self.job.least}:... needs at "
                    f"least {self.job.least}; go on from the last checkpoint with --resume"
                )
                return False
            delay_s = self.budget.allow(_failure(w.rank, said))
            if isinstance(delay_s, str):
                _say(f"{fate}; {len(at_work)} at work go on without it ({delay_s})")
                continue
            self._due[w.rank] = self.clock() + delay_s
            soon = f" in {delay_s:g} s" if delay_s else ""
            _say(f"{fate}; {len(at_work)} at work go on, a new process takes its place{soon}")
            self.start_due(workers)
        return True

    def start_due(self, workers: list[Any]) -> None:
        """Start the processes whose pause is over; none any more in a run that is over."""
        if any(w.process.poll() == 0 for w in workers):
            self._due.clear()
        for rank in [r for r, due in self._due.items() if due <= self.clock()]:
            del self._due[rank]
            self.starts[rank] = self.starts.get(rank, 0) + 1
            workers.append(self.restart(rank, self.starts[rank]))

    def _report(self, rank: int) -> dict[str, Any] | None:
        """The error of the rank's last process; the store keeps those of the ones before."""
        said = self.reported(rank)
        if said is None or said == self._heard.get(rank):
            return None
        self._heard[rank] = said
        return said

    def joining(self, w: Process) -> bool:
        """Whether a process that was started in place of another has not joined the run yet."""
        starts = self.starts.get(w.rank, 0)
        return starts > 0 and self._told(f"joined/{w.rank}/{starts}") is None

    def superfluous(self, workers: list[Any]) -> list[Any]:
        """Processes to kill: those that the others have taken for dead, though they are not; and of
        a run that is over, those that were to join it, or that do not end."""
        if self.ended_s is None and any(w.process.poll() == 0 for w in workers):
            self.ended_s = time.monotonic()
        over = self.ended_s is not None
        late = self.ended_s is not None and time.monotonic() - self.ended_s > END_S
        running = [w for w in workers if w.process.poll() is None]
        self.hung += [w for w in running if w not in self.hung and self._taken_for_dead(w)]
        return [w for w in running if w in self.hung or late or (over and self.joining(w))]

    def _taken_for_dead(self, w: Process) -> bool:
        now = self._told(f"incarnation/{w.rank}/{self.starts.get(w.rank, 0)}")
        return now is not None and self._told(f"lost/{w.rank}/{now}") is not None

    def _told(self, key: str) -> str | None:
        if not self.store.check([key]):
            return None
        return run_token.verify(self.token, key, bytes(self.store.get(key)))


def tell(store: dist.Store, key: str, value: object = "") -> None:
    """A rank tells the launcher something, signed: the launcher kills and starts processes by
    it."""
    store.set(key, run_token.sign(run_token.of_environment(), key, str(value)))


def run_keys(store: dist.Store) -> dist.Store:
    """Where the ranks of the job's only run keep their keys."""
    return dist.PrefixStore(f"{environment.PREFIX}/run/0", store)


def _failure(rank: int, said: dict[str, Any] | None) -> Failure:
    own = said is not None and said["kind"] != REFUSED
    text, round = (said["text"], said.get("round")) if said is not None and own else ("", None)
    return Failure(text, round, f"rank {rank}")


def _fate(w: Process, said: dict[str, Any] | None, hung: bool) -> str:
    code = w.process.returncode
    if hung:
        return "said nothing any more and was taken for dead"
    if said is not None:
        first = said["text"].strip().splitlines()[-1:]
        return "was taken for dead" if said["kind"] == REFUSED else f"could not join: {first[0]}"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _say(text: str) -> None:
    print(f"manyhands: {text}", file=sys.stderr, flush=True)
