"""Evaluation over ranks: every sample of the test data counts once, in one all-reduce of sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from manyhands.assembly.data import DEFAULT_BATCH
from manyhands.assembly.rank_context import RankContext
from manyhands.core import Plan
from manyhands.data.sources import Source
from manyhands.errors import TaskError
from manyhands.replica import forward
from manyhands.task import Task


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

    @property
    def has_data(self) -> bool:
        return self.test is not None

    def evaluate(self) -> dict[str, float]:
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
            task.loss,
            task.step,
            task.metrics,
            self.plan.precision,
            context.device,
            self.predict,
        )
        if not context.has_output:
            sums.zero_()
        context.group.all_reduce({"sums": sums}).wait()
        *totals, count = sums.tolist()
        if not count:
            raise TaskError("Task.test gave no sample; give at least one, or leave test out")
        names = ["loss", *task.metrics]
        return {name: total / count for name, total in zip(names, totals, strict=False)}

    def average_buffers(self) -> None:
        if self.buffers and self.context.data_parallel_size > 1:
            self.context.mean_over_data({str(i): b for i, b in enumerate(self.buffers)})
