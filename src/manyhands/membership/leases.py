"""Leases: which members have not been heard of for as long as they may be silent.

    leases.renew("worker 3", 10)      at every heartbeat
    for member in leases.expired():   evict it, then
        leases.drop(member)

A lease is measured on one clock, that of the process which holds this object: members never send
their time, so their clocks may be wrong.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Member = TypeVar("Member", bound=Hashable)


class Leases(Generic[Member]):
    """When each member's lease ends, by `clock`, which must never go back. Any thread may call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._ends: dict[Member, float] = {}
        self._lock = threading.Lock()

    def renew(self, member: Member, seconds: float) -> None:
        """The member was heard of: its lease ends `seconds` from now, whatever it was before."""
        if not seconds > 0:
            raise ValueError(f"a lease of {seconds} s for {member}; more than 0 s is needed")
        with self._lock:
            self._ends[member] = self._clock() + seconds

    def expired(self) -> list[Member]:
        """Members whose lease has ended, the earliest first, until they are renewed or dropped."""
        with self._lock:
            now = self._clock()
            ended = [(end, member) for member, end in self._ends.items() if end <= now]
        return [member for _, member in sorted(ended, key=lambda each: each[0])]

    def drop(self, member: Member) -> None:
        """Forget the member: it left, or was evicted."""
        with self._lock:
            self._ends.pop(member, None)

    def next_s(self) -> float | None:
        """Seconds until the next lease ends, 0 where one has; None without leases."""
        with self._lock:
            if not self._ends:
                return None
            return max(0.0, min(self._ends.values()) - self._clock())

    def __contains__(self, member: object) -> bool:
        with self._lock:
            return member in self._ends

    def __len__(self) -> int:
        with self._lock:
            return len(self._ends)
