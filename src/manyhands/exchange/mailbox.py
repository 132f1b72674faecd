"""Mailboxes: messages between two processes of one host, through one shared ring buffer per pair.

    send       copy chunk by chunk into the buffer while it has a free slot;    sent += 1
    receive    copy every chunk that is there out of the buffer;                read += 1
               free slots = SLOTS - (sent - read)

A buffer has one writer and one reader, so its two counters need no lock. It is made with the first
message: the sender creates it and puts its size and path into the rendezvous store, the receiver
maps and unlinks it. Nothing moves by itself: a rank that waits, for anything, calls `progress`
meanwhile, so that ranks that all send first do not wait for each other for ever.

Ranks that send to many others have smaller buffers: each new one takes half of what is left to its
sender, so that the memory of all grows with the number of ranks, not with that of pairs. The first
two, the neighbours of a pipeline or a ring, are the large ones.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.errors import Deadlock
from manyhands.exchange import segments

CHUNK_BYTES = 128 << 10
SLOTS = 32  # chunks in the largest buffer: the receiver empties one while the sender fills another
HOST_BYTES = 32 << 20  # of the buffers of all ranks, but for what the smallest ones take
PAGE = 4096
MADE, MAPPED = 1, 2


class Mailboxes:
    """`words` are 3 * size * size zeroed integers that all ranks map: for every pair of ranks the
    state of its ring buffer, `sent` and `read`."""

    def __init__(
        self, rank: int, size: int, words: np.ndarray, store: dist.Store, fence: Callable[[], None]
    ):
        self._rank, self._store, self._fence = rank, store, fence
        self._state, self._sent, self._read = words.reshape(3, size, size)
        self._paths: dict[int, Path] = {}
        self._rings: dict[tuple[int, int], _Ring] = {}
        self._left = HOST_BYTES // size
        self._outgoing: dict[int, deque[Parcel]] = {}
        self._incoming: dict[int, deque[Parcel]] = {}

    def send(self, peer: int, tensor: Tensor) -> Parcel:
        self._outgoing.setdefault(peer, deque()).append(parcel := Parcel(peer, tensor))
        return parcel

    def receive(self, peer: int, tensor: Tensor) -> Parcel:
        self._incoming.setdefault(peer, deque()).append(parcel := Parcel(peer, tensor))
        return parcel

    def progress(self) -> None:
        """Move what can be moved now, and drop the queues that have become empty."""
        for queues, step in ((self._outgoing, self._push), (self._incoming, self._pull)):
            for peer in list(queues):
                queue = queues[peer]
                while queue and step(peer, queue[0]):
                    queue.popleft().done = True
                if not queue:
                    del queues[peer]

    def close(self) -> None:
        self._outgoing.clear()
        self._incoming.clear()
        for peer, path in self._paths.items():
            if self._state[self._rank, peer] != MAPPED:  # the receiver has not mapped it
                path.unlink(missing_ok=True)

    def _push(self, peer: int, parcel: Parcel) -> bool:
        pair = (self._rank, peer)
        if pair not in self._rings:
            room = min(SLOTS * CHUNK_BYTES, max(PAGE, self._left // 2))
            self._left -= room
            path, memory = segments.create(_Ring.nbytes(room))
            self._rings[pair], self._paths[peer] = _Ring(memory, room), path
            self._store.set(f"mail/{self._rank}-{peer}", f"{room} {path}")
            self._state[pair] = MADE
        ring = self._rings[pair]
        while parcel.left and self._sent[pair] - self._read[pair] < ring.count:
            ring.put(int(self._sent[pair]) % ring.count, parcel)
            self._fence()  # the chunk is there before the counter says so
            self._sent[pair] += 1
        # only when mapped: a sender that leaves removes a buffer that the receiver has not mapped
        return not parcel.left and self._state[pair] == MAPPED

    def _pull(self, peer: int, parcel: Parcel) -> bool:
        pair = (peer, self._rank)
        if pair not in self._rings:
            if self._state[pair] != MADE:
                return False
            told, _, name = self._store.get(f"mail/{peer}-{self._rank}").decode().partition(" ")
            room, path = int(told), Path(name)
            try:
                self._rings[pair] = _Ring(segments.attach(path, _Ring.nbytes(room)), room)
            except FileNotFoundError:
                # the sender has left and removed it: the rank that waits will find that out
                return False
            path.unlink()
            self._state[pair] = MAPPED
        ring = self._rings[pair]
        while parcel.left and self._sent[pair] > self._read[pair]:
            self._fence()  # nothing of the chunk is read before the counter
            slot = int(self._read[pair]) % ring.count
            if (given := int(ring.lengths[slot])) != len(parcel.bytes):
                raise Deadlock(
                    f"a transfer does not match: rank {peer} gives {given} bytes, rank "
                    f"{self._rank} waits for {len(parcel.bytes)} ({parcel.dtype}). "
                    "Both ends of every message must know its length and dtype"
                )
            ring.take(slot, parcel)
            self._fence()
            self._read[pair] += 1
        return not parcel.left


class Parcel:
    """A message of which this rank has moved `at` bytes so far."""

    def __init__(self, peer: int, tensor: Tensor):
        self.peer, self.dtype = peer, tensor.dtype
        flat: Any = tensor.detach().view(-1)
        self.bytes: np.ndarray = flat.view(torch.uint8).numpy()
        self.at, self.done = 0, False

    @property
    def left(self) -> int:
        return len(self.bytes) - self.at

    def chunk(self, most: int) -> np.ndarray:
        start, self.at = self.at, min(self.at + most, len(self.bytes))
        return self.bytes[start : self.at]


class _Ring:
    """`room` bytes as slots of one chunk each: at least two, of at most CHUNK_BYTES."""

    def __init__(self, memory: mmap.mmap, room: int):
        self.count, width = _geometry(room)
        self.slots = np.frombuffer(memory, np.uint8, self.count * width).reshape(-1, width)
        # of the whole message
        self.lengths = np.frombuffer(memory, np.int64, self.count, offset=self.count * width)

    @staticmethod
    def nbytes(room: int) -> int:
        count, width = _geometry(room)
        return count * (width + 8)

    def put(self, slot: int, parcel: Parcel) -> None:
        self.lengths[slot] = len(parcel.bytes)
        chunk = parcel.chunk(self.slots.shape[1])
        self.slots[slot, : len(chunk)] = chunk

    def take(self, slot: int, parcel: Parcel) -> None:
        chunk = parcel.chunk(self.slots.shape[1])
        chunk[:] = self.slots[slot, : len(chunk)]


def _geometry(room: int) -> tuple[int, int]:
    """How many slots, and how long each is: whole cache lines."""
    count = max(2, room // CHUNK_BYTES)
    return count, min(CHUNK_BYTES, room // count // 64 * 64)
