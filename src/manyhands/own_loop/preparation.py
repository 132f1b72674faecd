"""Preparation of an own loop: model, optimizer and data become one rank's trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from manyhands.assembly.data import loader_batch
from manyhands.assembly.drawn_data import check_drawn, drawn_plan
from manyhands.assembly.rank_context import RankContext, warn_of_eval_mode
from manyhands.assembly.spec import TrainingSpec
from manyhands.assembly.trainer import Assembled, assemble
from manyhands.core import Plan
from manyhands.data.drawn import DrawnSource
from manyhands.data.sources import Source, source
from manyhands.embedding.tables import embeddings
from manyhands.errors import PlanError, TaskError
from manyhands.launch.signals import Stop
from manyhands.own_loop.coroutine import ClosureBatches, TrainerCoroutine
from manyhands.own_loop.script import saves_optimizer
from manyhands.plan import words as plan_words
from manyhands.replica.cast import Cast
from manyhands.replica.checks.step_guard import merged_steps

DDP_LINES = (
    "the model is wrapped in DistributedDataParallel, which exchanges gradients itself; give "
    "run.prepare the plain model, and leave out the lines of DDP: init_process_group, "
    "DistributedDataParallel(model), DistributedSampler, no_sync, destroy_process_group"
)


@dataclass
class Prepared:
    """What a loop needs of its trainer."""

    made: Assembled
    plan: Plan
    parameters: list[tuple[str, nn.Parameter]]  # that it trains
    has_rows: bool  # of embedding tables


def prepared(
    context: RankContext,
    coroutine: TrainerCoroutine,
    model: nn.Module,
    optimizer: Optimizer,
    data: Any,
    batch: int | None,
    schedule: LRScheduler | None,
    stop: Stop,
    run: Any,
) -> Prepared:
    """`data` None: the script draws its own batches."""
    _check(context, model, data, batch)
    if data is None:
        check_drawn(model)
        plan = drawn_plan(context.plan)
        train: Source = DrawnSource(context.device)
    else:
        batch = context.plan.batch or batch or loader_batch(data)
        plan = dataclasses.replace(context.plan, batch=batch)
        train = source(data, context.device, "the training data", plan.loaders)
    plan = dataclasses.replace(plan, seed=plan.seed or 0)
    spec = TrainingSpec(
        model.to(context.device),
        lambda _: optimizer,
        None if schedule is None else lambda _: schedule,
        train,
        lambda *_: coroutine.ask,
        # an own loop may change parameters itself (clamp, average), on every rank
        one_copy=False,
        whole_update=saves_optimizer(),
        closures=ClosureBatches(coroutine),
    )
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer.zero_grad = _clearing(coroutine, trained)  # type: ignore[method-assign]
    with merged_steps():
        made = assemble(context, plan, spec, stop, run)
    coroutine.trainer = made.trainer
    warn_of_eval_mode(context, model)
    if plan.precision != "fp32":
        Cast(plan.precision, context.device).over(made.module)
    return Prepared(made, plan, trained, bool(embeddings(model)))


def _check(context: RankContext, model: nn.Module, data: Any, batch: int | None) -> None:
    if context.splits_model:
        axes = plan_words.describe(context.plan).split(" merge=")[0]
        raise PlanError(
            f"{axes} splits the model over ranks, for which manyhands must run it; give it as "
            "a task() with its loss, or use data= alone in a loop of your own"
        )
    if isinstance(model, DistributedDataParallel):
        raise TaskError(DDP_LINES)
    if data is None and batch is not None:
        raise TaskError(
            f"run.prepare was given batch={batch} and no data: the script draws its own batches; "
            "leave batch out, or give the data"
        )


def _clearing(
    coroutine: TrainerCoroutine, trained: list[tuple[str, nn.Parameter]]
) -> Callable[..., None]:
    """`zero_grad` of a prepared optimizer. A step starts without gradients; between two of its
    micro-batches the first one's would be lost."""

    def zero_grad(set_to_none: bool = True) -> None:
        if not coroutine.in_step:
            for _, parameter in trained:
                parameter.grad = None

    return zero_grad
