"""Plans of a race: parsed, checked and labelled before the first one starts."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from manyhands.cli.race import ddp
from manyhands.core import Goal, Plan
from manyhands.data.sources import source
from manyhands.entry import load_task
from manyhands.errors import ManyhandsError, PlanError, TaskError
from manyhands.metrics.metric_set import accumulates
from manyhands.plan import words as plan_words
from manyhands.task import Task


@dataclasses.dataclass(frozen=True)
class RacePlan:
    """One plan of the race: its words, label and folder."""

    given: str
    words: dict[str, Any]
    plan: Plan
    label: str
    folder: str
    is_ddp: bool


@dataclasses.dataclass(frozen=True)
class TaskFacts:
    """Facts of the task that a race needs."""

    metrics: tuple[str, ...]
    samples: int | None  # of one epoch; None: a stream
    seed: int
    name: str


def parse_plans(plans: Sequence[str], common: str, goal: Goal) -> list[RacePlan]:
    """All plans, parsed: a mistake in the last one is reported before the first one starts."""
    shared = plan_words.overlay(common)
    parsed = []
    for i, given in enumerate(plans, 1):
        try:
            parsed.append(_parse(given, shared, goal))
        except ManyhandsError as e:
            raise PlanError(f"plan {i} ({given!r}): {e}") from None
    labels = _labels([(own, is_ddp, plan) for own, _, plan, is_ddp in parsed])
    return [
        RacePlan(given, words, plan, label, f"{i:02}-{_slug(label)}", is_ddp)
        for i, (given, label, (_, words, plan, is_ddp)) in enumerate(
            zip(plans, labels, parsed, strict=True), 1
        )
    ]


def _parse(
    given: str, shared: dict[str, Any], goal: Goal
) -> tuple[dict[str, Any], dict[str, Any], Plan, bool]:
    """(the plan's own words, all of its words, the plan, whether it is DDP's)."""
    first, *rest = shlex.split(given) or [""]
    is_ddp = first == "ddp"
    own = plan_words.overlay(rest if is_ddp else shlex.split(given))
    if is_ddp:
        ddp.check(own)
        # words for all plans may have no meaning for DDP
        shared = {k: v for k, v in shared.items() if k in ddp.SHARED}
    for word in ("until", "best"):
        if word in own:
            raise PlanError(
                f"{word}= cannot be set in a race; --target is the goal of all plans: leave it out"
            )
    # checkpoints would be written inside the time that is measured, and no run resumes from them
    ours = {} if is_ddp else {"save": "off"}
    words = plan_words.overlay(ours, shared, own, {"until": str(goal)})
    return own, words, plan_words.parse(words), is_ddp


def _labels(parsed: list[tuple[dict[str, Any], bool, Plan]]) -> list[str]:
    """Labels: the words in which each plan differs from the others, no two the same."""
    plain = [own for own, *_ in parsed]
    alike = {
        k
        for k, v in plain[0].items()
        if len(plain) > 1 and all(str(o.get(k)) == str(v) for o in plain)
    }
    labels: list[str] = []
    for own, is_ddp, plan in parsed:
        name = plan.merge
        if is_ddp:
            name = "ddp" if plan.merge == "all_reduce" else f"ddp {plan.merge}"
        rest = [
            f"{k.removeprefix('merge.')}={v}"
            for k, v in own.items()
            if k not in alike and k != "merge"
        ]
        label = " ".join([name, *rest])
        times = sum(re.sub(r" #\d+$", "", earlier) == label for earlier in labels)
        labels.append(f"{label} #{times + 1}" if times else label)
    return labels


def _slug(label: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", label.lower()).strip("-.")[:48] or "plan"


def task_facts(script: Path, goal: Goal, arguments: Sequence[str] = ()) -> TaskFacts:
    """Load the task once, so that an unknown metric is reported before anything starts."""
    sys.path.insert(0, str(script.resolve().parent))
    before, sys.argv = sys.argv, [str(script), *arguments]
    try:
        made = load_task(str(script))
        task = made if isinstance(made, Task) else made()
    finally:
        sys.path.pop(0)
        sys.argv = before
    if not isinstance(task, Task):
        raise TaskError(f"task() returned a {type(task).__name__}, but a manyhands.Task is needed")
    metrics = () if task.test is None else ("loss", *task.metrics)
    # an object may compute several values, f1/macro: their names are known when it has
    several = {name for name in metrics if name in task.metrics and accumulates(task.metrics[name])}
    if goal.name not in metrics and goal.name.partition("/")[0] not in several:
        known = (
            f"it has {', '.join(metrics)}"
            if metrics
            else "it has no test data (test=), so nothing is ever evaluated"
        )
        raise PlanError(f"--target {goal.name}: the task of {script} has no such metric; {known}")
    samples = source(task.train, torch.device("cpu"), "Task.train").samples
    return TaskFacts(metrics, samples, task.seed, task.name)
