"""Elastic launcher: starts the ranks of a run that outlives them, and decides who takes part.

Each look at the processes: who has ended, who is ready, who said nothing for too long; then the
roster says which epoch follows, and which processes are to be started. An epoch is saved in the
run directory (`membership`) before ranks hear of it, and published in the rendezvous store.

The launcher is the run's only coordinator: when it ends, every rank ends.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from manyhands import membership
from manyhands.core import ElasticJob, Job
from manyhands.errors import LaunchError
from manyhands.launch import environment, run_token
from manyhands.launch.elastic.admission import Admission
from manyhands.launch.elastic.liveness import Liveness
from manyhands.launch.elastic.loss_policy import LossPolicy
from manyhands.launch.elastic.outside_process import OutsideProcess
from manyhands.launch.elastic.rank_starter import RankStarter
from manyhands.launch.elastic.roster import Roster
from manyhands.launch.elastic.run_requests import Rendezvous, RequestDesk, left_in
from manyhands.launch.elastic.worker_replacements import run_keys
from manyhands.launch.hosts import HostsLauncher, assign_ranks
from manyhands.launch.restart_budget import RestartBudget
from manyhands.launch.signals import Stop
from manyhands.launch.stopping.grace import say_stopping, stopped_error
from manyhands.launch.worker_process import (
    WorkerProcess,
    ask_to_stop,
    end,
    kill_session,
    said_by,
    wait_for_an_end,
)

LOOK_S = 0.03
SLOW_LOOK_S = 0.5  # for what is not urgent: heartbeats, requests
END_S = 20.0  # for the others to end, when the first has done everything
MOST_BROKEN = 20  # connections that break without a loss, over a run


class ElasticLauncher:
    """Launcher of elastic jobs between ranks, on the hosts of a `HostsLauncher`."""

    def __init__(self, hosts: HostsLauncher):
        self.hosts = hosts

    def launch(self, job: Job) -> dict[str, Any]:
        with self.hosts:
            return self._launch(job)

    def _launch(self, job: Job) -> dict[str, Any]:
        assert job.elastic is not None
        self.hosts.begin(dataclasses.replace(job, size=job.elastic.most * job.elastic.inner))
        store = self.hosts._rendezvous(job.port)
        token = run_token.of_environment() or secrets.token_hex(32)
        with (
            Stop(preempt_file=job.preempt_file) as stop,
            membership.open(Path(job.elastic.directory), "ranks") as keeper,
        ):
            keeper.claim("launcher")
            run = ElasticRun(self.hosts, job, job.elastic, store, token, keeper, stop)
            folder = Path(job.elastic.directory)
            pid = os.getpid()
            there = Rendezvous(self.hosts.address, store.port, token, pid, job.elastic.needs)
            try:
                with left_in(folder, there):
                    run.watch()
            finally:
                end(run.processes())
        return run.result()


class ElasticRun:
    """One elastic job under way."""

    def __init__(
        self,
        hosts: HostsLauncher,
        job: Job,
        elastic: ElasticJob,
        store: dist.TCPStore,
        token: str,
        keeper: membership.Keeper,
        stop: Stop,
    ):
        self.hosts, self.job, self.elastic, self.stop = hosts, job, elastic, stop
        self._store, self._token, self._keeper = store, token, keeper
        self._keys = run_keys(store)
        self._reports = dist.PrefixStore(environment.PREFIX, store)
        inner = elastic.inner
        self.roster = Roster(elastic.least, elastic.most, job.size // inner, inner, elastic.spares)
        hosted = assign_ranks(elastic.most * inner, hosts.hosts)
        self._starter = RankStarter(hosts, job, store.port, token, hosted)
        self.workers: dict[int, WorkerProcess] = {}  # by member, while they live
        self.ended: list[WorkerProcess] = []
        self.finished: list[int] = []  # members that have done everything
        self.late: list[int] = []  # members that had not saved when the time was over
        self.failure: LaunchError | None = None
        budget = RestartBudget(elastic.respawns, elastic.window_s, first_s=0.0)
        self._policy = LossPolicy(budget)
        self._lost = 0  # processes so far
        self._broken = 0  # times that connections broke
        self._desk = RequestDesk(self._keys, token)
        self._few: LaunchError | None = None  # how the run ends, where too few are left
        self._loss = False  # since the last epoch
        self._few_since: float | None = None
        self._stopping = 0.0
        self._over: float | None = None
        self._liveness = Liveness(self._keys, elastic.lease_s, token)
        self._admission = Admission(self.roster, elastic.needs, self._admit)
        self._looked = 0.0

    def processes(self) -> list[WorkerProcess]:
        """All that this launcher has started, and must not leave behind."""
        found = [*self.workers.values(), *self.ended, *self._starter.processes()]
        outside = [w for w in found if isinstance(w.process, OutsideProcess)]
        for worker in outside:
            if worker.handle is not None:
                os.close(worker.handle)
                worker.handle = None
        return [w for w in found if w not in outside]

    # -- the loop --

    def watch(self) -> None:
        while True:
            self._fill()
            self._reap()
            self._welcome()
            if time.monotonic() - self._looked > SLOW_LOOK_S:
                self._looked = time.monotonic()
                self._listen()
            if self.failure is not None:
                return
            if self._over is None and (self._loss or not self._stopping):
                self._decide()
            self._forward_stop()
            if not self.workers or self._ends():
                return
            settled = self.roster.epoch is not None and not self.roster.starting
            if settled and self.elastic.respawns and not (self._stopping or self._over):
                self._starter.keep_standby(self._lost)
            # a process that ends wakes us; one that is on its way has to be looked for
            busy = self.roster.starting or self._loss or self._stopping
            wait_for_an_end(list(self.workers.values()), LOOK_S if busy else SLOW_LOOK_S)

    def _ends(self) -> bool:
        """Whether what is still running need not be waited for."""
        now = time.monotonic()
        if self._stopping and now - self._stopping > self.job.grace_s:
            self.late = list(self.workers)
            return True
        epoch = self.roster.epoch
        active = [m for m in self.workers if epoch is not None and m in epoch.members]
        if self._over is not None:
            return not active or now - self._over > END_S
        return bool(self._stopping) and not active and epoch is not None

    def _fill(self) -> None:
        """Start the processes that are missing, as far as they may be."""
        if self._stopping or self._over is not None or self.failure is not None:
            return
        for seat in self.roster.missing():
            if self._policy.may_start(seat):
                member = self.roster.add(seat)
                self.workers[member] = self._starter.start(seat, member)

    def _reap(self) -> None:
        for member, worker in list(self.workers.items()):
            process: Any = worker.process
            if isinstance(process, OutsideProcess) and self._has_result(member):
                process.finished = True
            if (code := worker.process.poll()) is None:
                continue
            del self.workers[member]
            self.ended.append(worker)
            epoch = self.roster.epoch
            if code == 0:
                if member not in self.roster.left and epoch and member in epoch.members:
                    self.finished.append(member)
                    self._over = self._over or time.monotonic()
                self.roster.lost(member, "")
                continue
            if self._over is None:
                self._lose(member, worker, code)

    def _has_result(self, member: int) -> bool:
        return bool(self._reports.check([f"result/{member}"]))

    def _lose(self, member: int, worker: WorkerProcess, code: int) -> None:
        said = said_by(self._reports, f"error/{member}", self._token)
        epoch, rank = self.roster.epoch, self._rank(member)
        who = f"rank {rank}" if rank is not None else f"process {member}"
        fate = f"{who} (pid {worker.process.pid}) {_fate(code, said, worker.tail)}"
        seat = self.roster.lost(member, fate)
        self._lost += 1
        self._loss = self._loss or rank is not None
        if self._stopping:
            return
        answer = self._policy.lost(seat, said, epoch is not None, rank is not None)
        if isinstance(answer, LaunchError):
            self.failure = LaunchError(f"{who} failed:\n{answer}", answer.exit_code, answer.kind)
            return
        if answer and seat is not None:
            self.roster.given_up.add(seat)
        left = self.roster.replicas()
        alone = f"; no other takes its place: {answer}" if answer else ""
        _say(f"{fate}; {left} replica{'s' * (left != 1)} at work{alone}")

    def _rank(self, member: int) -> int | None:
        epoch = self.roster.epoch
        if epoch is None or member not in epoch.members:
            return None
        return epoch.members.index(member)

    def _welcome(self) -> None:
        for member in list(self.roster.starting):
            if self._keys.check([f"ready/{member}"]):
                self.roster.ready(member)

    def _decide(self) -> None:
        """Where a rank is lost while the run stops, the others form a last epoch, and save."""
        epoch = self.roster.decide(self._loss, over=bool(self._stopping))
        if epoch is None and self._stopping:
            return
        if epoch is None:
            self._wait_for_the_least()
            return
        self._few_since = None
        self._publish(epoch)

    def _wait_for_the_least(self) -> None:
        """Fewer replicas than the least: wait for others to come, then save and end."""
        roster, now = self.roster, time.monotonic()
        present = roster.replicas()
        if roster.epoch is not None and not self._loss:
            return
        hopeless = not roster.starting and not roster.missing()
        if roster.epoch is None and not hopeless:
            return
        if self._few_since is None:
            self._few_since = now
            _say(
                f"{present} replica(s) left, but elastic={self.elastic.least}:... needs at least "
                f"{self.elastic.least}; waiting {self.elastic.wait_s:g} s for others to come "
                "(wait_s)"
            )
        if now - self._few_since < self.elastic.wait_s:
            return
        text = (
            f"{roster.why}: {present} replica(s) left, elastic={self.elastic.least}:... needs at "
            f"least {self.elastic.least}, and none came within wait_s={self.elastic.wait_s:g}; "
            "go on from the last checkpoint with --resume"
        )
        epoch = roster.decide(True, over=True)
        self._few = LaunchError(text)
        if epoch is None:
            self.failure = self._few
            return
        self._publish(epoch)
        self._over = now

    def _publish(self, epoch: membership.RankEpoch) -> None:
        key, text = f"epoch/{epoch.number}", epoch.encode()
        self._keeper.save(text.encode())
        self._keys.set(key, run_token.sign(self._token, key, text))
        for rank, member in enumerate(epoch.members):
            if member in self.workers:
                self.workers[member].rank = rank
        self._loss, self.roster.why = False, ""

    # -- requests, heartbeats, signals --

    def _listen(self) -> None:
        if self.stop.requested or self._over is not None:
            return
        alive = {m: w.process.pid for m, w in self.workers.items()}
        for member, why in self._liveness.lost(self.roster.epoch, alive):
            self._kill(member, why)
        if not self._loss and self._liveness.broken(self.roster.epoch):
            self._connect_again()
        self._desk.serve(self._admission.answer)

    def _connect_again(self) -> None:
        """The same ranks form new groups: they have lost each other, and all live."""
        self._broken += 1
        if self._broken > MOST_BROKEN:
            self.failure = LaunchError(
                f"ranks lost their connections {self._broken} times, though none has ended; look "
                "at the network between them, or raise timeout_s"
            )
        self._loss, self.roster.why = True, "ranks have lost their connections"

    def _admit(self, member: int, asked: dict[str, Any]) -> None:
        pid, here = int(asked["pid"]), asked["machine"] == environment.process_info().machine
        process: Any = OutsideProcess(pid, here, asked["born"])
        handle = os.pidfd_open(pid) if here and hasattr(os, "pidfd_open") else None
        self.workers[member] = WorkerProcess(member, process, [], None, handle=handle)

    def _kill(self, member: int, why: str) -> None:
        worker = self.workers[member]
        _say(f"rank {self._rank(member)} (pid {worker.process.pid}) {why}; it is left out")
        _end_process(worker)
        worker.process.wait()

    def _forward_stop(self) -> None:
        if not self.stop.requested or self._stopping:
            return
        say_stopping(self.stop, self.job.grace_s)
        epoch = self.roster.epoch
        working = [w for m, w in self.workers.items() if epoch and m in epoch.members]
        for member, worker in self.workers.items():
            if worker not in working:
                _end_process(worker)
                self.roster.lost(member, "")
        self._stopping = ask_to_stop(working)

    def result(self) -> dict[str, Any]:
        """What the run returned, or the error that ended it."""
        if self.failure is not None:
            raise self.failure
        if self._few is not None:
            raise self._few
        told = (said_by(self._reports, f"result/{m}", self._token) for m in self.finished)
        result = next(filter(None, told), None)
        if result is None and self.stop.requested:
            late = [m for m in self.late if self._rank(m) is not None]
            ranks = [self._rank(m) or 0 for m in late]
            raise stopped_error(self.stop, ranks, self.job.grace_s, self._store)
        if result is None:
            why = self.roster.why or "no process has finished the run"
            raise LaunchError(f"{why}; go on from the last checkpoint with --resume")
        if not self.stop.requested:
            return result
        return {**result, "stopped": self.stop.requested, "stopped_by": self.stop.notice}


def _end_process(worker: WorkerProcess) -> None:
    process: Any = worker.process
    if isinstance(process, OutsideProcess):
        process.give_up()
    else:
        kill_session(process.pid)


def _fate(code: int, said: dict[str, Any] | None, tail: list[str]) -> str:
    if said is not None:
        return f"failed: {_last_line(said)}"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    last = f" ({tail[-1].strip()})" if tail else ""
    return f"ended with code {code}{last}"


def _last_line(said: dict[str, Any]) -> str:
    return str((said["text"].strip().splitlines() or [said["kind"]])[-1])


def _say(text: str) -> None:
    print(f"manyhands: {text}", file=sys.stderr, flush=True)
