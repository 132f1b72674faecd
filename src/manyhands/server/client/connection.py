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
    Evicted,
    NotFinite,
    PeerLost,
    ServerLost,
    StoreError,
)
from manyhands.server.client.dial import Transport
from manyhands.server.client.pending_request import Parts, PendingRequest
from manyhands.server.client.reconnection import PAUSE_S, Reconnection
from manyhands.server.protocol import handshake
from manyhands.server.protocol import messages as m
from manyhands.server.protocol.frame import Channel, Closed, Malformed
from manyhands.server.protocol.key_lists import KeyLists

WINDOW = 16  # requests under way at once
STALL_S = 1.0  # without an answer: has another server taken the place of this one?


class Connection(Reconnection):
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
        super().__init__(
            where,
            token,
            proof,
            timeout_s,
            transport,
            tls,
            None if on_absence is None else lambda: on_absence(self),
        )
        # one thread at a time may read and write TLS
        self._window = 1 if tls is not None else WINDOW
        self._on_epoch = on_epoch
        self.sent_bytes = self.received_bytes = 0
        self.acknowledged = 0  # pushes, but for pending ones
        self._numbers = 0
        self._sending, self._reading = threading.RLock(), threading.Lock()

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
                self._on_absence()
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
        if answer.kind == "evicted":
            return Evicted(answer.text)
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
