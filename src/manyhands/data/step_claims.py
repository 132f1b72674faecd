"""Step claims: asynchronous ranks claim steps from a shared counter and stop at sync points.

    step n  ->  the samples from  offset + (n - steps) * global_batch  on
                epoch, offset, steps: the position at the last sync point

Between two sync points no rank knows which rank computes which step, only that every step below the
limit is claimed exactly once. A limit is never beyond the end of an epoch. At a sync point all
claimed steps are computed, so that all ranks have one position again.

Where a step has several parts, ranks claim parts: see `step_counter`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

from manyhands.core import Position
from manyhands.errors import TaskError
from manyhands.split.data import DataSplit, StepSamples


class RankLeases(Protocol):
    """Of a rank that may die: its claims are leases, which others get when it does
    (`assembly.elastic.leases`)."""

    sync_at: int | None  # the last claim gave None: the sync point; None: push, then claim again

    @property
    def alone(self) -> bool: ...
    def begin(self, step: int) -> None: ...


class StepClaims:
    """The steps that this rank claims. `claim_step(limit)` returns the next number of the shared
    counter, which starts at 0 with the run, or None: go to the sync point. `request_sync()` makes
    it return None for every rank. `parts`: how many numbers each step has, one for the samples of
    each rank of `split`; whoever claims it computes them."""

    def __init__(
        self,
        split: DataSplit,
        at: Position,
        claim_step: Callable[[int], int | None],
        request_sync: Callable[[], None],
        leases: RankLeases | None = None,
        parts: int = 1,
    ):
        self.position = self.latest = at  # at the last sync point; after the step claimed last
        self.request_sync = request_sync
        self._split, self._claim_step, self._first = split, claim_step, at.steps
        self._parts = [split] if parts == 1 else [replace(split, rank=r) for r in range(parts)]
        self._part = split  # of the step claimed last
        self._claimed: Position | None = None
        self._claimed_steps = at.steps
        self._must_sync = False  # the counter said so, and the sync is still to come
        self._leases = leases
        self.on_step: Callable[[StepSamples], None] | None = None  # before it is computed
        self.on_sync: Callable[[], None] | None = None

    @property
    def alone(self) -> bool:
        """Whether a block of steps must end before the step claimed last."""
        return self._leases is not None and self._leases.alone

    def enter(self, at: Position) -> None:
        """Go on from the position that the other ranks had at their last sync point."""
        self.position = self.latest = at
        self._claimed_steps = at.steps

    def claim(self, limit: float) -> bool:
        """Whether this rank has a step to compute; claims one where it has none."""
        if self._claimed is None and not self._must_sync:
            parts = len(self._parts)
            number = self._claim_step((int(limit) - self._first) * parts)
            if number is None and self._leases is not None:
                if self._leases.sync_at is None:
                    return False
                # another rank, now dead, may have computed the last step
                self._claimed_steps = self._first + self._leases.sync_at
            # claiming again would count as one more sync point than the other ranks had
            self._must_sync = number is None
            if number is not None:
                self._claimed = self._at(self._first + number // parts)
                self._part = self._parts[number % parts]
        return self._claimed is not None

    def claimed_samples(self) -> Iterator[StepSamples]:
        """The samples of every claimed step, without end."""
        while True:
            if self._claimed is None:
                raise TaskError(
                    "a batch was requested without run.step(loss) of the one before; call it for "
                    "every batch, also with a loss of 0"
                )
            step = self._part.step_samples(self._claimed)
            if self._leases is not None:
                self._leases.begin(self._claimed.steps - self._first)
            self._claimed = None
            if step.after.steps > self.latest.steps:  # not a step that a dead rank had held
                self.latest, self._claimed_steps = step.after, step.after.steps
            if self.on_step is not None:
                self.on_step(step)
            yield step

    def claimed_steps(self) -> int:
        """Steps of the run up to the last one that this rank has computed."""
        return self._claimed_steps

    def sync(self, steps: int) -> None:
        """At a sync point: all ranks have computed what they claimed, `steps` steps of the run."""
        at = self._at(steps)
        over = at.offset >= self._split.samples
        self.position = self.latest = Position(at.epoch + 1, 0, steps) if over else at
        self._claimed_steps, self._must_sync = steps, False
        if self.on_sync is not None:
            self.on_sync()

    def stop_claiming(self) -> None:
        """Compute no more before the next sync point: a step that is claimed and not begun is left
        out."""
        self._claimed = None
        # a limit of 0 claims nothing, but the counter no longer waits for this rank
        self.claim(self._first)

    def steps_to(self, epochs: float) -> float:
        """The number of steps after which so many epochs are over; at most to the end of the
        current one."""
        if math.isinf(epochs):
            return math.inf
        samples = (epochs - self.position.epoch) * self._split.samples - self.position.offset
        return self.position.steps + max(0, math.ceil(samples / self._split.global_batch - 1e-9))

    def _at(self, step: int) -> Position:
        at = self.position
        return replace(
            at, offset=at.offset + (step - at.steps) * self._split.global_batch, steps=step
        )
