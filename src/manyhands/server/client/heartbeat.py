"""Heartbeat of a worker: a connection to the coordinator on which a thread sends pings.

When the connection ends, or no ping comes for `lease_s`, the coordinator removes the worker and the
other ranks go on without it.
"""

from __future__ import annotations

import ssl
import threading
import time

from manyhands.errors import ServerLost, StoreError
from manyhands.server.client.dial import open_channel
from manyhands.server.protocol import handshake
from manyhands.server.protocol.frame import Channel
from manyhands.server.protocol.messages import Ping, Proof, ShardAddress

PINGS = 4  # in `lease_s`, at least
PING_S = 1.0  # at most, between two: so soon a coordinator that was started again hears of us
PAUSE_S = 0.02  # between two attempts to connect


class Heartbeat:
    def __init__(
        self,
        where: ShardAddress,
        token: str,
        proof: Proof,
        lease_s: float,
        tls: ssl.SSLContext | None = None,
    ):
        self._where, self._token, self._proof = where, token, proof
        self._lease_s, self._tls = lease_s, tls
        self._closing = threading.Event()
        self._channel: Channel | None = self._first()
        self._thread = threading.Thread(target=self._ping, name="manyhands-heartbeat", daemon=True)
        self._thread.start()

    def _first(self) -> Channel:
        deadline = time.monotonic() + self._lease_s
        while True:
            try:
                return self._connect()
            except handshake.HandshakeRefused as e:
                raise StoreError(f"server {self._where}: {e}") from e
            except OSError as e:
                if time.monotonic() > deadline:
                    raise ServerLost(
                        f"server {self._where} did not accept a heartbeat connection within "
                        f"{self._lease_s:g} s ({e}); look at the server's log"
                    ) from e
            self._closing.wait(PAUSE_S)

    def _connect(self) -> Channel:
        deadline = time.monotonic() + self._lease_s
        return open_channel(self._where, self._token, self._proof, deadline, False, self._tls)[0]

    def _ping(self) -> None:
        while not self._closing.wait(min(PING_S, self._lease_s / PINGS)):
            try:
                if self._channel is None:
                    self._channel = self._connect()
                self._channel.send(Ping())
            except (OSError, handshake.HandshakeRefused):
                if self._channel is not None:
                    self._channel.close()
                self._channel = None

    def close(self) -> None:
        self._closing.set()
        self._thread.join(self._lease_s)
        if self._channel is not None:
            self._channel.close()
            self._channel = None
