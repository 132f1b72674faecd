"""Evaluation over ranks: every sample of the test data counts once.

sums of the loss and of functions     one all-reduce
states of accumulating metrics        gathered, then merged on every rank
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.assembly.data import DEFAULT_BATCH, sampler_draws
from manyhands.assembly.evaluation.goals import metric_names
from manyhands.assembly.rank_context import RankContext
from manyhands.core import Plan, Tensors
from manyhands.data.sources import Source, StreamSource
from manyhands.metrics import evaluation_pass
from manyhands.metrics.evaluation_pass import EvaluatedModel
from manyhands.metrics.metric_set import MetricSet
from manyhands.replica.objective import Objective
from manyhands.task import Task


@dataclass
class Evaluation:
    """Evaluates `module` on the task's test data, where it has some."""

    context: RankContext
    plan: Plan
    module: nn.Module
    task: Task | None = None
    test: Source | None = None
    infer: Callable[..., Any] | None = None  # of a pipeline: its inference over all stages
    # BatchNorm's running statistics, where they are each rank's own
    buffers: Sequence[Tensor] = ()
    known: Sequence[str] = ()  # what it gives, where a rehearsal has shown it
    _order: Tensor | None = None
    _looked: bool = False

    @property
    def has_data(self) -> bool:
        return self.test is not None

    @property
    def metric_names(self) -> Sequence[str]:
        if self.known:
            return self.known
        return [] if self.task is None else metric_names(self.task)

    def named_buffers(self) -> Tensors:
        """Of the module, as its state_dict names them."""
        compiled = "_orig_mod."  # torch.compile's
        return {k.replace(compiled, ""): v for k, v in self.module.named_buffers()}

    def evaluate(self) -> dict[str, float]:
        elastic = self.context.elastic
        while True:
            members = None if elastic is None else elastic.members
            with self.context.group.activity.during("evaluation"):
                found = self._evaluate(members)
            if found is not None:
                return found
            # a rank died, and its part of the test data is missing: divide it anew

    @functools.cached_property
    def metrics(self) -> MetricSet:
        assert self.task is not None
        return MetricSet(self.task.metrics, self.context.device, self.context.process.size)

    def model(self, module: nn.Module | None = None) -> EvaluatedModel:
        """What is evaluated, with `module` in place of its own."""
        assert self.task is not None
        return EvaluatedModel(
            self.module if module is None else module,
            Objective(self.task.loss, self.task.step, self.task.reduction),
            self.task.predict,
            self.plan.precision,
            self.infer,
        )

    def batches(self) -> Iterator[tuple[Any, int]]:
        """This rank's part of the test data, by batches, with their numbers of samples."""
        assert self.test is not None
        batch = 4 * (self.plan.batch or DEFAULT_BATCH)
        rank, size = self.context.evaluation_shard
        return evaluation_pass.evaluation_batches(self.test, rank, size, batch, self._chosen())

    def _evaluate(self, members: tuple[int, ...] | None) -> dict[str, float] | None:
        """None: `members` of an elastic group are others now."""
        context, metrics = self.context, self.metrics
        metrics.reset()
        counts = context.has_output
        doubt = None if self._looked else self._doubt
        sums = evaluation_pass.evaluate(
            self.model(), self.batches(), metrics, context.device, counts=counts, doubt=doubt
        )
        self._looked = True
        if not counts:
            sums.zero_()
        context.group.all_reduce({"sums": sums}).wait()
        gathered = metrics.all_gather(context.group, context.device, counts)
        if context.elastic is not None and context.elastic.members != members:
            return None
        means = evaluation_pass.read_sums(sums, metrics)
        if metrics.objects:
            metrics.merge(gathered, isinstance(self.test, StreamSource))
        return {"loss": means.pop("loss"), **metrics.compute(means)}

    def _doubt(self, names: list[str]) -> None:
        self.context.warn(
            f"the metric {', '.join(names)} is no mean over samples: it is averaged over batches "
            "and ranks, so that its value depends on both; give an object that accumulates "
            "(mh.metrics.F1, AUC, those of torchmetrics), or mh.metrics.Gathered(function)"
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
