"""Which pushes were applied, so that one that is sent again changes nothing.

    a push is (worker, incarnation, sequence), numbered 0, 1, 2, ... by its sender
    low: every sequence below it was applied;   beyond: those above it that came out of order

A mark is set under the same lock as the change of the data, and is dumped with it. A process that took a dead one's place
has a larger incarnation: its numbers begin anew, and what the dead one still had on the way is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import StoreError

WINDOW = 4096  # a sender has fewer pushes than this on the way: what is older than the newest by more was applied


@dataclass
class _Mark:
    incarnation: int
    low: int = 0
    beyond: set[int] = field(default_factory=set)


class DedupMarks:
    """Not thread-safe: whoever holds the data's lock calls it."""

    def __init__(self) -> None:
        self._of: dict[int, _Mark] = {}

    def fresh(self, worker: int, incarnation: int, sequence: int) -> bool:
        """Whether this push was not applied yet; nothing is noted."""
        if sequence < 0:
            raise StoreError(f"push number {sequence} of worker {worker}; numbers count from 0")
        mark = self._of.get(worker)
        if mark is None or incarnation > mark.incarnation:
            return True
        if incarnation < mark.incarnation:
            raise StoreError(
                f"a push of worker {worker}, incarnation {incarnation}, but incarnation {mark.incarnation} took its place; "
                "a worker that comes back must enter again"
            )
        return sequence >= mark.low and sequence not in mark.beyond

    def replaces(self, worker: int, incarnation: int) -> bool:
        """Whether another process stood under this worker's name before."""
        mark = self._of.get(worker)
        return mark is not None and incarnation > mark.incarnation

    def add(self, worker: int, incarnation: int, sequence: int) -> None:
        """Note a fresh push as applied."""
        mark = self._of.get(worker)
        if mark is None or incarnation > mark.incarnation:
            mark = self._of[worker] = _Mark(incarnation)
        if sequence == mark.low:  # nearly always
            mark.low += 1
        else:
            mark.beyond.add(sequence)
            if (
                sequence - WINDOW >= mark.low
            ):  # numbers that never came here must not be kept for ever
                passed = range(mark.low, sequence - WINDOW + 1)
                mark.beyond -= (
                    set(passed) if len(passed) < WINDOW else {s for s in mark.beyond if s in passed}
                )
                mark.low = passed.stop
        while mark.low in mark.beyond:
            mark.beyond.remove(mark.low)
            mark.low += 1

    def dump(self) -> NDArray[np.int64]:
        """(worker, incarnation, low, number beyond, those beyond...) one after the other."""
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
