"""Preparation of an own loop: model, optimizer and data become one rank's trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from manyhands.assembly.data import loader_batch
from manyhands.assembly.drawn_data import check_drawn, drawn_plan
from manyhands.assembly.rank_context import RankContext, warn_of_eval_mode
from manyhands.assembly.several_optimizers.named_checks import check_named_plan
from manyhands.assembly.spec import TrainingSpec
from manyhands.assembly.trainer import Assembled, assemble
from manyhands.core import Plan
from manyhands.data.drawn import DrawnSource
from manyhands.data.sources import Source, source
from manyhands.embedding.tables import embeddings
from manyhands.errors import PlanError, TaskError
from manyhands.launch.signals import Stop
from manyhands.own_loop.coroutine import ClosureBatches, TrainerCoroutine
from manyhands.own_loop.loop_parts import LoopParts
from manyhands.own_loop.loop_steps import LoopSteps
from manyhands.own_loop.script import saves_optimizer
from manyhands.plan import words as plan_words
from manyhands.replica.cast import Cast
from manyhands.replica.checks.step_guard import merged_steps
from manyhands.replica.module import NextLoss
from manyhands.replica.several_optimizers.named_optimizers import members


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
    parts: LoopParts,
    data: Any,
    batch: int | None,
    stop: Stop,
    run: Any,
) -> Prepared:
    """`data` None: the script draws its own batches."""
    model, optimizer = parts.model, parts.optimizer
    _check(context, data, batch)
    if data is None:
        check_drawn(model)
        plan = drawn_plan(context.plan)
        train: Source = DrawnSource(context.device)
    else:
        batch = context.plan.batch or batch or loader_batch(data)
        plan = dataclasses.replace(context.plan, batch=batch)
        train = source(data, context.device, "the training data", plan.loaders)
    plan = dataclasses.replace(plan, seed=plan.seed or 0)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    every = [p for _, p in trained]
    next_loss: NextLoss = coroutine.ask
    if parts.names:
        check_named_plan(context, plan, parts.names, model, apart=True)
        next_loss = LoopSteps(coroutine, every, drawn=data is None)
    spec = TrainingSpec(
        model.to(context.device),
        lambda _: optimizer,
        {name: _given(schedule) for name, schedule in parts.schedules.items()} or None,
        train,
        lambda *_: next_loss,
        # an own loop may change parameters itself (clamp, average), on every rank
        one_copy=False,
        whole_update=saves_optimizer(),
        # what such loops do beside steps (clamp a critic, count batches) ranks must do alike
        all_shown=bool(parts.names),
        closures=ClosureBatches(coroutine),
    )
    for each in members(optimizer):
        held = [p for g in each.param_groups for p in g["params"]] if parts.names else every
        each.zero_grad = _clearing(coroutine, held)  # type: ignore[method-assign]
    with merged_steps():
        made = assemble(context, plan, spec, stop, run)
    coroutine.trainer = made.trainer
    for given in parts.computing(model):
        warn_of_eval_mode(context, given)
    for module in parts.computing(made.module) if plan.precision != "fp32" else ():
        Cast(plan.precision, context.device).over(module)
    return Prepared(made, plan, trained, bool(embeddings(model)))


def _given(schedule: LRScheduler) -> Callable[[Any], LRScheduler]:
    return lambda optimizer: schedule


def _check(context: RankContext, data: Any, batch: int | None) -> None:
    if context.splits_model:
        axes = plan_words.describe(context.plan).split(" merge=")[0]
        raise PlanError(
            f"{axes} splits the model over ranks, for which manyhands must run it; give it as "
            "a task() with its loss, or use data= alone in a loop of your own"
        )
    if data is None and batch is not None:
        raise TaskError(
            f"run.prepare was given batch={batch} and no data: the script draws its own batches; "
            "leave batch out, or give the data"
        )


def _clearing(coroutine: TrainerCoroutine, held: list[nn.Parameter]) -> Callable[..., None]:
    """`zero_grad` of a prepared optimizer. A step starts without gradients; between two of its
    micro-batches the first one's would be lost."""

    def zero_grad(set_to_none: bool = True) -> None:
        if not coroutine.in_step:
            for parameter in held:
                parameter.grad = None

    return zero_grad
