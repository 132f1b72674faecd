"""Launch of parameter servers: server i is a child process of rank i % size.

    rank 0    start the coordinator: server 0, or where shards have replicas a process of its own,
              so that any server may die;   its address -> store
    rank r    start servers r, r + size, ...;   wait for the coordinator's address and pass it to
              them;   their addresses -> store
    all       wait until every server has published its address, or why it could not start

All of them know the run's token (`run_token`), and what they put into the store is signed with it.
With replicas, a child that dies is started again (`server_supervisor`). Servers that were started
by hand (DMLC_PS_ROOT_URI) are joined instead.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import os
import shutil
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from manyhands.core import ProcessInfo
from manyhands.errors import LaunchError
from manyhands.launch import environment, run_token
from manyhands.launch.environment import ServedBy
from manyhands.launch.server_child import COORDINATOR, GRACE_S, Child, begin, end, spawn
from manyhands.launch.server_supervisor import ServerSupervisor

POLL_S = 0.05
PATIENCE_S = 60.0  # of servers, for a coordinator that died to be started again


@dataclass(frozen=True)
class ServerOptions:
    """Options of the servers of a run."""

    shards: int = 1  # of each server
    replicas: int = 1  # servers that hold each shard
    ack: str = "all"  # who has a push when it is acknowledged: all of them, or the first (primary)
    memory_bytes: int | None = None  # of each server
    modules: tuple[str, ...] = ()  # of custom optimizers, that servers may import
    membership: str = ""  # where the coordinator keeps its state: a folder, or etcd://HOST:PORT
    run: str = "run"  # the run's name there
    # a file for their address and token, by which `manyhands servers` finds them; only its owner
    # can read it
    address_file: str = ""
    hot_rows: float = 0.0  # share of accesses from which on a row is copied to all servers
    hot_age: float = 0.1  # seconds that a copy may be old


@dataclass
class Servers:
    """The servers of a run, and those of them that this process has started."""

    coordinator: str  # "host:port"
    token: str
    addresses: tuple[str, ...] = ()  # by index; (): started by hand, ask the coordinator
    children: list[Child] = field(default_factory=list)
    tls: ssl.SSLContext | None = None  # to connect with
    namespace: str = ""  # of this run there
    leave: Callable[[], None] = lambda: None  # returns when no other rank needs them
    supervisor: ServerSupervisor | None = None
    state: str = ""  # where the coordinator keeps its state
    address_file: str = ""

    def alive(self) -> bool:
        """Whether all servers that this process started are running."""
        return all(child.alive for child in self.children)

    def fate(self) -> str:
        """How those that are not running ended, for an error message."""
        ended = [] if self.supervisor is None else self.supervisor.fates
        return "\n".join(filter(None, [*ended, *(child.fate() for child in self.children)]))

    def close(self) -> None:
        """This rank is done with all servers. When the other ranks are, end its own: close their
        lifelines, and after a grace period kill them. May be called twice.
        """
        self.leave()
        self.leave = lambda: None
        if self.supervisor is not None:
            self.supervisor.close()
        coordinates = any(child.index == COORDINATOR for child in self.children)
        end(self.children)
        self.children.clear()
        if self.address_file:
            Path(self.address_file).unlink(missing_ok=True)
        if coordinates and self.state and not self.state.startswith("etcd://"):
            shutil.rmtree(self.state, ignore_errors=True)  # of no use to another run


def start(
    count: int,
    process: ProcessInfo,
    store: dist.Store,
    *,
    workers: int | None,
    timeout_s: float,
    options: ServerOptions | None = None,
    token: str | None = None,
    served: ServedBy | None = None,
    env: Mapping[str, str] | None = None,
    address: str | None = None,
) -> Servers:
    """Start or join the servers of a run, for so many `workers` (None: as many as the first says).
    Every rank calls it; it returns on all of them when all servers are up, or raises on all of them
    what went wrong.
    """
    options, served = options or ServerOptions(), served or environment.served(env)
    if served.coordinator:
        return join(served, count, workers, options)
    _check_count(count)
    deadline = time.monotonic() + timeout_s
    first = COORDINATOR if options.replicas > 1 else 0  # the index of the one that coordinates
    mine = [COORDINATOR] if process.rank == 0 and first == COORDINATOR else []
    mine += range(process.rank, count, process.size)
    address, one_machine = _bind_address(process, store, deadline, env, address)
    shared = (
        token
        or run_token.of_environment(env)
        or run_token.agree(
            process, store, one_machine, lambda key, what: _get(store, key, deadline, what)
        )
    )
    children: list[Child] = []
    requests: dict[int, dict[str, Any]] = {}
    make = lambda root: _request(count, workers, address, shared, root, options)
    try:
        with _errors_to_all_ranks(store, process, shared):
            for i in mine:  # before any wait: starting Python takes a second
                children.append(spawn(i))
            find = lambda: _address(store, first, deadline, shared)
            for child in children:
                root = "" if child.index == first else find()
                request = make(root) | ({"shards": 0} if child.index == COORDINATOR else {})
                key, begun = f"servers/{child.index}", begin(child, request, deadline)
                # a coordinator that is started again must be found where it was
                request["port"] = 0 if root else int(begun.rpartition(":")[2])
                requests[child.index] = request
                store.set(key, run_token.sign(shared, key, begun))
        addresses = tuple(_address(store, i, deadline, shared) for i in range(count))
        found = Servers(find(), shared, addresses, children, state=options.membership)
    except BaseException:
        end(children)
        raise
    found.leave = lambda: _leave(store, process, bool(children))
    if process.rank == 0:
        _leave_address(found, options)
    if options.replicas > 1 and children:
        found.supervisor = ServerSupervisor(children, requests, timeout_s)
    return found


def _check_count(count: int) -> None:
    if count < 1:
        raise LaunchError(f"{count} servers; needed: 1 or more")


def _leave_address(servers: Servers, options: ServerOptions) -> None:
    if not options.address_file:
        return
    servers.address_file = options.address_file
    told = {
        "coordinator": servers.coordinator,
        "token": servers.token,
        "modules": options.modules,
        "memory_bytes": options.memory_bytes,
    }
    file = Path(options.address_file)
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as out:
        json.dump(told, out)


def join(
    served: ServedBy, count: int, workers: int | None, options: ServerOptions | None = None
) -> Servers:
    """The servers that the environment names, where they agree with the plan."""
    options = ServerOptions() if options is None else options
    for word in ("replicas", "shards", "memory_bytes", "membership"):
        if getattr(options, word) != getattr(ServerOptions, word):
            own = {"memory_bytes": "--memory", "shards": "--shards"}.get(word)
            do = f"give `manyhands server` {own} instead" if own else "leave it out"
            said = word.replace("memory_bytes", "server_memory")
            raise LaunchError(
                f"{said}= of the plan is for servers that the run starts itself, but it joins "
                f"those at {served.coordinator}; {do}"
            )
    if options.hot_rows:
        raise LaunchError(
            f"hot_rows={options.hot_rows:g} of the plan is for servers that the run starts itself, "
            f"but it joins those at {served.coordinator}; leave it out"
        )
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
    return Servers(served.coordinator, served.secret(), tls=tls, namespace=served.namespace)


def _request(
    count: int,
    workers: int | None,
    address: str,
    token: str,
    coordinator: str,
    options: ServerOptions,
) -> dict[str, Any]:
    """The configuration of one server; it coordinates where it is given no coordinator."""
    return {
        "servers": count,
        "workers": workers,
        "host": address,
        "port": 0,
        "token": token,
        "coordinator": coordinator or None,
        "shards": options.shards,
        "replicas": options.replicas,
        "ack": options.ack,
        "memory_bytes": options.memory_bytes,
        "modules": list(options.modules),
        "hot_rows": options.hot_rows,
        "hot_age": options.hot_age,
        "membership": options.membership if not coordinator else "",
        # of this start of the run: a resumed run has other servers
        "run": f"{options.run}-{hashlib.sha256(token.encode()).hexdigest()[:12]}",
        "patience_s": PATIENCE_S if options.replicas > 1 else 0.0,
    }


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
