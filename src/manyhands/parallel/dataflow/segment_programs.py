"""Segment programs: what each segment of a partitioned graph runs, receives and sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from manyhands.parallel.dataflow.graph_nodes import inputs_of_groups
from manyhands.parallel.pipeline.stage_program import StageProgram
from manyhands.parallel.trace.program import TracedProgram, TraceNode, ref_names
from manyhands.split.graph import GraphNode, SegmentEdge, TransferCost, segment_edges, segments


@dataclass(frozen=True)
class SegmentProgram:
    """A segment: its rank, its program, and the seconds that it takes."""

    rank: int
    program: StageProgram
    seconds: float


@dataclass(frozen=True)
class Flow:
    """A forward pass in one mode, over all ranks: segments, and the values that go from one to
    another."""

    segments: list[SegmentProgram]
    edges: list[SegmentEdge]
    nbytes: list[float]  # by edge, of the example
    # raises where a batch would run other nodes than those that were traced
    check: Callable[[tuple[Any, ...]], None] | None

    def of_rank(self, rank: int) -> StageProgram:
        """All nodes of a rank, for the parameters that it must hold."""
        mine = [s.program for s in self.segments if s.rank == rank]
        output = next((p.output for p in mine if p.output is not None), None)
        return StageProgram(tuple(n for p in mine for n in p.nodes), (), (), (), output)


def flow(
    traced: TracedProgram,
    mode: bool,
    groups: list[list[int]],
    graph: Sequence[GraphNode],
    where: Sequence[int],
    link: TransferCost,
    sizes: dict[str, float],
) -> Flow:
    """The segments of one mode. `groups`: traced nodes by graph node; `where`: rank of each;
    `sizes`: bytes of values by name."""
    nodes, output = traced.nodes[mode], traced.output[mode]
    inputs = inputs_of_groups(nodes, output, groups)
    own = [replace(n, inputs=t) for n, t in zip(graph, inputs, strict=True)]
    found = segments(own, where, link)
    lists = [[nodes[i] for u in segment.nodes for i in groups[u]] for segment in found]
    recomputable = {s.name: s for s in nodes if s.recomputable}
    makes = [[s.name for s in mine] for mine in lists]
    needs = []
    for s, segment in enumerate(found):
        wanted = [n for node in lists[s] for n in ref_names(node)] + (
            ref_names(output) if len(groups) - 1 in segment.nodes else []
        )
        needs.append(
            [n for n in dict.fromkeys(wanted) if n not in recomputable and n not in set(makes[s])]
        )
    edges = segment_edges([segment.rank for segment in found], makes, needs)
    made = []
    for s, segment in enumerate(found):
        last = len(groups) - 1 in segment.nodes
        sends = tuple(dict.fromkeys(n for e in edges if e.source == s for n in e.names))
        program = _program(lists[s], recomputable, needs[s], sends, output if last else None)
        made.append(
            SegmentProgram(segment.rank, program, sum(own[u].seconds for u in segment.nodes))
        )
    nbytes = [sum(sizes.get(n, 0) for n in e.names) for e in edges]
    return Flow(made, edges, nbytes, traced.size_guards.get(mode))


def _program(
    mine: list[TraceNode],
    recomputable: dict[str, TraceNode],
    receives: list[str],
    sends: tuple[str, ...],
    output: Any,
) -> StageProgram:
    ends = ref_names(output)
    wanted = {n for s in mine for n in ref_names(s)} | {*ends}
    first = []
    for node in reversed(list(recomputable.values())):
        if node.name in wanted:
            first.append(node)
            wanted.update(ref_names(node))
    nodes = [*first[::-1], *mine]
    use = {name: i for i, node in enumerate(nodes) for name in (*ref_names(node), node.name)}
    drops: list[list[str]] = [[] for _ in nodes]
    for name, i in use.items():
        if name not in sends and name not in ends:
            drops[i].append(name)
    return StageProgram(tuple(nodes), tuple(map(tuple, drops)), tuple(receives), sends, output)
