"""Gatherings: at a sync point every live worker brings some bytes, and all get those of all.

A gathering is (sync point, number): the first of sync point 3 is (3, 0). Its members are the
workers that were in the run before that sync point and live; it is complete when all of them have
brought theirs. Then its answer is fixed: what a worker brought counts also if it dies afterwards,
and all members get the same bytes of the same workers. So whatever they compute from it is equal on
all of them, as after an all-reduce.

Gatherings before the first step have the sync point -1; processes that replace a dead one are in
none of these.
"""

from __future__ import annotations

from collections.abc import Iterable

Key = tuple[int, int]  # sync point, number
START = -1


class Gatherings:
    """Not thread-safe: the caller holds the clock's lock."""

    def __init__(self, size: int):
        self.since = [START] * size  # the first sync point that each worker takes part in
        self.brought: dict[Key, dict[int, bytes]] = {}
        self.complete: dict[Key, dict[int, bytes]] = {}

    def join(self, worker: int, period: int) -> None:
        """A new process takes a worker's place; the next sync point is number `period`."""
        self.since[worker] = period
        for brought in self.brought.values():  # what the dead one brought does not count twice
            brought.pop(worker, None)

    def absent(self, key: Key, alive: Iterable[int]) -> list[int]:
        """The members that have not brought theirs."""
        brought = self.brought.get(key, {})
        return [w for w in alive if self.since[w] <= key[0] and w not in brought]

    def fixed(self, key: Key) -> bool:
        return key in self.complete

    def bring(self, worker: int, key: Key, payload: bytes) -> None:
        if key not in self.complete:
            self.brought.setdefault(key, {})[worker] = payload
        # whoever is at a sync point has read all of the one before the last
        for kept in (self.brought, self.complete):
            for old in [k for k in kept if k[0] < key[0] - 1]:
                del kept[old]

    def answer(self, key: Key, alive: Iterable[int]) -> dict[int, bytes] | None:
        """By worker: what was brought; None: somebody is absent still."""
        if key not in self.complete:
            alive = list(alive)
            if self.absent(key, alive):
                return None
            brought = self.brought.pop(key, {})
            self.complete[key] = {w: brought[w] for w in sorted(brought) if w in alive}
        return self.complete[key]
