"""Batches of a race's DDP run: the same samples in the same order as under our own plans."""

from __future__ import annotations

import torch

from manyhands.assembly.data import DEFAULT_BATCH, resolve_split
from manyhands.core import Plan, Position
from manyhands.data.batches import BatchIterator, IndexedBatches, StreamedBatches
from manyhands.data.sources import StreamSource, source
from manyhands.errors import PlanError
from manyhands.split.data import SPLITS, DataSplit, StepSamples
from manyhands.task import Task


def ddp_batches(
    task: Task, plan: Plan, device: torch.device, global_batch: int, rank: int, size: int
) -> BatchIterator:
    train = source(task.train, device, "Task.train", plan.loaders)
    sampling, micro = train.sampling, plan.batch or DEFAULT_BATCH
    if isinstance(train, StreamSource):

        def cut(samples: int) -> StepSamples:
            return DataSplit(samples, samples, micro, rank, size).step_samples(Position())

        drop, seed = sampling.drop_last, plan.seed or 0
        return StreamedBatches(
            train, cut, global_batch, Position(), borrow=True, drop_last=drop, seed=seed
        )
    if sampling.own is not None:
        raise PlanError(
            "ddp draws samples by the plan's split, not by the DataLoader's "
            f"{type(sampling.own).__name__}; leave the sampler out of a race against ddp"
        )
    order, seed, n = SPLITS[resolve_split(plan, train).split], plan.seed or 0, train.samples
    used = n - n % global_batch if sampling.drop_last else n
    split = DataSplit(used, global_batch, micro, rank, size)
    return IndexedBatches(
        train, lambda epoch: order(n, seed, epoch), split, Position(), borrow=True
    )
