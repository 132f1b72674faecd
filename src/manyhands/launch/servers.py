"""Launch of parameter servers: server i is a child process of rank i % size.

    rank 0    start server 0, which also coordinates;   its address -> store
    rank r    start servers r, r + size, ...;   wait for the coordinator's address and pass it to
              them;   their addresses -> store
    all       wait until every server has published its address, or why it could not start

All of them know the run's token (`run_token`), and what they put into the store is signed with it.
Standard input is the child's lifeline, as it is a worker's (`launch.worker`): when its rank is
gone, however it ended, reading ends and so does the server. The child has a session of its own:
Ctrl-C is handled by the launcher, and a server must outlive the last push. Servers that were
started by hand (DMLC_PS_ROOT_URI) are joined instead.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import queue
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import torch.distributed as dist

from manyhands.core import ProcessInfo
from manyhands.errors import LaunchError
from manyhands.launch import environment, run_token
from manyhands.launch.environment import ServedBy

MODULE = "manyhands.server.process"  # by name: launch may not import server
GRACE_S = 5.0  # for a child after its lifeline was closed, to answer requests in flight
POLL_S = 0.05
TAIL_LINES = 20


@dataclass
class Child:
    """One server process and its last lines of output."""

    index: int
    process: subprocess.Popen[bytes]
    tail: list[str]
    pumps: list[threading.Thread]
    answers: queue.Queue[bytes]  # the first line it printed; b"": it ended without one

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def fate(self) -> str:
        """How it ended, with its last lines of output; "": it is running."""
        code = self.process.poll()
        if code is None:
            return ""
        for pump in self.pumps:
            pump.join(timeout=1.0)  # its last lines may still be in the pipe
        ended = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )
        hint = "; the kernel does so when memory runs out" if code == -signal.SIGKILL else ""
        said = "".join(f"\n  {line.rstrip()}" for line in self.tail)
        return f"server {self.index} (pid {self.process.pid}) {ended}{hint}{said}"


@dataclass
class Servers:
    """The servers of a run, and those of them that this process has started."""

    coordinator: str  # "host:port"
    token: str
    addresses: tuple[str, ...] = ()  # by index; (): started by hand, ask the coordinator
    children: list[Child] = field(default_factory=list)
    tls: ssl.SSLContext | None = None  # to connect with
    leave: Callable[[], None] = lambda: None  # returns when no other rank needs them

    def alive(self) -> bool:
        """Whether all servers that this process started are running."""
        return all(child.alive for child in self.children)

    def fate(self) -> str:
        """How those that are not running ended, for an error message."""
        return "\n".join(filter(None, (child.fate() for child in self.children)))

    def close(self) -> None:
        """This rank is done with all servers. When the other ranks are, end its own: close their
        lifelines, and after a grace period kill them. May be called twice.
        """
        self.leave()
        self.leave = lambda: None
        _end(self.children)
        self.children.clear()


def start(
    count: int,
    process: ProcessInfo,
    store: dist.Store,
    *,
    workers: int,
    timeout_s: float,
    token: str | None = None,
    memory_bytes: int | None = None,
    modules: Sequence[str] = (),
    served: ServedBy | None = None,
    env: Mapping[str, str] | None = None,
    address: str | None = None,
) -> Servers:
    """Start or join the servers of a run. Every rank calls it; it returns on all of them when all
    servers are up, or raises on all of them what went wrong.

    `workers` is how many will join, `memory_bytes` the limit of each server, `modules` those of
    custom optimizers that servers may import.
    """
    served = environment.served(env) if served is None else served
    if served.coordinator:
        return join(served, count, workers)
    if count < 1:
        raise LaunchError(f"{count} servers; needed: 1 or more")
    deadline = time.monotonic() + timeout_s
    mine = range(process.rank, count, process.size)
    address, one_machine = _bind_address(process, store, deadline, env, address)
    shared = (
        token
        or run_token.of_environment(env)
        or run_token.agree(
            process, store, one_machine, lambda key, what: _get(store, key, deadline, what)
        )
    )
    children: list[Child] = []
    try:
        with _errors_to_all_ranks(store, process, shared):
            for i in mine:  # before any wait: starting Python takes a second
                children.append(_spawn(i))
            coordinator = ""
            for child in children:
                if child.index > 0 and not coordinator:
                    coordinator = _address(store, 0, deadline, shared)
                request = _request(
                    child.index, count, workers, address, shared, coordinator, memory_bytes, modules
                )
                key, begun = f"servers/{child.index}", _begin(child, request, deadline)
                store.set(key, run_token.sign(shared, key, begun))
        addresses = tuple(_address(store, i, deadline, shared) for i in range(count))
    except BaseException:
        _end(children)
        raise
    return Servers(
        addresses[0],
        shared,
        addresses,
        children,
        leave=lambda: _leave(store, process, bool(children)),
    )


def join(served: ServedBy, count: int, workers: int) -> Servers:
    """The servers that the environment names, where they agree with the plan."""
    if served.role not in (None, "worker"):
        raise LaunchError(
            f"DMLC_ROLE={served.role}, but this process trains; start it with DMLC_ROLE=worker, "
            f"and the {served.role} with `manyhands server`"
        )
    for name, there, needed, word in (
        ("DMLC_NUM_WORKER", served.num_workers, workers, "data"),
        ("DMLC_NUM_SERVER", served.num_servers, count, "servers"),
    ):
        if there is not None and needed and there != needed:
            raise LaunchError(
                f"{name}={there}, but the plan says {word}={needed}; "
                "make them equal: the servers count on it"
            )
    try:
        tls = ssl.create_default_context(cafile=served.tls_ca) if served.tls_ca else None
    except (OSError, ssl.SSLError) as e:
        raise LaunchError(
            f"{environment.TLS_CA}={served.tls_ca} is no certificate ({e}); "
            "give the servers' --tls-ca, PEM"
        ) from e
    return Servers(served.coordinator, served.secret(), tls=tls)


# -- one child --


def _request(
    index: int,
    count: int,
    workers: int,
    address: str,
    token: str,
    coordinator: str,
    memory_bytes: int | None,
    modules: Sequence[str],
) -> dict[str, Any]:
    return {
        "index": index,
        "servers": count,
        "workers": workers,
        "host": address,
        "port": 0,
        "token": token,
        "coordinator": coordinator or None,  # None: it coordinates itself
        "memory_bytes": memory_bytes,
        "modules": list(modules),
    }


def _spawn(index: int) -> Child:
    env = {
        **environment.variables(),
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "PYTHONUNBUFFERED": "1",
        # it computes on the CPU, and must not take memory of the rank's GPU
        "CUDA_VISIBLE_DEVICES": "",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
        start_new_session=True,
    )
    tail: list[str] = []
    answers: queue.Queue[bytes] = queue.Queue()
    pumps = [
        threading.Thread(
            target=_pump,
            args=(pipe, f"[server{index}]: ", tail, first),
            name=f"server {index}",
            daemon=True,
        )
        for pipe, first in ((process.stdout, answers), (process.stderr, None))
    ]
    for pump in pumps:
        pump.start()
    return Child(index, process, tail, pumps, answers)


def _begin(child: Child, request: Mapping[str, Any], deadline: float) -> str:
    """Send it its configuration; returns its address."""
    process = child.process
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died at once; its output follows
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()  # and stay open: the server lives as long as this pipe
    try:
        line = child.answers.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        raise LaunchError(
            f"server {child.index} (pid {process.pid}) did not publish its address in time; "
            "raise timeout_s"
        ) from None
    try:
        answer = json.loads(line)
        return str(answer["address"])
    except (ValueError, KeyError, TypeError):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        fate = (
            child.fate()
            or f"server {child.index} (pid {process.pid}) printed {line!r} instead of its address"
        )
        raise LaunchError(f"a parameter server could not start: {fate}") from None


def _pump(pipe: IO[bytes], prefix: str, tail: list[str], first: queue.Queue[bytes] | None) -> None:
    if first is not None:
        first.put(pipe.readline())
    for raw in pipe:
        line = raw.decode(errors="replace")
        tail.append(line)
        del tail[:-TAIL_LINES]
        # our stderr may be closed, and the server must not stall for that
        with contextlib.suppress(Exception):
            sys.stderr.write(f"{prefix}{line}")
            sys.stderr.flush()


def _end(children: Sequence[Child]) -> None:
    for child in children:
        assert child.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            child.process.stdin.close()
    deadline = time.monotonic() + GRACE_S
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
        for pump in child.pumps:
            pump.join(timeout=1.0)
        for pipe in (child.process.stdout, child.process.stderr):
            assert pipe is not None
            pipe.close()


# -- with the other ranks --


@contextlib.contextmanager
def _errors_to_all_ranks(store: dist.Store, process: ProcessInfo, token: str) -> Iterator[None]:
    """Publish an error to all other ranks, which would wait for ever, and raise it here."""
    try:
        yield
    except Exception as e:
        with contextlib.suppress(Exception):
            text = f"rank {process.rank}: {e}" if process.size > 1 else str(e)
            store.set("servers/error", run_token.sign(token, "servers/error", text))
        raise


def _leave(store: dist.Store, process: ProcessInfo, has_servers: bool) -> None:
    """Wait until all ranks are done: a server that ended while another rank still closes its store
    would be an error of that rank. After an error, do not wait.
    """
    with contextlib.suppress(Exception):  # the rank that hosts the store may be gone
        store.set(f"servers/done/{process.rank}", "")
        deadline = time.monotonic() + GRACE_S
        while has_servers and sys.exc_info()[0] is None and time.monotonic() < deadline:
            if store.check([f"servers/done/{r}" for r in range(process.size)]):
                return
            time.sleep(POLL_S / 5)


def _address(store: dist.Store, index: int, deadline: float, token: str) -> str:
    key = f"servers/{index}"
    raw = _get(store, key, deadline, f"server {index} to start", token)
    address = run_token.verify(token, key, raw)
    if address is None:
        raise LaunchError(
            f"the address of server {index} in the rendezvous is not signed by this run: somebody "
            "else writes to it, or ranks have different tokens; give all ranks one MANYHANDS_TOKEN"
        )
    return address


def _get(store: dist.Store, key: str, deadline: float, what: str, token: str = "") -> bytes:
    while not store.check([key]):
        if token and store.check(["servers/error"]):
            error = run_token.verify(token, "servers/error", bytes(store.get("servers/error")))
            if error is not None:
                raise LaunchError(error)
        if time.monotonic() > deadline:
            raise LaunchError(
                f"waited in vain for {what}; look at the output of that rank above, "
                "or raise timeout_s"
            )
        # not store.wait: an error that another rank publishes must end this at once
        time.sleep(POLL_S)
    return bytes(store.get(key))


def _bind_address(
    process: ProcessInfo, store: dist.Store, deadline: float, env: Any, given: str | None = None
) -> tuple[str, bool]:
    """Loopback where all ranks share a host, so that no other host can connect; otherwise an
    address that the other hosts reach. And whether they share one.
    """
    if given:
        return given, False
    ours = "127.0.0.1" if process.size == 1 else environment.own_address(env)
    here = f"{process.host} {process.machine}"  # two machines may have the same name
    store.set(f"servers/host/{process.rank}", json.dumps([here, ours]))
    found = []
    for r in range(process.size):
        what = f"rank {r} of {process.size} to publish its host"
        found.append(json.loads(_get(store, f"servers/host/{r}", deadline, what)))
    if len({host for host, _ in found}) == 1:
        return "127.0.0.1", True
    # the name of the rendezvous resolves to loopback on its own host: use the route to the others
    if _loopback(ours):
        others = [address for host, address in found if host != here and not _loopback(address)]
        ours = environment.address_towards(others[0]) if others else ours
    if _loopback(ours):
        raise LaunchError(
            f"rank {process.rank} on {process.host} has no address but {ours}, which other hosts "
            "cannot reach; set MASTER_ADDR to an address or name of rank 0 that is not loopback, "
            "or DMLC_NODE_HOST on each host"
        )
    return ours, False


def _loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
