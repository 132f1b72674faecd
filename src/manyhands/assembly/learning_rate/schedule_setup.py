"""Schedule setup: makes a task's schedule and refuses what it cannot follow."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from manyhands.assembly.data import Feed
from manyhands.assembly.evaluation.goals import metric_names
from manyhands.assembly.learning_rate.schedule_checks import (
    check_length,
    check_mode,
    check_optimizer,
    check_told,
)
from manyhands.assembly.learning_rate.steps_due import StepsDue, steps_due
from manyhands.assembly.learning_rate.total_steps import total_steps
from manyhands.assembly.rank_context import RankContext
from manyhands.assembly.resume import Start
from manyhands.assembly.spec import TrainingSpec
from manyhands.core import Store
from manyhands.errors import PlanError, TaskError
from manyhands.replica.several_optimizers.named_optimizers import NamedOptimizers, named
from manyhands.replica.several_optimizers.named_schedules import NamedSchedules
from manyhands.task import Callback

TOTAL = "total_steps"
_VARIABLE = inspect.Parameter.VAR_POSITIONAL


@dataclass(frozen=True)
class LearningRate:
    """The schedule of a rank, and what steps it."""

    schedule: LRScheduler | None = None
    due: StepsDue = field(default_factory=StepsDue)
    total: int | None = None  # steps that the schedule was told
    metric: str | None = None  # whose value steps it, after each evaluation

    def by_metric(self) -> tuple[Callback, ...]:
        if self.metric is None:
            return ()
        return (SteppedByMetric(cast(ReduceLROnPlateau, self.schedule), self.metric),)


def make_schedule(
    context: RankContext, begin: Start, spec: TrainingSpec, optimizer: Optimizer, feed: Feed
) -> LearningRate:
    given, total = spec.make_schedule, None
    if given is None:
        return LearningRate()
    makes = given if isinstance(given, Mapping) else dict.fromkeys(named(optimizer), given)
    if any(map(takes_total, makes.values())):
        total = total_steps(begin.plan, feed, begin.position, context.data_parallel_size)
        total = _as_before(context, begin, total)
    made = {k: made_schedule(make, named(optimizer)[k], total) for k, make in makes.items()}
    kind, plateau = _alike(made)
    by = "loss" if plateau and spec.schedule_by == "step" else spec.schedule_by
    _check_steps(context, begin, spec, kind, plateau, by)
    if spec.task is not None:
        _check_rates(context, begin, made, feed, by, total)
    due = steps_due(context, begin, feed, by, total)
    schedule = made.get("")
    if isinstance(optimizer, NamedOptimizers):
        schedule = NamedSchedules(optimizer, made, due.made)
    return LearningRate(schedule, due, total, None if by in ("step", "epoch") else by)


def _check_rates(
    context: RankContext,
    begin: Start,
    made: Mapping[str, LRScheduler],
    feed: Feed,
    by: str,
    total: int | None,
) -> None:
    """Of a task, all of whose steps are known."""
    check_told(by, total is not None)
    check_mode(context, made.values(), by)
    if total is None and by in ("step", "epoch") and begin.saved is None:
        steps = None
        if begin.plan.steps is not None or feed.indexed is not None:
            steps = total_steps(begin.plan, feed, begin.position, context.data_parallel_size)
        check_length(context, made.values(), begin.plan, feed, by, steps)


def made_schedule(make: Callable[..., Any], optimizer: Optimizer, total: int | None) -> LRScheduler:
    """What a task's function makes; `total`: steps of the run, where it takes them."""
    if takes_total(make):
        assert total is not None
        schedule = _call(make, optimizer, total)
    else:
        schedule = make(optimizer)
    if not isinstance(schedule, LRScheduler):
        raise TaskError(
            f"schedule=(optimizer) returned a {type(schedule).__name__}, but a schedule of "
            "torch.optim.lr_scheduler is needed"
        )
    check_optimizer(schedule, optimizer)
    return schedule


def _alike(made: Mapping[str, LRScheduler]) -> tuple[str, bool]:
    """The class of the schedules, and whether a metric steps them: all, or none of them."""
    plateaus = {name: isinstance(s, ReduceLROnPlateau) for name, s in made.items()}
    if len(set(plateaus.values())) > 1:
        one = next(name for name, plateau in plateaus.items() if plateau)
        raise TaskError(
            f"the schedule of {one!r} is stepped by an evaluated metric and others by steps, but "
            "schedule_by= is one for all of them; give all of them the one kind or the other"
        )
    return ", ".join(dict.fromkeys(type(s).__name__ for s in made.values())), any(plateaus.values())


def _as_before(context: RankContext, begin: Start, total: int) -> int:
    """A resumed run goes on with the schedule it had, whose state is in the checkpoint."""
    before = None if begin.saved is None else begin.saved.meta.get(TOTAL)
    if before is None or before == total:
        return total
    context.notice(
        f"the schedule was made for {before} steps, and this run has {total}: it stays as it was, "
        f"and after step {before} at its last learning rate; for another, start anew"
    )
    return int(before)


def _parameters(make: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(make).parameters
    except (TypeError, ValueError):  # written in C
        return {}


def takes_total(make: Callable[..., Any]) -> bool:
    """Whether a schedule is a function of (optimizer, total_steps), not of the optimizer alone."""
    known = _parameters(make)
    positional = [
        p for p in known.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if isinstance(make, type):
        needed = [p.name for p in positional[1:] if p.default is p.empty]
        if needed:
            raise TaskError(
                f"schedule is the class {make.__name__}, which needs {', '.join(needed)}; give a "
                f"function: schedule=lambda o, total_steps: {make.__name__}(o, ...)"
            )
        return False
    needed = [p.name for p in positional if p.default is p.empty]
    if len(needed) > 2:
        raise TaskError(
            f"schedule takes {', '.join(needed)}, but it is called with the optimizer, or with "
            "(optimizer, total_steps)"
        )
    if not positional and TOTAL not in known and _VARIABLE not in {p.kind for p in known.values()}:
        raise TaskError(
            "schedule takes no argument, but it is called with the optimizer, or with (optimizer, "
            "total_steps): schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 100)"
        )
    return len(needed) == 2 or TOTAL in known


def _call(make: Callable[..., Any], optimizer: Optimizer, total: int) -> Any:
    named = _parameters(make).get(TOTAL)
    if named is not None and named.kind is not named.POSITIONAL_ONLY:
        return make(optimizer, **{TOTAL: total})
    return make(optimizer, total)


def _check_steps(
    context: RankContext, begin: Start, spec: TrainingSpec, kind: str, plateau: bool, by: str
) -> None:
    if spec.task is None:
        if plateau:
            raise TaskError(
                f"{kind} is stepped by an evaluated metric, and a loop of your own evaluates "
                "itself: leave it out of run.prepare, and step it after each evaluation, with a "
                "value that is the same on every rank (run.sum)"
            )
        return
    if by == "epoch" and plateau:
        raise TaskError(
            f"schedule_by='epoch', but {kind} is stepped by the value of a metric; give its name: "
            "schedule_by='loss'"
        )
    if by in ("step", "epoch"):
        return
    known = metric_names(spec.task)
    if not known:
        raise TaskError(
            f"{kind} is stepped by the evaluated {by}, but the task has no test data; give test=, "
            "or another schedule"
        )
    if by not in known and by.partition("/")[0] not in known[1:]:
        raise TaskError(
            f"schedule_by={by!r}: no such metric; 'step', 'epoch' or one of those that are "
            f"evaluated is needed: {', '.join(known)}"
        )
    if not plateau:
        raise TaskError(
            f"schedule_by={by!r} gives the metric's value to the schedule, but {kind} takes none; "
            "only ReduceLROnPlateau does: leave schedule_by out, or set it to 'epoch'"
        )
    if context.elastic is not None and begin.plan.strategy.link is Store:
        raise PlanError(
            f"{kind}: a process that takes a dead one's place would not know the values before, "
            "and step by another learning rate; leave elastic= out, or use another schedule"
        )


class SteppedByMetric(Callback):
    """Steps a schedule after each evaluation, by a metric's value, which is the same everywhere."""

    def __init__(self, schedule: ReduceLROnPlateau, name: str):
        self._schedule, self._name = schedule, name

    def on_evaluate(self, run: Any, metrics: Mapping[str, float]) -> None:
        self._schedule.step(metrics[self._name])
