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

from manyhands.compute import batches as data
from manyhands.compute import features as summed
from manyhands.compute import forward, stages, tensor
from manyhands.compute.assembled import Assembled
from manyhands.compute.flat import FlatParameters
from manyhands.compute.graph import Graph
from manyhands.compute.graph_common import shortened
from manyhands.compute.graph_cut import FIELDS, Deal, Share, dealt, traced_finely, weigh
from manyhands.compute.local_state import Local, LocalSlices, LocalState
from manyhands.compute.module import Inside
from manyhands.compute.pieced_probe import attempt
from manyhands.compute.pipeline import Pipeline
from manyhands.compute.sharded import ShardedParameters
from manyhands.compute.sharded_update import ShardUpdate
from manyhands.compute.traced import Traced, trace
from manyhands.compute.update import Update
from manyhands.core import Plan, Tensors
from manyhands.errors import PlanError
from manyhands.forecasting import Watch, example, room, watch
from manyhands.observe.graph_picture import draw
from manyhands.site import Site, micro_batches
from manyhands.split import features
from manyhands.split import pipeline as schedules
from manyhands.split import tensor as matrices
from manyhands.split.parts import Part
from manyhands.task import Task

MOST_MEASURED = 8  # samples of the batch with which stages are balanced: one rank runs the whole model for that
CHUNKS = 2  # stages of a rank under schedule=interleaved


@dataclass
class Division:
    """This rank's part of a model."""

    name: str  # of the whole model, and how large it is
    module: nn.Module
    parts: dict[str, Part]  # of its parameters and buffers, by their names
    aliases: dict[str, str] = field(default_factory=dict)  # further names of tied weights in the whole model -> the first
    holders: dict[str, int] = field(default_factory=dict)  # parameters that several stages hold: how many
    pipeline: Pipeline | None = None
    watched: Watch | None = None  # on rank 0: what memory it will need

    def inside(self, site: Site, flat: FlatParameters | ShardedParameters) -> Inside:
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
            assert isinstance(update, ShardUpdate)
            local = LocalSlices(flat, update)
            return Assembled(local.regions(self.parts), site.link, self.aliases, site.device), local
        assert not isinstance(update, ShardUpdate)
        local = LocalState(module, update, lambda values: site.merging.all_reduce(values).wait())
        return Assembled(self.parts, site.link, self.aliases, site.device), local

    def _part(self, name: str) -> Part:
        return self.parts[self.aliases.get(name, name)]


def divide(site: Site, plan: Plan, model: nn.Module, train: data.Source, task: Task) -> Division:
    """Cut the whole model, which every rank has made alike, and keep this rank's part."""
    layout, where = plan.layout, plan.layout.coordinates(site.rank)
    _same_whole(site, model)
    looks = layout.tensor * layout.pipe > 1 or bool(train.samples)  # at a batch; slices of parameters do not need it
    values: Any = _here(example(site, plan, train)) if looks else None
    inputs = forward.inputs_of(values, task.step) if looks else ()
    name, named = _named(model), dict(model.named_parameters())
    first = {id(p): name for name, p in named.items()}
    aliases = {n: first[id(p)] for n, p in model.named_parameters(remove_duplicate=False) if first[id(p)] != n}
    cuts: dict[str, matrices.Cut] = {}
    if layout.tensor > 1:
        few = _here(example(site, plan, train, 2))  # it may be computed for real
        if task.step is None:
            tries = attempt(model, few[:-1], layout.tensor, task.loss, few[-1], plan.sequence)
        else:
            tries = attempt(model, (few,), layout.tensor, sequence=plan.sequence, call=task.step)
        derived = matrices.derive(model, tries, layout.tensor, task.tensor)
        cuts = derived.cuts
        for line in derived.sentences:
            site.notice(line)
    parts = matrices.parts(matrices.everything(model), cuts, layout.tensor, where["tensor"])
    given = forward.names_of(values, task.step) if looks else ()
    call = (lambda module, *inputs: forward.called(module, inputs, given)) if given else None
    deal = _dealt(site, plan, model, inputs, call, task) if plan.cut == "graph" else None
    found = [] if layout.pipe == 1 else _stages(site, plan, model, inputs, call, task) if deal is None else deal.shares
    watched = None if not looks else watch(
        site, plan, model, lambda: values, task,
        [frozenset(n for n, _ in s.module.named_parameters()) for s in found] or None,
        {n: (c.dim, c.groups) for n, c in cuts.items()} or None,
    )  # fmt: skip
    _check_stages(site, found)
    mine = [s for s in found if s.index % layout.pipe == where["pipe"]]
    axis = None
    for held in [s.module for s in mine] or [model]:
        if layout.tensor > 1:
            axis = tensor.apply(held, parts, site.axes["tensor"], sequence=plan.sequence)
        held.to(site.device)
    if not found:
        return Division(name, model, parts, aliases, watched=watched)
    options: dict[str, Any] = {
        "loss": task.loss, "step": task.step, "precision": plan.precision, "device": site.device, "recompute": plan.recompute,
        "axis": axis, "emit": site.recorder.emit, "rank": site.rank,
    }  # fmt: skip
    if deal is not None:
        pipeline: Pipeline = Graph(deal, site.axes["pipe"], **options)
    else:
        chunks = len(mine)
        order = lambda rank, micros: schedules.actions(plan.schedule, layout.pipe, rank, micros, chunks)
        pipeline = Pipeline(mine, site.axes["pipe"], order, **options)
    _let_go(model, [s.module for s in mine])
    holders = {name: len({i % layout.pipe for i in among}) for s in found for name, among in s.tied.items()}
    return Division(name, _joined([s.module for s in mine]), parts, aliases, holders, pipeline, watched)


def _check_stages(site: Site, found: Sequence[stages.Stage | Share]) -> None:
    pipe = site.plan.layout.pipe
    for s in found:
        if not any(p.requires_grad for p in s.module.parameters()):
            raise PlanError(
                f"stage {s.index} of {len(found)} would have no parameter that trains; cut the model elsewhere (cut=auto looks for it) or "
                f"set pipe={pipe - 1}"
            )
    if site.gathers and any(s.tied for s in found):
        raise PlanError(
            f"the model ties weights over stages of pipe={pipe}, whose gradients zero=3 sends away before they are summed; set zero=2"
        )


def _dealt(
    site: Site, plan: Plan, model: nn.Module, example: tuple[Any, ...], call: Callable[..., Any] | None, task: Task
) -> Deal:
    """The model's graph dealt out over the ranks of the pipe axis, by the costs and the memory that one rank has measured; and drawn."""
    with forward.autocast(plan.precision, site.device):
        traced = shortened(traced_finely(model, example, plan.layout.pipe, call))
        said = torch.zeros(FIELDS * len(traced.steps[True]) + 2, dtype=torch.int64, device=site.device)
        if site.rank == 0:
            limit, state = room(site, model, task)
            few = _few(example)
            costs = [round(x * _rows(example) / _rows(few)) for x in weigh(traced, few)]
            said += torch.tensor([*costs, limit, round(state * 1000)])
    site.link.all_reduce({"numbers": said}).wait()
    *numbers, limit, thousandths = said.tolist()
    deal_out = partial(dealt, traced, numbers, plan.layout.pipe, micro_batches(plan) * plan.accumulate, state=thousandths / 1000)
    deal = _within(deal_out, None if site.options.anyway else limit)
    if site.rank == 0:
        drawn = draw(
            deal.nodes, deal.placement.where, site.directory / "graph.svg", f"{_named(model)} on {plan.layout.pipe} ranks"
        )
        site.notice(f"{len(deal.nodes)} nodes of the model's graph over {plan.layout.pipe} ranks: {drawn}")
    return deal


def by_feature(site: Site, model: nn.Module, sources: list[data.Source]) -> Division:
    """Columns of the data and of the first matrix dealt out over `tensor`; the rest of the model is on every rank."""
    axis, known = site.axes["tensor"], [s for s in sources if not isinstance(s, data.StreamSource)]
    if len(known) < len(sources):
        raise PlanError(
            "split=by_feature keeps columns of data that has a length, but a stream was given; give a Dataset or tensors"
        )
    name = _named(model)
    _same_whole(site, model)
    total = known[0].features
    shard, weight = features.columns(total, axis.rank, axis.size), summed.first(model, total)
    assert shard.cols is not None
    parts = features.parts(matrices.everything(model), weight, axis.rank, axis.size)
    summed.apply(model, weight, parts[weight], lambda scores: axis.all_reduce({"scores": scores}).wait())
    for source in known:
        source.keep_features(shard.cols)
    return Division(name, model, parts)


def _within(cut: Callable[..., Any], limit: float | None) -> Any:
    """Within the memory that there is, if that can be. If not, what is forecast of the result says so, in numbers and with what to do."""
    if limit is not None:
        with suppress(PlanError):
            return cut(limit=limit)
    return cut(limit=None)


def _stages(
    site: Site, plan: Plan, model: nn.Module, example: tuple[Any, ...], call: Callable[..., Any] | None, task: Task
) -> Sequence[stages.Stage]:
    """All stages of the model, cut where one rank says."""
    layout, chunks = plan.layout, CHUNKS if plan.schedule == "interleaved" else 1
    number, micros = layout.pipe * chunks, micro_batches(plan) * plan.accumulate
    schedules.check(plan.schedule, layout.pipe, micros, chunks)
    names = [] if plan.cut == "auto" else plan.cut.split(",")
    with forward.autocast(plan.precision, site.device):
        traced = trace(model, example, names, call, pieces=number)
        begins = torch.zeros(number - 1, dtype=torch.int64, device=site.device)
        if site.rank == 0:  # one measures for all: times differ from rank to rank
            begins += torch.tensor(traced.at(names, number) if names else _balanced(site, plan, traced, example, number, task))
    site.link.all_reduce({"begins": begins}).wait()
    found = stages.cut(traced, begins.tolist())
    said = ", ".join(f"{i}: {sum(p.numel() for p in s.module.parameters()):,} parameters" for i, s in enumerate(found))
    site.notice(f"{number} stages ({said}); {micros} micro-batches a step, schedule={plan.schedule}")
    return found


def _balanced(site: Site, plan: Plan, traced: Traced, example: tuple[Any, ...], number: int, task: Task) -> list[int]:
    """Where stages begin so that the slowest is as fast as can be, and each has the memory that it needs."""
    few = _few(example)
    costs, pipe = stages.measure(traced, few), plan.layout.pipe
    crossing = [float(c.crossing_bytes) if traced.cuttable(i) else float("inf") for i, c in enumerate(costs)]
    chunks, micros = number // pipe, micro_batches(plan) * plan.accumulate
    limit, state = room(site, traced.model, task)
    cut = partial(
        schedules.contiguous, [c.seconds for c in costs], number, counts=traced.weighty, crossing=crossing,
        memory=[c.parameter_bytes * state for c in costs],
        kept=[0.0 if plan.recompute else c.kept_bytes * _rows(example) / _rows(few) for c in costs],
        in_flight=[max(1, schedules.most_kept(plan.schedule, pipe, s % pipe, micros, chunks) // chunks) for s in range(number)],
    )  # fmt: skip
    return _within(cut, None if site.options.anyway else limit / chunks)


def _rows(example: tuple[Any, ...]) -> int:
    return max((len(v) for v in tree_leaves(example) if isinstance(v, torch.Tensor) and v.ndim), default=0) or 1


def _few(example: tuple[Any, ...]) -> tuple[Any, ...]:
    few: tuple[Any, ...] = tree_map(lambda v: v[:MOST_MEASURED] if isinstance(v, torch.Tensor) and v.ndim else v, example)
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


def _same_whole(site: Site, model: nn.Module) -> None:
    """All ranks cut the same model: rank 0's, where a script forgot to seed."""
    values: Tensors = {n: v.data for n, v in [*model.named_parameters(), *model.named_buffers()]}
    raw = [v.contiguous().view(-1).view(torch.uint8) for v in values.values() if v.numel()]
    sums = torch.stack([b[i::2].sum(dtype=torch.int64) for b in raw for i in range(2)]).to(site.device)
    span = torch.cat([sums, -sums])
    site.link.all_reduce({"span": span}, op="max").wait()
    if torch.equal(span[: len(sums)], -span[len(sums) :]):
        return
    for name, value in values.items():
        sent = value.to(site.device) if site.rank == 0 else torch.zeros_like(value, device=site.device)
        site.link.all_reduce({name: sent}).wait()
        value.copy_(sent)
