"""Graph partition: the computation graph of a traced model, placed on ranks and cut into segments.

traced = without_common_subexpressions(trace_finely(...))    the same on every rank
costs = measure_costs(traced, example)                       on one rank, which broadcasts them
made = partition(traced, costs, ranks, micros)               the same on every rank again
GraphExecutor(made, group, ...)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from manyhands.parallel.dataflow.graph_nodes import (
    FIELDS,
    evaluation_groups,
    graph_nodes,
    group_nodes,
)
from manyhands.parallel.dataflow.segment_programs import Flow, flow
from manyhands.parallel.pipeline.stage_program import (
    StageModuleBuilder,
    refuse_shared_statistics,
    tied_parameters,
)
from manyhands.parallel.trace.program import TracedProgram
from manyhands.split.graph import GraphNode, TransferCost
from manyhands.split.graph_placement import Placement, place_nodes


@dataclass(frozen=True)
class GraphStage:
    """The module that rank `index` holds, with the parameters of all its segments."""

    module: nn.Module
    index: int
    tied: dict[str, list[int]]  # parameters that other ranks hold too -> the ranks that do


@dataclass(frozen=True)
class GraphPartition:
    """A graph placed on ranks: the flow of each mode, and what each rank holds."""

    nodes: list[GraphNode]  # the last one is the output
    placement: Placement
    flows: dict[bool, Flow]  # by whether the model is in training
    stages: list[GraphStage]  # by rank
    link: TransferCost


def partition(
    traced: TracedProgram,
    costs: Sequence[int],
    ranks: int,
    micros: int = 1,
    *,
    limit: float | None = None,
    state: float = 1.0,
    link: TransferCost | None = None,
) -> GraphPartition:
    """`costs`: of `measure_costs`. `limit`: bytes that a rank may hold; `state`: how many times its
    bytes a parameter takes, with its gradient and its optimizer state."""
    link, groups = link or TransferCost(), group_nodes(traced)
    nodes = graph_nodes(traced, groups, costs, ranks, state)
    placement = place_nodes(nodes, ranks, micros, limit=limit, link=link)
    sizes = {n.name: float(max(0, costs[FIELDS * i + 1])) for i, n in enumerate(traced.nodes[True])}
    flows = {}
    for mode in (True, False):
        own = groups if mode else evaluation_groups(traced, groups)
        flows[mode] = flow(traced, mode, own, nodes, placement.where, link, sizes)
    builder = StageModuleBuilder(traced.model)
    modules = [
        builder.build({mode: found.of_rank(rank) for mode, found in flows.items()})
        for rank in range(ranks)
    ]
    refuse_shared_statistics(modules)
    stages = []
    for rank, (module, tied) in enumerate(zip(modules, tied_parameters(modules), strict=True)):
        stages.append(GraphStage(module, rank, tied))
        module.train(traced.model.training)
    return GraphPartition(nodes, placement, flows, stages, link)
