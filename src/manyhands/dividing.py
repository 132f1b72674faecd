"""A model that no rank holds as a whole: from the user's module to what this rank computes with.

    the whole model, the same on every rank  ->  stages (pipe), of which this rank keeps its own  ->  shares of matrices (tensor)

What is left here are plain parameters under their names in the whole model; `parts` says where they lie in it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from manyhands.compute import batches as data
from manyhands.compute import features as summed
from manyhands.compute import forward, stages, tensor
from manyhands.compute.assembled import Assembled
from manyhands.compute.flat import FlatParameters
from manyhands.compute.local_state import Local, LocalSlices, LocalState
from manyhands.compute.module import Inside
from manyhands.compute.pieced import Pieced
from manyhands.compute.pieced_probe import attempt
from manyhands.compute.pipeline import Pipeline
from manyhands.compute.sharded import ShardedParameters
from manyhands.compute.sharded_update import ShardUpdate
from manyhands.compute.traced import Traced, trace
from manyhands.compute.update import Update
from manyhands.core import Plan, Tensors
from manyhands.errors import PlanError
from manyhands.site import Site, micro_batches
from manyhands.split import features
from manyhands.split import pipeline as schedules
from manyhands.split import tensor as matrices
from manyhands.split.parts import Part
from manyhands.task import Task

CHUNKS = 2  # stages of a rank under schedule=interleaved


@dataclass
class Division:
    """This rank's part of a model."""

    module: nn.Module
    parts: dict[str, Part]  # of its parameters and buffers, by their names
    aliases: dict[str, str] = field(default_factory=dict)  # further names of tied weights in the whole model -> the first
    holders: dict[str, int] = field(default_factory=dict)  # parameters that several stages hold: how many
    pipeline: Pipeline | None = None

    def inside(self, site: Site, flat: FlatParameters) -> Inside:
        """For sums over the whole model, where each element counts once."""
        copies = lambda name: (site.plan.layout.tensor if self._part(name).dim is None else 1) * self.holders.get(name, 1)
        axes = [site.axes[axis] for axis in ("tensor", "pipe", "shard") if site.axes[axis].size > 1]

        def total(values: torch.Tensor) -> None:
            for axis in axes:
                axis.all_reduce({"inside": values}).wait()

        whole = Assembled(self.parts, site.link, self.aliases, site.device)
        gather = lambda held: {k: v for k, v in whole.gather(held).items() if k not in self.aliases}
        return Inside(total, [1 / copies(piece.name) for piece in flat.pieces], gather)

    def held(
        self, site: Site, module: nn.Module, flat: FlatParameters | ShardedParameters, update: Update | ShardUpdate
    ) -> tuple[Assembled, Local]:
        """What this rank holds, and how that lies in the whole: for checkpoints."""
        local: Local
        if isinstance(flat, ShardedParameters):
            local = LocalSlices(flat, update)
            return Assembled(local.regions(self.parts), site.link, self.aliases, site.device), local
        local = LocalState(module, update, lambda values: site.merging.all_reduce(values).wait())
        return Assembled(self.parts, site.link, self.aliases, site.device), local

    def _part(self, name: str) -> Part:
        return self.parts[self.aliases.get(name, name)]


def divide(site: Site, plan: Plan, model: nn.Module, train: data.Source, task: Task) -> Division:
    """Cut the whole model, which every rank has made alike, and keep this rank's part."""
    layout, where = plan.layout, plan.layout.coordinates(site.rank)
    _same_whole(site, model)
    values = _example(site, plan, train)
    inputs = forward.inputs_of(values, task.step)
    target = values[-1] if task.loss is not None else None
    named = dict(model.named_parameters())
    first = {id(p): name for name, p in named.items()}
    aliases = {n: first[id(p)] for n, p in model.named_parameters(remove_duplicate=False) if first[id(p)] != n}
    cuts: dict[str, matrices.Cut] = {}
    if layout.tensor > 1:
        derived = matrices.derive(model, attempt(model, inputs, layout.tensor, task.loss, target), layout.tensor, task.tensor)
        cuts = derived.cuts
        for line in derived.sentences:
            site.notice(line)
    parts = matrices.parts(matrices.everything(model), cuts, layout.tensor, where["tensor"])
    module, pipeline = model, None
    holders: dict[str, int] = {}
    if layout.pipe > 1:
        pipeline, holders = _pipeline(site, plan, model, inputs, task)
        module = _joined([s.module for s in pipeline.stages])
    if layout.tensor > 1:
        for held in [s.module for s in pipeline.stages] if pipeline is not None else [model]:
            tensor.apply(held, parts, site.axes["tensor"], sequence=plan.sequence)
    return Division(module, parts, aliases, holders, pipeline)


def by_feature(site: Site, model: nn.Module, sources: list[data.Source]) -> Division:
    """Columns of the data and of the first matrix dealt out over `tensor`; the rest of the model is on every rank."""
    axis, known = site.axes["tensor"], [s for s in sources if not isinstance(s, data.StreamSource)]
    if len(known) < len(sources):
        raise PlanError(
            "split=by_feature keeps columns of data that has a length, but a stream was given; give a Dataset or tensors"
        )
    _same_whole(site, model)
    total = known[0].features
    shard, weight = features.columns(total, axis.rank, axis.size), summed.first(model, total)
    assert shard.cols is not None
    parts = features.parts(matrices.everything(model), weight, axis.rank, axis.size)
    summed.apply(model, weight, parts[weight], lambda scores: axis.all_reduce({"scores": scores}).wait())
    for source in known:
        source.keep_features(shard.cols)
    return Division(model, parts)


def _pipeline(site: Site, plan: Plan, model: nn.Module, example: tuple[Any, ...], task: Task) -> tuple[Pipeline, dict[str, int]]:
    layout, chunks = plan.layout, CHUNKS if plan.schedule == "interleaved" else 1
    number, micros = layout.pipe * chunks, micro_batches(plan) * plan.accumulate
    schedules.check(plan.schedule, layout.pipe, micros, chunks)
    names = [] if plan.cut == "auto" else plan.cut.split(",")
    with forward.autocast(plan.precision, site.device):
        traced = trace(model, example, names, pieces=number)
        begins = torch.zeros(number - 1, dtype=torch.int64, device=site.device)
        if site.rank == 0:  # one measures for all: times differ from rank to rank
            begins += torch.tensor(traced.at(names, number) if names else _balanced(traced, example, plan, number))
    site.link.all_reduce({"begins": begins}).wait()
    all_stages = stages.cut(traced, begins.tolist())
    mine = [_Plain(s) for s in all_stages if s.index % layout.pipe == site.axes["pipe"].rank]
    holders = {name: len({i % layout.pipe for i in among}) for s in all_stages for name, among in s.tied.items()}
    said = ", ".join(f"{i}: {sum(p.numel() for p in s.module.parameters()):,} parameters" for i, s in enumerate(all_stages))
    site.notice(f"{number} stages ({said}); {micros} micro-batches a step, schedule={plan.schedule}")
    order = functools.partial(_actions, plan.schedule, layout.pipe, chunks)
    pipeline = Pipeline(
        mine, site.axes["pipe"], order, loss=task.loss, step=task.step, precision=plan.precision, device=site.device,
        recompute=plan.recompute, emit=site.recorder.emit, rank=site.rank,
    )  # fmt: skip
    return pipeline, holders


def _balanced(traced: Traced, example: tuple[Any, ...], plan: Plan, number: int) -> list[int]:
    """Where stages begin so that the slowest is as fast as can be."""
    costs = stages.measure(traced, example)
    crossing = [float(c.crossing_bytes) if traced.cuttable(i) else float("inf") for i, c in enumerate(costs)]
    return schedules.contiguous([c.seconds for c in costs], number, counts=traced.weighty, crossing=crossing)


def _actions(schedule: str, ranks: int, chunks: int, rank: int, micros: int) -> list[schedules.Action]:
    return schedules.actions(schedule, ranks, rank, micros, chunks)


class _Plain:
    """A stage that passes on whole tensors where matrices are split too: only those can be sent."""

    def __init__(self, stage: stages.Stage):
        self._stage, self.module, self.tied = stage, stage.module, stage.tied

    def forward(self, inputs: tuple[Any, ...], values: dict[str, Any]) -> dict[str, Any]:
        given = self._stage.forward(inputs, values)
        if self._stage.last:
            return given
        return {name: value.gather() if isinstance(value, Pieced) else value for name, value in given.items()}


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


def _example(site: Site, plan: Plan, train: data.Source) -> Any:
    """One micro-batch."""
    if isinstance(train, data.StreamSource) or not train.samples:
        raise PlanError(
            "a model is split by looking at what it does with a batch, but the training data is a stream; give a Dataset"
        )
    count = min(train.samples, site.micro_batch(plan.batch or 1))
    return train.fetch(torch.arange(count, device=train.device if isinstance(train, data.TensorSource) else "cpu"))


def _same_whole(site: Site, model: nn.Module) -> None:
    """All ranks cut the same model: rank 0's, where a script forgot to seed."""
    values: Tensors = {n: v.data for n, v in [*model.named_parameters(), *model.named_buffers()]}
    sums = torch.stack([v.double().sum() + v.double().square().sum() for v in values.values()])
    span = torch.cat([sums, -sums])
    site.link.all_reduce({"span": span}, op="max").wait()
    if torch.equal(span[: len(sums)], -span[len(sums) :]):
        return
    if site.rank != 0:
        for value in values.values():
            value.zero_()
    site.link.all_reduce(values).wait()
