"""Graph nodes: a traced model as a graph whose nodes can be placed on ranks, with their costs.

Traced nodes are separated freely, with two exceptions: those between which a value is changed in
place, and all uses of what keeps a state (running statistics). Each of these is one graph node, in
its order. Traced nodes that follow from the batch alone belong to no graph node: every segment that
needs them computes them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.errors import PlanError, TaskError
from manyhands.parallel.dataflow.common_subexpressions import changed_in_forward
from manyhands.parallel.pipeline.message_format import encode
from manyhands.parallel.pipeline.node_costs import measure
from manyhands.parallel.trace.leaf_modules import smallest
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
from manyhands.split.graph import GraphNode

# numbers of a traced node: nanoseconds, bytes of its value (-1: it cannot be sent), bytes it keeps
FIELDS = 3


def trace_finely(
    model: nn.Module, example: tuple[Any, ...], ranks: int, call: Callable[..., Any] | None = None
) -> TracedProgram:
    """Trace down to the smallest modules, so that branches inside of blocks are seen; down to
    blocks where that fails."""
    try:
        return trace_modes(model, example, smallest(model), call)
    except Untraceable:
        return trace(model, example, call=call, pieces=ranks)


# -- costs --


def measure_costs(traced: TracedProgram, example: tuple[Any, ...], repeats: int = 5) -> list[int]:
    """FIELDS ints for every traced node of training. One rank measures and broadcasts them: times
    differ from rank to rank."""
    costs, model = measure(traced, example, repeats), traced.model
    buffers = [(b, b.clone()) for b in model.buffers()]
    numbers: list[int] = []
    known: dict[str, Any] = {}
    with torch.no_grad(), torch.random.fork_rng():
        for node, cost in zip(traced.nodes[True], costs, strict=True):
            known[node.name] = run_node(model, node, example, known)
            nbytes = sum(t.nbytes for t in tensors(known[node.name]))
            try:
                encode(known[node.name], [], 0)
            except TaskError:
                nbytes = -1
            numbers += [round(cost.seconds * 1e9), nbytes, cost.kept_bytes]
    for buffer, value in buffers:
        buffer.copy_(value)
    return numbers


# -- traced nodes -> graph nodes --


def group_nodes(traced: TracedProgram) -> list[list[int]]:
    """By graph node, in order: its traced nodes of training. The last one is the output and has
    none."""
    nodes, states = traced.nodes[True], changed_in_forward(traced)
    spans = [(max(a, 0), b) for a, b in traced.inseparable]
    users: dict[int, list[int]] = {}
    for i, s in enumerate(nodes):
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
    if any(a < 0 for a, _ in traced.inseparable):
        # the batch itself may be changed in place: nodes that read it later must see that
        reads = (
            i for i, s in enumerate(nodes) if find_refs(s, Input) or (-1, i) in traced.inseparable
        )
        spans.append((0, max(reads)))
    groups: list[list[int]] = []
    for i, s in enumerate(nodes):
        if s.recomputable:
            continue
        if groups and any(a <= groups[-1][-1] and i <= b for a, b in spans):
            groups[-1].append(i)
        else:
            groups.append([i])
    return [*groups, []]


def evaluation_groups(traced: TracedProgram, groups: list[list[int]]) -> list[list[int]]:
    """The same graph nodes with the traced nodes of evaluation. What only evaluation does belongs
    to the node before it."""
    train, test = ([(s.op, str(s.target)) for s in traced.nodes[mode]] for mode in (True, False))
    same = (
        {b: a for a, b in zip(range(len(train)), range(len(test)), strict=False)}
        if train == test
        else {}
    )
    if train != test:
        for block in SequenceMatcher(None, train, test, autojunk=False).get_matching_blocks():
            same.update({block.b + k: block.a + k for k in range(block.size)})
    of = {i: u for u, some in enumerate(groups) for i in some}
    made: list[list[int]] = [[] for _ in groups]
    u = 0
    for i, s in enumerate(traced.nodes[False]):
        u = max(u, of.get(same.get(i, -1), u))
        if not s.recomputable:
            made[u].append(i)
    return made


def graph_nodes(
    traced: TracedProgram, groups: list[list[int]], costs: Sequence[int], ranks: int, state: float
) -> list[GraphNode]:
    """`costs`: of `measure_costs`; `state`: how many times its bytes a trained parameter takes."""
    nodes, model = traced.nodes[True], traced.model
    if len(costs) != FIELDS * len(nodes):
        raise PlanError(
            f"{len(costs)} numbers for {len(nodes)} nodes, but each has {FIELDS}; "
            "measure the same traced model on rank 0"
        )
    inputs = inputs_of_groups(nodes, traced.output[True], groups)
    total = sum(costs[::FIELDS]) or 1
    together = list(range(len(groups)))  # node -> another that must be on the same rank

    def root(u: int) -> int:
        while together[u] != u:
            u = together[u]
        return u

    made = []
    outside = {n for some in _needs(nodes, traced.output[True], groups) for n in some}
    for u, some in enumerate(groups):
        weights: dict[str, float] = {}
        trains = False
        for i in some:
            for name, p in _parameters(model, nodes[i]):
                weights[name] = (state if p.requires_grad else 1.0) * p.nbytes
                trains = trains or p.requires_grad
        time = sum(costs[FIELDS * i] for i in some)
        # an element of a structure, and what costs nothing, stay with the value they are made of
        light = some and not weights and time * ranks * 500 < total
        if inputs[u] and (light or (some and nodes[some[0]].target is operator.getitem)):
            largest = max(inputs[u], key=lambda t: sum(costs[FIELDS * i + 1] for i in groups[t]))
            together[root(u)] = root(largest)
        for t in inputs[u]:
            if any(costs[FIELDS * i + 1] < 0 for i in groups[t]):
                together[root(u)] = root(t)
        nbytes = sum(max(0, costs[FIELDS * i + 1]) for i in some if nodes[i].name in outside)
        kept = sum(costs[FIELDS * i + 2] for i in some)
        name = nodes[some[-1]].name if some else "output"
        made.append(GraphNode(name, time / 1e9, inputs[u], nbytes, kept, weights, trains=trains))
    return [replace(n, group=root(u)) for u, n in enumerate(made)]


def inputs_of_groups(
    nodes: Sequence[TraceNode], output: Any, groups: list[list[int]]
) -> list[tuple[int, ...]]:
    """By graph node: the graph nodes whose values it needs."""
    of = {nodes[i].name: u for u, some in enumerate(groups) for i in some}
    return [
        tuple(sorted({of[n] for n in some if n in of})) for some in _needs(nodes, output, groups)
    ]


def _needs(nodes: Sequence[TraceNode], output: Any, groups: list[list[int]]) -> list[list[str]]:
    """By graph node: the names of the values that it needs and does not make."""
    needs = []
    for u, some in enumerate(groups):
        own = {nodes[i].name for i in some}
        wanted = [n for i in some for n in ref_names(nodes[i])] + (
            ref_names(output) if u == len(groups) - 1 else []
        )
        needs.append([n for n in dict.fromkeys(wanted) if n not in own])
    return needs


def _parameters(model: nn.Module, node: TraceNode) -> Iterator[tuple[str, Tensor]]:
    if node.op == "module":
        yield from ((str(id(p)), p) for p in model.get_submodule(node.target).parameters())
    for held in find_refs(node, ParameterRef):
        if isinstance(tensor := attribute_at(model, held.name), nn.Parameter):
            yield str(id(tensor)), tensor
