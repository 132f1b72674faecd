"""Total steps: how many optimizer steps a run will have made on a rank, at its end.

    steps done before + those from the position to the end of steps= or epochs=

Under strategies that share steps (`downpour`) it counts as schedules do: one for as many steps as
there are ranks.
"""

from __future__ import annotations

import math

from manyhands.assembly.data import Feed, shares_steps
from manyhands.core import Plan, Position
from manyhands.errors import TaskError
from manyhands.split.data import BatchSplit, DataSplit

NEARLY = 1e-9  # as `Limits.at_end` rounds


def total_steps(plan: Plan, feed: Feed, at: Position, size: int) -> int:
    """`size`: ranks among which steps may be shared."""
    total = steps_of_run(plan, None if feed.indexed is None else feed.indexed.split, at)
    return max(1, total // size if feed.claims is not None and shares_steps(plan) else total)


def steps_of_run(plan: Plan, split: DataSplit | BatchSplit | None, at: Position) -> int:
    """Steps of the run at its end. `split`: of data with a length."""
    by_epochs = math.inf
    if plan.epochs is not None and split is not None:
        by_epochs = at.steps + steps_to(plan.epochs, split, at)
    if plan.steps is None and math.isinf(by_epochs):
        raise TaskError(
            "schedule=(optimizer, total_steps) wants the number of steps, which a stream without "
            "length does not tell; limit the run with steps=, or give a schedule of the optimizer "
            "alone"
        )
    return int(min(by_epochs, math.inf if plan.steps is None else plan.steps))


def steps_to(epochs: float, split: DataSplit | BatchSplit, at: Position) -> int:
    """Steps from a position until so many epochs are done. Of a batch sampler whose epochs differ
    in length, as if all were as long as the first."""
    counted, position = 0, at
    whole = math.floor(epochs + NEARLY)
    if position.epoch < whole and position.offset:
        counted += _rest_of_epoch(split, position)
        position = Position(position.epoch + 1)
    if position.epoch < whole:
        counted += (whole - position.epoch) * split.steps_per_epoch
        position = Position(whole)
    part = epochs - position.epoch
    if part <= NEARLY:
        return counted
    for step in split.steps_from(position):
        counted += 1
        if step.after.epoch > position.epoch or step.after.offset / split.samples >= part - NEARLY:
            return counted
    raise AssertionError("an epoch has an end")


def _rest_of_epoch(split: DataSplit | BatchSplit, at: Position) -> int:
    for counted, step in enumerate(split.steps_from(at), 1):
        if step.after.epoch > at.epoch:
            return counted
    raise AssertionError("an epoch has an end")
