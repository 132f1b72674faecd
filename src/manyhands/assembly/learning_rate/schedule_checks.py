"""Schedule checks: what would train with other learning rates than its author meant.

Refused is what cannot be meant, warned of what rarely is: a schedule that counts epochs, or the
steps of one process, stepped after every optimizer step of this run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)

from manyhands.assembly.data import Feed
from manyhands.assembly.rank_context import RankContext
from manyhands.core import Plan
from manyhands.errors import TaskError
from manyhands.metrics.usual_direction import usual_direction

VANISHED = 1e-4  # of the first learning rate


def check_optimizer(schedule: LRScheduler, optimizer: Optimizer) -> None:
    """Refuse a schedule that moves the learning rates of something else."""
    if getattr(schedule, "optimizer", optimizer) is not optimizer:
        raise TaskError(
            f"schedule=(optimizer) returned a {type(schedule).__name__} of another optimizer, so "
            "that the learning rate would stay as it is; make it of the optimizer that is given: "
            f"schedule=lambda o: {type(schedule).__name__}(o, ...)"
        )


def check_told(by: str, told: bool) -> None:
    """Refuse to tell optimizer steps to a schedule that is stepped by something else."""
    if told and by != "step":
        raise TaskError(
            f"schedule=(optimizer, total_steps) is told the optimizer steps of the run, but "
            f"schedule_by={by!r} does not step it so often; leave schedule_by out, or give a "
            "function of the optimizer alone"
        )


def check_mode(context: RankContext, schedules: Iterable[LRScheduler], metric: str) -> None:
    """Refuse, or doubt, a plateau that takes a better metric for a worse one."""
    usual = usual_direction(metric)
    wanted = {"small": "min", "large": "max"}.get(usual or "")
    for schedule in schedules:
        if not isinstance(schedule, ReduceLROnPlateau) or wanted in (None, schedule.mode):
            continue
        said = (
            f"ReduceLROnPlateau(mode={schedule.mode!r}) takes a {_larger(schedule.mode)} {metric} "
            f"for a better one; give mode={wanted!r}"
        )
        if metric == "loss":
            raise TaskError(said)
        context.warn(said)


def _larger(mode: str) -> str:
    return "larger" if mode == "max" else "smaller"


def check_length(
    context: RankContext,
    schedules: Iterable[LRScheduler],
    plan: Plan,
    feed: Feed,
    by: str,
    steps: int | None,
) -> None:
    """Of schedules that were not told the steps of the run. `steps`: that it makes; None: who
    knows, of a stream."""
    if steps is None or feed.indexed is None:
        return
    an_epoch = feed.indexed.split.steps_per_epoch
    epochs = steps / an_epoch if plan.epochs is None else plan.epochs
    due = steps if by == "step" else math.floor(epochs)
    for schedule in schedules:
        if isinstance(schedule, OneCycleLR):
            _check_cycle(context, schedule, due)
        elif by == "step" and epochs >= 2 and an_epoch >= 2:
            _doubt_epochs(context, schedule, steps, epochs)


def _check_cycle(context: RankContext, schedule: OneCycleLR, due: int) -> None:
    made = int(schedule.total_steps)
    do = (
        "take the number that it is told: schedule=lambda o, total_steps: OneCycleLR(o, ..., "
        "total_steps=total_steps)"
    )
    if made < due:
        raise TaskError(
            f"OneCycleLR was made for {made} steps, but this run steps it {due} times; {do}"
        )
    if made > due:
        context.warn(
            f"OneCycleLR was made for {made} steps, but this run steps it {due} times, so that "
            f"its learning rate does not come down; {do}"
        )


def _doubt_epochs(context: RankContext, schedule: LRScheduler, steps: int, epochs: float) -> None:
    """Warn of a number that looks like one of epochs."""
    given, vanishes = "", False
    if isinstance(schedule, StepLR):
        given, counted = f"step_size={schedule.step_size}", schedule.step_size
    elif isinstance(schedule, CosineAnnealingLR):
        given, counted = f"T_max={schedule.T_max}", schedule.T_max
    elif isinstance(schedule, MultiStepLR):
        counted = max(schedule.milestones, default=0)
        given = f"milestones={sorted(schedule.milestones)}"
    elif isinstance(schedule, ExponentialLR):
        given, counted = f"gamma={schedule.gamma}", steps
        vanishes = schedule.gamma**steps < VANISHED <= schedule.gamma**epochs
    if given and (counted <= epochs or vanishes):
        context.warn(
            f"{type(schedule).__name__}({given}) is stepped after every optimizer step, {steps} "
            f"times in this run of {epochs:g} epochs; if it counts epochs, give "
            "schedule_by='epoch'"
        )
