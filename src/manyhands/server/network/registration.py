"""Registration of a server with the coordinator: it sends its address and receives slot maps.

A thread sends pings, so that a server that hangs is noticed. Where the coordinator is gone, the
server goes on serving and registers again, for `patience_s`: a coordinator that was started again
goes on with the servers that come back.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable

from manyhands.errors import ServerLost, StoreError
from manyhands.server.protocol import handshake
from manyhands.server.protocol import messages as m
from manyhands.server.protocol.frame import Channel, Closed, Malformed

REGISTER_S = 60.0
PING_S = 0.5


class Registration:
    """The connection of one server to its coordinator, in a thread of its own.

    `assign` gets every slot map; `over` is called when the run is over, or this server was drained.
    `closing` is set when the run is over or the coordinator is lost;
    `lost` says why, in the second case.
    """

    def __init__(
        self,
        coordinator: m.ShardAddress,
        register: Callable[[], m.Register],
        *,
        token: str,
        tls: ssl.SSLContext | None,
        assign: Callable[[m.AssignSlots], None],
        again: Callable[[], None],
        over: Callable[[], None],
        ping: Callable[[], m.Message],
        closing: threading.Event,
        patience_s: float = 0.0,
    ):
        self._coordinator, self._register = coordinator, register
        self._token, self._tls, self._assign, self._closing = token, tls, assign, closing
        self._over = over
        self._again, self._ping_message, self._patience_s = again, ping, patience_s
        self.lost: str | None = None
        self._channel: Channel | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="manyhands-register", daemon=True)

    def start(self) -> None:
        self._thread.start()
        threading.Thread(target=self._ping, name="manyhands-ping", daemon=True).start()

    def stop(self) -> None:
        self._closing.set()
        self.drop()

    def drop(self) -> None:
        """End the connection that is there."""
        with self._lock:
            if self._channel is not None:
                self._channel.stop()

    def close(self) -> None:
        self.stop()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def tell(self, message: m.Message) -> None:
        """Send something to the coordinator; where it cannot be reached, it is not told."""
        with self._lock:
            if self._channel is not None:
                try:
                    self._channel.send(message)
                except OSError:
                    self._channel.stop()

    def _ping(self) -> None:
        while not self._closing.wait(PING_S):
            self.tell(self._ping_message())

    def _run(self) -> None:
        wait_s, times = REGISTER_S, 0
        while not self._closing.is_set():
            try:
                channel = connect(
                    self._coordinator,
                    self._token,
                    m.Proof(b"", "server", 0, 0, 0, b""),
                    wait_s,
                    self._tls,
                    self._closing,
                )
            except (ServerLost, StoreError) as e:
                self.lost = self.lost or str(e)
                break
            try:
                self._follow(channel, times)
            except (Closed, OSError, Malformed):
                pass
            finally:
                with self._lock:
                    self._channel = None
                channel.close()
            times += 1
            if self.lost is None and not self._closing.is_set():
                gone = (
                    f"the coordinator at {self._coordinator} is gone, and with it the run that "
                    "this server was for"
                )
                if self._patience_s <= 0:
                    self.lost = gone
                wait_s = self._patience_s
            if self.lost is not None:
                break
        self._closing.set()

    def _follow(self, channel: Channel, times: int) -> None:
        """Register, then take slot maps for as long as the coordinator is there."""
        channel.send(self._register())
        with self._lock:
            self._channel = channel
        if times:
            self._again()
        while not self._closing.is_set():
            head, message = channel.receive()
            if isinstance(message, m.AssignSlots):
                self._assign(message)
                with self._lock:
                    channel.send(m.Ready(message.epoch), head.number)
            elif isinstance(message, m.Failed):
                self.lost = message.text
                return
            elif isinstance(message, m.Leave):
                self._closing.set()
                self._over()
                return
            elif not isinstance(message, m.Done):
                return


def connect(
    where: m.ShardAddress,
    token: str,
    proof: m.Proof,
    timeout_s: float,
    tls: ssl.SSLContext | None,
    closing: threading.Event,
) -> Channel:
    """Connect to a coordinator, which may not have started yet."""
    deadline, trouble = time.monotonic() + timeout_s, ""
    while not closing.is_set():
        channel = None
        try:
            channel = handshake.connect(where, max(0.1, deadline - time.monotonic()), False, tls)
            handshake.prove(
                channel, token, proof, min(deadline, time.monotonic() + handshake.HANDSHAKE_S)
            )
            return channel
        except handshake.HandshakeRefused as e:
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
        f"the coordinator at {where} did not answer within {timeout_s:g} s ({trouble}); "
        "is it started, and can it be reached?"
    )
