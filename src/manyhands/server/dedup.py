"""Dedup marks: which pushes were applied, so that a push that is sent again changes nothing.

    a push is (worker, incarnation, sequence): each worker numbers its pushes to this shard 0, 1, 2
    low: every sequence below it was applied;   beyond: those above it that came out of order

A mark is set under the same lock as the change of the data, and is dumped with it. A process that
replaces a dead one has a larger incarnation: its sequence begins at 0, and pushes of the dead one
that still arrive are refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import StoreError

# A worker has fewer pushes than this in flight: any older one was applied.
WINDOW = 4096


@dataclass
class _Mark:
    incarnation: int
    low: int = 0
    beyond: set[int] = field(default_factory=set)


class DedupMarks:
    """Not thread-safe: the caller holds the data's lock."""

    def __init__(self) -> None:
        self._of: dict[int, _Mark] = {}

    def fresh(self, worker: int, incarnation: int, sequence: int) -> bool:
        """Whether this push was not applied yet; marks nothing."""
        if sequence < 0:
            raise StoreError(f"push number {sequence} of worker {worker}; numbers count from 0")
        mark = self._of.get(worker)
        if mark is None or incarnation > mark.incarnation:
            return True
        if incarnation < mark.incarnation:
            raise StoreError(
                f"a push of worker {worker}, incarnation {incarnation}, but incarnation "
                f"{mark.incarnation} took its place; a worker that comes back must join again"
            )
        return sequence >= mark.low and sequence not in mark.beyond

    def replaces(self, worker: int, incarnation: int) -> bool:
        """Whether this process replaces an older one of the same worker."""
        mark = self._of.get(worker)
        return mark is not None and incarnation > mark.incarnation

    def add(self, worker: int, incarnation: int, sequence: int) -> None:
        """Mark a fresh push as applied."""
        mark = self._of.get(worker)
        if mark is None or incarnation > mark.incarnation:
            mark = self._of[worker] = _Mark(incarnation)
        if sequence == mark.low:  # nearly always
            mark.low += 1
        else:
            mark.beyond.add(sequence)
            # sequences that never come must not keep `beyond` growing
            if sequence - WINDOW >= mark.low:
                passed = range(mark.low, sequence - WINDOW + 1)
                mark.beyond -= (
                    set(passed) if len(passed) < WINDOW else {s for s in mark.beyond if s in passed}
                )
                mark.low = passed.stop
        while mark.low in mark.beyond:
            mark.beyond.remove(mark.low)
            mark.low += 1

    def dump(self) -> NDArray[np.int64]:
        """(worker, incarnation, low, count beyond, those beyond...) of each worker."""
        flat: list[int] = []
        for worker, mark in sorted(self._of.items()):
            flat += [worker, mark.incarnation, mark.low, len(mark.beyond), *sorted(mark.beyond)]
        return np.array(flat, np.int64)

    def load(self, flat: NDArray[np.int64]) -> None:
        values, self._of = [int(v) for v in flat], {}
        while values:
            worker, incarnation, low, n = values[:4]
            self._of[worker] = _Mark(incarnation, low, set(values[4 : 4 + n]))
            values = values[4 + n :]
