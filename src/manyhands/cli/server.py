"""`manyhands server`: starts a parameter server, or the coordinator of several, by hand.

    manyhands server          one server that also coordinates, for workers of this machine
    manyhands server --keep   the same, for runs and stores that come and go

As with PS-Lite, on several machines:

    export DMLC_PS_ROOT_URI=10.0.0.1 DMLC_PS_ROOT_PORT=9400 DMLC_NUM_WORKER=4 DMLC_NUM_SERVER=2
    DMLC_ROLE=scheduler manyhands server
    DMLC_ROLE=server    manyhands server

Options of the command line override the environment. All settings are resolved here, before
anything listens; the server itself is `server.process`.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import re
import secrets
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from manyhands.errors import LaunchError
from manyhands.launch import environment
from manyhands.launch.environment import ServedBy
from manyhands.launch.signals import Stop
from manyhands.observe.server_events import figures
from manyhands.observe.text import rate, size
from manyhands.server.counters import since, together
from manyhands.server.malloc_arenas import limit_malloc_arenas
from manyhands.server.network.tls import tls_contexts
from manyhands.server.process import Server

Role = Literal["server", "coordinator"]
# scheduler is PS-Lite's name
ROLES = {"server": "server", "coordinator": "coordinator", "scheduler": "coordinator"}
SIZES = {
    "": 1,
    **{f"{p}ib": 1024 ** (i + 1) for i, p in enumerate("kmgt")},
    **{f"{p}b": 1000 ** (i + 1) for i, p in enumerate("kmgt")},
}
LEAST_MEMORY_BYTES = 1 << 20
LINE_EVERY_S = 2.0
LOOK_EVERY_S = 0.1


@dataclass(frozen=True)
class Settings:
    """Everything about one process, resolved."""

    role: Role
    bind: str
    port: int  # 0: any free one
    token: str
    token_file: Path | None  # where workers can read it
    coordinator: str | None  # None: this process coordinates
    workers: int | None = None  # how many will join; None: as many as the first one says
    servers: int = 1
    shards: int = 1
    memory_bytes: int | None = None
    modules: tuple[str, ...] = ()
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    temporary: bool = False  # the token file is deleted at the end
    keep: bool = False  # go on when the workers have left


@dataclass(frozen=True)
class Given:
    """Options of the command line; None: not given."""

    role: str | None = None
    bind: str | None = None
    port: int | None = None
    workers: int | None = None
    servers: int | None = None
    coordinator: str | None = None
    shards: int = 1
    memory: str | None = None
    token_file: Path | None = None
    modules: Sequence[str] = ()  # of custom optimizers
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    keep: bool = False


def server(given: Given) -> int:
    """Serve until Ctrl-C or SIGTERM; the exit code."""
    settings = settle(given, environment.served())
    with Stop() as stop:
        running = start(settings)
        try:
            for line in introduce(settings, running):
                print(line, flush=True)
            watch(running, stop, live=sys.stdout.isatty())
        finally:
            running.close()
            if settings.temporary and settings.token_file is not None:
                settings.token_file.unlink(missing_ok=True)
    print("stopped" if stop.requested else "the run is over: all workers have left", flush=True)
    return 0


def start(settings: Settings) -> Server:
    s = settings
    accepts, connects = tls_contexts(
        *(None if f is None else str(f) for f in (s.tls_cert, s.tls_key, s.tls_ca or s.tls_cert))
    )
    everywhere = s.bind in ("0.0.0.0", "::", "")
    towards = s.coordinator.rpartition(":")[0].strip("[]") if s.coordinator is not None else None
    limit_malloc_arenas()
    return Server(
        environment.at(s.bind, s.port),
        0 if s.role == "coordinator" else s.shards,
        s.token,
        coordinator=s.coordinator,
        servers=s.servers,
        workers=s.workers,
        keep=s.keep,
        memory_bytes=s.memory_bytes,
        modules=s.modules,
        tls=accepts,
        client_tls=connects,
        advertise=environment.address_towards(towards) if everywhere and towards else None,
    ).start()


def introduce(settings: Settings, running: Server) -> list[str]:
    """The lines to print first: what this is, and how servers and workers join it."""
    s = settings
    shards = f"{len(running.shards)} shard{'s' * (len(running.shards) > 1)}"
    what = f"at {running.address}" + (f", {shards}" if running.shards else "")
    if s.coordinator is not None:
        return [f"{s.role:<12}{what}, joins the coordinator at {s.coordinator}"]
    for_whom = f"{s.workers} workers" if s.workers else "as many workers as the first says"
    if s.keep:
        for_whom = "runs and stores that come and go, until Ctrl-C"
    waits = f"coordinates {s.servers} server{'s' * (s.servers > 1)} for {for_whom}"
    host, port = running.address.rpartition(":")[::2]
    root = f"DMLC_PS_ROOT_URI={host.strip('[]')} DMLC_PS_ROOT_PORT={port}"
    secret = (
        f"MANYHANDS_TOKEN_FILE={s.token_file.resolve()}"
        if s.token_file is not None
        else "MANYHANDS_TOKEN=..."
    )
    if s.tls_cert is not None:
        secret += f" MANYHANDS_TLS_CA={(s.tls_ca or s.tls_cert).resolve()}"
    lines = [f"{s.role:<12}{what}, {waits}"]
    if s.token_file is not None:
        lines.append(
            f"{'token':<12}{s.token_file.resolve()}, which only you can read; "
            "the other hosts need it too"
        )
    if s.role == "coordinator" or s.servers > 1:
        lines.append(f"{'servers':<12}{root} {secret} DMLC_ROLE=server manyhands server")
    words = f"data={s.workers or 'N'} servers={s.servers}"
    lines.append(f"{'workers':<12}{root} {secret} manyhands run SCRIPT {words}")
    if s.keep:
        lines[-1] = lines[-1].replace(" manyhands run", " MANYHANDS_NAMESPACE=NAME manyhands run")
        lines.append(f'{"stores":<12}{secret} and mh.Store("{running.address}")')
    return lines


def watch(running: Server, stop: Stop, live: bool) -> None:
    """Wait for a signal, for all workers to leave, or for the loss of the coordinator; on a
    terminal (`live`) one line shows the figures.
    """
    before, shown = counted(running), time.monotonic()
    nothing = threading.Event()
    while (
        not stop.requested
        and not running.ended
        and not (running.coordinator is not None and running.coordinator.over)
    ):
        nothing.wait(LOOK_EVERY_S)
        now = time.monotonic()
        if live and now - shown >= LINE_EVERY_S:
            after = counted(running)
            print(f"\r\x1b[2K{line_of(since(before, after), now - shown)}", end="", flush=True)
            before, shown = after, now
    nothing.wait(LOOK_EVERY_S)  # for the last worker to get the answer to its Leave
    if live:
        print("\r\x1b[2K", end="", flush=True)
    if running.lost is not None:
        raise LaunchError(running.lost)


def counted(running: Server) -> dict[str, float]:
    runs = running.coordinator.runs.stats() if running.coordinator is not None else {}
    return together([endpoint.stats() for endpoint in running.endpoints]) | runs


def line_of(stats: Mapping[str, float], seconds: float) -> str:
    """12.3k rows  1.2M rows/s  310.0 MB/s  2 workers  stale 1.5"""
    shown = figures(stats, seconds)
    parts = [
        f"{rate(shown.get('rows', 0.0))} rows",
        f"{size(int(shown.get('bytes', 0)))}",
        f"{rate(shown['rows_per_s'])} rows/s",
    ]
    parts.append(f"{size(int(shown['bytes_per_s']))}/s")
    if "running" in shown:
        parts.append(f"{shown['running']:.0f} workers")
    if shown.get("guests"):
        parts.append(f"{shown['guests']:.0f} stores")
    if shown.get("staleness"):
        parts.append(f"stale {shown['staleness']:.1f}")
    if shown["refused"]:
        parts.append(f"{shown['refused']:.0f} refused")
    return "  ".join(parts)


def settle(given: Given, found: ServedBy) -> Settings:
    """Resolve options, then the environment, then defaults; refuse contradictions."""
    role = _role(given, found)
    coordinator = _coordinator(role, given, found)
    servers = given.servers or found.num_servers or 1
    if coordinator is None and role == "server" and servers > 1:
        raise LaunchError(
            f"{servers} servers, but this one was given no coordinator; start one with "
            "--role coordinator, then each server with --coordinator HOST:PORT"
        )
    if given.keep and coordinator is not None:
        raise LaunchError(
            f"--keep is for the coordinator, at {coordinator}; this server stays as long as that"
        )
    if given.keep and given.workers:
        raise LaunchError(
            f"--keep with --workers {given.workers}: runs that come and go say themselves how many "
            "workers they have; leave --workers out"
        )
    bind = _bind(role, given, found, coordinator)
    # the root's port is for the coordinator; a server that joins it listens on any free port
    port = given.port if given.port is not None else found.port if coordinator is None else 0
    if (given.tls_cert is None) != (given.tls_key is None):
        raise LaunchError("TLS needs both: --tls-cert FILE and --tls-key FILE")
    for option, path in (
        ("--tls-cert", given.tls_cert),
        ("--tls-key", given.tls_key),
        ("--tls-ca", given.tls_ca),
    ):
        if path is not None and not path.is_file():
            raise LaunchError(f"{option} {path}: there is no such file")
    memory_bytes = None if given.memory is None else parse_bytes("--memory", given.memory)
    token, token_file = _token(given, found, bind, coordinator)  # last: it may create a file
    return Settings(
        role,
        bind,
        port,
        token,
        token_file,
        coordinator,
        None if given.keep else given.workers or found.num_workers,
        servers,
        given.shards,
        memory_bytes,
        tuple(given.modules),
        given.tls_cert,
        given.tls_key,
        given.tls_ca or (Path(found.tls_ca) if found.tls_ca else None),
        temporary=given.token_file is None and not found.token_file and token_file is not None,
        keep=given.keep,
    )


def parse_bytes(option: str, text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in SIZES:
        raise LaunchError(
            f"{option} {text}; needed: a number of bytes with a unit, e.g. 512MiB, 8GiB or 8GB"
        )
    size = int(float(match[1]) * SIZES[match[2]])
    if size < LEAST_MEMORY_BYTES:
        raise LaunchError(f"{option} {text}; needed: 1MiB or more, e.g. 8GiB")
    return size


def _role(given: Given, found: ServedBy) -> Role:
    named = given.role or found.role or "server"
    if named == "worker":
        where = found.coordinator or "HOST:PORT of the coordinator"
        raise LaunchError(
            "DMLC_ROLE=worker, but a worker is the training script, not a server: start that one "
            "(manyhands run script.py data=N servers=M, or torchrun) with the same DMLC_ "
            f"variables, and it joins the servers at {where}"
        )
    if named not in ROLES:
        raise LaunchError(f"--role {named}; needed: server or coordinator")
    return "coordinator" if ROLES[named] == "coordinator" else "server"


def _coordinator(role: Role, given: Given, found: ServedBy) -> str | None:
    if role == "coordinator":
        if given.coordinator is not None:
            raise LaunchError(
                f"--coordinator {given.coordinator} is for servers; this is the coordinator: "
                "use --bind and --port"
            )
        return None
    if given.coordinator is not None:
        host, _, port = given.coordinator.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise LaunchError(
                f"--coordinator {given.coordinator}; needed: HOST:PORT, e.g. 10.0.0.1:9400"
            )
        return given.coordinator
    # by the variables alone, a process with a role joins the root; one without may be the root
    return found.coordinator or None if found.role == "server" or given.role == "server" else None


def _bind(role: Role, given: Given, found: ServedBy, coordinator: str | None) -> str:
    if given.bind is not None:
        return given.bind
    if found.node_host:
        return found.node_host
    if found.interface:
        return card_address(found.interface)
    if coordinator is not None:
        return environment.address_towards(coordinator.rpartition(":")[0].strip("[]"))
    return found.uri or "127.0.0.1"


def card_address(name: str) -> str:
    """The IPv4 address of a network card."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            siocgifaddr = 0x8915
            answer = fcntl.ioctl(
                probe.fileno(), siocgifaddr, struct.pack("256s", name.encode()[:15])
            )
        except OSError as e:
            cards = ", ".join(card for _, card in socket.if_nameindex())
            raise LaunchError(
                f"DMLC_INTERFACE={name} has no address ({e.strerror}); cards here: {cards}"
            ) from e
    return socket.inet_ntoa(answer[20:24])


def _token(
    given: Given, found: ServedBy, bind: str, coordinator: str | None
) -> tuple[str, Path | None]:
    option, path = "--token-file", given.token_file
    if path is None and found.token:
        return found.token, None
    if path is None and found.token_file:
        option, path = environment.TOKEN_FILE, Path(found.token_file)
    if path is not None and (path.exists() or coordinator is not None):
        return environment.read_token(path, option), path
    if coordinator is not None:
        raise LaunchError(
            "a server that joins others needs their token: --token-file FILE, "
            "MANYHANDS_TOKEN_FILE or MANYHANDS_TOKEN; the coordinator at "
            f"{coordinator} printed where it is"
        )
    if path is None and not loopback(bind):
        raise LaunchError(
            f"listening at {bind} without a token would let everybody who reaches it read and "
            "change the tables; give --token-file FILE (made if it does not exist), or set "
            "MANYHANDS_TOKEN, or use --bind 127.0.0.1"
        )
    return make_token(option, path)


def make_token(option: str, path: Path | None) -> tuple[str, Path]:
    """A new secret in a file that only this user can read."""
    made = secrets.token_hex(32)
    if path is None:
        # 0600, with a name that nobody can guess
        number, name = tempfile.mkstemp(prefix="manyhands-", suffix=".token")
        path = Path(name)
    else:
        try:
            number = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except OSError as e:
            raise LaunchError(
                f"{option} {path} cannot be made: {e.strerror}; give a path in a folder that exists"
            ) from e
    with os.fdopen(number, "w") as file:
        file.write(made + "\n")
    return made, path


def loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return address == "localhost"
