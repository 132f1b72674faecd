"""A traced model as a graph over ranks: what is computed once, what may not be parted, and what each rank does in which segment.

    traced = shortened(traced)                     the same on every rank
    numbers = weigh(traced, example)               on one rank, which tells the others: plain ints
    deal = dealt(traced, numbers, ranks, micros)   the same on every rank again
    Graph(deal, group, ...)                        compute/graph

Steps are parted freely, but for those between which something is changed in place, and for all uses of what keeps a state
(running statistics): these are one node, in their order. Steps that follow from the batch alone are done wherever they are needed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.errors import PlanError, TaskError
from manyhands.parallel.dataflow.common_subexpressions import moving
from manyhands.parallel.pipeline.stage_modules import (
    Program,
    _Holding,
    _refuse_shared_statistics,
    measure,
)
from manyhands.parallel.pipeline.transfers import _plain
from manyhands.parallel.trace.program import (
    Input,
    ParameterRef,
    TracedProgram,
    TraceNode,
    attribute_at,
    find_refs,
    ref_names,
    run_node,
    tensors,
)
from manyhands.parallel.trace.source_location import Untraceable
from manyhands.parallel.trace.trace_model import trace, trace_modes
from manyhands.replica.leaf_modules import smallest
from manyhands.split.graph import (
    Node,
    Placement,
    SegmentEdge,
    TransferCost,
    place,
    segments,
    wires,
)

FIELDS = 3  # numbers of a step: nanoseconds, bytes of what it gives (-1: it cannot travel), bytes that it keeps


def traced_finely(
    model: nn.Module, example: tuple[Any, ...], ranks: int, call: Callable[..., Any] | None = None
) -> TracedProgram:
    """Its smallest modules as steps, so that branches inside of blocks are seen; its blocks, where those cannot be opened."""
    try:
        return trace_modes(model, example, smallest(model), call)
    except Untraceable:
        return trace(model, example, call=call, pieces=ranks)


# -- what it costs --


def weigh(traced: TracedProgram, example: tuple[Any, ...], repeats: int = 5) -> list[int]:
    """FIELDS ints for every step of training, to be told to all ranks: times differ from rank to rank."""
    costs, model = measure(traced, example, repeats), traced.model
    buffers = [(b, b.clone()) for b in model.buffers()]
    numbers: list[int] = []
    known: dict[str, Any] = {}
    with torch.no_grad(), torch.random.fork_rng():
        for step, cost in zip(traced.nodes[True], costs, strict=True):
            known[step.name] = run_node(model, step, example, known)
            nbytes = sum(t.nbytes for t in tensors(known[step.name]))
            try:
                _plain(known[step.name], [], 0)
            except TaskError:
                nbytes = -1
            numbers += [round(cost.seconds * 1e9), nbytes, cost.kept_bytes]
    for buffer, value in buffers:
        buffer.copy_(value)
    return numbers


# -- who does what --


@dataclass(frozen=True)
class SegmentProgram:
    """A segment: what it does, and what it hands on by wire."""

    rank: int
    program: Program
    seconds: float


@dataclass(frozen=True)
class Flow:
    """A forward pass in one mode, over all ranks."""

    parts: list[SegmentProgram]
    wires: list[SegmentEdge]
    nbytes: list[float]  # by wire, of the example
    check: Any


@dataclass(frozen=True)
class GraphStage:
    """What rank `index` holds of the model, as a stage of a pipeline would be asked for it."""

    module: nn.Module
    index: int
    tied: dict[str, list[int]]  # its parameters that others hold too -> the ranks that do

    def forward(self, inputs: tuple[Any, ...], values: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError("segments are run one by one")


@dataclass(frozen=True)
class GraphPartition:
    nodes: list[Node]  # the last one is the output
    placement: Placement
    flows: dict[bool, Flow]  # by whether the model is in training
    shares: list[GraphStage]  # by rank
    link: TransferCost


def dealt(
    traced: TracedProgram, numbers: Sequence[int], ranks: int, micros: int = 1, *, limit: float | None = None, state: float = 1.0,
    link: TransferCost | None = None,
) -> GraphPartition:  # fmt: skip
    """`numbers`: of `weigh`. `limit`: bytes that a rank may hold; `state`: how many times the bytes of a parameter it holds, with
    its gradient and what the optimizer keeps."""
    link, units = link or TransferCost(), _units(traced)
    nodes = _nodes(traced, units, numbers, ranks, state)
    placement = place(nodes, ranks, micros, limit=limit, link=link)
    sizes = {
        s.name: float(max(0, numbers[FIELDS * i + 1])) for i, s in enumerate(traced.nodes[True])
    }
    flows = {}
    for mode in (True, False):
        inside = units if mode else _in_evaluation(traced, units)
        flows[mode] = _flow(traced, mode, inside, nodes, placement.where, link, sizes)
    held = _Holding(traced.model)
    modules = [
        held.module({mode: _whole(flow, rank) for mode, flow in flows.items()})
        for rank in range(ranks)
    ]
    _refuse_shared_statistics(modules)
    holds = [{name for name, _ in m.named_parameters()} for m in modules]
    shares = []
    for rank, (mine, module) in enumerate(zip(holds, modules, strict=True)):
        among = {
            name: [r for r, other in enumerate(holds) if name in other] for name in sorted(mine)
        }
        shares.append(
            GraphStage(module, rank, {name: some for name, some in among.items() if len(some) > 1})
        )
        module.train(traced.model.training)
    return GraphPartition(nodes, placement, flows, shares, link)


def _units(traced: TracedProgram) -> list[list[int]]:
    """Steps of training that are one node each, in order; without those that are done again wherever they are needed."""
    steps, states = traced.nodes[True], moving(traced)
    spans = [(max(a, 0), b) for a, b in traced.inseparable]
    users: dict[int, list[int]] = {}
    for i, s in enumerate(steps):
        touched = [
            attribute_at(traced.model, h.name)
            for h in find_refs(s, ParameterRef)
            if h.name in states
        ]
        if s.op == "module":
            touched += traced.model.get_submodule(s.target).buffers()
        for tensor in touched:
            users.setdefault(id(tensor), []).append(i)
    spans += [(some[0], some[-1]) for some in users.values() if len(some) > 1]
    if any(
        a < 0 for a, _ in traced.inseparable
    ):  # the batch itself may be changed: who reads it later must see that
        spans.append(
            (
                0,
                max(
                    i
                    for i, s in enumerate(steps)
                    if find_refs(s, Input) or (-1, i) in traced.inseparable
                ),
            )
        )
    units: list[list[int]] = []
    for i, s in enumerate(steps):
        if s.recomputable:
            continue
        if units and any(a <= units[-1][-1] and i <= b for a, b in spans):
            units[-1].append(i)
        else:
            units.append([i])
    return [*units, []]  # the output


def _nodes(
    traced: TracedProgram, units: list[list[int]], numbers: Sequence[int], ranks: int, state: float
) -> list[Node]:
    steps, model = traced.nodes[True], traced.model
    if len(numbers) != FIELDS * len(steps):
        raise PlanError(
            f"{len(numbers)} numbers for {len(steps)} steps, but each has {FIELDS}; weigh the same traced model on rank 0"
        )
    takes = _takes(steps, traced.output[True], units)
    total = sum(numbers[::FIELDS]) or 1
    group = list(range(len(units)))

    def root(u: int) -> int:
        while group[u] != u:
            u = group[u]
        return u

    nodes = []
    outside = {n for some in _needs(steps, traced.output[True], units) for n in some}
    for u, some in enumerate(units):
        weights: dict[str, float] = {}
        trains = False
        for i in some:
            for name, p in _parameters(model, steps[i]):
                weights[name] = (state if p.requires_grad else 1.0) * p.nbytes
                trains = trains or p.requires_grad
        time = sum(numbers[FIELDS * i] for i in some)
        # what is taken out of a structure, and what costs nothing, stays with what it is made of
        light = some and not weights and time * ranks * 500 < total
        if takes[u] and (light or (some and steps[some[0]].target is operator.getitem)):
            group[root(u)] = root(
                max(takes[u], key=lambda t: sum(numbers[FIELDS * i + 1] for i in units[t]))
            )
        for t in takes[u]:
            if any(numbers[FIELDS * i + 1] < 0 for i in units[t]):
                group[root(u)] = root(t)
        nbytes = sum(max(0, numbers[FIELDS * i + 1]) for i in some if steps[i].name in outside)
        name = steps[some[-1]].name if some else "output"
        nodes.append(
            Node(
                name,
                time / 1e9,
                takes[u],
                nbytes,
                sum(numbers[FIELDS * i + 2] for i in some),
                weights,
                trains=trains,
            )
        )
    return [replace(n, group=root(u)) for u, n in enumerate(nodes)]


def _needs(steps: Sequence[TraceNode], output: Any, units: list[list[int]]) -> list[list[str]]:
    """By node: the names of what it takes from others."""
    made = []
    for u, some in enumerate(units):
        own = {steps[i].name for i in some}
        wanted = [n for i in some for n in ref_names(steps[i])] + (
            ref_names(output) if u == len(units) - 1 else []
        )
        made.append([n for n in dict.fromkeys(wanted) if n not in own])
    return made


def _takes(
    steps: Sequence[TraceNode], output: Any, units: list[list[int]]
) -> list[tuple[int, ...]]:
    of = {steps[i].name: u for u, some in enumerate(units) for i in some}
    return [
        tuple(sorted({of[n] for n in some if n in of})) for some in _needs(steps, output, units)
    ]


def _parameters(model: nn.Module, step: TraceNode) -> Iterator[tuple[str, Tensor]]:
    if step.op == "module":
        yield from ((str(id(p)), p) for p in model.get_submodule(step.target).parameters())
    for held in find_refs(step, ParameterRef):
        if isinstance(tensor := attribute_at(model, held.name), nn.Parameter):
            yield str(id(tensor)), tensor


def _in_evaluation(traced: TracedProgram, units: list[list[int]]) -> list[list[int]]:
    """The same nodes with the steps of evaluation. What only evaluation does belongs to what it comes after."""
    train, test = ([(s.op, str(s.target)) for s in traced.nodes[mode]] for mode in (True, False))
    same = (
        {b: a for a, b in zip(range(len(train)), range(len(test)), strict=False)}
        if train == test
        else {}
    )
    if train != test:
        for block in SequenceMatcher(None, train, test, autojunk=False).get_matching_blocks():
            same.update({block.b + k: block.a + k for k in range(block.size)})
    of = {i: u for u, some in enumerate(units) for i in some}
    made: list[list[int]] = [[] for _ in units]
    u = 0
    for i, s in enumerate(traced.nodes[False]):
        u = max(u, of.get(same.get(i, -1), u))
        if not s.recomputable:
            made[u].append(i)
    return made


def _flow(
    traced: TracedProgram,
    mode: bool,
    units: list[list[int]],
    nodes: Sequence[Node],
    where: Sequence[int],
    link: TransferCost,
    sizes: dict[str, float],
) -> Flow:
    steps, output = traced.nodes[mode], traced.output[mode]
    own = [replace(n, takes=t) for n, t in zip(nodes, _takes(steps, output, units), strict=True)]
    parts = segments(own, where, link)
    lists = [[steps[i] for u in part.nodes for i in units[u]] for part in parts]
    again = {s.name: s for s in steps if s.recomputable}
    makes = [[s.name for s in mine] for mine in lists]
    needs = []
    for s, part in enumerate(parts):
        wanted = [n for step in lists[s] for n in ref_names(step)] + (
            ref_names(output) if len(units) - 1 in part.nodes else []
        )
        needs.append(
            [n for n in dict.fromkeys(wanted) if n not in again and n not in set(makes[s])]
        )
    between = wires([p.rank for p in parts], makes, needs)
    made = []
    for s, part in enumerate(parts):
        last = len(units) - 1 in part.nodes
        gives = tuple(dict.fromkeys(n for w in between if w.source == s for n in w.names))
        made.append(
            SegmentProgram(
                part.rank,
                _program(lists[s], again, needs[s], gives, output, last),
                sum(own[u].seconds for u in part.nodes),
            )
        )
    return Flow(
        made,
        between,
        [sum(sizes.get(n, 0) for n in w.names) for w in between],
        traced.size_guards.get(mode),
    )


def _program(
    mine: list[TraceNode],
    again: dict[str, TraceNode],
    takes: list[str],
    gives: tuple[str, ...],
    output: Any,
    last: bool,
) -> Program:
    ends = ref_names(output) if last else []
    wanted = {n for s in mine for n in ref_names(s)} | {*ends}
    first = []
    for step in reversed(list(again.values())):
        if step.name in wanted:
            first.append(step)
            wanted.update(ref_names(step))
    steps = [*first[::-1], *mine]
    use = {name: i for i, step in enumerate(steps) for name in (*ref_names(step), step.name)}
    drops: list[list[str]] = [[] for _ in steps]
    for name, i in use.items():
        if name not in gives and name not in ends:
            drops[i].append(name)
    return Program(
        tuple(steps), tuple(map(tuple, drops)), tuple(takes), gives, output if last else None
    )


def _whole(flow: Flow, rank: int) -> Program:
    """All that a rank does, for what it must hold."""
    mine = [p.program for p in flow.parts if p.rank == rank]
    output = next((p.output for p in mine if p.output is not None), None)
    return Program(tuple(s for p in mine for s in p.steps), (), (), (), output)
