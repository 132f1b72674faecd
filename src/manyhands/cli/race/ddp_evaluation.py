"""Evaluation of the plan `ddp` of a race: the same pass over the test data, over torch's ranks."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist

from manyhands.core import Finished, Group, Op, Tensors, Work
from manyhands.data.sources import Source, StreamSource
from manyhands.metrics import evaluation_pass
from manyhands.metrics.evaluation_pass import EvaluatedModel
from manyhands.metrics.metric_set import MetricSet


class _TorchRanks:
    """Of a group, what gathers the states of metrics."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    def all_reduce(self, values: Tensors, op: Op = "sum") -> Work:
        for value in values.values():
            dist.all_reduce(value)
        return Finished()

    def broadcast(self, values: Tensors, source: int = 0) -> Work:
        for value in values.values():
            dist.broadcast(value, source)
        return Finished()


def evaluate(
    model: EvaluatedModel,
    test: Source,
    metrics: MetricSet,
    rank: int,
    size: int,
    batch: int,
    device: torch.device,
) -> dict[str, float]:
    """Loss and metrics over the whole test data, the same on every rank."""
    metrics.reset()
    batches = evaluation_pass.evaluation_batches(test, rank, size, batch)
    sums = evaluation_pass.evaluate(model, batches, metrics, device)
    dist.all_reduce(sums)
    ranks = cast(Group, _TorchRanks(rank, size))
    gathered = metrics.all_gather(ranks, device)
    means = evaluation_pass.read_sums(sums, metrics)
    if metrics.objects:
        metrics.merge(gathered, isinstance(test, StreamSource))
    return {"loss": means.pop("loss"), **metrics.compute(means)}
