"""A worker's sign of life: a connection to the coordinator on which a small thread says something now and then.

When it ends or falls silent the worker counts as dead, and the others go on without it.
"""

from __future__ import annotations

import ssl
import threading
import time

from manyhands.errors import ServerLost, StoreError
from manyhands.server.protocol import handshake
from manyhands.server.protocol.frame import Channel
from manyhands.server.protocol.messages import Ping, Proof, ShardAddress

PINGS = 4  # in the time after which silence means death


class Heartbeat:
    def __init__(
        self,
        where: ShardAddress,
        token: str,
        proof: Proof,
        lease_s: float,
        tls: ssl.SSLContext | None = None,
    ):
        self._where, self._token, self._proof, self._lease_s, self._tls = (
            where,
            token,
            proof,
            lease_s,
            tls,
        )
        self._closing = threading.Event()
        self._channel: Channel | None = self._first()
        self._thread = threading.Thread(target=self._ping, name="manyhands-lease", daemon=True)
        self._thread.start()

    def _first(self) -> Channel:
        deadline = time.monotonic() + self._lease_s
        while True:
            try:
                return self._connect()
            except handshake.Unwelcome as e:
                raise StoreError(f"server {self._where}: {e}") from e
            except OSError as e:
                if time.monotonic() > deadline:
                    raise ServerLost(
                        f"server {self._where} did not take a lease within {self._lease_s:g} s ({e})"
                    ) from e
            self._closing.wait(0.02)

    def _connect(self) -> Channel:
        channel = handshake.connect(self._where, self._lease_s, False, self._tls)
        try:
            handshake.prove(
                channel,
                self._token,
                self._proof,
                time.monotonic() + min(self._lease_s, handshake.HANDSHAKE_S),
            )
        except BaseException:
            channel.close()
            raise
        return channel

    def _ping(self) -> None:
        while not self._closing.wait(self._lease_s / PINGS):
            try:
                if self._channel is None:
                    self._channel = self._connect()
                self._channel.send(Ping())
            except (OSError, handshake.Unwelcome):
                if self._channel is not None:
                    self._channel.close()
                self._channel = None

    def close(self) -> None:
        self._closing.set()
        self._thread.join(self._lease_s)
        if self._channel is not None:
            self._channel.close()
            self._channel = None
