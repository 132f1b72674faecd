"""A model that no rank holds as a whole: from the user's module to what this rank computes with.

    the whole model, the same on every rank  ->  stages (pipe), of which this rank keeps its own  ->  shares of matrices (tensor)

What is left here are plain parameters under their names in the whole model; `parts` says where they lie in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from manyhands.assembly.memory import (
    MemoryWatch,
    example,
    room,
    watch,
)
from manyhands.assembly.rank_context import RankContext, micro_batches
from manyhands.core import Plan, Tensors
from manyhands.data.sources import Source, StreamSource
from manyhands.errors import PlanError
from manyhands.observe.graph_picture import draw
from manyhands.parallel import feature_linear as summed
from manyhands.parallel.dataflow.common_subexpressions import without_common_subexpressions
from manyhands.parallel.dataflow.graph_executor import GraphExecutor
from manyhands.parallel.dataflow.graph_nodes import FIELDS, measure_costs, trace_finely
from manyhands.parallel.dataflow.partition import GraphPartition, GraphStage, partition
from manyhands.parallel.pipeline import node_costs, stage_modules
from manyhands.parallel.pipeline.executor import PipelineExecutor
from manyhands.parallel.pipeline.step_executor import StepExecutor
from manyhands.parallel.reshard.rank_state import RankState, SlicedState, WholeTensorState
from manyhands.parallel.reshard.resharding import Resharding
from manyhands.parallel.tensor import shard_module
from manyhands.parallel.tensor.dry_run import prepare_dry_run
from manyhands.parallel.trace.program import TracedProgram
from manyhands.parallel.trace.trace_model import trace
from manyhands.parallel.zero.sharded_parameters import ShardedParameters
from manyhands.parallel.zero.sharded_update import ShardUpdate
from manyhands.replica import forward
from manyhands.replica.parameters import ReplicaGroup, ReplicaParameters
from manyhands.replica.update import Update
from manyhands.split import features, schedules, stages
from manyhands.split import tensor as matrices
from manyhands.split.shard_spec import ShardSpec
from manyhands.task import Task

MOST_MEASURED = (
    8  # samples of the batch with which stages are balanced: one rank runs the whole model for that
)
CHUNKS = 2  # stages of a rank under schedule=interleaved


@dataclass
class ModelPart:
    """This rank's part of a model."""

    name: str  # of the whole model, and how large it is
    module: nn.Module
    parts: dict[str, ShardSpec]  # of its parameters and buffers, by their names
    aliases: dict[str, str] = field(
        default_factory=dict
    )  # further names of tied weights in the whole model -> the first
    holders: dict[str, int] = field(
        default_factory=dict
    )  # parameters that several stages hold: how many
    pipeline: StepExecutor | None = None
    watched: MemoryWatch | None = None  # on rank 0: what memory it will need

    def replica_group(self, context: RankContext, flat: ReplicaParameters) -> ReplicaGroup:
        """For sums over the whole model, where each element counts once."""
        copies = lambda name: (
            (context.plan.layout.tensor if self._part(name).dim is None else 1)
            * self.holders.get(name, 1)
        )
        axes = [
            context.axes[axis]
            for axis in ("tensor", "pipe", "shard")
            if context.axes[axis].size > 1
        ]

        def total(values: torch.Tensor) -> None:
            for axis in axes:
                axis.all_reduce({"inside": values}).wait()

        whole = Resharding(self.parts, context.link, self.aliases, context.device)
        gather = lambda held: {k: v for k, v in whole.gather(held).items() if k not in self.aliases}
        return ReplicaGroup(total, [1 / copies(view.name) for view in flat.views], gather)

    def held(
        self,
        context: RankContext,
        module: nn.Module,
        flat: ReplicaParameters,
        update: Update,
    ) -> tuple[Resharding, RankState]:
        """What this rank holds, and how that lies in the whole: for checkpoints."""
        local: RankState
        if isinstance(flat, ShardedParameters):
            assert isinstance(update, ShardUpdate)
            local = SlicedState(flat, update)
            return Resharding(
                local.shard_specs(self.parts), context.link, self.aliases, context.device
            ), local
        local = WholeTensorState(
            module, update, lambda values: context.merging.all_reduce(values).wait()
        )
        return Resharding(self.parts, context.link, self.aliases, context.device), local

    def _part(self, name: str) -> ShardSpec:
        return self.parts[self.aliases.get(name, name)]


def divide(
    context: RankContext, plan: Plan, model: nn.Module, train: Source, task: Task
) -> ModelPart:
    """Cut the whole model, which every rank has made alike, and keep this rank's part."""
    layout, where = plan.layout, plan.layout.coordinates(context.rank)
    _same_whole(context, model)
    looks = layout.tensor * layout.pipe > 1 or bool(
        train.samples
    )  # at a batch; slices of parameters do not need it
    values: Any = _here(example(context, plan, train)) if looks else None
    inputs = forward.inputs_of(values, task.step) if looks else ()
    name, named = _named(model), dict(model.named_parameters())
    first = {id(p): name for name, p in named.items()}
    aliases = {
        n: first[id(p)]
        for n, p in model.named_parameters(remove_duplicate=False)
        if first[id(p)] != n
    }
    cuts: dict[str, matrices.Cut] = {}
    if layout.tensor > 1:
        few = _here(example(context, plan, train, 2))  # it may be computed for real
        if task.step is None:
            tries = prepare_dry_run(
                model, few[:-1], layout.tensor, task.loss, few[-1], plan.sequence
            )
        else:
            tries = prepare_dry_run(
                model, (few,), layout.tensor, sequence=plan.sequence, call=task.step
            )
        derived = matrices.derive(model, tries, layout.tensor, task.tensor)
        cuts = derived.cuts
        for line in derived.notes:
            context.notice(line)
    parts = matrices.shard_specs(
        matrices.named_tensors(model), cuts, layout.tensor, where["tensor"]
    )
    given = forward.names_of(values, task.step) if looks else ()
    call = (lambda module, *inputs: forward.called(module, inputs, given)) if given else None
    graph = _partition(context, plan, model, inputs, call, task) if plan.cut == "graph" else None
    found = (
        []
        if layout.pipe == 1
        else _stages(context, plan, model, inputs, call, task)
        if graph is None
        else graph.stages
    )
    watched = None if not looks else watch(
        context, plan, model, lambda: values, task,
        [frozenset(n for n, _ in s.module.named_parameters()) for s in found] or None,
        {n: (c.dim, c.groups) for n, c in cuts.items()} or None,
    )  # fmt: skip
    _check_stages(context, found)
    mine = [s for s in found if s.index % layout.pipe == where["pipe"]]
    axis = None
    for held in [s.module for s in mine] or [model]:
        if layout.tensor > 1:
            axis = shard_module.apply(held, parts, context.axes["tensor"], sequence=plan.sequence)
        held.to(context.device)
    if not found:
        return ModelPart(name, model, parts, aliases, watched=watched)
    options: dict[str, Any] = {
        "loss": task.loss, "step": task.step, "precision": plan.precision, "device": context.device, "recompute": plan.recompute,
        "axis": axis, "emit": context.recorder.emit, "rank": context.rank,
    }  # fmt: skip
    if graph is not None:
        pipeline: StepExecutor = GraphExecutor(graph, context.axes["pipe"], **options)
    else:
        chunks = len(mine)
        order = lambda rank, micros: schedules.actions(
            plan.schedule, layout.pipe, rank, micros, chunks
        )
        stages = [s for s in mine if isinstance(s, stage_modules.Stage)]
        pipeline = PipelineExecutor(stages, context.axes["pipe"], order, **options)
    _let_go(model, [s.module for s in mine])
    holders = {
        name: len({i % layout.pipe for i in among}) for s in found for name, among in s.tied.items()
    }
    return ModelPart(
        name, _joined([s.module for s in mine]), parts, aliases, holders, pipeline, watched
    )


def _check_stages(context: RankContext, found: Sequence[stage_modules.Stage | GraphStage]) -> None:
    pipe = context.plan.layout.pipe
    for s in found:
        if not any(p.requires_grad for p in s.module.parameters()):
            raise PlanError(
                f"stage {s.index} of {len(found)} would have no parameter that trains; cut the model elsewhere (cut=auto looks for it) or "
                f"set pipe={pipe - 1}"
            )
    if context.gathers and any(s.tied for s in found):
        raise PlanError(
            f"the model ties weights over stages of pipe={pipe}, whose gradients zero=3 sends away before they are summed; set zero=2"
        )


def _partition(
    context: RankContext,
    plan: Plan,
    model: nn.Module,
    example: tuple[Any, ...],
    call: Callable[..., Any] | None,
    task: Task,
) -> GraphPartition:
    """Partition the model's graph over the ranks of the pipe axis, by the costs and the memory that one rank has measured; and draw it."""
    with forward.autocast(plan.precision, context.device):
        fine = trace_finely(model, example, plan.layout.pipe, call)
        traced = without_common_subexpressions(fine)
        said = torch.zeros(
            FIELDS * len(traced.nodes[True]) + 2, dtype=torch.int64, device=context.device
        )
        if context.rank == 0:
            limit, state = room(context, model, task)
            few = _few(example)
            costs = [round(x * _rows(example) / _rows(few)) for x in measure_costs(traced, few)]
            said += torch.tensor([*costs, limit, round(state * 1000)])
    context.link.all_reduce({"numbers": said}).wait()
    *numbers, limit, thousandths = said.tolist()
    partition_within = partial(
        partition,
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
            f"{_named(model)} on {plan.layout.pipe} ranks",
        )
        context.notice(
            f"{len(graph.nodes)} nodes of the model's graph over {plan.layout.pipe} ranks: {drawn}"
        )
    return graph


def by_feature(context: RankContext, model: nn.Module, sources: list[Source]) -> ModelPart:
    """Columns of the data and of the first matrix dealt out over `tensor`; the rest of the model is on every rank."""
    axis, known = (
        context.axes["tensor"],
        [s for s in sources if not isinstance(s, StreamSource)],
    )
    if len(known) < len(sources):
        raise PlanError(
            "split=by_feature keeps columns of data that has a length, but a stream was given; give a Dataset or tensors"
        )
    name = _named(model)
    _same_whole(context, model)
    total = known[0].features
    shard, weight = features.columns(total, axis.rank, axis.size), summed.first(model, total)
    assert shard.cols is not None
    parts = features.shard_specs(matrices.named_tensors(model), weight, axis.rank, axis.size)
    summed.apply(
        model, weight, parts[weight], lambda scores: axis.all_reduce({"scores": scores}).wait()
    )
    for source in known:
        source.keep_features(shard.cols)
    return ModelPart(name, model, parts)


def _within(cut: Callable[..., Any], limit: float | None) -> Any:
    """Within the memory that there is, if that can be. If not, what is forecast of the result says so, in numbers and with what to do."""
    if limit is not None:
        with suppress(PlanError):
            return cut(limit=limit)
    return cut(limit=None)


def _stages(
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
        begins = torch.zeros(number - 1, dtype=torch.int64, device=context.device)
        if context.rank == 0:  # one measures for all: times differ from rank to rank
            begins += torch.tensor(
                traced.cuts_at(names, number)
                if names
                else _balanced(context, plan, traced, example, number, task)
            )
    context.link.all_reduce({"begins": begins}).wait()
    found = stage_modules.cut(traced, begins.tolist())
    said = ", ".join(
        f"{i}: {sum(p.numel() for p in s.module.parameters()):,} parameters"
        for i, s in enumerate(found)
    )
    context.notice(
        f"{number} stages ({said}); {micros} micro-batches a step, schedule={plan.schedule}"
    )
    return found


def _balanced(
    context: RankContext,
    plan: Plan,
    traced: TracedProgram,
    example: tuple[Any, ...],
    number: int,
    task: Task,
) -> list[int]:
    """Where stages begin so that the slowest is as fast as can be, and each has the memory that it needs."""
    few = _few(example)
    costs, pipe = node_costs.measure(traced, few), plan.layout.pipe
    crossing = [
        float(c.crossing_bytes) if traced.cuttable(i) else float("inf") for i, c in enumerate(costs)
    ]
    chunks, micros = number // pipe, micro_batches(plan) * plan.accumulate
    limit, state = room(context, traced.model, task)
    cut = partial(
        stages.balance_stages, [c.seconds for c in costs], number, trainable=traced.trainable, crossing=crossing,
        memory=[c.parameter_bytes * state for c in costs],
        activations=[0.0 if plan.recompute else c.kept_bytes * _rows(example) / _rows(few) for c in costs],
        in_flight=[max(1, schedules.max_in_flight(plan.schedule, pipe, s % pipe, micros, chunks) // chunks) for s in range(number)],
    )  # fmt: skip
    return _within(cut, None if context.options.anyway else limit / chunks)


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


def _joined(modules: list[nn.Module]) -> nn.Module:
    """One module that holds what several hold, all under their own names."""
    if len(modules) == 1:
        return modules[0]
    whole = nn.Module()
    for module in modules:
        whole._parameters.update(module._parameters)
        whole._buffers.update(module._buffers)
        whole._non_persistent_buffers_set |= module._non_persistent_buffers_set
    for name in dict.fromkeys(name for module in modules for name in module._modules):
        found = [m for module in modules if (m := module._modules.get(name)) is not None]
        whole._modules[name] = _joined(list({id(m): m for m in found}.values()))
    return whole


def _here(values: Any) -> Any:
    """A model is cut before it is moved to a device, which may not hold all of it."""
    return tree_map(lambda v: v.cpu() if isinstance(v, torch.Tensor) else v, values)


def _let_go(model: nn.Module, kept: list[nn.Module]) -> None:
    """Free what other stages hold: the user's task still refers to the whole model."""
    mine = {id(t) for m in kept for t in (*m.parameters(), *m.buffers())}
    for held in (*model.parameters(), *model.buffers()):
        if id(held) not in mine:
            held.data = torch.empty(0, dtype=held.dtype)


def _named(model: nn.Module) -> str:
    return f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters"


def _same_whole(context: RankContext, model: nn.Module) -> None:
    """All ranks cut the same model: rank 0's, where a script forgot to seed."""
    values: Tensors = {n: v.data for n, v in [*model.named_parameters(), *model.named_buffers()]}
    raw = [v.contiguous().view(-1).view(torch.uint8) for v in values.values() if v.numel()]
    sums = torch.stack([b[i::2].sum(dtype=torch.int64) for b in raw for i in range(2)]).to(
        context.device
    )
    span = torch.cat([sums, -sums])
    context.link.all_reduce({"span": span}, op="max").wait()
    if torch.equal(span[: len(sums)], -span[len(sums) :]):
        return
    for name, value in values.items():
        sent = (
            value.to(context.device)
            if context.rank == 0
            else torch.zeros_like(value, device=context.device)
        )
        context.link.all_reduce({name: sent}).wait()
        value.copy_(sent)
