"""Goals of a plan: until=, best= and at= name values that an evaluation gives."""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.assembly.rank_context import RankContext
from manyhands.core import Goal, Plan
from manyhands.errors import PlanError
from manyhands.metrics.metric_set import accumulates
from manyhands.metrics.usual_direction import doubt
from manyhands.task import Task

RUN_VALUES = ("epoch", "step", "noise")  # what a goal may name besides the task's metrics


def metric_names(task: Task) -> list[str]:
    """What an evaluation of a task gives; an object may give `<name>/<part>`. []: no test data."""
    return [] if task.test is None else ["loss", *task.metrics]


def check_goals(context: RankContext, plan: Plan, task: Task) -> None:
    """Before there is a model: goals name metrics that the task has, or what an object among them
    may compute (`check_names`)."""
    if task.metrics and task.test is None:
        context.warn(
            f"the metrics {', '.join(task.metrics)} are never computed: the task has no test data; "
            "give test="
        )
    if plan.evaluate != "epoch" and task.test is None:
        raise PlanError(
            f"evaluate={plan.evaluate} has no effect: the task has no test data; give test="
        )
    objects = {name for name, metric in task.metrics.items() if accumulates(metric)}
    named = [name.partition("/")[0] for name in _named(plan).values()]
    known = metric_names(task)
    for key, name in _named(plan).items():
        given = getattr(plan, key)
        if name == "loss" and not str(given).startswith("-"):
            raise PlanError(
                f"{key}={given} asks for a large loss; write {key}=-{given}, with a minus, for a "
                "small one"
            )
        at_most = given.at_most if isinstance(given, Goal) else str(given).startswith("-")
        if said := doubt(f"{key}={given}", name, at_most):
            context.warn(said)
    if task.test is None or not objects.intersection(named):
        check_names(plan, known)


def check_names(plan: Plan, has: Sequence[str]) -> None:
    """Goals name values that an evaluation gives: `has`."""
    for key, name in _named(plan).items():
        if name not in [*has, *(() if key == "best" else RUN_VALUES)]:
            raise PlanError(
                f"{key}={getattr(plan, key)}: no such metric; the task has "
                f"{', '.join(has) or 'no test data'}"
            )


def _named(plan: Plan) -> dict[str, str]:
    """What the plan's goals name, by plan word."""
    named = {
        "best": plan.best and plan.best.lstrip("-"),
        "until": plan.until and plan.until.name,
        "at": plan.at and plan.at.name,
    }
    return {key: name for key, name in named.items() if name}
