"""Where requests and answers stand while they are under way: memory of this process, or memory that a server on the same host maps.

The shared kind is a file without a name (memfd) whose descriptor goes to the server over the unix socket; what is written there is
read there, so only a header and a message of some hundred bytes go through the socket, as a doorbell. Nothing is ever linked
anywhere, so nothing is left behind however a process ends. The file is sealed against shrinking: no client can make a server touch
memory that is gone. When a request does not fit, a larger segment is made, and the older one goes when nothing in it is under way.
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


def possible() -> bool:
    return hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")


@dataclass(eq=False)
class ArenaSegment:
    number: int
    memory: np.ndarray
    descriptor: int = -1
    live: list[tuple[int, int]] = field(default_factory=list)  # (begin, end), sorted

    @property
    def shared(self) -> bool:
        return self.descriptor >= 0

    def find(self, nbytes: int) -> int | None:
        """The lowest place that is free: what was used last is still in the cache."""
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
    """A piece of a segment, to be given back by each that uses it."""

    segment: ArenaSegment
    at: int
    nbytes: int
    users: int = 1

    @property
    def memory(self) -> np.ndarray:
        return self.segment.memory[self.at : self.at + self.nbytes]


class Arena:
    """Pieces of memory for one connection, from any thread."""

    def __init__(self, shared: bool):
        self._shared, self._lock = shared, threading.Lock()
        self._numbers = 0
        self._left: deque[ArenaBlock] = (
            deque()
        )  # by arrays that went; taken back later, since that can happen anywhere
        self.segments: list[ArenaSegment] = []

    def take(self, nbytes: int) -> ArenaBlock:
        nbytes = max(ALIGN, aligned(nbytes))
        while self._left:
            self.give(self._left.popleft())
        with self._lock:
            if self.segments and (at := self.segments[-1].find(nbytes)) is not None:
                return ArenaBlock(self.segments[-1], at, nbytes)
            used = sum(end - begin for segment in self.segments for begin, end in segment.live)
            size = max(SMALLEST, 1 << (2 * (used + nbytes) - 1).bit_length())
            self._numbers += 1
            segment = (
                share(self._numbers, size)
                if self._shared
                else ArenaSegment(self._numbers, _fresh(size))
            )
            self.segments.append(segment)
            at = segment.find(nbytes)
            assert at is not None
            return ArenaBlock(segment, at, nbytes)

    def copy(self, region: ArenaBlock) -> ArenaBlock:
        found = self.take(region.nbytes)
        found.memory[:] = region.memory
        return found

    def hold(self, region: ArenaBlock) -> ArenaBlock:
        """One more uses it."""
        with self._lock:
            region.users += 1
        return region

    def lend(self, region: ArenaBlock, array: np.ndarray) -> None:
        """`array` lies in `region`, which stays as long as the array does."""
        self.hold(region)
        weakref.finalize(array, self._left.append, region).atexit = False

    def give(self, region: ArenaBlock) -> None:
        with self._lock:
            region.users -= 1
            if region.users:
                return
            region.segment.live.remove((region.at, region.at + region.nbytes))
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


def share(number: int, nbytes: int) -> ArenaSegment:
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
    """Map what a client gave, and close the descriptor; ValueError where it is not what was said."""
    try:
        if not 0 < nbytes <= LARGEST or os.fstat(descriptor).st_size != nbytes:
            raise ValueError(
                f"shared memory of {nbytes} bytes was announced, {os.fstat(descriptor).st_size} came"
            )
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
    flags = mmap.MAP_SHARED | getattr(
        mmap, "MAP_POPULATE", 0
    )  # page faults now, not in the first requests
    return np.frombuffer(mmap.mmap(descriptor, nbytes, flags=flags), np.uint8)
