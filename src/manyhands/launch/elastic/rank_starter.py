"""Rank starter: starts the processes of an elastic run, from one on standby where there is one.

A process on standby has loaded everything but the task, so that a replacement begins there. It is
kept once the run has trained for STANDBY_S or has lost a rank: loading takes processor time, which
a run that is over soon would not get back. A fork server is one itself: none is kept beside it.
"""

from __future__ import annotations

import time

from manyhands.core import Job
from manyhands.launch import environment
from manyhands.launch.hosts import HERE, HostedRank, HostsLauncher
from manyhands.launch.worker_process import WorkerProcess, send

STANDBY_S = 30.0
# variables by which one rank differs from another
CHANGING = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", environment.MEMBER)


class RankStarter:
    """`hosted`: where each seat is; the last one's place is that of spares and of the standby."""

    def __init__(
        self, hosts: HostsLauncher, job: Job, port: int, token: str, hosted: list[HostedRank]
    ):
        self._hosts, self._job, self._port, self._token = hosts, job, port, token
        self._hosted = hosted
        self._begun = time.monotonic()
        self._standby: WorkerProcess | None = None
        self._failed = False  # one on standby has ended by itself: do without
        self.ended: list[WorkerProcess] = []

    def start(self, seat: int | None, member: int) -> WorkerProcess:
        """A process for a seat; None: for a spare."""
        hosted = self._hosted[len(self._hosted) - 1 if seat is None else seat]
        more = self._variables(member)
        if (worker := self._standby) is not None and hosted.host is HERE:
            self._standby = None
            env = self._hosts._environment(hosted, self._job, self._port, self._token, more)
            changed = {k: v for k, v in env.items() if k in CHANGING}
            send(worker.process, self._job.payload, changed)
            return worker
        worker = self._hosts._start(hosted, self._job, self._port, self._token, more)
        send(worker.process, self._job.payload)
        return worker

    def keep_standby(self, losses: int) -> None:
        """Call it while no other process is on its way: it needs the processor."""
        if self._standby is not None and self._standby.process.poll() is not None:
            self.ended.append(self._standby)
            self._standby, self._failed = None, True
        early = time.monotonic() - self._begun < STANDBY_S and not losses
        if early or self._failed or self._standby is not None:
            return
        last = self._hosted[-1]
        if last.host is HERE and not self._hosts.forks_on(HERE):
            more = self._variables(-1)
            self._standby = self._hosts._start(last, self._job, self._port, self._token, more)

    def processes(self) -> list[WorkerProcess]:
        return [*self.ended, *([] if self._standby is None else [self._standby])]

    def _variables(self, member: int) -> dict[str, str]:
        return {
            "WORLD_SIZE": str(len(self._hosted)),  # until an epoch says otherwise
            environment.MEMBER: str(member),
            environment.PRELOAD: " ".join(self._job.preload),
        }
