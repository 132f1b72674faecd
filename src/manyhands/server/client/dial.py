"""Dialling a server: the choice of a transport, and the handshake that opens a channel."""

from __future__ import annotations

import ssl
import time
from typing import Literal

from manyhands.errors import StoreError
from manyhands.server.protocol import arena, handshake
from manyhands.server.protocol import messages as m
from manyhands.server.protocol.frame import Channel

Transport = Literal["auto", "tcp", "unix", "shared"]


def choose_transport(
    where: m.ShardAddress, transport: Transport, tls: ssl.SSLContext | None
) -> tuple[bool, bool]:
    """Whether a connection uses the server's unix socket, and whether it shares memory with it."""
    same_host = bool(where.local) and where.machine == handshake.machine() and tls is None
    if transport in ("unix", "shared") and not same_host:
        raise StoreError(
            f"transport={transport!r}, but the server at {where} is not on this host; "
            "use 'auto' or 'tcp'"
        )
    if transport == "shared" and not arena.can_share():
        raise StoreError("transport='shared', but this system has no memfd; use 'auto' or 'unix'")
    local = same_host and transport != "tcp"
    return local, local and transport != "unix" and arena.can_share()


def open_channel(
    where: m.ShardAddress,
    token: str,
    proof: m.Proof,
    deadline: float,
    local: bool,
    tls: ssl.SSLContext | None,
) -> tuple[Channel, m.Welcome]:
    """Connect and prove that both sides know the token."""
    channel = handshake.connect(where, deadline - time.monotonic(), local, tls)
    try:
        until = min(deadline, time.monotonic() + handshake.HANDSHAKE_S)
        return channel, handshake.prove(channel, token, proof, until)
    except BaseException:
        channel.close()
        raise
