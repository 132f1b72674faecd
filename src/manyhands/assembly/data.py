"""Batches and limits of a rank: builds its batch iterator and says when the run ends."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from manyhands.assembly.rank_context import RankContext
from manyhands.assembly.tables import RunTables
from manyhands.core import Plan, Position, Snapshot, Store
from manyhands.data.batches import BatchIterator, IndexedBatches, StreamedBatches
from manyhands.data.prefetch import PrefetchedBatches
from manyhands.data.sources import DatasetSource, Source, StreamSource, source
from manyhands.data.step_claims import StepClaims
from manyhands.errors import PlanError
from manyhands.limits import Limits
from manyhands.split.data import SPLITS, DataSplit, StepSamples
from manyhands.task import Task

DEFAULT_BATCH = 64


@dataclass
class Feed:
    """This rank's batches, and when they end."""

    batches: BatchIterator
    limits: Limits
    claims: StepClaims | None = None  # of an asynchronous rank


# -- from a task and a plan --


def with_task_defaults(plan: Plan, task: Task, seed: int) -> Plan:
    """The plan, with the task's own numbers where the plan leaves them open."""
    limited = plan.epochs is not None or plan.steps is not None
    return dataclasses.replace(
        plan,
        seed=seed,
        epochs=plan.epochs if limited or task.steps else task.epochs,
        steps=plan.steps if limited else task.steps,
        clip=plan.clip if plan.clip is not None else task.clip,
        batch=plan.batch or task.batch or loader_batch(task.train) or DEFAULT_BATCH,
    )


def loader_batch(train: Any) -> int | None:
    return train.batch_size if isinstance(train, DataLoader) else None


def task_data(context: RankContext, plan: Plan, task: Task) -> tuple[Source, Source | None]:
    """Training and test data of a task."""
    sampler = task.train.sampler if isinstance(task.train, DataLoader) else None
    if sampler is not None and not isinstance(sampler, RandomSampler | SequentialSampler):
        context.notice(
            f"the order comes from split={plan.split}: "
            f"the DataLoader's own {type(sampler).__name__} is not used"
        )
    train = source(task.train, context.device, "Task.train", plan.loaders)
    test = None
    if task.test is not None:
        test = source(task.test, context.device, "Task.test", plan.loaders)
    if plan.loaders and not isinstance(train, DatasetSource):
        raise PlanError(
            f"loaders={plan.loaders} has no effect: the training data is in memory already or a "
            "stream; leave it out"
        )
    return train, test


def batch_sizes(context: RankContext, plan: Plan, saved: Snapshot | None) -> tuple[Plan, int]:
    """Samples of a step over all ranks. A resumed run keeps that number on any number of ranks, so
    it takes the same batches."""
    batch = plan.batch or DEFAULT_BATCH
    size = 1 if shares_steps(plan) else context.data_parallel_size
    wanted = batch * plan.accumulate * size
    kept = wanted if saved is None else saved.meta["global_batch"]
    if kept != wanted and context.plan.batch is not None:
        context.notice(f"{wanted} samples a step from here on, {kept} before")
    elif kept != wanted:
        context.notice(
            f"keeping {kept} samples a step as before, {-(-kept // size)} or fewer a rank; "
            "batch= changes that"
        )
        return dataclasses.replace(plan, batch=batch), kept
    return dataclasses.replace(plan, batch=batch), wanted


def shares_steps(plan: Plan) -> bool:
    """Whether ranks claim their steps from one counter, each step a batch of one rank."""
    return plan.strategy.link is Store and plan.strategy.shares_steps


# -- to batches --


def open_feed(
    context: RankContext,
    plan: Plan,
    train: Source,
    global_batch: int,
    at: Position,
    tables: RunTables | None,
    borrow: bool,
) -> Feed:
    """`borrow`: a rank without samples in a step still runs the model, on a sample of another's."""
    if isinstance(train, StreamSource):
        own: IndexedBatches | StreamedBatches
        own, claims = _streamed(context, plan, train, global_batch, at, borrow), None
    else:
        own, claims = _indexed(context, plan, train, global_batch, at, tables, borrow)
    batches: BatchIterator = own
    if tables is not None and tables.embeddings is not None:
        depth = plan.lookahead if plan.servers and claims is None else 0
        batches = PrefetchedBatches(own, tables.embeddings, depth)
    return Feed(batches, _limits(plan, batches, claims), claims)


def _streamed(
    context: RankContext,
    plan: Plan,
    train: StreamSource,
    global_batch: int,
    at: Position,
    borrow: bool,
) -> StreamedBatches:
    if plan.split == "sampled":
        raise PlanError(
            "split=sampled draws samples by index, but the training data is a stream; "
            "leave split out"
        )
    if plan.strategy.link is Store:
        raise PlanError(
            f"merge={plan.merge} lets ranks claim batches by number, but the training data is a "
            "stream; give a Dataset with a length"
        )
    context.notice(
        "the training data is a stream: it is read in its own order by every rank, "
        "each keeps its part"
    )
    micro = context.micro_batch(plan.batch or DEFAULT_BATCH)
    rank, size = context.data_parallel_rank, context.data_parallel_size

    def cut(samples: int) -> StepSamples:
        return DataSplit(samples, samples, micro, rank, size).step_samples(Position())

    return StreamedBatches(train, cut, global_batch, at, borrow=borrow)


def _indexed(
    context: RankContext,
    plan: Plan,
    train: Any,  # a source with a length
    global_batch: int,
    at: Position,
    tables: RunTables | None,
    borrow: bool,
) -> tuple[IndexedBatches, StepClaims | None]:
    rank, size = context.data_parallel_rank, context.data_parallel_size
    if train.samples < size:
        raise PlanError(
            f"data={size} ranks, but only {train.samples} samples: some ranks would never have "
            f"any; set data={train.samples} or fewer"
        )
    shares, claims = shares_steps(plan), None
    micro = context.micro_batch(plan.batch or DEFAULT_BATCH)
    split = DataSplit(
        train.samples, global_batch, micro, 0 if shares else rank, 1 if shares else size
    )
    if plan.strategy.link is Store:
        assert tables is not None
        store = tables.store
        claim_step = functools.partial(store.claim_step, shared=shares)
        claims = StepClaims(split, at, claim_step, store.request_sync)
        _refuse_loaders(context, plan, train)
    order = functools.partial(SPLITS[plan.split], train.samples or 0, plan.seed or 0)
    return IndexedBatches(train, order, split, at, borrow=borrow, claims=claims), claims


def _refuse_loaders(context: RankContext, plan: Plan, train: Any) -> None:
    """Steps that are claimed are not known beforehand, so no process can load them early."""
    if plan.loaders:
        raise PlanError(
            f"loaders={plan.loaders} has no effect: merge={plan.merge} claims batches when they "
            "are wanted; leave it out"
        )
    if isinstance(train, DatasetSource) and train.loaders:
        context.notice(
            f"the DataLoader's {train.loaders} workers are not used: merge={plan.merge} claims "
            "batches when they are wanted"
        )


def _limits(plan: Plan, batches: BatchIterator, claims: StepClaims | None) -> Limits:
    save = {"epoch": 0, "off": None}
    return Limits(
        batches,
        epochs=math.inf if plan.epochs is None else plan.epochs,
        steps=math.inf if plan.steps is None else plan.steps,
        evaluate_every=int(plan.evaluate) if plan.evaluate.isdigit() else None,
        save_every=save.get(plan.save, int(plan.save) if plan.save.isdigit() else 0),
        save_evaluated=plan.best is not None,
        claims=claims,
    )
