"""A model in a pipeline, and the same model in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.core import Group
from manyhands.data.batches import Batch
from manyhands.parallel.pipeline.executor import PipelineExecutor
from manyhands.parallel.pipeline.stage_modules import Stage, cut
from manyhands.parallel.trace.trace_model import trace
from manyhands.replica.objective import Objective
from manyhands.split.schedules import actions
from support.paths import zoo_task

NOMINAL = 16.0
Make = Callable[[], nn.Module]


@dataclass
class GivenBatches:
    """A batch iterator over given micro-batches, one step after the other."""

    batches: list[Batch]

    def next(self) -> Batch:
        return self.batches.pop(0)


@dataclass(frozen=True)
class HandStage:
    """A stage written by hand: `call(module, inputs, values)`."""

    module: nn.Module
    call: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], dict[str, Any]]
    tied: dict[str, list[int]] = field(default_factory=dict)

    def forward(self, inputs: tuple[Any, ...], values: dict[str, Any]) -> dict[str, Any]:
        return self.call(self.module, inputs, values)


def chain(layers: Sequence[nn.Module], count: int) -> list[HandStage]:
    """`layers` in a row, cut evenly: one value crosses every cut."""

    def call(module: nn.Module, inputs: tuple[Any, ...], values: dict[str, Any]) -> dict[str, Any]:
        x = module(values["x"] if values else inputs[0])
        return {"output" if module.get_buffer("last") else "x": x}

    stages = []
    for k in range(count):
        module = nn.Sequential(*layers[len(layers) * k // count : len(layers) * (k + 1) // count])
        module.register_buffer("last", torch.tensor(k == count - 1), persistent=False)
        stages.append(HandStage(module, call))
    return stages


def step(values: tuple[Any, ...], sizes: Sequence[int]) -> list[Batch]:
    """The rows of `values` as the micro-batches of one step; of 0 rows: an empty one."""
    cuts, at = [], 0
    for i, n in enumerate(sizes):
        rows = tuple(v[at : at + n] for v in values) if n else None
        cuts.append(Batch(rows, n, i == len(sizes) - 1))
        at += n
    return cuts


def scaled_by_count(loss: Tensor, count: int) -> Tensor:
    return loss * (count / NOMINAL)


def alone(
    model: nn.Module, loss: Callable[..., Tensor], batches: Sequence[Batch]
) -> tuple[float, int]:
    """One process that accumulates the same micro-batches."""
    total, count = 0.0, 0
    for batch in batches:
        if batch.values is not None:
            *inputs, target = batch.values
            one = loss(model(*inputs), target)
            scaled_by_count(one, batch.count).backward()
            total, count = total + float(one.detach()) * batch.count, count + batch.count
    return total, count


def piped(
    group: Group,
    schedule: str,
    chunks: int,
    stages: Sequence[Stage],
    loss: Callable[..., Tensor] | None = None,
    step: Any = None,
    **more: Any,
) -> PipelineExecutor:
    """The pipeline of this rank, of all stages."""
    p = group.size

    def listed(rank: int, micros: int) -> Any:
        return actions(schedule, p, rank, micros, chunks)

    mine = [stages[c * p + group.rank] for c in range(chunks)]
    return PipelineExecutor(mine, group, listed, objective=Objective(loss, step), **more)


def in_zoo(name: str) -> tuple[nn.Module, Callable[..., Tensor], tuple[Tensor, ...]]:
    """A model of the zoo in float64 and without dropout, its loss and its data."""
    task = zoo_task(name)
    model = task.model.double()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if hasattr(part, "dropout") and isinstance(part.dropout, float):
            part.dropout = 0.0
    return model, task.loss, tuple(v.double() if v.is_floating_point() else v for v in task.train)


def traced(model: nn.Module, inputs: tuple[Tensor, ...], count: int) -> list[Any]:
    """Cut into so many stages, each with a share of what has parameters."""
    found = trace(model, inputs, pieces=count)
    heavy = [i for i, weighty in enumerate(found.trainable) if weighty]
    return cut(found, [heavy[len(heavy) * k // count] for k in range(1, count)])


def gradients(stages: Sequence[Stage]) -> dict[str, Tensor | None]:
    return {name: w.grad for stage in stages for name, w in stage.module.named_parameters()}
