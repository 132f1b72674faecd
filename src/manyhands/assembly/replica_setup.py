"""Replica of a rank: the module replica, and the wrappers that the strategies of the plan need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.assembly.data import Feed, shares_steps
from manyhands.assembly.lbfgs.search_setup import balanced_gradient
from manyhands.assembly.learning_rate.schedule_setup import LearningRate
from manyhands.assembly.parameters import LocalModel
from manyhands.assembly.rank_context import RankContext
from manyhands.assembly.resume import Start
from manyhands.assembly.several_optimizers.step_agreement import StepAgreement
from manyhands.assembly.spec import TrainingSpec
from manyhands.assembly.strategies import replicas_agree, strategies
from manyhands.core import Plan
from manyhands.data.batches import BatchIterator, IndexedBatches
from manyhands.data.sources import Source, TensorSource
from manyhands.embedding.tables import EmbeddingTables
from manyhands.errors import PlanError, TaskError
from manyhands.launch.stopping.block_stop import BlockStop
from manyhands.parallel.pipeline.step_executor import StepExecutor
from manyhands.replica import forward
from manyhands.replica.captured import CapturedReplica
from manyhands.replica.checks.own_buffers import OwnBuffers
from manyhands.replica.distillation import student
from manyhands.replica.module import (
    Agree,
    ModuleReplica,
    NextLoss,
    RunMicroBatches,
    SubSteps,
)
from manyhands.replica.objective import Reduction
from manyhands.replica.several_optimizers.named_optimizers import NamedOptimizers
from manyhands.replica.thinned import thinned
from manyhands.replica.wrapper import ReplicaWrapper
from manyhands.train import Trainer
from manyhands.trainer_parts import StopFlag


def module_replica(
    context: RankContext,
    start: Start,
    spec: TrainingSpec,
    model: LocalModel,
    feed: Feed,
    next_loss: NextLoss,
    synced: bool,
    stop: StopFlag,
    rate: LearningRate,
) -> ModuleReplica:
    """`synced`: BatchNorm exchanges statistics inside the backward pass."""
    plan, size = start.plan, context.data_parallel_size
    agree, shares = replicas_agree(plan), shares_steps(plan)
    nominal = start.global_batch
    if not agree and not shares:
        nominal = max(1, start.global_batch // plan.layout.data)
    rows = None if model.tables is None else model.tables.embeddings
    part = spec.part
    sub_steps = next_loss if isinstance(next_loss, SubSteps) else None

    replica = ModuleReplica(
        model.flat,
        model.update,
        next_loss,
        nominal=nominal,
        clip=plan.clip,
        schedule=rate.schedule,
        scaler=torch.amp.GradScaler(context.device.type) if plan.precision == "fp16" else None,
        # buckets sent among BatchNorm's own exchanges could come in another order on other ranks
        overlap=not synced,
        frozen=[p for p in model.module.parameters() if not p.requires_grad],
        on_first=FirstWindow(context, model, OwnBuffers(model.module)),
        ended=_block_ends(context, feed),
        block_end=_block_end(context, feed, stop),
        steps_alone=not agree,
        on_window=None if rows is None else RowPush(rows, plan, feed.batches, size),
        run_micro_batches=_micro_batches(context, plan, model, feed, next_loss),
        replica_group=None if part is None else part.replica_group(context, model.flat),
        schedule_at=rate.due.at,
        scheduled=rate.due.made,
        schedule_most=rate.due.most,
        reduction="mean" if spec.task is None else _checked(spec.task.reduction, model.tables),
        sub_steps=sub_steps,
        agree=_agreement(context, model.optimizer),
    )
    if rate.due.by_epoch and feed.claims is not None:
        # an epoch of asynchronous ranks is over at a sync point
        feed.claims.on_sync = replica.stepped
    return replica


def _agreement(context: RankContext, optimizer: Optimizer) -> Agree:
    names = list(optimizer.named) if isinstance(optimizer, NamedOptimizers) else []
    return StepAgreement(context.data_group, names, context.device)


def _micro_batches(
    context: RankContext, plan: Plan, model: LocalModel, feed: Feed, next_loss: NextLoss
) -> RunMicroBatches | None:
    """What runs all micro-batches of a step; None: the replica, one after the other."""
    if model.pipeline is not None:
        return PipelineMicroBatches(context, model.pipeline, feed.batches)
    return balanced_gradient(context, plan, model, feed, next_loss)


def _block_ends(context: RankContext, feed: Feed) -> Callable[[], bool]:
    """Whether a block of local steps ends here; where a rank is lost, it is given up at once."""
    if (interruption := context.interruption) is None:
        return feed.limits.block_ends

    def ends() -> bool:
        interruption.check()
        return feed.limits.block_ends()

    return ends


def _block_end(context: RankContext, feed: Feed, stop: StopFlag) -> BlockStop | None:
    """Asynchronous ranks need none: a sync point ends their blocks."""
    if feed.claims is not None:
        return None
    found = BlockStop(
        stop,
        context.store,
        context.rank,
        context.process.size,
        # a round that is done again, in an elastic run, has a store of its own: that of its epoch
        name=lambda: context.group.round,
        # a quarter of the time to leave: the rest is for the last steps, merge and checkpoint
        agree_s=context.plan.grace_s / 4,
    )
    feed.limits.early = found
    context.to_close.append(found.close)
    return found


@dataclass
class FirstWindow:
    """What the first step of a run shows: parameters and buffers that train otherwise than users
    may think."""

    context: RankContext
    model: LocalModel
    buffers: OwnBuffers

    def __call__(self, unused: list[str], views: int) -> None:
        context = self.context
        if context.data_parallel_size > 1 and (changed := self.buffers.changed()):
            context.warn(
                f"buffer {changed[0]} changes in the forward pass: each rank updates its own, by "
                "its own batches, and nothing merges them (BatchNorm's are merged); "
                "manyhands verify shows what that changes"
            )
        if not context.splits_model and len(unused) == views:
            whose = "model" if views == len(self.model.flat.views) else "optimizer"
            raise TaskError(
                f"the first loss gives no gradient to any of the {whose}'s {len(unused)} "
                f"parameters ({unused[0]}, ...): it was computed by another model, or by a copy; "
                "compute it by the model of the run (in a loop of your own, the one that "
                "run.prepare returned)"
            )
        if unused:
            context.notice(
                "parameters without a gradient in the first round (left as they are): "
                + ", ".join(unused)
            )


def set_reduction(trainer: Trainer, reduction: Reduction) -> None:
    """Of a user's own loop, whose first step says what its losses do over a batch."""
    replica = cast("ModuleReplica | ReplicaWrapper", trainer.replica)
    plain = replica.module_replica if isinstance(replica, ReplicaWrapper) else replica
    plain.optimizer_step.reduction = _checked(reduction, trainer.tables)


def _checked(reduction: Reduction, tables: object) -> Reduction:
    if reduction == "sum" and tables is not None:
        raise PlanError(
            'reduction="sum" adds gradients up, but servers and embedding tables average them over '
            "samples; divide the loss by the samples of the batch, and leave reduction out"
        )
    return reduction


@dataclass
class RowPush:
    """Pushes the gradients of embedding rows when a step's last backward pass is over."""

    rows: EmbeddingTables
    plan: Plan
    batches: BatchIterator
    size: int

    def __call__(self, replica: ModuleReplica) -> None:
        group = replica.optimizer.param_groups[0]
        first = float(group.get("initial_lr", group["lr"]))
        rate = float(group["lr"]) / first if first else 1.0  # the model's schedule holds for rows
        self.rows.push(self._scale(replica), rate)

    def _scale(self, replica: ModuleReplica) -> float:
        """Factor that rescales row gradients to this rank's share of the mean over the step.

        They come from a loss that was multiplied by count / nominal."""
        if not replica.own_count:
            return 1.0
        own, total = self.batches.own, self.batches.total
        # a task may count tokens; ranks divide a step by samples
        mean = replica.nominal * own / replica.own_count
        if shares_steps(self.plan):
            return mean / own * self.plan.strategy.batch_fraction(self.size)
        return mean / max(1, total)


@dataclass
class PipelineMicroBatches:
    """All forward and backward passes of a step, by the pipeline's schedule."""

    context: RankContext
    pipeline: StepExecutor
    batches: BatchIterator

    def __call__(self, scaled: Callable[[Tensor, int], Tensor]) -> tuple[Tensor, int]:
        self.pipeline.round = self.context.group.round
        passed: tuple[Tensor, int] = self.pipeline(scaled, self.batches)
        return passed


# -- wrappers --


@dataclass
class Wrapped:
    """The replica that computes, and the one by which strategies make their state."""

    replica: ModuleReplica | ReplicaWrapper
    known: ModuleReplica | ReplicaWrapper


def wrapped(
    context: RankContext,
    plan: Plan,
    plain: ModuleReplica,
    model: LocalModel,
    next_loss: NextLoss,
    train: Source,
    batches: BatchIterator,
    hooked: bool,
) -> Wrapped:
    """What the plan's strategies need: a student, a thinned replica, or a step as a CUDA graph,
    where nothing is `hooked` into the step."""
    used = strategies(plan).values()
    replica: ModuleReplica | ReplicaWrapper
    if any(strategy.distils for strategy in used):
        replica = student(plain, next_loss)
    else:
        replica = plain if hooked else _captured(context, plan, plain, next_loss, batches)
    if not any(strategy.thins for strategy in used):
        return Wrapped(replica, plain)
    if context.splits_model:
        raise PlanError(
            "merge=skeleton leaves out units of whole layers, which tensor=, pipe= and shard= "
            "split; leave them out"
        )
    thin = thinned(replica, model.module, next_loss, train)
    context.to_close.append(thin.close)
    context.notice(
        f"units of {', '.join(thin.names)} may be left out; everything else is on every rank"
    )
    return Wrapped(thin, thin)


def _captured(
    context: RankContext,
    plan: Plan,
    replica: ModuleReplica,
    next_loss: NextLoss,
    batches: BatchIterator,
) -> ModuleReplica | CapturedReplica:
    """Capture the step as CUDA graphs where that is possible. A strategy that reads gradients needs
    them between the two graphs, so the rank must be alone."""
    alone = context.device.type == "cuda" and context.process.size == 1
    if plan.capture != "auto" or not alone or replica.scaler is not None:
        return replica
    if context.options.float64:  # torch's captured updates round the learning rate to float32
        return replica
    if replica.line_search is not None or isinstance(replica.optimizer, NamedOptimizers):
        return replica
    if not replicas_agree(plan) or not isinstance(next_loss, forward.TaskLoss):
        return replica
    if not isinstance(batches, IndexedBatches) or not isinstance(batches.source, TensorSource):
        return replica
    return CapturedReplica(replica, next_loss, batches, context.notice)
