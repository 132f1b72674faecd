"""Arena: memory for the requests in flight of one connection, private or shared with the server.

A shared segment is a file without a name (memfd), whose descriptor goes to a server on the same
host over the unix socket. Both map it, so only a header and a message of some hundred bytes go
through the socket. The file has no path, so nothing is left behind however a process ends. It is
sealed against shrinking: no client can make a server touch memory that is gone. When a request does
not fit, the arena adds a larger segment; the older one goes when no request uses it any more.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from bisect import insort
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from manyhands.server.protocol.frame import ALIGN, aligned

SMALLEST = 1 << 20
LARGEST = 1 << 36  # of a segment that a server will map


def can_share() -> bool:
    """Whether this system has sealed memory files."""
    return hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")


@dataclass(eq=False)
class ArenaSegment:
    """One piece of mapped memory."""

    number: int
    memory: np.ndarray
    descriptor: int = -1
    live: list[tuple[int, int]] = field(default_factory=list)  # (begin, end), sorted

    @property
    def shared(self) -> bool:
        return self.descriptor >= 0

    def reserve(self, nbytes: int) -> int | None:
        """The lowest free offset, since memory used last is still in the cache; None: no room."""
        at = 0
        for begin, end in self.live:
            if begin - at >= nbytes:
                break
            at = end
        if at + nbytes > self.memory.size:
            return None
        insort(self.live, (at, at + nbytes))
        return at

    def close(self) -> None:
        if self.shared:
            os.close(self.descriptor)
            self.descriptor = -1


@dataclass(eq=False)
class ArenaBlock:
    """A range of a segment, with a count of its users; each must release it."""

    segment: ArenaSegment
    at: int
    nbytes: int
    users: int = 1

    @property
    def memory(self) -> np.ndarray:
        return self.segment.memory[self.at : self.at + self.nbytes]


class Arena:
    """Allocates blocks for one connection. Thread-safe."""

    def __init__(self, shared: bool):
        self._shared, self._lock = shared, threading.Lock()
        self._numbers = 0
        # blocks of arrays that were collected; released later, since that can happen anywhere
        self._collected: deque[ArenaBlock] = deque()
        self.segments: list[ArenaSegment] = []

    def allocate(self, nbytes: int) -> ArenaBlock:
        nbytes = max(ALIGN, aligned(nbytes))
        while self._collected:
            self.release(self._collected.popleft())
        with self._lock:
            if self.segments and (at := self.segments[-1].reserve(nbytes)) is not None:
                return ArenaBlock(self.segments[-1], at, nbytes)
            used = sum(end - begin for segment in self.segments for begin, end in segment.live)
            size = max(SMALLEST, 1 << (2 * (used + nbytes) - 1).bit_length())
            self._numbers += 1
            segment = (
                create_shared(self._numbers, size)
                if self._shared
                else ArenaSegment(self._numbers, _fresh(size))
            )
            self.segments.append(segment)
            at = segment.reserve(nbytes)
            assert at is not None
            return ArenaBlock(segment, at, nbytes)

    def copy(self, block: ArenaBlock) -> ArenaBlock:
        found = self.allocate(block.nbytes)
        found.memory[:] = block.memory
        return found

    def retain(self, block: ArenaBlock) -> ArenaBlock:
        """Count one more user of a block."""
        with self._lock:
            block.users += 1
        return block

    def lend(self, block: ArenaBlock, array: np.ndarray) -> None:
        """`array` is a view of `block`, which stays allocated as long as the array exists."""
        self.retain(block)
        weakref.finalize(array, self._collected.append, block).atexit = False

    def release(self, block: ArenaBlock) -> None:
        """Count one user less; a block without users is free."""
        with self._lock:
            block.users -= 1
            if block.users:
                return
            block.segment.live.remove((block.at, block.at + block.nbytes))
            for segment in [s for s in self.segments[:-1] if not s.live]:
                self.segments.remove(segment)
                segment.close()

    def close(self) -> None:
        with self._lock:
            for segment in self.segments:
                segment.close()
            self.segments.clear()


def _fresh(nbytes: int) -> np.ndarray:
    return np.empty(nbytes, np.uint8)


def create_shared(number: int, nbytes: int) -> ArenaSegment:
    descriptor = os.memfd_create("manyhands", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)  # now: running out later would be a SIGBUS
        fcntl.fcntl(
            descriptor,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
        )
        return ArenaSegment(number, _map(descriptor, nbytes), descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def attach(number: int, nbytes: int, descriptor: int) -> ArenaSegment:
    """Map the memory that a client shares, and close the descriptor.

    ValueError where it is not as announced, or not sealed.
    """
    try:
        if not 0 < nbytes <= LARGEST or os.fstat(descriptor).st_size != nbytes:
            came = os.fstat(descriptor).st_size
            raise ValueError(f"shared memory of {nbytes} bytes was announced, {came} came")
        try:
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError as e:
            raise ValueError("a file that cannot be sealed was sent as shared memory") from e
        if not sealed & fcntl.F_SEAL_SHRINK:
            raise ValueError("shared memory that is not sealed against shrinking was sent")
        return ArenaSegment(number, _map(descriptor, nbytes))
    finally:
        os.close(descriptor)


def _map(descriptor: int, nbytes: int) -> np.ndarray:
    # MAP_POPULATE: page faults now, not in the first requests
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    return np.frombuffer(mmap.mmap(descriptor, nbytes, flags=flags), np.uint8)
