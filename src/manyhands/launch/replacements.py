"""Replacement of dead ranks: a new process for one that died, while enough others are at work.

lost          killed by a signal, ended without a report, or taken for dead and refused since
at work       a process of the first start, or one that has joined the run in place of another
the end       fewer than `least` are at work; or a rank at work reports an error of its own,
              which a new process would meet again
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist

from manyhands.core import ElasticJob
from manyhands.launch import environment

REFUSED = "Evicted"  # kind of the error of a rank that was taken for dead


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
    store: dist.Store
    starts: dict[int, int] = field(default_factory=dict)  # by rank, beyond the first
    lost: list[Any] = field(default_factory=list)  # processes that died, and what they left
    failure: str = ""  # why the run cannot go on

    @property
    def spent(self) -> int:
        return sum(self.starts.values())

    def replace(self, workers: list[Any], stopping: bool) -> bool:
        """Replace the workers that died, or where the run is `stopping` or over leave them out.
        False: the run cannot go on."""
        for w in [w for w in workers if w.process.poll() not in (None, 0)]:
            said = self.reported(w.rank)
            over = stopping or any(o.process.poll() == 0 for o in workers)
            if said is not None and said["kind"] != REFUSED and not self.joining(w):
                return False
            workers.remove(w)
            self.lost.append(w)
            at_work = [o.rank for o in workers if o.process.poll() is None and not self.joining(o)]
            fate = f"rank {w.rank} (pid {w.process.pid}) {_fate(w, said)}"
            if over:
                continue
            if len(at_work) < self.job.least:
                self.failure = (
                    f"{fate}: {len(at_work)} at work, but elastic={self.job.least}:... needs at "
                    f"least {self.job.least}; go on from the last checkpoint with --resume"
                )
                return False
            if self.spent >= self.job.respawns:
                spent = f"respawn={self.job.respawns} is used up"
                _say(f"{fate}; {len(at_work)} at work go on without it ({spent})")
                continue
            self.starts[w.rank] = self.starts.get(w.rank, 0) + 1
            workers.append(self.restart(w.rank, self.starts[w.rank]))
            _say(f"{fate}; {len(at_work)} at work go on, a new process takes its place")
        return True

    def joining(self, w: Process) -> bool:
        """Whether a process that was started in place of another has not joined the run yet."""
        starts = self.starts.get(w.rank, 0)
        return starts > 0 and not self.store.check([f"joined/{w.rank}/{starts}"])

    def superfluous(self, workers: list[Any]) -> list[Any]:
        """Processes that join a run which is over."""
        ended = any(w.process.poll() == 0 for w in workers)
        return [w for w in workers if w.process.poll() is None and self.joining(w)] if ended else []


def run_keys(store: dist.Store) -> dist.Store:
    """Where the ranks of the job's only run keep their keys."""
    return dist.PrefixStore(f"{environment.PREFIX}/run/0", store)


def _fate(w: Process, said: dict[str, Any] | None) -> str:
    code = w.process.returncode
    if said is not None:
        first = said["text"].strip().splitlines()[-1:]
        return "was taken for dead" if said["kind"] == REFUSED else f"could not join: {first[0]}"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _say(text: str) -> None:
    print(f"manyhands: {text}", file=sys.stderr, flush=True)
