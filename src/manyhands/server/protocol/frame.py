"""Frames: one message on a socket, as a fixed header, a typed message and raw numbers.

    magic 4 | version 2 | kind 2 | message bytes 4 | payload bytes 8 | number 8 | crc32 of these 4

Sizes are checked before memory is allocated for them, and nothing is unpickled: what an
unauthenticated peer sends can be refused, not executed. Sockets block, with one thread per
connection: `recv` with MSG_WAITALL fills a whole part in one system call, `sendmsg` sends all parts
in one. Kernel buffer sizes stay as they are: setting them turns off the kernel's own tuning.
"""

from __future__ import annotations

import errno
import socket
import ssl
import struct
import time
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from manyhands.server.protocol.kinds import KIND_OF, KINDS
from manyhands.server.protocol.messages import Message

MAGIC, VERSION = b"mhps", 2
_HEADER = struct.Struct("<4sHHIQQ")
_CHECK = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECK.size
MESSAGE_BYTES = 1 << 20  # at most
PAYLOAD_BYTES = 1 << 34  # at most; 16 GiB
UNAUTHENTICATED_BYTES = 1 << 12  # at most, of a message of the handshake, which has no payload
# of an idle connection: after 10 s, each 5 s, 4 times (macOS calls the first one TCP_KEEPALIVE)
PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
ALIGN = 64  # where arrays of a payload begin: a cache line
_PADDING = bytes(ALIGN)
_PARTS = 512  # buffers that the kernel takes at once

Buffer = bytes | bytearray | memoryview
_encoder = msgspec.msgpack.Encoder()
_decoders = {number: msgspec.msgpack.Decoder(kind) for number, kind in KINDS.items()}


class Malformed(Exception):
    """A frame that breaks the protocol; `reason` is the name of its counter."""

    def __init__(self, reason: str, text: str):
        super().__init__(text)
        self.reason = reason


class Closed(ConnectionError):
    """The other side is gone."""


class Header(NamedTuple):
    kind: int
    message_bytes: int
    payload_bytes: int
    number: int


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def encode_body(message: Message) -> bytes:
    return _encoder.encode(message)


def encode(
    message: Message, number: int = 0, payload_bytes: int = 0, version: int = VERSION
) -> bytes:
    """Header and message of a frame."""
    body = _encoder.encode(message)
    head = _HEADER.pack(MAGIC, version, KIND_OF[type(message)], len(body), payload_bytes, number)
    return head + _CHECK.pack(zlib.crc32(head)) + body


def header(raw: Buffer, authenticated: bool = True) -> Header:
    """Parse and check a header; its sizes are within bounds."""
    magic, version, kind, message_bytes, payload_bytes, number = _HEADER.unpack_from(raw)
    if magic != MAGIC:
        raise Malformed(
            "garbage",
            f"a frame begins with {MAGIC!r}, this with {bytes(magic)!r}; is the other side a "
            "manyhands server or worker?",
        )
    if version != VERSION:
        raise Malformed(
            "version",
            f"protocol version {version} was given, {VERSION} is needed; "
            "install the same manyhands everywhere",
        )
    if zlib.crc32(memoryview(raw)[: _HEADER.size]) != _CHECK.unpack_from(raw, _HEADER.size)[0]:
        raise Malformed(
            "garbage",
            "the checksum of the header is wrong: it was damaged on the way or is no header",
        )
    if kind not in KINDS:
        raise Malformed("garbage", f"there is no kind {kind} of frame")
    most = MESSAGE_BYTES if authenticated else UNAUTHENTICATED_BYTES
    if message_bytes > most or payload_bytes > (PAYLOAD_BYTES if authenticated else 0):
        raise Malformed(
            "size",
            f"a frame of {message_bytes} + {payload_bytes} bytes was announced, "
            "more than is allowed here",
        )
    return Header(kind, message_bytes, payload_bytes, number)


def decode(kind: int, raw: Buffer) -> Any:
    try:
        return _decoders[kind].decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise Malformed("garbage", f"a malformed {KINDS[kind].__name__}: {e}") from e


class Channel:
    """One connection: sends and receives frames. One thread may send while another receives,
    unless the connection uses TLS.
    """

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self.secure = isinstance(sock, ssl.SSLSocket)
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._room = memoryview(bytearray(4096))
        self.sent_bytes = self.received_bytes = 0
        self._receive_s: float | None = None
        self._send_s: float | None = None
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _watch_peer(sock)
            _unpaced(sock)
        if not self.secure:
            sock.settimeout(None)  # truly blocking: MSG_WAITALL would be cut short otherwise

    def limit(self, receive_s: float | None, send_s: float | None = None) -> None:
        """How long one call may wait for the other side; then it raises TimeoutError and can be
        repeated.
        """
        self._receive_s, self._send_s = receive_s, send_s
        # the TLS layer would retry on the kernel's time-out, so there each call sets its own
        if self.secure:
            return
        for option, seconds in ((socket.SO_RCVTIMEO, receive_s), (socket.SO_SNDTIMEO, send_s)):
            whole = 0.0 if seconds is None else max(seconds, 1e-3)
            self.sock.setsockopt(
                socket.SOL_SOCKET, option, struct.pack("@ll", int(whole), int(whole % 1 * 1e6))
            )

    def send(
        self, message: Message, number: int = 0, payload: Sequence[np.ndarray | Buffer] = ()
    ) -> int:
        """Send one frame, each part of its payload padded to a multiple of ALIGN; returns its size
        in bytes.
        """
        if not payload:
            data = encode(message, number)
            if self.secure:
                self.sock.settimeout(self._send_s)
            self.sock.sendall(data)
            self.sent_bytes += len(data)
            return len(data)
        views = []
        for part in payload:
            raw = part.data if isinstance(part, np.ndarray) else memoryview(part)
            view = raw.cast("B") if raw.nbytes else memoryview(b"")
            views.append(view)
            if rest := -len(view) % ALIGN:
                views.append(memoryview(_PADDING)[:rest])
        total = sum(map(len, views))
        head = encode(message, number, total)
        self.write([memoryview(head), *views])
        return len(head) + total

    def write(self, views: Sequence[memoryview]) -> None:
        if self.secure:
            self.sock.settimeout(self._send_s)
            for view in views:
                self.sock.sendall(view)
                self.sent_bytes += len(view)
            return
        todo = [v for v in views if len(v)]
        while todo:
            done = self.sock.sendmsg(todo[:_PARTS])
            self.sent_bytes += done
            while todo and done >= len(todo[0]):
                done -= len(todo.pop(0))
            if done:
                todo[0] = todo[0][done:]

    def fill(self, view: memoryview, deadline: float | None = None) -> None:
        """Receive exactly this much. TimeoutError only where none of it had come, or after the
        deadline.
        """
        got, size = 0, len(view)
        # nearly always, and nearly always all of it at once
        if deadline is None and not self.secure:
            try:
                got = self.sock.recv_into(view, size, socket.MSG_WAITALL)
            except BlockingIOError as e:
                raise TimeoutError from e
            self.received_bytes += got
            if got == size:
                return
            if got == 0:
                raise Closed("the connection was closed")
        while got < size:
            if deadline is not None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                self.limit(left, left)
            if self.secure:
                self.sock.settimeout(self._receive_s)
            try:
                n = (
                    self.sock.recv_into(view[got:])
                    if self.secure
                    else self.sock.recv_into(view[got:], size - got, socket.MSG_WAITALL)
                )
            except (BlockingIOError, TimeoutError) as e:
                if got == 0 or deadline is not None:
                    raise TimeoutError from e
                continue
            except ssl.SSLError as e:
                raise Closed(str(e)) from e
            if n == 0:
                raise Closed("the connection was closed")
            got += n
            self.received_bytes += n

    def receive(
        self, authenticated: bool = True, deadline: float | None = None
    ) -> tuple[Header, Any]:
        """The next frame up to its payload, which the caller has to `fill`."""
        self.fill(self._head, deadline)
        head = header(self._head, authenticated)
        if head.message_bytes > len(self._room):
            self._room = memoryview(bytearray(head.message_bytes))
        view = self._room[: head.message_bytes]
        self._rest(view, deadline)
        return head, decode(head.kind, view)

    def _rest(self, view: memoryview, deadline: float | None) -> None:
        """Receive the rest of a frame: a pause within a frame is no reason to stop."""
        while True:
            try:
                return self.fill(view, deadline)
            except TimeoutError:
                if deadline is not None:
                    raise

    def body(self, view: memoryview) -> None:
        self._rest(view, None)

    def stop(self) -> None:
        """Wake the threads that wait in it. The descriptor stays open: its number must not be
        reused while a thread is about to read from it.
        """
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError as e:
            if e.errno not in (errno.ENOTCONN, errno.EBADF, errno.EINVAL, errno.EPIPE):
                raise

    def close(self) -> None:
        """Close the socket; only the last user may do so."""
        self.stop()
        self.sock.close()


def _watch_peer(sock: socket.socket) -> None:
    """Let the kernel end a connection whose other host is gone: a receive without a limit would
    wait for the two hours that Linux waits before its first probe."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in PROBES.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _unpaced(sock: socket.socket) -> None:
    """Turn off pacing within one host, where nothing is congested.

    BBR, where it is the system's choice, paces to a fraction of what memory gives (measured: 5 MB
    in 2 to 4 ms instead of 0.6). Between hosts the system's choice stays.
    """
    try:
        if sock.getsockname()[0] == sock.getpeername()[0] and hasattr(socket, "TCP_CONGESTION"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    except OSError:
        pass  # the peer is gone, or a system without it


class Cursor:
    """Reads the arrays of a payload one after the other; each begins at a multiple of ALIGN."""

    def __init__(self, memory: np.ndarray, at: int = 0):
        self.memory, self.at = memory, at

    def take(self, count: int, dtype: Any) -> np.ndarray:
        nbytes = count * np.dtype(dtype).itemsize
        if self.at + nbytes > self.memory.size:
            raise Malformed(
                "size",
                f"a payload of {self.memory.size} bytes is shorter than what its message describes",
            )
        part = self.memory[self.at : self.at + nbytes].view(dtype)
        self.at += aligned(nbytes)
        return part
