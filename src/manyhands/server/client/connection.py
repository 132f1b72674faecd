"""A client's connection to one shard or to the coordinator: numbered requests out, answers in, in order, none lost and none done twice.

Requests may be under way together. What has no answer yet is kept, and sent again in its order when the connection had to be made
anew, or when the other side says so (`Again`); pushes carry sequence numbers, so that the shard applies none twice. Nothing waits for
ever: after `timeout_s` ServerLost names the server, the operation and the last thing that went wrong.

Answers with rows that come through a socket are read by a thread, so that they move while the worker computes and so that both
ends never wait in `send` for each other. Where only doorbells travel (shared memory), whoever waits reads.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from manyhands.errors import (
    NotFinite,
    PeerLost,
    ServerLost,
    StoreError,
)
from manyhands.server.protocol import arena, handshake
from manyhands.server.protocol import messages as m
from manyhands.server.protocol.frame import Channel, Closed, Malformed
from manyhands.server.request_loop import KeyLists

Transport = Literal["auto", "tcp", "unix", "shared"]
WINDOW = 16  # requests under way at once
SLICE_S = 0.5  # of waiting, between two looks at the clock
ABSENT_S = 2.0  # a server that was there and refuses connections for so long has died
PAUSE_S = 0.05  # between two attempts to connect
Parts = Sequence[np.ndarray]


class PendingRequest:
    """A request that has no answer yet. `compose` makes its message and payload, each time it is sent."""

    def __init__(
        self,
        what: str | Callable[[], str],
        compose: Callable[[], tuple[m.Message, Parts]],
        deadline: float,
    ):
        self._what, self.compose, self.deadline = what, compose, deadline
        self.number = -1
        self.region: arena.ArenaBlock | None = None
        self.answer_at = 0  # within the region
        self.answer: Any = None
        self.arrived: np.ndarray | None = None  # payload of an answer for which no place was given
        self.error: Exception | None = None
        self.done = self.abandoned = False
        self.on_answer: Callable[[PendingRequest], None] | None = None
        self.commits = 0  # the last commit that was sent along

    @property
    def what(self) -> str:
        return self._what if isinstance(self._what, str) else self._what()

    def move(self, arena: arena.Arena) -> None:
        """To memory of a new connection."""
        if self.region is not None:
            self.region = arena.copy(self.region)

    def room(self, nbytes: int) -> np.ndarray:
        if self.region is not None and self.answer_at + nbytes <= self.region.nbytes:
            return self.region.memory[self.answer_at : self.answer_at + nbytes]
        self.arrived = np.empty(nbytes, np.uint8)
        return self.arrived


class Connection:
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
        self.where, self._token, self._proof, self._tls = where, token, proof, tls
        self.timeout_s = timeout_s
        same = bool(where.local) and where.machine == handshake.machine() and tls is None
        if transport in ("unix", "shared") and not same:
            raise StoreError(
                f"transport={transport!r}, but the server at {where} is not on this host; use 'auto' or 'tcp'"
            )
        if transport == "shared" and not arena.possible():
            raise StoreError(
                "transport='shared', but this system has no memfd; use 'auto' or 'unix'"
            )
        self.local = same and transport != "tcp"
        self.shared = self.local and transport != "unix" and arena.possible()
        self._threaded = not self.shared and tls is None and proof().role == "data"
        self._window = (
            1 if tls is not None else WINDOW
        )  # TLS is read and written by one thread at a time
        self._on_epoch, self._on_absence = on_epoch, on_absence
        self.arena = arena.Arena(self.shared)
        self.keys = KeyLists()
        self.instance: int | None = None
        self.reconnects = -1
        self.sent_bytes = self.received_bytes = 0
        self._attached: set[int] = set()
        self._channel: Channel | None = None
        self._reader: threading.Thread | None = None
        self._broken: Exception | None = Closed("not connected yet")
        self._again: tuple[int, m.Resend] | None = None
        self._outstanding: dict[int, PendingRequest] = {}
        self._numbers = 0
        self._sending, self._reading = threading.RLock(), threading.Lock()
        self._changed = threading.Condition()
        self._closed = False

    # -- requests --

    def post(self, pending: PendingRequest) -> PendingRequest:
        with self._sending:
            while len(self._outstanding) >= self._window:
                self.wait(next(iter(self._outstanding.values())), quiet=True)
            if self._broken is not None or self._again is not None:
                self._recover(pending)
            pending.number = self._numbers
            self._numbers += 1
            with self._changed:
                self._outstanding[pending.number] = pending
            self._transmit(pending)
        return pending

    def ask(
        self, message: m.Message, what: str, parts: Parts = (), timeout_s: float | None = None
    ) -> Any:
        """One request and its answer."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        pending = self.post(
            PendingRequest(what, lambda: (message, parts), time.monotonic() + limit)
        )
        self.wait(pending)
        return pending.answer

    def wait(self, pending: PendingRequest, quiet: bool = False) -> None:
        """Until it is answered; raises what the answer says, unless `quiet`."""
        while not pending.done:
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
                        left,
                    )
            elif self._reading.acquire(blocking=False):
                try:
                    if not pending.done and self._broken is None and self._again is None:
                        self._read()
                finally:
                    self._reading.release()
            else:  # another thread reads, and may read ours
                with self._changed:
                    self._changed.wait_for(
                        lambda: pending.done or self._broken is not None, min(left, PAUSE_S)
                    )
        if pending.error is not None and not quiet:
            raise pending.error

    def settle(self, what: Callable[[], str]) -> None:
        """Be connected before memory is taken for a request: a connection made anew begins with memory of its own."""
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
        """Take back requests that the other side refused."""
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
        """A connection that breaks here is mended by whoever waits for the answer."""
        try:
            channel = self._channel
            assert channel is not None
            if self.shared:
                self._attach(channel)
            before = channel.sent_bytes
            message, parts = pending.compose()
            channel.send(message, pending.number, parts)
            self.sent_bytes += channel.sent_bytes - before
        except (OSError, ssl.SSLError) as e:
            self._break(e)

    def _attach(self, channel: Channel) -> None:
        """Let the server map what it does not have yet."""
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
        """A late answer must not be taken for another's, nor a late write fall into memory that is used again."""
        trouble = f" ({self._broken})" if self._broken is not None and str(self._broken) else ""
        self._break(TimeoutError("no answer in time"))
        with self._changed:
            self._outstanding.pop(pending.number, None)
        pending.region = None  # never to be used again
        pending.error = ServerLost(
            f"server {self.where} {fate}; look at its last words"
            if fate
            else f"server {self.where} did not answer a {pending.what} within {self.timeout_s:g} s{trouble}; "
            "is it alive and reachable? raise timeout_s if it is only slow"
        )
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
                room = (
                    pending.room(head.payload_bytes)
                    if pending is not None
                    else np.empty(head.payload_bytes, np.uint8)
                )
                channel.body(room.data)
            self.received_bytes += channel.received_bytes - before
        except TimeoutError:
            return
        except (OSError, ssl.SSLError, Malformed) as e:
            self._break(e)
            return
        if isinstance(message, m.Refused):
            self._break(handshake.Unwelcome(f"refused ({message.reason}): {message.text}"))
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

    # -- mending --

    def _recover(self, pending: PendingRequest) -> None:
        """Called with the right to send."""
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
            raise ServerLost(f"a {pending.what} of server {self.where}, after the store was closed")
        self._end_channel()
        trouble: Exception | None = self._broken
        since = 0.0
        while time.monotonic() < pending.deadline:
            channel = None
            try:
                channel = handshake.connect(
                    self.where, pending.deadline - time.monotonic(), self.local, self._tls
                )
                until = min(pending.deadline, time.monotonic() + handshake.HANDSHAKE_S)
                welcome = handshake.prove(channel, self._token, self._proof(), until)
                break
            except handshake.Unwelcome as e:
                assert channel is not None
                channel.close()
                raise StoreError(f"server {self.where}: {e}") from e
            except OSError as e:
                trouble = e if str(e) else trouble or e
                if channel is not None:
                    channel.close()
                if self._on_absence is not None:
                    self._on_absence(self)
                # a shard listened before anybody heard of it; a coordinator may yet have to start
                known = self.instance is not None or self._proof().role == "data"
                gone = known and isinstance(e, ConnectionRefusedError | FileNotFoundError)
                since = since or time.monotonic() if gone else 0.0
                if (
                    since and time.monotonic() - since > ABSENT_S
                ):  # its tables are gone with it: waiting would bring nothing back
                    with self._changed:
                        self._broken = e
                    raise self._give_up(
                        pending,
                        f"is gone (it does not listen any more: {e}), in the middle of a {pending.what}",
                    ) from e
            time.sleep(min(PAUSE_S, max(0.0, pending.deadline - time.monotonic())))
        else:
            with self._changed:
                self._broken = trouble
            raise self._give_up(pending)
        channel.limit(None if self._threaded else SLICE_S, self.timeout_s)
        self._take_up(channel, welcome)

    def _take_up(self, channel: Channel, welcome: m.Welcome) -> None:
        new = self.instance is not None and welcome.instance != self.instance
        self.instance = welcome.instance
        self.reconnects += 1
        self.keys, self._attached, self._again = KeyLists(), set(), None
        if (
            self.reconnects
        ):  # the conversation that broke may still be writing to the memory it knew
            self.arena, old = arena.Arena(self.shared), self.arena
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
                f"server {self.where} was started anew: its tables are gone; create and restore them"
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
