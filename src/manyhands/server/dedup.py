"""Dedup marks: which pushes were applied, so that a push that is sent again changes nothing.

    a push is (worker, incarnation, sequence): each worker numbers its pushes to this shard 0, 1, 2
    low: every sequence below it was applied;   beyond: those above it that came out of order

A mark is set under the same lock as the change of the data, and is dumped with it. A process that
replaces a dead one has a larger incarnation: its sequence begins at 0, and pushes of the dead one
that still arrive are refused. Pushes of elastic workers also name their steps, of which each is
applied once whoever pushes it (`elastic.step_marks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import Evicted, StoreError
from manyhands.server.elastic.step_marks import StepMarks

# A worker has fewer pushes than this in flight: any older one was applied.
WINDOW = 4096
STEPS = -1  # in a dump, in place of a worker: the step marks


@dataclass
class _Mark:
    incarnation: int
    low: int = 0
    beyond: set[int] = field(default_factory=set)


class DedupMarks:
    """Not thread-safe: the caller holds the data's lock."""

    def __init__(self) -> None:
        self._of: dict[int, _Mark] = {}
        self._steps = StepMarks()

    def fresh(
        self,
        worker: int,
        incarnation: int,
        sequence: int,
        steps: Sequence[int] = (),
        done_below: int = 0,
    ) -> bool:
        """Whether this push was not applied yet, nor its steps; marks nothing that was not."""
        if sequence < 0:
            raise StoreError(f"push number {sequence} of worker {worker}; numbers count from 0")
        mark = self._of.get(worker)
        if mark is None or incarnation > mark.incarnation:
            return self._fresh_steps(worker, incarnation, sequence, steps, done_below)
        if incarnation < mark.incarnation:
            raise Evicted(
                f"a push of worker {worker}, incarnation {incarnation}, but incarnation "
                f"{mark.incarnation} took its place; a worker that comes back must join again"
            )
        if sequence < mark.low or sequence in mark.beyond:
            return False
        return self._fresh_steps(worker, incarnation, sequence, steps, done_below)

    def _fresh_steps(
        self, worker: int, incarnation: int, sequence: int, steps: Sequence[int], done_below: int
    ) -> bool:
        fresh = not steps or self._steps.fresh(steps, done_below)
        if not fresh and not self.replaces(worker, incarnation):
            self.add(worker, incarnation, sequence)  # skipped for good
        return fresh

    @property
    def steps(self) -> int:
        """Steps of elastic workers that were applied."""
        return self._steps.count

    def replaces(self, worker: int, incarnation: int) -> bool:
        """Whether this process replaces an older one of the same worker."""
        mark = self._of.get(worker)
        return mark is not None and incarnation > mark.incarnation

    def add(self, worker: int, incarnation: int, sequence: int, steps: Sequence[int] = ()) -> None:
        """Mark a fresh push as applied."""
        self._steps.add(steps)
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
        of, applied = self._steps, sorted(self._steps.applied)
        flat += [STEPS, of.count, of.below, len(applied), *applied] if of.below or applied else []
        return np.array(flat, np.int64)

    def load(self, flat: NDArray[np.int64]) -> None:
        values, self._of, self._steps = [int(v) for v in flat], {}, StepMarks()
        while values:
            worker, incarnation, low, n = values[:4]
            some = set(values[4 : 4 + n])
            if worker == STEPS:
                self._steps = StepMarks(low, some, incarnation)  # here: how many were applied
            else:
                self._of[worker] = _Mark(incarnation, low, some)
            values = values[4 + n :]
