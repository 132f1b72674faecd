"""Which plans can train with several named optimizers; the others are refused before training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from manyhands.assembly.data import claiming_word
from manyhands.assembly.rank_context import RankContext
from manyhands.assembly.spec import TrainingSpec
from manyhands.assembly.strategies import strategies
from manyhands.core import Group, Plan
from manyhands.embedding.tables import embeddings
from manyhands.errors import PlanError, TaskError
from manyhands.plan import words
from manyhands.replica.several_optimizers.named_optimizers import named_optimizers
from manyhands.task import Task
from manyhands.task_forms.named_parts import yields


def optimizer_maker(task: Task, model: nn.Module) -> Callable[[Any], Optimizer]:
    """Makes the task's optimizer, or a composite of those that it names."""
    if not isinstance(task.optimizer, Mapping):
        return task.optimizer
    named = functools.partial(named_optimizers, model, task.optimizer)
    return lambda parameters: named()


def check_named_task(context: RankContext, plan: Plan, task: Task, model: nn.Module) -> None:
    if isinstance(task.optimizer, Mapping):
        check_named_plan(context, plan, list(task.optimizer), model, yields(task.step))


def check_named_plan(
    context: RankContext, plan: Plan, names: Sequence[str], module: nn.Module, apart: bool
) -> None:
    """Raise where the plan cannot do with named optimizers; `apart`: they make steps of their own,
    several for one batch."""
    named = ", ".join(names)
    if context.splits_model:
        axes = words.describe(plan).split(" merge=")[0]
        raise PlanError(
            f"{axes} splits the model over ranks, but there are several optimizers ({named}), "
            "each of whose parameters every rank holds whole; use data= alone"
        )
    if word := claiming_word(plan):
        raise PlanError(
            f"{word} is asynchronous and makes one step for all parameters, but there are "
            f"several optimizers ({named}); choose a strategy between ranks: merge=all_reduce, "
            "local_sgd, diloco, easgd, d_psgd, ..."
        )
    if plan.elastic is not None:
        raise PlanError(
            f"elastic={plan.elastic}: a process that replaces a dead one takes over the state of "
            f"one optimizer, but there are several ({named}); leave elastic out and use "
            "restarts= or --resume, or give one optimizer with several parameter groups"
        )
    if apart:
        _check_apart(plan, module)


def _check_apart(plan: Plan, module: nn.Module) -> None:
    """Of a step that yields, or of an own loop."""
    if embeddings(module):
        raise PlanError(
            "several optimizers step by losses of their own, but rows of mh.Embedding are pushed "
            "once a batch; use nn.Embedding, or one loss for all (a task whose step returns it)"
        )
    for word, strategy in strategies(plan).items():
        name = f"{word}={getattr(plan, word)}"
        if strategy.distils:
            raise TaskError(
                f"{name} averages the class probabilities of one model(*inputs), but several "
                "optimizers step by losses of their own; choose another merge="
            )
        if strategy.thins:
            raise TaskError(
                f"{name} leaves units out of one forward pass, but several optimizers "
                "step by losses of their own; choose another merge="
            )


def makes_same_steps(plan: Plan, spec: TrainingSpec) -> bool:
    """Whether every rank must make all optimizer steps of a batch, also without samples, because
    some strategy merges each of them; else ranks merge after whole batches only."""
    if spec.task is None:
        return spec.all_shown
    every = strategies(plan).values()
    merged = any(s.link is Group and s.sends == "gradients" for s in every)
    return merged and yields(spec.task.step)
