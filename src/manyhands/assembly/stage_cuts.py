"""Stage cuts: where a model is cut over the pipe axis, by costs that rank 0 measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from manyhands.assembly.memory import room
from manyhands.assembly.rank_context import RankContext, micro_batches
from manyhands.core import Plan
from manyhands.errors import PlanError
from manyhands.observe.graph_picture import draw
from manyhands.parallel.dataflow import partition as graphs
from manyhands.parallel.dataflow.common_subexpressions import without_common_subexpressions
from manyhands.parallel.dataflow.graph_nodes import FIELDS, measure_costs, trace_finely
from manyhands.parallel.dataflow.partition import GraphPartition
from manyhands.parallel.pipeline import node_costs, stage_modules
from manyhands.parallel.trace.program import TracedProgram
from manyhands.parallel.trace.trace_model import trace
from manyhands.replica import forward
from manyhands.split import schedules
from manyhands.split.stages import balance_stages
from manyhands.task import Task

MOST_MEASURED = 8  # samples with which stages are balanced: one rank runs the whole model for that
CHUNKS = 2  # stages of a rank under schedule=interleaved


def stages(
    context: RankContext,
    plan: Plan,
    model: nn.Module,
    example: tuple[Any, ...],
    call: Callable[..., Any] | None,
    task: Task,
) -> Sequence[stage_modules.Stage]:
    """All stages of the model, cut where one rank says."""
    layout, chunks = plan.layout, CHUNKS if plan.schedule == "interleaved" else 1
    number, micros = layout.pipe * chunks, micro_batches(plan) * plan.accumulate
    schedules.check(plan.schedule, layout.pipe, micros, chunks)
    names = [] if plan.cut == "auto" else plan.cut.split(",")
    with forward.autocast(plan.precision, context.device):
        traced = trace(model, example, names, call, pieces=number)

        def measured() -> list[int]:
            if names:
                return list(traced.cuts_at(names, number))
            return _balanced(context, plan, traced, example, number, task)

        begins = context.measured_by_rank_0("stages", number - 1, measured)
    found = stage_modules.cut(traced, begins)
    said = ", ".join(
        f"{i}: {sum(p.numel() for p in s.module.parameters()):,} parameters"
        for i, s in enumerate(found)
    )
    context.notice(
        f"{number} stages ({said}); {micros} micro-batches a step, schedule={plan.schedule}"
    )
    return found


def partition(
    context: RankContext,
    plan: Plan,
    model: nn.Module,
    example: tuple[Any, ...],
    call: Callable[..., Any] | None,
    task: Task,
) -> GraphPartition:
    """Partition the model's graph over the ranks of the pipe axis, by the costs and the memory that
    rank 0 has measured; and draw it."""
    with forward.autocast(plan.precision, context.device):
        fine = trace_finely(model, example, plan.layout.pipe, call)
        traced = without_common_subexpressions(fine)

        def measured() -> list[int]:
            limit, state = room(context, model, task)
            few = _few(example)
            costs = [round(x * _rows(example) / _rows(few)) for x in measure_costs(traced, few)]
            return [*costs, round(limit), round(state * 1000)]

        length = FIELDS * len(traced.nodes[True]) + 2
        *numbers, limit, thousandths = context.measured_by_rank_0("graph", length, measured)
    partition_within = partial(
        graphs.partition,
        traced,
        numbers,
        plan.layout.pipe,
        micro_batches(plan) * plan.accumulate,
        state=thousandths / 1000,
    )
    graph = _within(partition_within, None if context.options.anyway else limit)
    if context.rank == 0:
        drawn = draw(
            graph.nodes,
            graph.placement.where,
            context.directory / "graph.svg",
            f"{described(model)} on {plan.layout.pipe} ranks",
        )
        context.notice(
            f"{len(graph.nodes)} nodes of the model's graph over {plan.layout.pipe} ranks: {drawn}"
        )
    return graph


def _balanced(
    context: RankContext,
    plan: Plan,
    traced: TracedProgram,
    example: tuple[Any, ...],
    number: int,
    task: Task,
) -> list[int]:
    """Where stages begin so that the slowest is as fast as possible, and each fits into memory."""
    few = _few(example)
    costs, pipe = node_costs.measure(traced, few), plan.layout.pipe
    crossing = [
        float(c.crossing_bytes) if traced.cuttable(i) else float("inf") for i, c in enumerate(costs)
    ]
    chunks, micros = number // pipe, micro_batches(plan) * plan.accumulate
    limit, state = room(context, traced.model, task)
    rows, measured = _rows(example), _rows(few)
    in_flight = [
        schedules.max_in_flight(plan.schedule, pipe, s % pipe, micros, chunks) // chunks
        for s in range(number)
    ]
    cut = partial(
        balance_stages,
        [c.seconds for c in costs],
        number,
        trainable=traced.trainable,
        crossing=crossing,
        memory=[c.parameter_bytes * state for c in costs],
        activations=[0.0 if plan.recompute else c.kept_bytes * rows / measured for c in costs],
        in_flight=[max(1, n) for n in in_flight],
    )
    return _within(cut, None if context.options.anyway else limit / chunks)


def _within(cut: Callable[..., Any], limit: float | None) -> Any:
    """Cut within the memory limit if possible. If not, cut without it: the memory forecast of the
    result then says so, in numbers and with what to do."""
    if limit is not None:
        with suppress(PlanError):
            return cut(limit=limit)
    return cut(limit=None)


def _rows(example: tuple[Any, ...]) -> int:
    return (
        max(
            (len(v) for v in tree_leaves(example) if isinstance(v, torch.Tensor) and v.ndim),
            default=0,
        )
        or 1
    )


def _few(example: tuple[Any, ...]) -> tuple[Any, ...]:
    few: tuple[Any, ...] = tree_map(
        lambda v: v[:MOST_MEASURED] if isinstance(v, torch.Tensor) and v.ndim else v, example
    )
    return few


def described(model: nn.Module) -> str:
    return f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters"
