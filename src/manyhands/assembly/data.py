"""Batches and limits of a rank: builds its batch iterator and says when the run ends."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from manyhands.assembly.rank_context import RankContext, micro_batches
from manyhands.assembly.tables import RunTables
from manyhands.core import Plan, Position, Snapshot, Store
from manyhands.data.batches import BatchIterator, EpochOrder, IndexedBatches, StreamedBatches
from manyhands.data.drawn import DrawnSource
from manyhands.data.prefetch import PrefetchedBatches
from manyhands.data.sampling import SamplerDraws
from manyhands.data.sources import DatasetSource, Source, StreamSource, source
from manyhands.data.step_claims import StepClaims
from manyhands.errors import PlanError
from manyhands.limits import Limits
from manyhands.split.data import SPLITS, BatchSplit, DataSplit, ShareSchedule, StepSamples
from manyhands.task import Task

DEFAULT_BATCH = 64


@dataclass
class Feed:
    """This rank's batches, and when they end."""

    batches: BatchIterator
    limits: Limits
    claims: StepClaims | None = None  # of an asynchronous rank
    # of straggler=rebalance: what changes the split of later steps, and the batches that follow it
    shares: ShareSchedule | None = None
    indexed: IndexedBatches | None = None


# -- from a task and a plan --


def with_task_defaults(plan: Plan, task: Task, seed: int) -> Plan:
    """The plan, with the task's own numbers where the plan leaves them open."""
    limited = plan.epochs is not None or plan.steps is not None
    return dataclasses.replace(
        plan,
        seed=seed,
        epochs=plan.epochs if limited or task.steps else task.epochs or 1.0,
        steps=plan.steps if limited else task.steps,
        clip=plan.clip if plan.clip is not None else task.clip,
        batch=plan.batch or task.batch or loader_batch(task.train) or DEFAULT_BATCH,
    )


def loader_batch(train: Any) -> int | None:
    if not isinstance(train, DataLoader):
        return None
    given = train.batch_sampler
    return given.batch_size if type(given) is BatchSampler else train.batch_size


def task_data(context: RankContext, plan: Plan, task: Task) -> tuple[Source, Source | None]:
    """Training and test data of a task."""
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


def resolve_split(plan: Plan, train: Source) -> Plan:
    """split=auto is as the DataLoader says: shuffled, in order, or by a sampler of its own."""
    sampling = train.sampling
    if plan.split != "auto" and sampling.own is not None:
        raise PlanError(
            f"split={plan.split} and the DataLoader's {type(sampling.own).__name__} both give the "
            "order of samples; leave one of them out"
        )
    word = claiming_word(plan)
    if sampling.batch_sampler is not None and word:
        raise PlanError(
            f"{word} lets ranks claim batches by number, but the DataLoader's "
            f"{type(sampling.batch_sampler).__name__} makes them as it goes; give a batch size"
        )
    if plan.split != "auto" or sampling.own is not None:
        return plan
    return dataclasses.replace(plan, split="ordered" if sampling.in_order else "shuffled")


def batch_sizes(
    context: RankContext, plan: Plan, train: Source, saved: Snapshot | None
) -> tuple[Plan, int]:
    """Samples of a step over all ranks. A resumed run keeps that number on any number of ranks, so
    it takes the same batches."""
    if train.sampling.batch_sampler is not None:
        return _sampled_batch(context, plan, train)
    batch = plan.batch or DEFAULT_BATCH
    size = 1 if shares_steps(plan) else context.data_parallel_size
    wanted = batch * plan.accumulate * size
    if train.samples is not None and wanted > train.samples:
        context.notice(
            f"a step takes {wanted} samples (batch={batch}), but the training data has "
            f"{train.samples}: every step takes all of them; lower batch= for more steps an epoch"
        )
    # of drawn data each rank has a batch of its own, on any number of ranks
    drawn = isinstance(train, DrawnSource)
    kept = wanted if saved is None or drawn else saved.meta["global_batch"]
    if kept != wanted and context.plan.batch is not None:
        context.notice(f"{wanted} samples a step from here on, {kept} before")
    elif kept != wanted:
        context.notice(
            f"keeping {kept} samples a step as before, {-(-kept // size)} or fewer a rank; "
            "batch= changes that"
        )
        return dataclasses.replace(plan, batch=batch), kept
    return dataclasses.replace(plan, batch=batch), wanted


def _sampled_batch(context: RankContext, plan: Plan, train: Source) -> tuple[Plan, int]:
    """Of a batch sampler: each rank computes one of its batches, on any number of ranks."""
    if context.plan.batch is not None:
        raise PlanError(
            f"batch={context.plan.batch} has no effect: the DataLoader's "
            f"{type(train.sampling.batch_sampler).__name__} makes the batches; leave batch out"
        )
    sizes = sampler_draws(context, plan, train).sizes(0)
    mean = max(1, round(sum(sizes) / len(sizes)))
    return dataclasses.replace(
        plan, batch=mean
    ), mean * plan.accumulate * context.data_parallel_size


def shares_steps(plan: Plan) -> bool:
    """Whether ranks claim their steps from one counter, each step a batch of one rank."""
    # of elastic ranks any may get any step, so that none is lost with a rank
    shares = plan.strategy.shares_steps or plan.elastic is not None
    return plan.strategy.link is Store and bool(shares)


def claiming_word(plan: Plan) -> str:
    """The word under which ranks claim their steps, all the time or for a while; "": none."""
    for word, strategy in (("merge", plan.strategy), ("then", plan.next_strategy)):
        if strategy is not None and (
            strategy.link is Store or (strategy.shares_parameters and plan.layout.data > 1)
        ):
            return f"{word}={getattr(plan, word)}"
    return ""


# -- to batches --


def open_feed(
    context: RankContext,
    plan: Plan,
    train: Source,
    global_batch: int,
    at: Position,
    tables: RunTables | None,
    borrow: bool,
    whole: bool,
) -> Feed:
    """`borrow`: a rank without samples in a step still runs the model, on a sample of another's.
    `whole`: every rank has all micro-batches of a step, of which it claims some."""
    schedule = _share_schedule(context, plan, train)
    if isinstance(train, StreamSource):
        own: IndexedBatches | StreamedBatches
        own, claims = _streamed(context, plan, train, global_batch, at, borrow), None
    else:
        own, claims = _indexed(
            context, plan, train, global_batch, at, tables, borrow, whole, schedule
        )
    batches: BatchIterator = own
    if tables is not None and tables.embeddings is not None:
        depth = plan.lookahead if plan.servers and claims is None else 0
        batches = PrefetchedBatches(own, tables.embeddings, depth)
    indexed = own if isinstance(own, IndexedBatches) else None
    return Feed(batches, _limits(plan, batches, claims), claims, schedule, indexed)


def _share_schedule(context: RankContext, plan: Plan, train: Source) -> ShareSchedule | None:
    """Shares of ranks that may change while the run goes on, where the plan wants that."""
    if plan.straggler != "rebalance" or context.data_parallel_size == 1:
        return None
    why = ""
    if isinstance(train, StreamSource):
        why = "the training data is a stream"
    elif (sampler := train.sampling.batch_sampler) is not None:
        why = f"the DataLoader's {type(sampler).__name__} makes the batches"
    if why:
        raise PlanError(
            f"straggler=rebalance gives slow ranks smaller batches, but {why}; set "
            "straggler=report, or give a Dataset with a length and a batch size"
        )
    return ShareSchedule()


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
    if word := claiming_word(plan):
        raise PlanError(
            f"{word} lets ranks claim batches by number, but the training data is a stream; give a "
            "Dataset with a length"
        )
    context.notice(
        "the training data is a stream: it is read in its own order by every rank, "
        "each keeps its part"
    )
    micro = context.micro_batch(plan.batch or DEFAULT_BATCH)
    rank, size = context.data_parallel_rank, context.data_parallel_size

    def cut(samples: int) -> StepSamples:
        return DataSplit(samples, samples, micro, rank, size).step_samples(Position())

    if train.loaders:
        context.notice(
            f"the DataLoader's {train.loaders} workers are not used: every rank reads the stream"
        )

    def agree(at: Position, digest: str) -> bool:
        return _agrees(context, f"stream/{at.epoch}/{at.offset}", digest)

    return StreamedBatches(
        train,
        cut,
        global_batch,
        at,
        borrow=borrow,
        drop_last=train.sampling.drop_last,
        seed=plan.seed or 0,
        agree=agree if context.process.size > 1 else None,
    )


def _indexed(
    context: RankContext,
    plan: Plan,
    train: Any,  # a source with a length
    global_batch: int,
    at: Position,
    tables: RunTables | None,
    borrow: bool,
    whole: bool,
    schedule: ShareSchedule | None,
) -> tuple[IndexedBatches, StepClaims | None]:
    shares, claims = shares_steps(plan), None
    order: EpochOrder
    split: DataSplit | BatchSplit
    if isinstance(train, DrawnSource):
        order, samples = train.order, train.samples
    elif train.sampling.own is None:
        samples = train.samples
        order = functools.partial(SPLITS[plan.split], samples, plan.seed or 0)
    else:
        draws = sampler_draws(context, plan, train)
        order, samples = draws.order, len(draws.order(at.epoch))
    if train.sampling.batch_sampler is not None:
        split = _batch_split(context, plan, draws)
    else:
        split = _data_split(context, plan, train, samples, global_batch, shares or whole)
        split = dataclasses.replace(split, shares=schedule)
    if plan.strategy.link is Store:
        assert tables is not None
        store = tables.store
        assert isinstance(split, DataSplit)
        if (leases := tables.leases) is not None:
            claims = StepClaims(split, at, leases.claim_step, leases.client.request_sync, leases)
        else:
            claim_step = functools.partial(store.claim_step, shared=shares)
            claims = StepClaims(split, at, claim_step, store.request_sync)
    if word := claiming_word(plan):
        _refuse_loaders(context, plan, train, word)
    return IndexedBatches(train, order, split, at, borrow=borrow, claims=claims), claims


def _data_split(
    context: RankContext, plan: Plan, train: Source, samples: int, global_batch: int, whole: bool
) -> DataSplit:
    rank, size = context.data_parallel_rank, context.data_parallel_size
    if samples < size:
        raise PlanError(
            f"data={size} ranks, but only {samples} samples: some ranks would never have "
            f"any; set data={samples} or fewer"
        )
    if train.sampling.drop_last:
        if samples < global_batch:
            raise PlanError(
                f"drop_last=True leaves nothing: {samples} samples, but a step over all ranks "
                f"takes {global_batch}; lower batch=, or leave drop_last out"
            )
        samples -= samples % global_batch
    micro = context.micro_batch(plan.batch or DEFAULT_BATCH)
    return DataSplit(samples, global_batch, micro, 0 if whole else rank, 1 if whole else size)


def _batch_split(context: RankContext, plan: Plan, draws: SamplerDraws) -> BatchSplit:
    pieces, union = micro_batches(plan), context.options.stands_for
    if pieces > 1 and union > 1:
        raise PlanError(
            "one process cannot compute a batch sampler's batches in the micro-batches that ranks "
            "have; set micro=1 to compare, or give a batch size"
        )
    rank, size = context.data_parallel_rank, context.data_parallel_size
    return BatchSplit(draws.sizes, rank, size, plan.accumulate, pieces, union)


def sampler_draws(context: RankContext, plan: Plan, data: Any, what: str = "train") -> SamplerDraws:
    """Orders of a DataLoader's own sampler, compared between ranks."""

    def agree(epoch: int, digest: str) -> bool:
        return context.process.size == 1 or _agrees(context, f"order/{what}/{epoch}", digest)

    return SamplerDraws(data.sampling, data.samples, plan.seed or 0, agree)


def _agrees(context: RankContext, key: str, digest: str) -> bool:
    """Whether the first rank that came here had the same digest."""
    return bytes(context.store.compare_set(key, "", digest)).decode() == digest


def _refuse_loaders(context: RankContext, plan: Plan, train: Any, word: str) -> None:
    """Steps that are claimed are not known beforehand, so no process can load them early."""
    if plan.loaders:
        raise PlanError(
            f"loaders={plan.loaders} has no effect: {word} claims batches when they are wanted; "
            "leave it out"
        )
    if isinstance(train, DatasetSource) and train.loaders:
        context.notice(
            f"the DataLoader's {train.loaders} workers are not used: {word} claims batches when "
            "they are wanted"
        )
        train.loaders = 0


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
