"""Registration of a server with the coordinator: it sends its addresses and receives slot maps."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Sequence

from manyhands.errors import ServerLost, StoreError
from manyhands.server.protocol import handshake
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
from manyhands.server.slots import SlotMap

REGISTER_S = 60.0


class Registration:
    """The connection of one server to its coordinator, in a thread of its own.

    `assign` gets every slot map. `closing` is set when the run is over or the coordinator is lost;
    `lost` says why, in the second case.
    """

    def __init__(
        self,
        coordinator: ShardAddress,
        shards: Sequence[ShardAddress],
        *,
        token: str,
        tls: ssl.SSLContext | None,
        assign: Callable[[SlotMap], None],
        closing: threading.Event,
    ):
        self._coordinator, self._shards = coordinator, list(shards)
        self._token, self._tls, self._assign, self._closing = token, tls, assign, closing
        self.lost: str | None = None
        self._channel: Channel | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="manyhands-register", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            if self._channel is not None:
                self._channel.stop()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _run(self) -> None:
        try:
            channel = connect(
                self._coordinator,
                self._token,
                Proof(b"", "server", 0, 0, 0, b""),
                REGISTER_S,
                self._tls,
                self._closing,
            )
        except (ServerLost, StoreError) as e:
            self.lost = str(e)
            self._closing.set()
            return
        with self._lock:
            self._channel = channel
        try:
            self._follow(channel)
        except (Closed, OSError, Malformed):
            pass
        finally:
            with self._lock:
                self._channel = None
            channel.close()
            if not self._closing.is_set():
                self.lost = self.lost or (
                    f"the coordinator at {self._coordinator} is gone, and with it the run that "
                    "this server was for"
                )
                self._closing.set()

    def _follow(self, channel: Channel) -> None:
        """Register, then take slot maps for as long as the coordinator is there."""
        channel.send(Register(self._shards))
        while not self._closing.is_set():
            head, message = channel.receive()
            if isinstance(message, AssignSlots):
                self._assign(SlotMap.of(message))
                channel.send(Ready(message.epoch), head.number)
            elif isinstance(message, Failed):
                self.lost = message.text
                return
            elif isinstance(message, Leave):  # the run is over
                self._closing.set()
                return
            elif not isinstance(message, Done):
                return


def connect(
    where: ShardAddress,
    token: str,
    proof: Proof,
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
