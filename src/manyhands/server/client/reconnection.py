"""Reconnection: how a connection is opened, opened again, and moved to another server.

Requests without an answer are sent again in their order. A server that is gone for ABSENT_S is
given up, unless another can take its place or it will be back (`patient`).
"""

from __future__ import annotations

import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from manyhands.errors import ServerLost, StoreError
from manyhands.server.client.dial import Transport, choose_transport, open_channel
from manyhands.server.client.pending_request import PendingRequest
from manyhands.server.protocol import frame_faults, handshake
from manyhands.server.protocol import messages as m
from manyhands.server.protocol.arena import Arena
from manyhands.server.protocol.frame import Channel, Closed
from manyhands.server.protocol.key_lists import KeyLists

SLICE_S = 0.5  # longest wait between two checks of a deadline
ABSENT_S = 2.0  # a server that listened before and refuses connections for so long has died
PAUSE_S = 0.05  # between two attempts to connect


class Reconnection(ABC):
    """The channel of a `Connection`, which sends and receives over it."""

    def __init__(
        self,
        where: m.ShardAddress,
        token: str,
        proof: Callable[[], m.Proof],
        timeout_s: float,
        transport: Transport,
        tls: ssl.SSLContext | None,
        on_absence: Callable[[], None] | None,
    ):
        self._token, self._proof, self._tls = token, proof, tls
        self.timeout_s, self._transport = timeout_s, transport
        self._faults = frame_faults.installed()
        self._address(where)
        self._on_absence = on_absence
        # whoever is not there will be back, or another server takes its place
        self.patient = False
        self._life, self._lost = 0, ""  # of the shard's content; why nobody has it any more
        self._moved = False  # the server says that it does not have this shard
        self.arena = Arena(self.shared)
        self.keys = KeyLists()
        self.instance: int | None = None
        self.reconnects = -1
        self._attached: set[int] = set()
        self._channel: Channel | None = None
        self._reader: threading.Thread | None = None
        self._broken: Exception | None = Closed("not connected yet")
        self._again: tuple[int, m.Resend] | None = None
        self._outstanding: dict[int, PendingRequest] = {}
        self._changed = threading.Condition()
        self._closed = False

    # -- of the connection --

    @abstractmethod
    def _follow(self, channel: Channel) -> None:
        """Read answers until the channel ends."""

    @abstractmethod
    def _give_up(self, pending: PendingRequest, fate: str = "") -> ServerLost:
        """Fail a request that will get no answer."""

    # -- where the server is --

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

    # -- connecting --

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
            self._on_absence()
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
                    self._on_absence()
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
