"""Where the tables of `mh.Store` are: in this process, on a running server, or on servers of it."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from manyhands.core import ProcessInfo
from manyhands.errors import ManyhandsError, ServerLost, StoreError
from manyhands.launch import environment
from manyhands.launch import servers as processes
from manyhands.launch.environment import ServedBy
from manyhands.launch.servers import ServerOptions, Servers
from manyhands.server.client.guest_store import GuestStore
from manyhands.server.local_store import LocalStore
from manyhands.server.namespaces.namespaced_store import ClientStore, NamespacedClient
from manyhands.server.shard import Shard

PROBE_S = 5.0  # for a server to accept a connection
START_S = 60.0  # for servers of this store to start


@dataclass
class Backend:
    """An open store, and the servers that live as long as it does."""

    client: ClientStore
    where: str  # in words
    address: str | None = None
    token: str = ""
    servers: Servers | None = None

    def close(self) -> None:
        """Return when everything pushed has arrived; the servers end in any case."""
        try:
            self.client.close()
        finally:
            if self.servers is not None:
                self.servers.close()

    def end(self) -> None:
        """For a store that nobody closed."""
        try:
            self.close()
        except ManyhandsError:
            pass


def in_this_process(optimizers: Sequence[str], namespace: str) -> Backend:
    client = LocalStore(0, 1, [Shard(modules=optimizers)])
    return Backend(_named(client, namespace), "in this process")


def on_own_servers(
    count: int, optimizers: Sequence[str], namespace: str, timeout_s: float
) -> Backend:
    """Start servers on this machine; they end with the store, and with this process however that
    ends."""
    started = processes.start(
        count,
        ProcessInfo(),
        dist.HashStore(),
        workers=None,
        timeout_s=START_S,
        token=secrets.token_hex(32),
        options=ServerOptions(modules=tuple(optimizers)),
        served=ServedBy(),
    )
    try:
        client = GuestStore(started.coordinator, started.token, timeout_s=timeout_s)
    except BaseException:  # Ctrl-C too: no process stays behind
        started.close()
        raise
    where = f"on {count} server{'s' * (count > 1)} of its own, at {started.coordinator}"
    return Backend(_named(client, namespace), where, started.coordinator, started.token, started)


def at_address(
    address: str,
    token: str | None,
    token_file: str | Path | None,
    tls_ca: str | Path | None,
    namespace: str | None,
    timeout_s: float,
) -> Backend:
    """Join a running `manyhands server`; what is not given is taken from the environment."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise StoreError(f"address {address!r}; HOST:PORT is needed, such as 127.0.0.1:9400")
    known = environment.served()
    if token is not None:
        secret = token
    elif token_file is not None:
        secret = environment.read_token(Path(token_file), "token_file")
    else:
        secret = known.secret()
    ca = str(tls_ca) if tls_ca is not None else known.tls_ca
    tls = processes.join(ServedBy(uri=host, port=int(port), tls_ca=ca), 0, None).tls
    name = known.namespace if namespace is None else namespace
    _probe(host.strip("[]"), int(port), address)
    try:
        client = GuestStore(address, secret, namespace=name, timeout_s=timeout_s, tls=tls)
    except StoreError as e:
        if "token" not in str(e):
            raise
        given = "the one given is another" if secret else "none was given"
        raise StoreError(
            f"{e}: {given}; use token= or token_file=, or set MANYHANDS_TOKEN_FILE, as the server "
            "printed it when it started"
        ) from e
    where = f"at {address}" + (f", namespace {name!r}" if name else "")
    return Backend(_named(client, name), where, address, secret)


def _named(client: ClientStore, namespace: str) -> ClientStore:
    return NamespacedClient(client, namespace) if namespace else client


def _probe(host: str, port: int, address: str) -> None:
    """A coordinator may start later than its workers, so those try for long; people want to know
    at once."""
    try:
        socket.create_connection((host, port), timeout=PROBE_S).close()
    except OSError as e:
        raise ServerLost(
            f"no server answers at {address} ({e}); start one with: "
            f"manyhands server --keep --port {port}, or look at the address that it printed"
        ) from e
