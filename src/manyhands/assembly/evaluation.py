"""Evaluation over ranks: every sample of the test data counts once, in one all-reduce of sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.assembly.data import DEFAULT_BATCH, sampler_draws
from manyhands.assembly.rank_context import RankContext
from manyhands.core import Plan
from manyhands.data.sources import Source, StreamSource
from manyhands.errors import PlanError, TaskError
from manyhands.replica import forward
from manyhands.replica.objective import Objective
from manyhands.task import Task

RUN_VALUES = ("epoch", "step", "noise")  # what a goal may name besides the task's metrics


@dataclass
class Evaluation:
    """Evaluates `module` on the task's test data, where it has some."""

    context: RankContext
    plan: Plan
    module: nn.Module
    task: Task | None = None
    test: Source | None = None
    predict: Callable[..., Any] | None = None  # of a pipeline: its inference over all stages
    # BatchNorm's running statistics, where they are each rank's own
    buffers: Sequence[Tensor] = ()
    _order: Tensor | None = None
    _looked: bool = False

    @property
    def has_data(self) -> bool:
        return self.test is not None

    def evaluate(self) -> dict[str, float]:
        elastic = self.context.elastic
        while True:
            members = None if elastic is None else elastic.members
            with self.context.group.activity.during("evaluation"):
                found = self._evaluate()
            if elastic is None or elastic.members == members:
                return found
            # a rank died, and its part of the test data is missing: divide it anew

    def _evaluate(self) -> dict[str, float]:
        task, context = self.task, self.context
        assert task is not None and self.test is not None
        batch = 4 * (self.plan.batch or DEFAULT_BATCH)
        rank, size = context.evaluation_shard
        sums = forward.evaluate(
            self.module,
            self.test,
            rank,
            size,
            batch,
            Objective(task.loss, task.step, task.reduction),
            task.metrics,
            self.plan.precision,
            context.device,
            self.predict,
            self._chosen(),
            None if self._looked else self._doubt,
        )
        self._looked = True
        if not context.has_output:
            sums.zero_()
        context.group.all_reduce({"sums": sums}).wait()
        *totals, count = sums.tolist()
        if not count:
            raise TaskError("Task.test gave no sample; give at least one, or leave test out")
        names = ["loss", *task.metrics]
        return {name: total / count for name, total in zip(names, totals, strict=False)}

    def _doubt(self, names: list[str]) -> None:
        self.context.warn(
            f"the metric {', '.join(names)} is no mean over samples: it is averaged over batches "
            "and ranks, so that its value depends on both; compute it over the whole test data "
            "after the run, with mh.load"
        )

    def _chosen(self) -> Tensor | None:
        """The samples that a DataLoader's sampler chooses of the test data; None: all of them."""
        data = self.test
        assert data is not None
        if isinstance(data, StreamSource):
            return None
        sampling = data.sampling
        if sampling.own is not None and self._order is None:
            self._order = sampler_draws(self.context, self.plan, data, "test").order(0)
        order = torch.arange(data.samples) if self._order is None else self._order
        if sampling.drop_last and sampling.batch:
            order = order[: len(order) - len(order) % sampling.batch]
        return order

    def average_buffers(self) -> None:
        if self.buffers and self.context.data_parallel_size > 1:
            self.context.mean_over_data({str(i): b for i, b in enumerate(self.buffers)})


# -- goals --


def check_goals(context: RankContext, plan: Plan, task: Task) -> None:
    """The goals of the plan name metrics that the task has."""
    has = [] if task.test is None else ["loss", *task.metrics]
    goals = {
        "best": plan.best and plan.best.lstrip("-"),
        "until": plan.until and plan.until.name,
        "at": plan.at and plan.at.name,
    }
    if task.metrics and task.test is None:
        context.warn(
            f"the metrics {', '.join(task.metrics)} are never computed: the task has no test data; "
            "give test="
        )
    if plan.evaluate != "epoch" and task.test is None:
        raise PlanError(
            f"evaluate={plan.evaluate} has no effect: the task has no test data; give test="
        )
    for key, name in goals.items():
        given = getattr(plan, key)
        if name == "loss" and not str(given).startswith("-"):
            raise PlanError(
                f"{key}={given} asks for a large loss; write {key}=-{given}, with a minus, for a "
                "small one"
            )
        if name is not None and name not in [*has, *(() if key == "best" else RUN_VALUES)]:
            raise PlanError(
                f"{key}={given}: no such metric; the task has {', '.join(has) or 'no test data'}"
            )
