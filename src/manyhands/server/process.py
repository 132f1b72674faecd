"""Server process: shards that workers reach over sockets. `python -m manyhands.server.process`.

    ConnectionListener   accepts and authenticates connections, one thread each
    HeldShards           the shards that this server holds, with their replicas elsewhere
    Coordinator          in one server of a run: membership, slot map and clock
    Registration         in the others: the connection to the coordinator

Only the coordinator makes workers wait for each other; a push waits for the servers that keep its
copies.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from manyhands import membership
from manyhands.errors import ManyhandsError, ServerLost, StoreError
from manyhands.server.client.dial import choose_transport, open_channel
from manyhands.server.coordinator import Coordinator
from manyhands.server.hot_copies.hot_ids import checked_hot
from manyhands.server.malloc_arenas import limit_malloc_arenas
from manyhands.server.network.cut_connections import cut_at_signal
from manyhands.server.network.held_shards import HeldShards
from manyhands.server.network.listener import ConnectionListener
from manyhands.server.network.registration import Registration
from manyhands.server.network.shard_endpoint import ServerStatus, ShardEndpoint
from manyhands.server.network.tls import tls_contexts
from manyhands.server.protocol import handshake
from manyhands.server.protocol.frame import Channel, Malformed
from manyhands.server.protocol.messages import AssignSlots, Message, Proof, Register, ShardAddress
from manyhands.server.server_registry import ServerRegistry
from manyhands.server.shard import Shard
from manyhands.server.slots import SlotMap
from manyhands.server.tables.warm_up import warm_up

LEASE_S = 10.0
CLAIM_S = 10.0  # for the claim of a coordinator that died to run out


def parse_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise StoreError(
            f"address {address!r} was given, HOST:PORT is needed, such as 10.0.0.1:9000"
        )
    return host.strip("[]"), int(port)


class Server:
    """Shards behind one listener, and in one server of a run the coordinator.

    `coordinator` is the coordinator's address. None: this server coordinates, for `servers` servers
    and `workers` workers, and keeps `replicas` of every shard; then `shards` may be 0, for a
    coordinator without tables. With `keep` it goes on when a run is over, for other runs and for
    `mh.Store`. `advertise` (HOST or HOST:PORT) is the address that others get,
    where it is not the one listened on. Rows with the share `hot[0]` of accesses are copied to all
    servers, copies at most `hot[1]` seconds old. `keeper` keeps the coordinator's state for the
    next one; a server whose coordinator has one waits `patience_s` for it to come back. `extra`:
    the coordinator was not started for this server; it takes its part of what the others hold.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:0",
        shards: int = 1,
        token: str = "",
        *,
        coordinator: str | None = None,
        servers: int = 1,
        workers: int | None = None,
        keep: bool = False,
        replicas: int = 1,
        ack: Literal["all", "primary"] = "all",
        hot: tuple[float, float] = (0.0, 0.1),
        memory_bytes: int | None = None,
        modules: Sequence[str] = (),
        tls: ssl.SSLContext | None = None,
        client_tls: ssl.SSLContext | None = None,
        advertise: str | None = None,
        lease_s: float = LEASE_S,
        keeper: membership.Keeper | None = None,
        patience_s: float = 0.0,
        extra: bool = False,
    ):
        _check(shards, coordinator, replicas, servers, ack)
        self._root = None if coordinator is None else ShardAddress(*parse_address(coordinator))
        self._status, self._failed, self._extra = ServerStatus(), "", extra
        self._closing, self._ready, self._shards = threading.Event(), threading.Event(), shards
        self._token, self._client_tls, self._instance = token, client_tls, secrets.randbits(62)
        self._memory_bytes = memory_bytes and memory_bytes // (max(1, shards) * replicas)
        self._listener = ConnectionListener(
            *parse_address(address),
            token=token,
            instance=self._instance,
            tls=tls,
            serve=self._serve,
            refused=self._status.refused,
            closing=self._closing,
        )
        self.host, self.port = _advertised(address, self._listener.port, advertise)
        self.coordinator: Coordinator | None = None
        self._registration: Registration | None = None
        self.held = HeldShards(
            self._status, modules, connect=self._dial, tell=self._tell, fail=self._fail
        )
        if self._root is None:
            self._coordinate(servers, workers, keep, replicas, ack, lease_s, keeper, hot)
        else:
            self._registration = Registration(
                self._root,
                self._register,
                token=token,
                tls=client_tls,
                assign=self._assign,
                again=self.held.tell_again,
                over=self._over,
                ping=self.held.loads,
                closing=self._closing,
                patience_s=patience_s,
            )

    def _coordinate(
        self,
        servers: int,
        workers: int | None,
        keep: bool,
        replicas: int,
        ack: Literal["all", "primary"],
        lease_s: float,
        keeper: membership.Keeper | None,
        hot: tuple[float, float],
    ) -> None:
        registry = ServerRegistry(servers, replicas=replicas, ack=ack)
        registry.recovers, registry.hot = replicas > 1, checked_hot(*hot)
        saved, save = (None, None) if keeper is None else (keeper.load(), keeper.save)
        self.coordinator = Coordinator(
            registry, workers, lease_s, keep=keep, save=save, saved=saved
        )
        registry.changed = self.coordinator.save

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def shards(self) -> list[Shard]:
        return self.held.shards

    @property
    def endpoints(self) -> list[ShardEndpoint]:
        return [endpoint for _, endpoint in sorted(self.held.endpoints.items())]

    @property
    def refused(self) -> Counter[str]:
        """Refused connections, by reason."""
        return self._status.refused

    @property
    def lost(self) -> str | None:
        """Why this server can no longer serve, when it ended by itself."""
        if self._failed or self._registration is None:
            return self._failed or None
        return self._registration.lost

    def _register(self) -> Register:
        where = ShardAddress(self.host, self.port, 0, self._listener.local, handshake.machine())
        memory_bytes, instance = self._memory_bytes, self._instance
        return Register(where, self._shards, instance, os.getpid(), memory_bytes, self._extra)

    # -- start and close --

    def start(self) -> Server:
        self._listener.start()
        if self._registration is not None:
            self._registration.start()
        elif self.coordinator is not None:
            self.coordinator.registry.watch()
            if self._shards:
                self.coordinator.registry.loads_here = lambda: self.held.loads().rates
                self.coordinator.register_here(self._register(), self._assign)
            else:
                self._ready.set()
        return self

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the coordinator has assigned the slot map."""
        return self._ready.wait(timeout_s)

    @property
    def ended(self) -> bool:
        return self._closing.is_set()

    def serve_forever(self) -> None:
        self._closing.wait()
        if self.lost is not None:
            raise ServerLost(self.lost)

    def close(self) -> None:
        self._closing.set()
        self.held.close()
        if self.coordinator is not None:
            self.coordinator.close()
        self._listener.close()
        if self._registration is not None:
            self._registration.close()

    def crash(self) -> None:
        """End as a killed process does: all connections at once, without a word to anybody."""
        self._closing.set()
        self._listener.stop()
        if self._registration is not None:
            self._registration.stop()
        self.held.close()

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- connections --

    def _serve(self, channel: Channel, proof: Proof) -> None:
        if proof.role == "data":
            self.held.find(proof.shard).serve(channel, proof)
        elif proof.role == "replica":
            self.held.follow(channel, proof.shard)
        elif self.coordinator is None:
            raise Malformed(
                "role", f"this server does not coordinate; the coordinator is at {self._root}"
            )
        else:
            self.coordinator.serve(channel, proof)

    def _assign(self, message: AssignSlots) -> None:
        self.held.assign(SlotMap.of(message), message)
        self._ready.set()

    def _dial(self, where: ShardAddress) -> Channel:
        """Open a connection to a shard of another server."""
        local = choose_transport(where, "auto", self._client_tls)[0]
        proof = Proof(b"", "replica", where.shard, 0, 0, b"")
        deadline = time.monotonic() + handshake.HANDSHAKE_S
        return open_channel(where, self._token, proof, deadline, local, self._client_tls)[0]

    def _tell(self, message: Message) -> None:
        if self._registration is not None:
            self._registration.tell(message)
        elif self.coordinator is not None:
            self.coordinator.tell_here(message)

    def _over(self) -> None:
        """Serve nobody any more: the run has ended, or others have all that was here."""
        self.held.close()
        self._listener.stop()

    def _fail(self, reason: str) -> None:
        """End at once: the other servers have what this one could not apply."""
        self._failed = reason
        self._closing.set()
        self._listener.stop()


def _advertised(address: str, port: int, advertise: str | None) -> tuple[str, int]:
    """The address that others get."""
    host = parse_address(address)[0]
    if advertise:
        return parse_address(advertise) if ":" in advertise else (advertise, port)
    return host if host not in ("0.0.0.0", "::", "") else socket.gethostname(), port


def _check(shards: int, coordinator: str | None, replicas: int, servers: int, ack: str) -> None:
    if shards < (1 if coordinator is not None else 0):
        raise StoreError(f"shards={shards}; a server that does not coordinate needs at least 1")
    if coordinator is not None:
        return  # the coordinator counts the servers
    if not 1 <= replicas <= servers:
        raise StoreError(
            f"replicas={replicas} with servers={servers}; each copy needs a server of its own: "
            f"give replicas=1 to {servers}, or more servers"
        )
    if ack not in ("all", "primary"):
        raise StoreError(f"ack={ack!r}; all or primary is needed")


# -- the process --


def serve(config: Mapping[str, Any], started: Callable[[str], None], stop: threading.Event) -> None:
    """Run the server that `config` describes until `stop`, or until it has lost its coordinator
    (ServerLost). `started` gets its address.
    """
    tls, client_tls = tls_contexts(
        config.get("tls_cert"), config.get("tls_key"), config.get("tls_ca")
    )
    keeper = _keeper(config)
    server = Server(
        f"{config.get('host') or config.get('bind') or '127.0.0.1'}:{config.get('port') or 0}",
        config.get("shards", 1),
        config.get("token") or "",
        coordinator=config.get("coordinator"),
        servers=config.get("servers") or 1,
        workers=config.get("workers"),
        keep=bool(config.get("keep")),
        replicas=config.get("replicas") or 1,
        ack=config.get("ack") or "all",
        hot=(config.get("hot_rows") or 0.0, config.get("hot_age") or 0.1),
        memory_bytes=config.get("memory_bytes"),
        modules=config.get("modules") or (),
        tls=tls,
        client_tls=client_tls,
        advertise=config.get("advertise"),
        lease_s=config.get("lease_s") or LEASE_S,
        keeper=keeper,
        patience_s=config.get("patience_s") or 0.0,
        extra=bool(config.get("extra")),
    )
    cut_at_signal(server._listener, server._registration, server.held)
    try:
        server.start()
        started(server.address)
        # load what the first requests will run while workers are still starting
        threading.Thread(
            target=warm_up,
            kwargs={"optimizers": ("sgd", "adagrad")},
            name="manyhands-warm-up",
            daemon=True,
        ).start()
        while not stop.wait(0.2) and not server.ended:
            if keeper is not None and keeper.lost.is_set():
                raise ServerLost("another coordinator has taken the place of this one")
        if server.lost is not None and not stop.is_set():
            raise ServerLost(server.lost)
    finally:
        server.close()
        if keeper is not None:
            keeper.close()


def _keeper(config: Mapping[str, Any]) -> membership.Keeper | None:
    """What keeps the state of a coordinator for the next one, and lets there be only one."""
    if not config.get("membership") or config.get("coordinator"):
        return None
    keeper = membership.open(config["membership"], config.get("run") or "run")
    keeper.claim(f"coordinator, pid {os.getpid()} on {socket.gethostname()}", wait_s=CLAIM_S)
    return keeper


def main() -> int:
    """Read one line of JSON from standard input, print one with the address, and serve until
    standard input ends or SIGTERM comes.
    """
    limit_malloc_arenas()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher
    lifeline = os.fdopen(os.dup(0), "rb")
    line = lifeline.readline()
    if not line.strip():
        return 0  # the parent process is gone

    def follow() -> None:
        lifeline.read()
        stop.set()

    config = json.loads(line)
    if not config.get("detached"):  # else it ends with its run
        threading.Thread(target=follow, name="lifeline", daemon=True).start()
    torch.set_num_threads(1)
    try:
        serve(
            config,
            lambda address: print(json.dumps({"address": address}), flush=True),
            stop,
        )
        return 0
    except ManyhandsError as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads of connections may be at work
