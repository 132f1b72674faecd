"""Which samples this rank takes at every step, and how many: the walk through the data, or a dealer of steps."""

from __future__ import annotations

import dataclasses

from manyhands.assembly.rank_context import RankContext
from manyhands.assembly.tables import RunTables
from manyhands.core import (
    Plan,
    Position,
    Snapshot,
    Store,
)
from manyhands.data.batches import IndexedBatches, StreamedBatches
from manyhands.data.sources import DatasetSource, Source, StreamSource
from manyhands.data.step_claims import StepClaims
from manyhands.errors import PlanError
from manyhands.split.data import SPLITS, DataSplit

DEFAULT_BATCH = 64


def shares_steps(plan: Plan) -> bool:
    """Whether ranks draw their steps from one counter, each a batch of one rank."""
    return plan.strategy.link is Store and plan.strategy.shares_steps


def batch_sizes(context: RankContext, plan: Plan, saved: Snapshot | None) -> tuple[Plan, int]:
    """A step's samples over all ranks. A resumed run keeps that number on any number of ranks, so it walks the same way."""
    batch = plan.batch or DEFAULT_BATCH
    size = 1 if shares_steps(plan) else context.feeds
    wanted = batch * plan.accumulate * size
    kept = wanted if saved is None else saved.meta["global_batch"]
    if kept != wanted and context.plan.batch is not None:
        context.notice(f"{wanted} samples a step from here on, {kept} before")
    elif kept != wanted:
        context.notice(
            f"keeping {kept} samples a step as before, {-(-kept // size)} or fewer a rank; batch= changes that"
        )
        return dataclasses.replace(plan, batch=batch), kept
    return dataclasses.replace(plan, batch=batch), wanted


def draw(
    context: RankContext,
    plan: Plan,
    train: Source,
    global_batch: int,
    seed: int,
    at: Position,
    serving: RunTables | None,
    borrow: bool,
) -> tuple[IndexedBatches | StreamedBatches, StepClaims | None]:
    rank, size, batch = (
        context.feed,
        context.feeds,
        context.micro_batch(plan.batch or DEFAULT_BATCH),
    )
    if isinstance(train, StreamSource):
        if plan.split == "sampled":
            raise PlanError(
                "split=sampled draws samples by index, but the training data is a stream; leave split out"
            )
        if plan.strategy.link is Store:
            raise PlanError(
                f"merge={plan.merge} lets ranks draw batches by number, but the training data is a stream; give a Dataset with a length"
            )
        context.notice(
            "the training data is a stream: it is read in its own order by every rank, each keeps its part"
        )
        cut = lambda n: DataSplit(n, n, batch, rank, size).step_samples(Position())
        return StreamedBatches(train, cut, global_batch, at, borrow=borrow), None
    if train.samples < size:
        raise PlanError(
            f"data={size} ranks, but only {train.samples} samples: some ranks would never have any; set data={train.samples} or fewer"
        )
    order = SPLITS[plan.split]
    shares, claims = shares_steps(plan), None
    split = DataSplit(
        train.samples, global_batch, batch, 0 if shares else rank, 1 if shares else size
    )
    if plan.strategy.link is Store:
        assert serving is not None
        store = serving.store
        claims = StepClaims(
            split, at, lambda limit: store.claim_step(limit, shares), store.request_sync
        )
        if plan.loaders:
            raise PlanError(
                f"loaders={plan.loaders} has no effect: merge={plan.merge} draws batches when they are wanted; leave it out"
            )
        if isinstance(train, DatasetSource) and train.loaders:
            context.notice(
                f"the DataLoader's {train.loaders} workers are not used: merge={plan.merge} draws batches when they are wanted"
            )
    found = IndexedBatches(
        train,
        lambda epoch: order(train.samples or 0, seed, epoch),
        split,
        at,
        borrow=borrow,
        claims=claims,
    )
    return found, claims
