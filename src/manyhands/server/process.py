"""Server process: shards that workers reach over sockets. `python -m manyhands.server.process`.

    ConnectionListener   accepts and authenticates connections, one thread each
    ShardEndpoint        serves the connections of one shard
    Coordinator          in one server of a run: membership, slot map and clock
    Registration         in the others: the connection to the coordinator

Servers never wait for each other or for workers; only the coordinator makes workers wait.
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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from manyhands.errors import ManyhandsError, ServerLost, StoreError
from manyhands.server.coordinator import Coordinator
from manyhands.server.malloc_arenas import limit_malloc_arenas
from manyhands.server.network.listener import ConnectionListener
from manyhands.server.network.registration import Registration
from manyhands.server.network.shard_endpoint import ServerStatus, ShardEndpoint
from manyhands.server.network.tls import tls_contexts
from manyhands.server.protocol import handshake
from manyhands.server.protocol.frame import Channel, Malformed
from manyhands.server.protocol.messages import Proof, ShardAddress
from manyhands.server.shard import Shard
from manyhands.server.slots import SlotMap
from manyhands.server.tables.warm_up import warm_up

LEASE_S = 10.0


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
    and `workers` workers; then `shards` may be 0, for a coordinator without tables, and `keep` says
    that it goes on when a run is over, for other runs and for `mh.Store`. `advertise`
    (HOST or HOST:PORT) is the address that others get, where it is not the one listened on.
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
        memory_bytes: int | None = None,
        modules: Sequence[str] = (),
        tls: ssl.SSLContext | None = None,
        client_tls: ssl.SSLContext | None = None,
        advertise: str | None = None,
        lease_s: float = LEASE_S,
    ):
        if shards < (1 if coordinator is not None else 0):
            raise StoreError(f"shards={shards}; a server that does not coordinate needs at least 1")
        host, port = parse_address(address)
        self._root = None if coordinator is None else ShardAddress(*parse_address(coordinator))
        self._status = ServerStatus()
        self._closing, self._ready = threading.Event(), threading.Event()
        part = None if memory_bytes is None or not shards else memory_bytes // shards
        self.shards = [Shard(i, memory_bytes=part, modules=modules) for i in range(shards)]
        self.endpoints = [ShardEndpoint(self._status, shard) for shard in self.shards]
        self._listener = ConnectionListener(
            host,
            port,
            token=token,
            instance=secrets.randbits(62),
            tls=tls,
            serve=self._serve,
            refused=self._status.refused,
            closing=self._closing,
        )
        self.port: int = self._listener.port
        self.host = host if host not in ("0.0.0.0", "::", "") else socket.gethostname()
        if advertise:
            named = ":" in advertise
            self.host, self.port = parse_address(advertise) if named else (advertise, self.port)
        self.coordinator: Coordinator | None = None
        self._registration: Registration | None = None
        if self._root is None:
            self.coordinator = Coordinator(servers, workers, lease_s, keep)
        else:
            self._registration = Registration(
                self._root,
                self._addresses(),
                token=token,
                tls=client_tls,
                assign=self._assign,
                closing=self._closing,
            )

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def refused(self) -> Counter[str]:
        """Refused connections, by reason."""
        return self._status.refused

    @property
    def lost(self) -> str | None:
        """Why this server can no longer serve, when it ended by itself."""
        return None if self._registration is None else self._registration.lost

    def _addresses(self) -> list[ShardAddress]:
        machine, local = handshake.machine(), self._listener.local
        return [
            ShardAddress(self.host, self.port, i, local, machine) for i in range(len(self.shards))
        ]

    # -- start and close --

    def start(self) -> Server:
        self._listener.start()
        if self._registration is not None:
            self._registration.start()
        elif self.coordinator is not None and self.shards:
            self.coordinator.register_here(self._addresses(), self._assign)
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
        if self.coordinator is not None:
            self.coordinator.close()
        self._listener.close()
        if self._registration is not None:
            self._registration.close()

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- connections --

    def _serve(self, channel: Channel, proof: Proof) -> None:
        if proof.role == "data":
            if not 0 <= proof.shard < len(self.shards):
                raise Malformed(
                    "shard",
                    f"shard {proof.shard} was asked for, this server has {len(self.shards)}",
                )
            self.endpoints[proof.shard].serve(channel, proof)
        elif self.coordinator is None:
            raise Malformed(
                "role", f"this server does not coordinate; the coordinator is at {self._root}"
            )
        else:
            self.coordinator.serve(channel, proof)

    def _assign(self, slots: SlotMap) -> None:
        self._status.epoch = slots.epoch
        self._ready.set()


# -- the process --


def serve(config: Mapping[str, Any], started: Callable[[str], None], stop: threading.Event) -> None:
    """Run the server that `config` describes until `stop`, or until it has lost its coordinator
    (ServerLost). `started` gets its address.
    """
    tls, client_tls = tls_contexts(
        config.get("tls_cert"), config.get("tls_key"), config.get("tls_ca")
    )
    server = Server(
        f"{config.get('host') or config.get('bind') or '127.0.0.1'}:{config.get('port') or 0}",
        config.get("shards", 1),
        config.get("token") or "",
        coordinator=config.get("coordinator"),
        servers=config.get("servers") or 1,
        workers=config.get("workers"),
        keep=bool(config.get("keep")),
        memory_bytes=config.get("memory_bytes"),
        modules=config.get("modules") or (),
        tls=tls,
        client_tls=client_tls,
        advertise=config.get("advertise"),
        lease_s=config.get("lease_s") or LEASE_S,
    )
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
            pass
        if server.lost is not None and not stop.is_set():
            raise ServerLost(server.lost)
    finally:
        server.close()


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

    threading.Thread(target=follow, name="lifeline", daemon=True).start()
    torch.set_num_threads(1)
    try:
        serve(
            json.loads(line),
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
