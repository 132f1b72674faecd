"""Step marks of a shard: which steps were applied here, so that none is applied twice.

    a push names its steps:   none of them applied   -> it is applied, and they are marked
                              all of them applied    -> it is skipped, and acknowledged
                              some of them           -> it is refused

The last can only come from a process that was taken for dead, and whose steps others computed since
(see `step_ledger`): what they pushed is single steps, so this sum cannot be divided. Marks are set
under the shard's lock, together with the data. Each shard has its own: a worker that dies in the
middle of a push leaves it on some shards, and whoever gets the step again completes the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from manyhands.errors import Evicted


class StepMarks:
    """Not thread-safe: the caller holds the data's lock."""

    def __init__(self, below: int = 0, applied: Iterable[int] = (), count: int = 0) -> None:
        self.below = below  # all steps below it are applied here, or done everywhere
        self.applied = set(applied)
        self.count = count  # steps that were applied here, so far

    def fresh(self, steps: Sequence[int], done_below: int) -> bool:
        """Whether a push of these steps is to be applied; marks nothing. `done_below`: its worker
        knows that all steps below are done.
        """
        if done_below > self.below:
            self.below = done_below
            self.applied = {s for s in self.applied if s >= done_below}
        known = [s for s in steps if s < self.below or s in self.applied]
        if known and len(known) < len(steps):
            raise Evicted(
                f"a push of steps {list(steps)}, of which other workers pushed {known} already: "
                "its worker was taken for dead, and must join again"
            )
        return not known

    def add(self, steps: Sequence[int]) -> None:
        self.applied.update(steps)
        self.count += len(steps)
        while self.below in self.applied:  # so that a long epoch takes no memory
            self.applied.remove(self.below)
            self.below += 1
