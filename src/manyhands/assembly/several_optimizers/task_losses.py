"""Losses of a task: one for a batch, or several, where its step yields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import nn

from manyhands.assembly.rank_context import RankContext, reduction_warning
from manyhands.core import Plan
from manyhands.data.batches import BatchIterator
from manyhands.replica.forward import TaskLoss
from manyhands.replica.module import NextLoss
from manyhands.replica.objective import Objective
from manyhands.replica.several_optimizers.step_losses import StepLosses
from manyhands.task import Task
from manyhands.task_forms.named_parts import yields


def loss_maker(
    context: RankContext, plan: Plan, task: Task
) -> Callable[[nn.Module, BatchIterator], NextLoss]:
    """Makes `next_loss` of the module that computes and this rank's batches."""
    objective = Objective(task.loss, task.step, task.reduction)
    warn = reduction_warning(context, plan)
    how = plan.precision, context.device, warn

    def make_loss(module: nn.Module, batches: BatchIterator) -> NextLoss:
        if not yields(task.step):
            return TaskLoss(module, batches, objective, *how)
        names = list(cast(dict[str, Any], task.optimizer))
        return StepLosses(module, batches, objective, names, *how)

    return make_loss
