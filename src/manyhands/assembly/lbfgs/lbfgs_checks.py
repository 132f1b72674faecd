"""Checks of a run under L-BFGS: what leaves a step without one loss and one gradient is refused."""

from __future__ import annotations

import math

from torch import nn

from manyhands.assembly.rank_context import RankContext
from manyhands.assembly.spec import TrainingSpec
from manyhands.assembly.strategies import strategies
from manyhands.core import Plan
from manyhands.data.sources import DatasetSource, Source, StreamSource
from manyhands.embedding.tables import embeddings
from manyhands.errors import PlanError, TaskError
from manyhands.parallel.sync_batchnorm import has_batchnorm
from manyhands.replica.lbfgs.lbfgs import LBFGS
from manyhands.replica.update import has_sparse_gradients, has_step_hooks

LEAST_SHARDS, MANY_SHARDS = 2, 10  # of each rank, where ranks claim them


def check_lbfgs(
    context: RankContext, plan: Plan, spec: TrainingSpec, module: nn.Module, optimizer: LBFGS
) -> None:
    """Refuse what would make the losses of one line search those of different functions."""
    _check_plan(plan)
    _check_model(module, optimizer)
    if spec.closures is None:
        _check_data(context, plan, spec.train)
    else:
        _check_closures(context, plan, optimizer)
    if optimizer.balance and context.process.size > 1:
        _check_balance(context, plan, spec)


def _check_plan(plan: Plan) -> None:
    for word, strategy in strategies(plan).items():
        name = getattr(plan, word)
        if name != "all_reduce":
            if strategy.sends == "gradients":
                why = "does not give the gradient of one loss to all ranks"
            else:
                why = "lets replicas take steps of their own, by losses and gradients of their own"
            raise PlanError(
                f"{word}={name} {why}, but the curvature pairs of LBFGS compare gradients of one "
                "loss, at parameters that only its own steps have moved; leave "
                f"{word}= out (all_reduce), or use SGD, Adam or AdamW"
            )
    if plan.codec is not None:
        raise PlanError(
            f"compress={plan.compress} changes the gradient that is merged, and the line search of "
            "LBFGS compares its slope with the loss; leave compress= out"
        )
    if plan.precision != "fp32":
        raise PlanError(
            f"precision={plan.precision} rounds losses more coarsely than the steps of a line "
            "search differ; leave precision= out for LBFGS"
        )
    if plan.clip is not None:
        raise PlanError(
            f"clip={plan.clip:g} changes the gradient, and LBFGS needs that of the loss; the line "
            "search bounds its steps; leave clip= out"
        )
    if plan.elastic is not None:
        raise PlanError(
            f"elastic={plan.elastic} does the round of a lost rank again with fewer ranks, which "
            "LBFGS does not support yet; leave elastic= out (restarts=3 starts the run again from "
            "its last checkpoint), or use SGD, Adam or AdamW"
        )


def _check_model(module: nn.Module, optimizer: LBFGS) -> None:
    if embeddings(module):
        raise TaskError(
            "rows of mh.Embedding are updated where they are stored, at every evaluation of a line "
            "search; use nn.Embedding with LBFGS, or another optimizer"
        )
    if has_sparse_gradients(module):
        raise TaskError(
            "an embedding with sparse=True gives sparse gradients, but the directions of LBFGS are "
            "dense; set sparse=False"
        )
    if has_step_hooks(optimizer):
        raise TaskError(
            "the optimizer has a hook before or after its step, but a step of LBFGS evaluates many "
            "gradients inside; leave the hook out"
        )


def _check_data(context: RankContext, plan: Plan, train: Source) -> None:
    if isinstance(train, StreamSource):
        raise TaskError(
            "LBFGS reads the samples of a step several times, but the training data is a stream, "
            "which is read once; give a Dataset with a length"
        )
    if plan.split == "by_feature":
        raise PlanError("split=by_feature is not known to LBFGS; leave split= out")
    if plan.loaders:
        raise PlanError(
            f"loaders={plan.loaders} fetches every sample once a step, and LBFGS evaluates a batch "
            "several times; leave it out"
        )
    if isinstance(train, DatasetSource) and train.loaders:
        context.notice(
            f"the DataLoader's {train.loaders} workers are not used: LBFGS evaluates a batch "
            "several times"
        )
        train.loaders = 0


def _check_closures(context: RankContext, plan: Plan, optimizer: LBFGS) -> None:
    """Of a loop of the user's, which computes a batch itself, whole and as often as it is asked."""
    if optimizer.balance:
        raise TaskError(
            "LBFGS(balance=True) lets ranks claim parts of each other's batches, but a loop of "
            "your own computes its batch itself; leave balance out, or give it as a task()"
        )
    several = {f"accumulate={plan.accumulate}": plan.accumulate > 1}
    several[f"micro={plan.micro}"] = (plan.micro or 1) > 1
    for word, given in several.items():
        if given:
            raise PlanError(
                f"{word} makes one step of several batches, but run.step(closure) evaluates one "
                f"batch for a step of LBFGS; leave {word.partition('=')[0]}= out, and let the "
                "closure go through all of them"
            )


def _check_balance(context: RankContext, plan: Plan, spec: TrainingSpec) -> None:
    """What ranks could not do with shards that they claim one by one."""
    words = {"straggler=rebalance": plan.straggler == "rebalance", "compile=true": plan.compile}
    for word, given in words.items():
        if given:
            raise PlanError(
                f"{word} with LBFGS(balance=True): ranks claim small shards of a step one by one, "
                f"as fast as they are; leave {word} out"
            )
    if context.splits_model:
        raise PlanError(
            "LBFGS(balance=True) lets every rank claim shards for itself, but the ranks of one "
            "replica (pipe=, tensor=, shard=) must compute the same; leave balance out, or use "
            "data= alone"
        )
    if spec.train.sampling.batch_sampler is not None:
        raise TaskError(
            "LBFGS(balance=True) cuts a step into small shards, but the DataLoader's batch sampler "
            "makes the batches; give a batch size, or leave balance out"
        )
    if has_batchnorm(spec.model):
        raise TaskError(
            "LBFGS(balance=True): ranks compute different numbers of shards, so BatchNorm could "
            "not take statistics over all ranks; leave balance out, or use another norm"
        )


def check_batch(
    context: RankContext, plan: Plan, train: Source, global_batch: int, balances: bool
) -> None:
    """Say that a step is not by the full gradient; refuse shards that are too few to claim."""
    samples = train.samples
    assert samples is not None
    size, micro = context.process.size, context.micro_batch(plan.batch or 1)
    shards = -(-min(samples, global_batch) // micro)
    if balances and shards < LEAST_SHARDS * size:
        raise PlanError(
            f"LBFGS(balance=True): a step has {shards} shards of {micro} samples for {size} ranks "
            f"to claim, but {LEAST_SHARDS} or more for each are needed; set micro="
            f"{math.ceil((plan.batch or 1) * MANY_SHARDS * size / min(samples, global_batch))}, "
            f"for {MANY_SHARDS} each"
        )
    if global_batch < samples:
        context.warn(
            f"a step of LBFGS is by {global_batch} of {samples} samples, and the next one by "
            "others: its line search and curvature are those of each batch; batch=ALL (the number "
            "of samples) takes the full gradient, and micro=K computes it in K pieces"
        )
