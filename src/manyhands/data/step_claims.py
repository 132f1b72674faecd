"""Steps that are drawn instead of known beforehand: how a rank walks through the data at its own pace.

    number n of a step   ->   the samples from  offset + (n - steps) * global_batch  on          (epoch, offset, steps: the last meeting)

Between two meetings nobody knows who computes what, only that every number below the limit is drawn exactly once; a limit is
never beyond the end of an epoch. At a meeting all of it is computed, so position is again one thing for all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from manyhands.core import Position
from manyhands.data.batches import Take, Walk
from manyhands.errors import TaskError


class StepClaims:
    """`deal(limit)` gives the next number of this run's steps, counted from 0 at its start, or None: time to meet."""

    def __init__(
        self, split: Walk, at: Position, deal: Callable[[int], int | None], call: Callable[[], None]
    ):
        self.position = self.latest = at
        self.call = call
        self._split, self._deal, self._first = split, deal, at.steps
        self._claimed: Position | None = None
        self._drawn = at.steps
        self._resting = False  # was told to meet, and has not met yet

    def claim(self, limit: float) -> bool:
        """Whether this rank has a step to compute; it draws one where it has none."""
        if self._claimed is None and not self._resting:
            number = self._deal(int(limit) - self._first)
            self._resting = (
                number is None
            )  # asking again would count as a meeting more than the others had
            self._claimed = None if number is None else self._at(self._first + number)
        return self._claimed is not None

    def takes(self) -> Iterator[Take]:
        """What this rank claims, as it is wanted."""
        while True:
            if self._claimed is None:
                raise TaskError(
                    "a batch was drawn without run.step(loss) of the one before; call it for every batch, also with a loss of 0"
                )
            take = self._split.take(self._claimed)
            self._claimed, self.latest, self._drawn = None, take.after, take.after.steps
            yield take

    def drawn(self) -> int:
        """Steps of the run, by the numbers that this rank has computed."""
        return self._drawn

    def meet(self, steps: int) -> None:
        """All ranks have computed what they drew, `steps` in all."""
        at = self._at(steps)
        over = at.offset >= self._split.samples
        self.position = self.latest = Position(at.epoch + 1, 0, steps) if over else at
        self._drawn, self._resting = steps, False

    def rest(self) -> None:
        """Compute no more before the next meeting: what was claimed and not begun is left out."""
        self._claimed = None
        self.claim(self._first)  # below no number: nobody waits for this rank from here on

    def steps_to(self, epochs: float) -> float:
        """The number of the step by which so many epochs are over; at most to the end of this one."""
        if math.isinf(epochs):
            return math.inf
        samples = (epochs - self.position.epoch) * self._split.samples - self.position.offset
        return self.position.steps + max(0, math.ceil(samples / self._split.global_batch - 1e-9))

    def _at(self, step: int) -> Position:
        at = self.position
        return replace(
            at, offset=at.offset + (step - at.steps) * self._split.global_batch, steps=step
        )
