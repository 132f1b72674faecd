"""Changes that are handed on: a message and its payload, kept until the next servers have it.

Payloads are in an arena. Servers on one host share its memory, and only the message goes through
the socket; to others the payload follows the message. It stays as it was: the next server copies
it before it applies the change, so it can be handed on once more.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from manyhands.server.protocol import messages as m
from manyhands.server.protocol import replication_messages as r
from manyhands.server.protocol.arena import Arena, ArenaBlock, can_share
from manyhands.server.protocol.frame import Channel, aligned


class Change(NamedTuple):
    message: r.Forward | r.ForwardTable
    block: ArenaBlock | None  # None: no payload
    nbytes: int


class Payloads:
    """The payloads of one shard's changes that are not acknowledged."""

    def __init__(self) -> None:
        self.arena = Arena(can_share())

    def keep(self, message: r.Forward | r.ForwardTable, parts: Sequence[np.ndarray]) -> Change:
        """A copy: whoever applies the change may use the memory of the parts."""
        nbytes = sum(aligned(part.nbytes) for part in parts)
        if not nbytes:
            return Change(message, None, 0)
        block, at = self.arena.allocate(nbytes), 0
        for part in parts:
            raw = part.reshape(-1).view(np.uint8)
            block.memory[at : at + raw.size] = raw
            at += aligned(raw.size)
        return Change(message, block, nbytes)

    def forget(self, change: Change) -> None:
        if change.block is not None:
            self.arena.release(change.block)


@dataclass(eq=False)
class Link:
    """The connection to the next server."""

    server: int
    channel: Channel
    acknowledged: int = -1  # by the other side
    _attached: set[int] = field(default_factory=set)  # segments that the other side has mapped

    def send(self, change: Change, arena: Arena) -> None:
        block, channel = change.block, self.channel
        if block is None:
            channel.send(change.message)
        elif channel.sock.family != socket.AF_UNIX or not block.segment.shared:
            channel.send(change.message, 0, [block.memory[: change.nbytes]])
        else:
            self._attach(block, arena)
            where = m.ArenaRange(block.segment.number, block.at, change.nbytes, 0, 0)
            channel.send(replace(change.message, arena=where))

    def _attach(self, block: ArenaBlock, arena: Arena) -> None:
        segment = block.segment
        if segment.number in self._attached:
            return
        gone = self._attached - {each.number for each in arena.segments}
        self.channel.send(m.Attach(segment.number, segment.memory.size, sorted(gone)))
        socket.send_fds(self.channel.sock, [b"\0"], [segment.descriptor])
        self._attached = (self._attached - gone) | {segment.number}
