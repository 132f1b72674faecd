"""A server: shards behind a socket, one blocking thread a connection. `python -m manyhands.server.process` is the process.

    listen . greet (handshake, with a deadline and a limit on how many at once) . serve until the other side goes

A thread spends its time in the kernel's copy and in the tables' compiled loops, both of which leave Python to the others. Servers never
wait for anybody: who may go on is the coordinator's business, which one of them can be besides.
"""

from __future__ import annotations

import contextlib
import errno
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
from typing import Any

import torch

from manyhands.errors import ManyhandsError, ServerLost, StoreError
from manyhands.server.coordinator import Coordinator
from manyhands.server.protocol import arena, handshake
from manyhands.server.protocol.frame import Channel, Closed, Malformed
from manyhands.server.protocol.messages import (
    AssignSlots,
    Done,
    Failed,
    Leave,
    Proof,
    Ready,
    Register,
    ShardAddress,
)
from manyhands.server.request_loop import Desk
from manyhands.server.shard import Shard
from manyhands.server.slots import SlotMap
from manyhands.server.tables.warm_up import warm_up

STRANGERS = 64  # connections that have not proved anything yet
REGISTER_S = 60.0
LEASE_S = 10.0


def parse(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise StoreError(
            f"address {address!r} was given, HOST:PORT is needed, such as 10.0.0.1:9000"
        )
    return host.strip("[]"), int(port)


class Server:
    """`coordinator`: where the coordinator is; None: this server is it, for `servers` servers and `workers` workers. `shards` may be 0
    then: a coordinator that holds no tables. `advertise` (HOST or HOST:PORT) is what others are told, where that is not the address it listens on."""

    def __init__(
        self,
        address: str = "127.0.0.1:0",
        shards: int = 1,
        token: str = "",
        *,
        coordinator: str | None = None,
        servers: int = 1,
        workers: int | None = None,
        memory_bytes: int | None = None,
        modules: Sequence[str] = (),
        tls: ssl.SSLContext | None = None,
        client_tls: ssl.SSLContext | None = None,
        advertise: str | None = None,
        lease_s: float = LEASE_S,
    ):
        if shards < (1 if coordinator is not None else 0):
            raise StoreError(f"shards={shards}; a server that does not coordinate needs at least 1")
        host, port = parse(address)
        self.instance, self.epoch = secrets.randbits(62), 0
        self.refused: Counter[str] = Counter()
        self.accepted = 0
        part = None if memory_bytes is None or not shards else memory_bytes // shards
        self.shards = [Shard(i, memory_bytes=part, modules=modules) for i in range(shards)]
        self.desks = [Desk(self, shard) for shard in self.shards]
        self._token, self._tls, self._client_tls = token, tls, client_tls
        self._root = None if coordinator is None else ShardAddress(*parse(coordinator))
        self._lock, self._channels, self._threads = (
            threading.Lock(),
            set[Channel](),
            set[threading.Thread](),
        )
        self._strangers: dict[
            socket.socket, None
        ] = {}  # who has not proved anything yet, the oldest first
        self._closing = threading.Event()
        self._listeners = [_listen(host, port)]
        self.port = self._listeners[0].getsockname()[1]
        self.host = host if host not in ("0.0.0.0", "::", "") else socket.gethostname()
        if advertise:
            self.host, self.port = parse(advertise) if ":" in advertise else (advertise, self.port)
        self.local = handshake.local_name() if tls is None else ""
        if self.local:
            self._listeners.append(_listen_local(self.local))
        self.coordinator = Coordinator(servers, workers, lease_s) if self._root is None else None
        self._ready = threading.Event()
        self.lost: str | None = None  # why it can no longer serve, when it ended by itself

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def places(self) -> list[ShardAddress]:
        return [
            ShardAddress(self.host, self.port, i, self.local, handshake.machine())
            for i in range(len(self.shards))
        ]

    # -- life --

    def start(self) -> Server:
        for listener in self._listeners:
            self._spawn(lambda listener=listener: self._accept(listener), "accept")
        if self.coordinator is not None:
            if self.shards:
                self.coordinator.register_here(self.places(), self._assign)
            else:
                self._ready.set()
        else:
            self._spawn(self._register, "register")
        return self

    def wait_ready(self, timeout_s: float) -> bool:
        """Until the coordinator has given out the slot map."""
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
        for listener in self._listeners:
            _stop_listening(listener)
        with self._lock:
            channels = list(self._channels)
        for channel in channels:
            channel.stop()
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(5.0)

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _spawn(self, work: object, name: str) -> None:
        def body() -> None:
            try:
                work()  # type: ignore[operator]
            finally:
                with self._lock:
                    self._threads.discard(thread)

        thread = threading.Thread(target=body, name=f"manyhands-{name}", daemon=True)
        with self._lock:
            self._threads.add(thread)
        thread.start()

    # -- connections --

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = listener.accept()
            except OSError as e:
                if self._closing.is_set():
                    break
                if e.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._count("descriptors")
                    self._closing.wait(
                        0.05
                    )  # until somebody goes; the connection waits in the queue meanwhile
                continue
            self._make_room(sock)
            try:
                self._spawn(lambda sock=sock: self._greet(sock), "connection")
            except RuntimeError:  # no more threads
                self._count("threads")
                self._known(sock)
                sock.close()
        listener.close()

    def _make_room(self, sock: socket.socket) -> None:
        """In a crowd the oldest stranger goes, not the one who comes: else a few who say nothing would keep workers out."""
        with self._lock:
            self._strangers[sock] = None
            if len(self._strangers) > STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                self.refused["crowd"] += 1
                with contextlib.suppress(OSError):
                    oldest.shutdown(
                        socket.SHUT_RDWR
                    )  # under the lock: its thread must not have closed it yet

    def _count(self, reason: str, stranger: socket.socket | None = None) -> None:
        with self._lock:
            if (
                stranger is None or stranger in self._strangers
            ):  # else it was counted when the crowd pushed it out
                self.refused[reason] += 1

    def _known(self, sock: socket.socket) -> bool:
        """It is no stranger any longer; False: it was sent away meanwhile."""
        with self._lock:
            return self._strangers.pop(sock, False) is None

    def _greet(self, sock: socket.socket) -> None:
        deadline = time.monotonic() + handshake.HANDSHAKE_S
        channel: Channel | None = None
        proof: Proof | None = None
        try:
            if self._tls is not None:
                sock.settimeout(handshake.HANDSHAKE_S)
                plain, sock = (
                    sock,
                    self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False),
                )
                if not self._known(plain):
                    return
                self._make_room(sock)
                sock.do_handshake()
            channel = Channel(sock)
            with self._lock:
                self._channels.add(channel)
            if self._closing.is_set():
                return
            proof = handshake.challenge(channel, self._token, self.instance, deadline)
        except Malformed as e:
            self._count(e.reason, sock)
            if channel is not None:
                handshake.refuse(channel, e.reason, str(e))
        except (ssl.SSLError, OSError) as e:
            self._count("tls" if isinstance(e, ssl.SSLError) else "left", sock)
        finally:
            self._known(sock)
            if proof is None:
                self._forget(channel, sock)
        if proof is None or channel is None:
            return
        self.accepted += 1
        try:
            self._attend(channel, proof)
        except Malformed as e:
            self._count(e.reason)
            handshake.refuse(channel, e.reason, str(e))
        except (OSError, ssl.SSLError):
            pass  # it went
        finally:
            self._forget(channel, sock)

    def _forget(self, channel: Channel | None, sock: socket.socket) -> None:
        if channel is None:
            sock.close()
            return
        with self._lock:
            self._channels.discard(channel)
        channel.close()

    def _attend(self, channel: Channel, proof: Proof) -> None:
        if proof.role == "data":
            if not 0 <= proof.shard < len(self.shards):
                raise Malformed(
                    "shard",
                    f"shard {proof.shard} was asked for, this server has {len(self.shards)}",
                )
            self.desks[proof.shard].attend(channel, proof)
        elif self.coordinator is None:
            raise Malformed(
                "role", f"this server does not coordinate; the coordinator is at {self._root}"
            )
        else:
            self.coordinator.attend(channel, proof)

    # -- the slot map --

    def _assign(self, slots: SlotMap) -> None:
        self.epoch = slots.epoch
        self._ready.set()

    def _register(self) -> None:
        """Tell the coordinator who we are, then take the maps it gives out, for as long as it is there."""
        assert self._root is not None
        try:
            channel = handshake_with(
                self._root,
                self._token,
                Proof(b"", "server", 0, 0, 0, b""),
                REGISTER_S,
                self._client_tls,
                self._closing,
            )
        except (ServerLost, StoreError) as e:
            self.lost = str(e)
            self._closing.set()
            return
        with self._lock:
            self._channels.add(channel)
        try:
            channel.send(Register(self.places()))
            while True:
                head, message = channel.receive()
                if isinstance(message, AssignSlots):
                    self._assign(SlotMap.of(message))
                    channel.send(Ready(self.epoch), head.number)
                elif isinstance(message, Failed):
                    self.lost = message.text
                    break
                elif isinstance(message, Leave):  # the run is over
                    self._closing.set()
                    break
                elif not isinstance(message, Done):
                    break
        except (Closed, OSError, Malformed):
            pass
        finally:
            with self._lock:
                self._channels.discard(channel)
            channel.close()
            if not self._closing.is_set():
                self.lost = (
                    self.lost
                    or f"the coordinator at {self._root} is gone, and with it the run that this server was for"
                )
                self._closing.set()


def handshake_with(
    where: ShardAddress,
    token: str,
    proof: Proof,
    timeout_s: float,
    tls: ssl.SSLContext | None,
    closing: threading.Event,
) -> Channel:
    """Connect to a coordinator, which may yet have to start."""
    deadline, trouble = time.monotonic() + timeout_s, ""
    while not closing.is_set():
        channel = None
        try:
            channel = handshake.connect(where, max(0.1, deadline - time.monotonic()), False, tls)
            handshake.prove(
                channel, token, proof, min(deadline, time.monotonic() + handshake.HANDSHAKE_S)
            )
            return channel
        except handshake.Unwelcome as e:
            assert channel is not None
            channel.close()
            raise StoreError(f"the coordinator at {where} {e}") from e
        except (OSError, TimeoutError) as e:
            trouble = str(e) or type(e).__name__
            if channel is not None:
                channel.close()
        if time.monotonic() >= deadline:
            break
        closing.wait(0.05)
    raise ServerLost(
        f"the coordinator at {where} did not answer within {timeout_s:g} s ({trouble}); is it started, and can it be reached?"
    )


# -- as a process --


def contexts(
    cert: str | None, key: str | None, ca: str | None
) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    """For those who come, and for those we go to."""
    if not cert:
        return None, None
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        server.load_cert_chain(cert, key)
        return server, ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as e:
        raise StoreError(
            f"TLS certificate {cert}, key {key}, authority {ca}: {e}; give files in PEM format that belong together"
        ) from e


def serve(config: Mapping[str, Any], began: Callable[[str], None], stop: threading.Event) -> None:
    """Be the server that `config` describes until `stop`, or until it has lost its coordinator (ServerLost). `began` gets its address."""
    tls, client_tls = contexts(config.get("tls_cert"), config.get("tls_key"), config.get("tls_ca"))
    server = Server(
        f"{config.get('host') or config.get('bind') or '127.0.0.1'}:{config.get('port') or 0}",
        config.get("shards", 1),
        config.get("token") or "",
        coordinator=config.get("coordinator"),
        servers=config.get("servers") or 1,
        workers=config.get("workers"),
        memory_bytes=config.get("memory_bytes"),
        modules=config.get("modules") or (),
        tls=tls,
        client_tls=client_tls,
        advertise=config.get("advertise"),
        lease_s=config.get("lease_s") or LEASE_S,
    )
    try:
        server.start()
        began(server.address)
        # what the first requests will run is loaded while workers are still on their way
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
    """One line of JSON on standard input says what to be, one on standard output where it is; it ends when standard input does, or on
    SIGTERM."""
    arena.few_arenas()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: for those who started us
    channel = os.fdopen(os.dup(0), "rb")
    line = channel.readline()
    if not line.strip():
        return 0  # whoever started us is gone

    def follow() -> None:
        channel.read()
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


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
        return listener
    except OSError as e:
        listener.close()
        if e.errno == errno.EADDRINUSE:
            raise StoreError(
                f"port {port} on {host} is in use by another process; end that, or take another port (0: any free one)"
            ) from e
        raise StoreError(
            f"cannot listen on {host}:{port}: {e.strerror or e}; give an address of this machine"
        ) from e


def _listen_local(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name)
    listener.listen(1024)
    return listener


def _stop_listening(listener: socket.socket) -> None:
    """Wakes the thread in accept(), which then closes it."""
    try:
        listener.shutdown(socket.SHUT_RDWR)
    except OSError:
        listener.close()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # connections' threads may be in the middle of something
