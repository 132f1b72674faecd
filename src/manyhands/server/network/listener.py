"""Connection listener: accepts connections, authenticates them, and runs one thread for each.

    listen -> accept -> handshake (with a deadline, and a limit on how many at once) -> serve

Threads block. They spend their time in the kernel's copies and in the tables' compiled loops, both
of which release the GIL.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

from manyhands.errors import StoreError
from manyhands.server.protocol import handshake
from manyhands.server.protocol.frame import Channel, Malformed
from manyhands.server.protocol.messages import Proof

MAX_UNAUTHENTICATED = 64  # connections in a handshake at once


class ConnectionListener:
    """`serve` is called with every connection that has passed the handshake, in its own thread.

    `refused` counts the others by reason. `instance` is the random number of this server process.
    Where `closing` is set, no more connections are accepted.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str,
        instance: int,
        tls: ssl.SSLContext | None,
        serve: Callable[[Channel, Proof], None],
        refused: Counter[str],
        closing: threading.Event,
    ):
        self._token, self._instance, self._tls, self._serve = token, instance, tls, serve
        self.refused = refused
        self.threads: set[threading.Thread] = set()
        self._lock, self._closing = threading.Lock(), closing
        self._channels: set[Channel] = set()
        self._unauthenticated: dict[socket.socket, None] = {}  # the oldest first
        self._sockets = [_listen(host, port)]
        self.port = self._sockets[0].getsockname()[1]
        self.local = handshake.local_name() if tls is None else ""
        if self.local:
            self._sockets.append(_listen_local(self.local))

    def start(self) -> None:
        for listener in self._sockets:
            self._spawn(partial(self._accept, listener), "accept")

    def stop(self) -> None:
        """Accept no more connections and end those that are there; waits for nothing."""
        self._closing.set()
        for listener in self._sockets:
            _stop_listening(listener)
        self.drop()

    def drop(self) -> None:
        """End the connections that are there; others may come."""
        with self._lock:
            channels = list(self._channels)
        for channel in channels:
            channel.stop()

    def close(self) -> None:
        self.stop()
        for thread in list(self.threads):
            # one that is not started yet ends by itself: `_closing` is set
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(5.0)

    def _spawn(self, work: Callable[[], None], name: str) -> None:
        def body() -> None:
            try:
                work()
            finally:
                with self._lock:
                    self.threads.discard(thread)

        thread = threading.Thread(target=body, name=f"manyhands-{name}", daemon=True)
        with self._lock:  # `close` joins what is in the set: only threads that have started
            thread.start()
            self.threads.add(thread)

    # -- accept --

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = listener.accept()
            except OSError as e:
                if self._closing.is_set():
                    break
                if e.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._count("descriptors")
                    # until a connection ends; the new one waits in the kernel's queue meanwhile
                    self._closing.wait(0.05)
                continue
            self._admit(sock)
            try:
                self._spawn(partial(self._run, sock), "connection")
            except RuntimeError:  # no more threads
                self._count("threads")
                self._release(sock)
                sock.close()
        listener.close()

    def _admit(self, sock: socket.socket) -> None:
        """Above the limit the oldest unauthenticated connection is closed, not the new one:
        otherwise a few silent connections would keep workers out.
        """
        with self._lock:
            self._unauthenticated[sock] = None
            if len(self._unauthenticated) > MAX_UNAUTHENTICATED:
                oldest = next(iter(self._unauthenticated))
                del self._unauthenticated[oldest]
                self.refused["crowd"] += 1
                with contextlib.suppress(OSError):
                    # under the lock: its thread must not have closed it yet
                    oldest.shutdown(socket.SHUT_RDWR)

    def _release(self, sock: socket.socket) -> bool:
        """The handshake is over; False: the connection was closed by `_admit` meanwhile."""
        with self._lock:
            return self._unauthenticated.pop(sock, False) is None

    def _count(self, reason: str, sock: socket.socket | None = None) -> None:
        with self._lock:
            # a connection that `_admit` closed was counted there
            if sock is None or sock in self._unauthenticated:
                self.refused[reason] += 1

    # -- one connection --

    def _run(self, sock: socket.socket) -> None:
        channel, proof = self._authenticate(sock)
        if proof is None or channel is None:
            return
        try:
            self._serve(channel, proof)
        except Malformed as e:
            self._count(e.reason)
            handshake.refuse(channel, e.reason, str(e))
        except (OSError, ssl.SSLError):
            pass  # the other side closed the connection
        finally:
            self._drop(channel)

    def _authenticate(self, sock: socket.socket) -> tuple[Channel | None, Proof | None]:
        """TLS and handshake; a connection without proof is closed here."""
        deadline = time.monotonic() + handshake.HANDSHAKE_S
        channel: Channel | None = None
        proof: Proof | None = None
        try:
            if self._tls is not None:
                sock.settimeout(handshake.HANDSHAKE_S)
                plain = sock
                sock = self._tls.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
                if not self._release(plain):
                    return None, None
                self._admit(sock)
                sock.do_handshake()
            channel = Channel(sock)
            with self._lock:
                self._channels.add(channel)
            if self._closing.is_set():
                return None, None
            proof = handshake.challenge(channel, self._token, self._instance, deadline)
        except Malformed as e:
            self._count(e.reason, sock)
            if channel is not None:
                handshake.refuse(channel, e.reason, str(e))
        except (ssl.SSLError, OSError) as e:
            self._count("tls" if isinstance(e, ssl.SSLError) else "left", sock)
        finally:
            self._release(sock)
            if proof is None:
                if channel is None:
                    sock.close()
                else:
                    self._drop(channel)
        return channel, proof

    def _drop(self, channel: Channel) -> None:
        with self._lock:
            self._channels.discard(channel)
        channel.close()


# -- sockets --


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
                f"port {port} on {host} is in use by another process; "
                "end that process, or take another port (0: any free one)"
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
    """Wakes the thread in accept(), which then closes the socket."""
    try:
        listener.shutdown(socket.SHUT_RDWR)
    except OSError:
        listener.close()
