"""Connection of a client to one shard or to the coordinator: numbered requests, answers in order.

Several requests may be under way at once. Requests without an answer are kept, and sent again in
their order after a reconnect, or when the server asks for it (`Resend`). Pushes carry sequence
numbers, so the shard applies none twice. Nothing waits for ever: after `timeout_s` ServerLost names
the server, the operation and the last error.

Over a socket a thread reads the answers with rows: they move while the worker computes, and the two
ends never wait in `send` for each other. With shared memory only short frames travel, and the
thread that waits for an answer reads it.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from manyhands.errors import (
    NotFinite,
    PeerLost,
    ServerLost,
    StoreError,
)
from manyhands.server.client import frame_faults
from manyhands.server.client.dial import Transport, choose_transport, open_channel
from manyhands.server.client.pending_request import Parts, PendingRequest
from manyhands.server.protocol import handshake
from manyhands.server.protocol import messages as m
from manyhands.server.protocol.arena import Arena
from manyhands.server.protocol.frame import Channel, Closed, Malformed
from manyhands.server.protocol.key_lists import KeyLists

WINDOW = 16  # requests under way at once
SLICE_S = 0.5  # longest wait between two checks of a deadline
STALL_S = 1.0  # without an answer: has another server taken the place of this one?
ABSENT_S = 2.0  # a server that listened before and refuses connections for so long has died
PAUSE_S = 0.05  # between two attempts to connect


class Connection:
    """`on_epoch(connection, epoch)`: the server has another slot map. `on_absence(connection)`: it
    cannot be reached."""

    def __init__(
        self,
        where: m.ShardAddress,
        token: str,
        proof: Callable[[], m.Proof],
        *,
        timeout_s: float = 60.0,
        transport: Transport = "auto",
        tls: ssl.SSLContext | None = None,
        on_epoch: Callable[[Connection, int], None] | None = None,
        on_absence: Callable[[Connection], None] | None = None,
    ):
        self._token, self._proof, self._tls = token, proof, tls
        self.timeout_s, self._transport = timeout_s, transport
        self._faults = frame_faults.installed()
        self._address(where)
        # whoever is not there will be back, or another server takes its place
        self.patient = False
        self._life, self._lost = 0, ""  # of the shard's content; why nobody has it any more
        # one thread at a time may read and write TLS
        self._window = 1 if tls is not None else WINDOW
        self._on_epoch, self._on_absence = on_epoch, on_absence
        self.arena = Arena(self.shared)
        self.keys = KeyLists()
        self.instance: int | None = None
        self.reconnects = -1
        self.sent_bytes = self.received_bytes = 0
        self.acknowledged = 0  # pushes, but for pending ones
        self._attached: set[int] = set()
        self._channel: Channel | None = None
        self._reader: threading.Thread | None = None
        self._broken: Exception | None = Closed("not connected yet")
        self._again: tuple[int, m.Resend] | None = None
        self._moved = False  # the server says that it does not have this shard
        self._outstanding: dict[int, PendingRequest] = {}
        self._numbers = 0
        self._sending, self._reading = threading.RLock(), threading.Lock()
        self._changed = threading.Condition()
        self._closed = False

    def _address(self, where: m.ShardAddress) -> None:
        self.where = where
        self.local, self.shared = choose_transport(where, self._transport, self._tls)
        self.shared = self.shared and self._faults is None
        self._threaded = not self.shared and self._tls is None and self._proof().role == "data"

    def redirect(self, where: m.ShardAddress, life: int, lost: str) -> None:
        """The shard is on this server now; requests without an answer are sent there. `lost`: why
        no server has it any more."""
        with self._changed:
            self._lost = lost
            same = (where.host, where.port, where.local) == (
                self.where.host,
                self.where.port,
                self.where.local,
            )
            if lost or (same and life == self._life):
                return
            if self._broken is None:
                self._broken = Closed("another server has this shard now")
            self._address(where)
            # the same content: another process is no loss
            self.instance = None if life == self._life else -1
            self._life = life
            self._changed.notify_all()
        if self._channel is not None:
            self._channel.stop()

    # -- requests --

    def post(self, pending: PendingRequest) -> PendingRequest:
        with self._sending:
            while len(self._outstanding) >= self._window:
                self.wait(next(iter(self._outstanding.values())), quiet=True)
            if self._broken is not None or self._again is not None:
                self._recover(pending)
            # memory taken before a reconnect is of the old arena, which the server no longer maps
            if pending.block is not None and pending.block.segment not in self.arena.segments:
                pending.move(self.arena)
            pending.number = self._numbers
            self._numbers += 1
            with self._changed:
                self._outstanding[pending.number] = pending
            self._transmit(pending)
        return pending

    def ask(
        self, message: m.Message, what: str, parts: Parts = (), timeout_s: float | None = None
    ) -> Any:
        """Send one request and wait for its answer."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        pending = self.post(
            PendingRequest(what, lambda: (message, parts), time.monotonic() + limit)
        )
        self.wait(pending)
        return pending.answer

    def wait(self, pending: PendingRequest, quiet: bool = False) -> None:
        """Wait for the answer; raise its error, unless `quiet`."""
        look = time.monotonic() + STALL_S
        while not pending.done:
            if self.patient and self._on_absence is not None and time.monotonic() > look:
                self._on_absence(self)
                look = time.monotonic() + STALL_S
            left = pending.deadline - time.monotonic()
            if left <= 0 and not quiet:
                raise self._give_up(pending)
            if left <= 0:
                self._give_up(pending)
                return
            if self._broken is not None or self._again is not None:
                with self._sending:
                    self._recover(pending)
            elif self._threaded:
                with self._changed:
                    self._changed.wait_for(
                        lambda: pending.done or self._broken is not None or self._again is not None,
                        min(left, STALL_S) if self.patient else left,
                    )
            elif self._reading.acquire(blocking=False):
                try:
                    if not pending.done and self._broken is None and self._again is None:
                        self._read()
                finally:
                    self._reading.release()
            else:  # another thread is reading, and may read this answer
                with self._changed:
                    self._changed.wait_for(
                        lambda: pending.done or self._broken is not None, min(left, PAUSE_S)
                    )
        if pending.error is not None and not quiet:
            raise pending.error

    def settle(self, what: Callable[[], str]) -> None:
        """Connect before memory is taken for a request: a new connection has its own arena."""
        if self._broken is not None or self._again is not None:
            with self._sending:
                self._recover(
                    PendingRequest(
                        what(), lambda: (m.Ping(), ()), time.monotonic() + self.timeout_s
                    )
                )

    def withdraw(
        self, which: Callable[[PendingRequest], bool], why: Exception
    ) -> list[PendingRequest]:
        """Take back requests that the server refused."""
        with self._changed:
            gone = [pending for pending in self._outstanding.values() if which(pending)]
            for pending in gone:
                del self._outstanding[pending.number]
                pending.error, pending.done = why, True
            self._changed.notify_all()
        return gone

    def flush(self) -> None:
        while self._outstanding:
            with self._changed:
                last = next(reversed(self._outstanding.values()), None)
            if last is not None:
                self.wait(last, quiet=True)

    def close(self) -> None:
        self._closed = True
        with self._changed:
            self._broken = self._broken or Closed("closed by us")
            self._changed.notify_all()
        if self._channel is not None:
            self._channel.stop()
        self._end_channel()
        self.arena.close()

    # -- sending --

    def _transmit(self, pending: PendingRequest) -> None:
        """Send; if the connection breaks here, the thread that waits for the answer reconnects."""
        try:
            channel = self._channel
            assert channel is not None
            if self.shared:
                self._attach(channel)
            before = channel.sent_bytes
            message, parts = pending.compose()
            if self._faults is not None:
                self._faults.wait()
            channel.send(message, pending.number, parts)
            if self._faults is not None and self._faults.repeats(message):
                channel.send(message, pending.number, parts)
            self.sent_bytes += channel.sent_bytes - before
        except (OSError, ssl.SSLError) as e:
            self._break(e)

    def _attach(self, channel: Channel) -> None:
        """Send the server the arena segments that it has not mapped yet."""
        for segment in list(self.arena.segments):
            if segment.number not in self._attached:
                gone = [
                    n for n in self._attached if n not in {s.number for s in self.arena.segments}
                ]
                channel.send(m.Attach(segment.number, segment.memory.size, gone), 1 << 63)
                socket.send_fds(channel.sock, [b"\0"], [segment.descriptor])
                self._attached -= set(gone)
                self._attached.add(segment.number)

    def _break(self, why: Exception) -> None:
        with self._changed:
            if self._broken is None:
                self._broken = why
            self._changed.notify_all()
        if self._channel is not None:
            self._channel.stop()

    def _give_up(self, pending: PendingRequest, fate: str = "") -> ServerLost:
        """Drop the connection and fail a request: a late answer must not pass for another's, nor
        a late write fall into memory that is used again."""
        trouble = f" ({self._broken})" if self._broken is not None and str(self._broken) else ""
        self._break(TimeoutError("no answer in time"))
        with self._changed:
            self._outstanding.pop(pending.number, None)
        pending.block = None  # never to be used again
        pending.error = ServerLost(
            f"server {self.where} {fate}; look at the end of its log"
            if fate
            else f"server {self.where} did not answer a {pending.what} within "
            f"{self.timeout_s:g} s{trouble}; check that it is alive and reachable, and raise "
            "timeout_s if it is only slow"
        )
        if pending.on_loss is not None:
            pending.on_loss(pending)
        pending.done = True
        return pending.error

    # -- receiving --

    def _read(self) -> None:
        channel = self._channel
        assert channel is not None
        try:
            before = channel.received_bytes
            head, message = channel.receive()
            with self._changed:
                pending = self._outstanding.get(head.number)
            if head.payload_bytes:
                memory = (
                    pending.answer_memory(head.payload_bytes)
                    if pending is not None
                    else np.empty(head.payload_bytes, np.uint8)
                )
                channel.body(memory.data)
            self.received_bytes += channel.received_bytes - before
        except TimeoutError:
            return
        except (OSError, ssl.SSLError, Malformed) as e:
            self._break(e)
            return
        if isinstance(message, m.Refused):
            self._moved = message.reason == "moved"
            self._break(handshake.HandshakeRefused(f"refused ({message.reason}): {message.text}"))
            return
        with self._changed:
            if isinstance(message, m.Resend):
                self._again = head.number, message
            elif pending is not None:
                del self._outstanding[head.number]
                pending.answer = message
                if isinstance(message, m.Failed):
                    pending.error = self._failure(pending, message)
                if pending.on_answer is not None:
                    pending.on_answer(pending)
                pending.done = True
            self._changed.notify_all()

    def _failure(self, pending: PendingRequest, answer: m.Failed) -> Exception:
        if answer.kind in ("store", "finite"):
            return (NotFinite if answer.kind == "finite" else StoreError)(answer.text)
        if answer.kind == "peer":
            return PeerLost(answer.text, tuple(answer.ranks))
        return ServerLost(f"server {self.where} failed in a {pending.what}: {answer.text}")

    def _follow(self, channel: Channel) -> None:
        while self._channel is channel and self._broken is None:
            self._read()

    # -- reconnecting --

    def _recover(self, pending: PendingRequest) -> None:
        """Resend or reconnect; the caller holds `_sending`."""
        if self._again is not None and self._broken is None:
            with self._changed:
                number, again = self._again
                self._again = None
            if again.reason == "keys":
                self.keys = KeyLists()
            elif self._on_epoch is not None:
                self._on_epoch(self, again.epoch)
            try:
                assert self._channel is not None
                self._channel.send(m.Resume())
            except (OSError, ssl.SSLError) as e:
                self._break(e)
            self._resend(number)
        elif self._broken is not None:
            self._connect(pending)
            self._resend(0)

    def _resend(self, first: int) -> None:
        with self._changed:
            todo = [p for n, p in sorted(self._outstanding.items()) if n >= first]
        for pending in todo:
            if self._broken is None:
                self._transmit(pending)

    def _connect(self, pending: PendingRequest) -> None:
        if self._closed:
            raise ServerLost(
                f"{pending.what} at server {self.where}: the store was closed before; "
                "finish all calls before close()"
            )
        self._end_channel()
        trouble: Exception | None = self._broken
        absent_since = 0.0
        if self._moved and self._on_absence is not None:
            self._moved = False
            time.sleep(PAUSE_S)
            self._on_absence(self)
        while time.monotonic() < pending.deadline:
            try:
                channel, welcome = open_channel(
                    self.where, self._token, self._proof(), pending.deadline, self.local, self._tls
                )
                break
            except handshake.HandshakeRefused as e:
                raise StoreError(f"server {self.where}: {e}") from e
            except OSError as e:
                trouble = e if str(e) else trouble or e
                if self._on_absence is not None:
                    self._on_absence(self)
                # a shard listens before it is announced; a coordinator may yet have to start
                known = self.instance is not None or self._proof().role == "data"
                gone = known and isinstance(e, ConnectionRefusedError | FileNotFoundError)
                absent_since = absent_since or time.monotonic() if gone else 0.0
                # its tables are gone with it: waiting would bring nothing back
                absent = absent_since and time.monotonic() - absent_since > ABSENT_S
                if self._lost or (absent and not self.patient):
                    with self._changed:
                        self._broken = e
                    raise self._give_up(
                        pending,
                        f"is gone (it does not listen any more: {e}), in the middle of a "
                        f"{pending.what}{self._lost}",
                    ) from e
            time.sleep(min(PAUSE_S, max(0.0, pending.deadline - time.monotonic())))
        else:
            with self._changed:
                self._broken = trouble
            raise self._give_up(pending)
        channel.limit(None if self._threaded else SLICE_S, self.timeout_s)
        self._adopt(channel, welcome)

    def _adopt(self, channel: Channel, welcome: m.Welcome) -> None:
        new = self.instance is not None and welcome.instance != self.instance
        # a coordinator that recovers goes on where the one before was
        new = new and not (self.patient and self._proof().role == "control")
        self.instance = welcome.instance
        self.reconnects += 1
        self.keys, self._attached, self._again = KeyLists(), set(), None
        if self.reconnects:  # the server may still write to the memory of the old connection
            self.arena, old = Arena(self.shared), self.arena
            for each in self._outstanding.values():
                each.move(self.arena)
            old.close()
        with self._changed:
            self._channel, self._broken = channel, None
        if self._threaded:
            self._reader = threading.Thread(
                target=self._follow, args=(channel,), name="manyhands-answers", daemon=True
            )
            self._reader.start()
        if new:
            with self._changed:
                lost, self._outstanding = list(self._outstanding.values()), {}
            error = ServerLost(
                f"server {self.where} was restarted and its tables are lost; "
                "create and restore them"
            )
            for each in lost:
                each.error, each.done = error, True
            raise error

    def _end_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.stop()
            if self._reader is not None:
                self._reader.join(SLICE_S)
            channel.close()
