"""Attached segments: shared memory that a worker has given to its connection with a shard."""

from __future__ import annotations

import socket

import numpy as np

from manyhands.server.protocol import arena
from manyhands.server.protocol import messages as m
from manyhands.server.protocol.frame import Channel, Malformed

MOST = 8  # of one connection


class AttachedSegments:
    def __init__(self, channel: Channel):
        self._channel = channel
        self.of: dict[int, arena.ArenaSegment] = {}  # by the worker's number

    def attach(self, message: m.Attach) -> None:
        """Map the segment whose descriptor follows the message."""
        if self._channel.sock.family != socket.AF_UNIX:
            raise Malformed(
                "garbage", "shared memory was offered through a connection that cannot carry it"
            )
        _, descriptors, _, _ = socket.recv_fds(self._channel.sock, 1, 1)
        for gone in message.drop:
            self.of.pop(gone, None)
        if len(descriptors) != 1 or len(self.of) >= MOST:
            raise Malformed(
                "garbage", f"{len(descriptors)} descriptors came with {len(self.of)} segments here"
            )
        try:
            self.of[message.segment] = arena.attach(message.segment, message.nbytes, descriptors[0])
        except ValueError as e:
            raise Malformed("garbage", str(e)) from e

    def view(self, number: int, at: int, nbytes: int) -> np.ndarray:
        """A part of a segment, within its bounds."""
        segment = self.of.get(number)
        if segment is None:
            raise Malformed("garbage", f"segment {number} was never attached")
        if at < 0 or nbytes < 0 or at + nbytes > segment.memory.size or at % arena.ALIGN:
            raise Malformed("size", f"{nbytes} bytes at {at} of a segment of {segment.memory.size}")
        return segment.memory[at : at + nbytes]
