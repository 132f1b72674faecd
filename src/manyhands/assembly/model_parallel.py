"""Model parallelism of a rank: from the user's whole module to the part this rank computes with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from manyhands.assembly import stage_cuts
from manyhands.assembly.memory import (
    MemoryWatch,
    example,
    watch,
)
from manyhands.assembly.rank_context import RankContext, reduction_warning
from manyhands.core import Plan, Tensors
from manyhands.data.drawn import DrawnSource
from manyhands.data.sources import Source, StreamSource
from manyhands.errors import PlanError
from manyhands.parallel import feature_linear
from manyhands.parallel.dataflow.graph_executor import GraphExecutor
from manyhands.parallel.dataflow.partition import GraphPartition, GraphStage
from manyhands.parallel.pipeline.executor import PipelineExecutor
from manyhands.parallel.pipeline.stage_modules import Stage
from manyhands.parallel.pipeline.step_executor import StepExecutor
from manyhands.parallel.reshard.rank_state import RankState, SlicedState, WholeTensorState
from manyhands.parallel.reshard.resharding import Resharding
from manyhands.parallel.tensor import shard_module
from manyhands.parallel.tensor.dry_run import prepare_dry_run
from manyhands.parallel.zero.sharded_parameters import ShardedParameters
from manyhands.parallel.zero.sharded_update import ShardUpdate
from manyhands.replica import forward
from manyhands.replica.deferred.unmade import (
    digest,
    is_loaded,
    is_unmade,
    make_parameters,
    place,
    value_of,
)
from manyhands.replica.objective import Objective
from manyhands.replica.parameters import ReplicaGroup, ReplicaParameters
from manyhands.replica.update import Update
from manyhands.split import features, schedules
from manyhands.split import tensor as tensor_split
from manyhands.split.shard_spec import ShardSpec
from manyhands.task import Task

AnyStage = Stage | GraphStage


@dataclass
class ModelPart:
    """This rank's part of a model that is split over ranks."""

    name: str  # of the whole model, with its number of parameters
    module: nn.Module
    specs: dict[str, ShardSpec]  # of its parameters and buffers, by local name
    # further names of tied weights in the whole model -> the first
    aliases: dict[str, str] = field(default_factory=dict)
    # parameters that several stages hold: how many
    holders: dict[str, int] = field(default_factory=dict)
    pipeline: StepExecutor | None = None
    watch: MemoryWatch | None = None  # on rank 0: the memory forecast

    def replica_group(self, context: RankContext, flat: ReplicaParameters) -> ReplicaGroup:
        """For sums over the whole model, in which each element counts once."""
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

        whole = Resharding(self.specs, context.group, self.aliases, context.device)
        gather = lambda held: {k: v for k, v in whole.gather(held).items() if k not in self.aliases}
        return ReplicaGroup(total, [1 / copies(view.name) for view in flat.views], gather)

    def rank_state(
        self,
        context: RankContext,
        module: nn.Module,
        flat: ReplicaParameters,
        update: Update,
    ) -> tuple[Resharding, RankState]:
        """What this rank holds, and where it lies in the whole tensors: for checkpoints."""
        local: RankState
        if isinstance(flat, ShardedParameters):
            assert isinstance(update, ShardUpdate)
            local = SlicedState(flat, update)
            return Resharding(
                local.shard_specs(self.specs), context.group, self.aliases, context.device
            ), local
        local = WholeTensorState(
            module, update, lambda values: context.data_group.all_reduce(values).wait()
        )
        return Resharding(self.specs, context.group, self.aliases, context.device), local

    def _part(self, name: str) -> ShardSpec:
        return self.specs[self.aliases.get(name, name)]


def divide(
    context: RankContext, plan: Plan, model: nn.Module, train: Source, task: Task
) -> ModelPart:
    """Split the whole model, which every rank has made alike, and keep this rank's part."""
    layout, where = plan.layout, plan.layout.coordinates(context.rank)
    _broadcast_model(context, model)
    name, aliases = stage_cuts.described(model), _aliases(model)
    # slices of parameters (shard=) need no look at a batch
    looks = layout.tensor * layout.pipe > 1 or bool(train.samples)
    values: Any = _on_cpu(example(context, plan, train)) if looks else None
    cuts = _tensor_cuts(context, plan, model, train, task) if layout.tensor > 1 else {}
    specs = tensor_split.shard_specs(
        tensor_split.named_tensors(model), cuts, layout.tensor, where["tensor"]
    )
    graph, stages = _stages(context, plan, model, values, task)
    memory = None
    if looks:
        parameters = [frozenset(n for n, _ in s.module.named_parameters()) for s in stages]
        dims = {n: (c.dim, c.groups) for n, c in cuts.items()}
        memory = watch(context, plan, model, lambda: values, task, parameters or None, dims or None)
    _check_stages(context, stages)
    mine = [s for s in stages if s.index % layout.pipe == where["pipe"]]
    axis = None
    for module in [s.module for s in mine] or [model]:
        if layout.tensor > 1:
            axis = shard_module.apply(module, specs, context.axes["tensor"], sequence=plan.sequence)
        if layout.shard == 1 or context.device.type != "cpu":  # else slices are made one by one
            make_parameters(module.parameters())
        module.to(context.device)
    if not stages:
        return ModelPart(name, model, specs, aliases, watch=memory)
    pipeline = _executor(context, plan, task, graph, mine, axis)
    _free_other_stages(model, [s.module for s in mine])
    holders = {
        tied: len({i % layout.pipe for i in among})
        for s in stages
        for tied, among in s.tied.items()
    }
    joined = _joined([s.module for s in mine])
    return ModelPart(name, joined, specs, aliases, holders, pipeline, memory)


def _aliases(model: nn.Module) -> dict[str, str]:
    """Further names of tied weights -> the first name."""
    first = {id(p): name for name, p in model.named_parameters()}
    names = model.named_parameters(remove_duplicate=False)
    return {n: first[id(p)] for n, p in names if first[id(p)] != n}


def _tensor_cuts(
    context: RankContext, plan: Plan, model: nn.Module, train: Source, task: Task
) -> dict[str, tensor_split.Cut]:
    """Which parameters are split over the tensor axis, found by a dry run; rank 0 reports it."""
    size = plan.layout.tensor
    few = _on_cpu(example(context, plan, train, 2))  # it may be computed for real
    if task.step is None:
        tries = prepare_dry_run(model, few[:-1], size, task.loss, few[-1], plan.sequence)
    else:
        tries = prepare_dry_run(model, (few,), size, sequence=plan.sequence, call=task.step)
    derived = tensor_split.derive(model, tries, size, task.tensor)
    for line in derived.notes:
        context.notice(line)
    return derived.cuts


def _stages(
    context: RankContext, plan: Plan, model: nn.Module, values: Any, task: Task
) -> tuple[GraphPartition | None, Sequence[AnyStage]]:
    """All stages of the model over the pipe axis; of cut=graph, its partition too."""
    if plan.layout.pipe == 1:
        return None, []
    inputs = forward.inputs_of(values, task.step)
    given = forward.names_of(values, task.step)
    call = (lambda module, *inputs: forward.called(module, inputs, given)) if given else None
    if plan.cut != "graph":
        return None, stage_cuts.stages(context, plan, model, inputs, call, task)
    graph = stage_cuts.partition(context, plan, model, inputs, call, task)
    return graph, graph.stages


def _executor(
    context: RankContext,
    plan: Plan,
    task: Task,
    graph: GraphPartition | None,
    mine: Sequence[AnyStage],
    axis: Any,
) -> StepExecutor:
    options: dict[str, Any] = {
        "objective": Objective(task.loss, task.step, task.reduction),
        "warn": reduction_warning(context, plan),
        "precision": plan.precision,
        "device": context.device,
        "recompute": plan.recompute,
        "axis": axis,
        "emit": context.recorder.emit,
        "rank": context.rank,
    }
    if graph is not None:
        return GraphExecutor(graph, context.axes["pipe"], **options)
    pipe, chunks = plan.layout.pipe, len(mine)

    def actions(rank: int, micros: int) -> Any:
        return schedules.actions(plan.schedule, pipe, rank, micros, chunks)

    stages = [s for s in mine if isinstance(s, Stage)]
    return PipelineExecutor(stages, context.axes["pipe"], actions, **options)


def _check_stages(context: RankContext, found: Sequence[AnyStage]) -> None:
    pipe = context.plan.layout.pipe
    for s in found:
        if not any(p.requires_grad for p in s.module.parameters()):
            raise PlanError(
                f"stage {s.index} of {len(found)} would have no parameter that trains; cut the "
                f"model elsewhere (cut=auto looks for it) or set pipe={pipe - 1}"
            )
    if context.gathers_parameters and any(s.tied for s in found):
        raise PlanError(
            f"the model ties weights over stages of pipe={pipe}, whose gradients zero=3 sends "
            "away before they are summed; set zero=2"
        )


def by_feature(context: RankContext, model: nn.Module, sources: list[Source]) -> ModelPart:
    """Split columns of the data and of the first matrix over the tensor axis; the rest of the model
    is on every rank."""
    axis = context.axes["tensor"]
    known = [s for s in sources if not isinstance(s, StreamSource | DrawnSource)]
    if len(known) < len(sources):
        raise PlanError(
            "split=by_feature keeps columns of data that has a length, but a stream was given; "
            "give a Dataset or tensors"
        )
    name = stage_cuts.described(model)
    _broadcast_model(context, model)
    total = known[0].features
    shard, weight = (
        features.columns(total, axis.rank, axis.size),
        feature_linear.first(model, total),
    )
    assert shard.cols is not None
    parts = features.shard_specs(tensor_split.named_tensors(model), weight, axis.rank, axis.size)
    feature_linear.apply(
        model, weight, parts[weight], lambda scores: axis.all_reduce({"scores": scores}).wait()
    )
    for source in known:
        source.keep_features(shard.cols)
    return ModelPart(name, model, parts)


def _joined(modules: list[nn.Module]) -> nn.Module:
    """One module that holds the parameters of several, all under their own names."""
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


def _on_cpu(values: Any) -> Any:
    """A model is split before it is moved to a device, which may not hold all of it."""
    return tree_map(lambda v: v.cpu() if isinstance(v, torch.Tensor) else v, values)


def _free_other_stages(model: nn.Module, kept: list[nn.Module]) -> None:
    """Free the parameters of other stages: the user's task still refers to the whole model."""
    mine = {id(t) for m in kept for t in (*m.parameters(), *m.buffers())}
    for held in (*model.parameters(), *model.buffers()):
        if id(held) not in mine:
            place(held, torch.empty(0, dtype=held.dtype))


def _broadcast_model(context: RankContext, model: nn.Module) -> None:
    """All ranks split the same model: rank 0's, where a script forgot to seed."""
    tensors = {n: v for n, v in [*model.named_parameters(), *model.named_buffers()]}
    unmade = torch.tensor([sum(map(is_unmade, tensors.values())), *digest(model)])
    if not _alike(context, unmade):
        make_parameters(tensors.values())
    made = [v for v in tensors.values() if v.numel() and (is_loaded(v) or not is_unmade(v))]
    if not made or _alike(context, torch.stack([s for v in made for s in _sums(value_of(v))])):
        return
    make_parameters(tensors.values())
    values: Tensors = {n: v.data for n, v in tensors.items()}
    for name, value in values.items():
        sent = value.to(context.device)
        context.group.broadcast({name: sent}).wait()
        value.copy_(sent)


def _alike(context: RankContext, numbers: torch.Tensor) -> bool:
    """Whether all ranks have the same numbers."""
    span = torch.cat([numbers, -numbers]).to(context.device)
    context.group.all_reduce({"span": span}, op="max").wait()
    return torch.equal(span[: len(numbers)], -span[len(numbers) :])


def _sums(value: torch.Tensor) -> list[torch.Tensor]:
    """Two numbers that differ where two values do, nearly always."""
    raw = value.detach().contiguous().view(-1).view(torch.uint8).cpu()
    # in pieces: torch makes 8 bytes of every byte first
    return [sum(c.sum(dtype=torch.int64) for c in raw[i::2].split(1 << 20)) for i in range(2)]
