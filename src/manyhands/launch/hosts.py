"""Hosts launcher: starts the processes of a job on one or several hosts and leaves none behind.

A host is a name, a command prefix that runs commands there (none: this machine), and environment
variables of its own. Ranks are numbered from host to host, split as evenly as possible; hosts
beyond the number of ranks stay idle.

Each worker is a session of its own, so Ctrl-C reaches only the launcher, which asks all workers to
save and stop. The error of the first failing rank is printed last, once; the others are killed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from manyhands.core import Job, ProcessInfo
from manyhands.errors import LaunchError
from manyhands.launch import environment, lifeline, run_token, servers
from manyhands.launch.elastic.worker_replacements import Replacements, run_keys
from manyhands.launch.fork_server.client import ForkServers
from manyhands.launch.signals import Stop
from manyhands.launch.stopping.grace import say_stopping, stopped_error
from manyhands.launch.worker_process import (
    WorkerProcess,
    ask_to_stop,
    end,
    is_real,
    kill_session,
    process_handle,
    pump,
    said_by,
    send,
    wait_for_an_end,
)

POLL_S = 0.5
SETTLE_S = 0.4  # after the first failure: for the report of the rank that caused it to arrive
TOGETHER = ("Diverged",)  # errors that every rank raises at the same round


@dataclass(frozen=True)
class Host:
    """A host that processes are started on. What `enter` starts must become the process itself
    (exec), because signals go to its pid."""

    name: str = ""  # ranks with the same name share memory; "": the machine's own name
    enter: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, ...]:
        return (self.name, *self.enter)


HERE = Host()


@dataclass(frozen=True)
class HostedRank:
    """A rank and the host it will be started on."""

    rank: int
    host: Host
    local_rank: int
    local_size: int


def assign_ranks(size: int, hosts: Sequence[Host]) -> list[HostedRank]:
    """Ranks in order over hosts in order; the first hosts take one more if they do not divide
    evenly."""
    each, rest = divmod(size, len(hosts))
    found: list[HostedRank] = []
    for i, host in enumerate(hosts):
        here = each + (i < rest)
        found += [HostedRank(len(found) + j, host, j, here) for j in range(here)]
    return found


class HostsLauncher:
    """Launcher of jobs on `hosts`. `address` is an address of this machine that all hosts reach;
    the rendezvous listens only there."""

    def __init__(self, hosts: Sequence[Host] = (HERE,), address: str = "127.0.0.1"):
        self.hosts, self.address = tuple(hosts), address
        self._fork_servers, self._entered = ForkServers(), 0
        self.pids: set[int] = set()  # of all ranks so far

    def __enter__(self) -> HostsLauncher:
        """Within the block, its fork servers outlive a launch: the next one goes faster."""
        self._entered += 1
        return self

    def __exit__(self, *error: object) -> None:
        self._entered -= 1
        if not self._entered:
            self._fork_servers.close()

    def launch(self, job: Job) -> dict[str, Any]:
        with self:
            return self._launch(job)

    def begin(self, job: Job) -> None:
        """Start what loads while the launcher does other things: the hosts' fork servers."""
        for host in {h.host.key: h.host for h in assign_ranks(job.size, self.hosts)}.values():
            env = {**environment.variables(), **host.variables}
            early = host.key == HERE.key
            self._fork_servers.begin(host.key, job.preload, host.enter, env, early)

    def forks_on(self, host: Host) -> bool:
        return self._fork_servers.has(host.key)

    def _launch(self, job: Job) -> dict[str, Any]:
        self.begin(job)
        store = self._rendezvous(job.port)
        token = run_token.of_environment() or secrets.token_hex(32)
        workers: list[WorkerProcess] = []
        keys = dist.PrefixStore(environment.PREFIX, store)
        hosted = assign_ranks(job.size, self.hosts)
        with Stop(preempt_file=job.preempt_file) as stop, contextlib.ExitStack() as stack:
            served, variables = None, dict[str, str]()
            if job.elastic is not None:
                served, variables = self._serve(job, store, token, stack)

            def start(rank: int, starts: int = 0) -> WorkerProcess:
                more = {**variables, environment.STARTS: str(starts)} if variables else {}
                return self._start(hosted[rank], job, store.port, token, more)

            def restart(rank: int, starts: int) -> WorkerProcess:
                worker = start(rank, starts)
                send(worker.process, job.payload)
                return worker

            said = lambda rank: said_by(keys, f"error/{rank}", token)
            replacements = None
            if job.elastic is not None:
                replacements = Replacements(job.elastic, restart, said, run_keys(store), token)
            try:
                for rank in range(job.size):
                    workers.append(start(rank))
                for w in workers:
                    send(w.process, job.payload)
                late = self._watch(workers, stop, replacements, job.grace_s)
            finally:
                fate = served.fate() if served else ""
                end(workers + (replacements.lost if replacements else []))
        if replacements and replacements.failure:
            raise LaunchError(replacements.failure)
        if late:
            raise stopped_error(stop, late, job.grace_s, store)
        if not (replacements and any(w.process.returncode == 0 for w in workers)):
            self._raise_cause(workers, keys, stop, token, fate)
        told = [said_by(keys, f"result/{w.rank}", token) for w in workers if replacements]
        result = next(filter(None, told), None) or said_by(keys, "result", token) or {}
        asked = {"stopped": stop.requested, "stopped_by": stop.notice}
        return {**result, **asked} if stop.requested and result else result

    def _rendezvous(self, port: int) -> dist.TCPStore:
        listener = socket.socket()
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self.address, port))
            listener.listen(1024)
        except OSError as e:
            listener.close()
            if e.errno != errno.EADDRINUSE:
                raise LaunchError(
                    f"this machine cannot listen at {self.address}: {e.strerror}; "
                    "give an address of its own"
                ) from e
            raise LaunchError(
                f"port {port} is taken on this machine; "
                "give another one with --port, or none to use any free one"
            ) from e
        # a socket of ours, because a store that opens its own listens on all addresses
        return dist.TCPStore(
            self.address,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def _serve(
        self, job: Job, store: dist.Store, token: str, stack: contextlib.ExitStack
    ) -> tuple[servers.Servers, dict[str, str]]:
        """Start the servers of an elastic job here: they must outlive any of its ranks. Returns the
        variables by which ranks find them."""
        assert job.elastic is not None
        started = servers.start(
            job.elastic.servers,
            ProcessInfo(),
            run_keys(store),
            workers=job.size,
            timeout_s=job.elastic.timeout_s,
            options=job.elastic.server_options,
            token=token,
            address=None if self.address == "127.0.0.1" else self.address,
        )
        stack.callback(started.close)
        if not started.children:  # they were started by hand
            return started, dict(environment.variables())
        host, _, port = started.coordinator.rpartition(":")
        where = {"DMLC_PS_ROOT_URI": host.strip("[]"), "DMLC_PS_ROOT_PORT": port}
        return started, {**where, environment.TOKEN: token}

    def _start(
        self, hosted: HostedRank, job: Job, port: int, token: str, more: Mapping[str, str]
    ) -> WorkerProcess:
        rank, host = hosted.rank, hosted.host
        env = self._environment(hosted, job, port, token, more)
        ours = rank == 0 and is_real(sys.stdout) and more.get(environment.MEMBER) in (None, "0")
        process = self._fork_servers.start(host.key, env, piped=not ours) or subprocess.Popen(
            [*host.enter, sys.executable, *lifeline.COMMAND],
            stdin=subprocess.PIPE,
            stdout=None if ours else subprocess.PIPE,
            stderr=None if ours else subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
        self.pids.add(process.pid)
        handle = process_handle(process)
        tail: list[str] = []
        reader = None
        if process.stdout is not None:
            reader = threading.Thread(target=lambda: pump(worker), daemon=True)
        worker = WorkerProcess(rank, process, tail, reader, handle=handle)
        if reader is not None:
            reader.start()
        return worker

    def _environment(
        self, hosted: HostedRank, job: Job, port: int, token: str, more: Mapping[str, str]
    ) -> dict[str, str]:
        rank, host = hosted.rank, hosted.host
        threads = job.threads or max(1, environment.cores() // job.size)
        env = {
            **environment.variables(),
            "RANK": str(rank),
            "WORLD_SIZE": str(job.size),
            "LOCAL_RANK": str(hosted.local_rank),
            "LOCAL_WORLD_SIZE": str(hosted.local_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # this process hosts the store
            environment.STARTED_BY_US: "1",
            environment.LAUNCHER: str(os.getpid()),
            environment.RUN_TOKEN: token,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            **more,
            **({environment.HOST: host.name} if host.name else {}),
            **host.variables,
        }
        if job.threads is not None or "OMP_NUM_THREADS" not in env:
            env["OMP_NUM_THREADS"] = str(threads)
        return env

    def _watch(
        self, workers: list[WorkerProcess], stop: Stop, lost: Replacements | None, grace_s: float
    ) -> list[int]:
        """Returns when all have ended or one has failed; or, with those that have not, when they
        had their time to stop."""
        forwarded = 0.0
        while any(w.process.poll() is None for w in workers):
            if lost and not forwarded:
                lost.start_due(workers)
            dead = any(w.process.poll() not in (None, 0) for w in workers)
            for w in lost.superfluous(workers) if lost else ():
                kill_session(w.process.pid)
                w.process.wait()
            if lost and dead:
                if lost.replace(workers, stopping=forwarded > 0):
                    continue
                if lost.failure and not forwarded:  # too few are left: these save, and stop
                    forwarded = ask_to_stop(workers)
                    continue
            if dead:
                deadline = time.monotonic() + SETTLE_S
                while time.monotonic() < deadline and any(
                    w.process.poll() is None for w in workers
                ):
                    wait_for_an_end(workers, POLL_S)
                return []
            if stop.requested and not forwarded:
                say_stopping(stop, grace_s)
                forwarded = ask_to_stop(workers)
            if forwarded and time.monotonic() - forwarded > grace_s:
                return [w.rank for w in workers if w.process.poll() is None] * bool(stop.requested)
            wait_for_an_end(workers, POLL_S)
        return []

    def _raise_cause(
        self, workers: list[WorkerProcess], store: dist.Store, stop: Stop, token: str, fate: str
    ) -> None:
        """`fate`: of servers that the launcher had started, and that are gone."""
        by_rank = {w.rank: w for w in workers}
        codes = {w.rank: w.process.returncode for w in workers}
        reports = {}
        for w in workers:
            if (said := said_by(store, f"error/{w.rank}", token)) is not None:
                reports[w.rank] = said
        killed = {
            w.rank: -codes[w.rank] for w in workers if codes[w.rank] < 0 and not w.ended_by_us
        }
        ended = [w.rank for w in workers if codes[w.rank] > 0 and w.rank not in reports]
        # a rank that lost its peer is a victim, not the cause; so is one that lost a server, where
        # the rank that had started the server is gone
        victims = {"PeerLost", "ServerLost"} if killed or ended else {"PeerLost"}
        causes = sorted(
            (r for r in reports if reports[r]["kind"] not in victims),
            key=lambda r: reports[r]["time"],
        )
        if causes:
            rank, said = causes[0], reports[causes[0]]
            # what all ranks found together is no rank's failure; the message names the culprit
            together = said["kind"] in TOGETHER or sum(
                reports[r]["text"] == said["text"] for r in causes
            ) == len(workers)
            size = 1 if together else len(workers)
            text = "\n".join(filter(None, (_attributed(rank, size, said["text"]), fate)))
            raise LaunchError(text, 2 if said["ours"] else 1, said["kind"], said.get("round"))
        # a rank that was told to stop while still starting ends by the signal; nothing to save yet
        if (
            stop.requested
            and any(codes.values())
            and all(w.ended_by_us or codes[w.rank] in (0, -signal.SIGTERM) for w in workers)
        ):
            raise stopped_error(stop, (), 0.0, store)
        if killed:
            rank = min(killed)
            name = signal.Signals(killed[rank]).name
            hint = "; the kernel does so when memory runs out" if name == "SIGKILL" else ""
            last = "".join(
                f"\n  {line.rstrip()}" for w in workers if w.rank == rank for line in w.tail[-5:]
            )
            raise LaunchError(
                f"rank {rank} (pid {by_rank[rank].process.pid}) was killed by {name}{hint}{last}",
                128 + killed[rank],
                "killed",
            )
        if ended:
            last = "".join(f"\n  {line.rstrip()}" for line in by_rank[ended[0]].tail[-20:])
            raise LaunchError(
                f"rank {ended[0]} ended with exit code {codes[ended[0]]} and no report{last}",
                codes[ended[0]],
                "ended",
            )
        if reports:
            rank = min(reports, key=lambda r: reports[r]["time"])
            text = _attributed(rank, len(workers), reports[rank]["text"])
            raise LaunchError(text, 1, reports[rank]["kind"], reports[rank].get("round"))


def _attributed(rank: int, size: int, text: str) -> str:
    return text.rstrip() if size == 1 else f"rank {rank} failed:\n{text.rstrip()}"
