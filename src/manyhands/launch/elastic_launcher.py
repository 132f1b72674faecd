"""Elastic launcher: starts the ranks of a run that outlives them, and decides who takes part.

Each look at the processes: who has ended, who is ready, who said nothing for too long; then the
roster says which epoch follows, and which processes are to be started. An epoch is saved in the
run directory (`membership`) before ranks hear of it, and published in the rendezvous store.

The launcher is the run's only coordinator: when it ends, every rank ends.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from manyhands import membership
from manyhands.core import ElasticJob, Job
from manyhands.errors import LaunchError, PeerLost
from manyhands.launch import environment, run_token
from manyhands.launch.hosts import (
    HERE,
    HostsLauncher,
    _ask_to_stop,
    _end,
    _kill_session,
    _said,
    _send,
    _wait_for_an_end,
    _Worker,
    assign_ranks,
)
from manyhands.launch.replacements import run_keys
from manyhands.launch.roster import Roster
from manyhands.launch.signals import Stop

LOOK_S = 0.03
SLOW_LOOK_S = 0.5  # for what is not urgent: heartbeats, requests
END_S = 20.0  # for the others to end, when the first has done everything
VICTIMS = (PeerLost.__name__,)
# variables by which one rank differs from another
CHANGING = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", environment.MEMBER)


class ElasticLauncher:
    """Launcher of elastic jobs between ranks, on the hosts of a `HostsLauncher`."""

    def __init__(self, hosts: HostsLauncher):
        self.hosts = hosts

    def launch(self, job: Job) -> dict[str, Any]:
        assert job.elastic is not None
        store = self.hosts._rendezvous(job.port)
        token = run_token.of_environment() or secrets.token_hex(32)
        with Stop() as stop, membership.open(Path(job.elastic.directory), "ranks") as keeper:
            keeper.claim("launcher")
            run = ElasticRun(self.hosts, job, job.elastic, store, token, keeper, stop)
            try:
                run.watch()
            finally:
                _end(run.processes())
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
        self._hosted = assign_ranks(elastic.most * inner, hosts.hosts)
        self.workers: dict[int, _Worker] = {}  # by member, while they live
        self.ended: list[_Worker] = []
        self.finished: list[int] = []  # members that have done everything
        self.failure: LaunchError | None = None
        self._replaced: list[float] = []  # when processes were started in place of others
        self._initial = job.size + elastic.spares  # processes of the first start
        self._standby: _Worker | None = None
        self._standbys = 1
        self._used_seats: set[int] = set()  # for which a process was started before
        self._few: LaunchError | None = None  # how the run ends, where too few are left
        self._loss = False  # since the last epoch
        self._few_since: float | None = None
        self._stopping = 0.0
        self._over: float | None = None
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._looked = 0.0

    def processes(self) -> list[_Worker]:
        standby = [] if self._standby is None else [self._standby]
        return [*self.workers.values(), *self.ended, *standby]

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
            if not self._stopping and self._over is None:
                self._keep_standby()
            _wait_for_an_end(list(self.workers.values()), LOOK_S)

    def _ends(self) -> bool:
        """Whether what is still running need not be waited for."""
        now = time.monotonic()
        if self._stopping and now - self._stopping > self.job.grace_s:
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
            if self._initial > 0:
                self._initial -= 1
            elif seat is not None and seat in self._grown():
                pass  # asked for by `manyhands scale`
            elif not self._may_replace():
                if seat is not None:
                    self.roster.given_up.add(seat)
                continue
            self._start(seat)

    def _grown(self) -> set[int]:
        seats = range(self.roster.want * self.roster.inner)
        return {s for s in seats if s not in self._used_seats}

    def _may_replace(self) -> bool:
        now = time.monotonic()
        within = [t for t in self._replaced if now - t < self.elastic.window_s]
        if len(within) >= self.elastic.respawns:
            return False
        self._replaced = [*within, now]
        return True

    def _start(self, seat: int | None) -> None:
        member = self.roster.add(seat)
        if seat is not None:
            self._used_seats.add(seat)
        hosted = self._hosted[seat if seat is not None else len(self._hosted) - 1]
        more = {environment.MEMBER: str(member), environment.PRELOAD: " ".join(self.job.preload)}
        if self._standby is not None and hosted.host is HERE:
            worker, self._standby = self._standby, None
            env = self.hosts._environment(hosted, self.job, self._store.port, self._token, more)
            changed = {k: v for k, v in env.items() if k in CHANGING}
            _send(worker.process, self.job.payload, changed)
        else:
            worker = self.hosts._start(hosted, self.job, self._store.port, self._token, more)
            _send(worker.process, self.job.payload)
        self.workers[member] = worker

    def _keep_standby(self) -> None:
        """A process that has loaded everything but the task: who replaces a rank starts there."""
        wanted = self.elastic.respawns > 0 and self._hosted[-1].host is HERE
        if self._standby is not None and self._standby.process.poll() is not None:
            self.ended.append(self._standby)
            self._standby, wanted = None, False
            self._standbys = 0  # it cannot be started: do without
        if not wanted or self._standby is not None or not self._standbys:
            return
        if self.roster.epoch is None or self.roster.starting:
            return  # others are on their way, and need the processor
        more = {environment.MEMBER: "-1", environment.PRELOAD: " ".join(self.job.preload)}
        last = self._hosted[-1]
        self._standby = self.hosts._start(last, self.job, self._store.port, self._token, more)

    def _reap(self) -> None:
        for member, worker in list(self.workers.items()):
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

    def _lose(self, member: int, worker: _Worker, code: int) -> None:
        said = _said(self._reports, f"error/{member}", self._token)
        epoch = self.roster.epoch
        rank = self._rank(member)
        who = f"rank {rank}" if rank is not None else f"process {member}"
        fate = f"{who} (pid {worker.process.pid}) {_fate(code, said)}"
        seat = self.roster.lost(member, fate)
        at_work = epoch is not None and member in epoch.members
        if said is not None and said["kind"] not in VICTIMS and (at_work or epoch is None):
            self.failure = LaunchError(
                f"{who} failed:\n{said['text'].rstrip()}", 2 if said["ours"] else 1, said["kind"]
            )
            return
        self._loss = self._loss or at_work
        if not self._stopping:
            left = self.roster.replicas()
            _say(f"{fate}; {left} replica{'s' * (left != 1)} at work")
        if seat is not None and said is not None and not at_work:
            self.roster.given_up.add(seat)  # what it reported would be met again
            _say(f"no further process is started for it: {_last_line(said)}")

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
        self._exclude_hung()
        self._check_beats()

    def _exclude_hung(self) -> None:
        epoch = self.roster.epoch
        for rank, member in enumerate(() if epoch is None else epoch.members):
            assert epoch is not None
            if self._keys.check([f"epoch/{epoch.number}/hung/{rank}"]) and member in self.workers:
                self._kill(member, "hangs")

    def _check_beats(self) -> None:
        """Processes that live but do not reach the store: their host is cut off."""
        epoch, now = self.roster.epoch, time.monotonic()
        for member in () if epoch is None else epoch.members:
            key = f"beat/{member}"
            if member not in self.workers or not self._keys.check([key]):
                continue
            beat = bytes(self._keys.get(key))
            if self._beats.get(member, (b"", 0.0))[0] != beat:
                self._beats[member] = beat, now
            elif now - self._beats[member][1] > self.elastic.lease_s:
                pid = self.workers[member].process.pid
                if _state(pid) not in ("T", "t"):  # stopped by somebody: see hang=
                    self._kill(member, f"sent no heartbeat for {self.elastic.lease_s:g} s")

    def _kill(self, member: int, why: str) -> None:
        worker = self.workers[member]
        _say(f"rank {self._rank(member)} (pid {worker.process.pid}) {why}; it is left out")
        _kill_session(worker.process.pid)
        worker.process.wait()

    def _forward_stop(self) -> None:
        if not self.stop.requested or self._stopping:
            return
        print(
            "\nstopping after this round; Ctrl-C again stops at once", file=sys.stderr, flush=True
        )
        epoch = self.roster.epoch
        working = [w for m, w in self.workers.items() if epoch and m in epoch.members]
        for member, worker in self.workers.items():
            if worker not in working:
                _kill_session(worker.process.pid)
                self.roster.lost(member, "")
        self._stopping = _ask_to_stop(working)

    def result(self) -> dict[str, Any]:
        """What the run returned, or the error that ended it."""
        if self.failure is not None:
            raise self.failure
        if self._few is not None:
            raise self._few
        told = (_said(self._reports, f"result/{m}", self._token) for m in self.finished)
        result = next(filter(None, told), None)
        if result is None and self.stop.requested:
            name = signal.Signals(self.stop.requested).name
            raise LaunchError(f"stopped by {name}", 128 + self.stop.requested)
        if result is None:
            why = self.roster.why or "no process has finished the run"
            raise LaunchError(f"{why}; go on from the last checkpoint with --resume")
        return {**result, "stopped": self.stop.requested} if self.stop.requested else result


def _state(pid: int) -> str:
    """The state of a process, as the kernel says: R, S, T for stopped; "": it is gone."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _fate(code: int, said: dict[str, Any] | None) -> str:
    if said is not None:
        return f"failed: {_last_line(said)}"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _last_line(said: dict[str, Any]) -> str:
    return str((said["text"].strip().splitlines() or [said["kind"]])[-1])


def _say(text: str) -> None:
    print(f"manyhands: {text}", file=sys.stderr, flush=True)
