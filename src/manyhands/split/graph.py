"""Computation graph over ranks: nodes with their costs, segments, and the edges between segments.

    common_calls     calls that compute the same are computed once
    graph_placement  a rank for every node
    segments         runs of one rank's nodes that receive only at their beginning and send only at
                     their end
    segment_edges    which values go from segment to segment; a value is sent to a rank once, and is
                     passed on locally from there
    graph_schedule   when every rank computes which segment of which micro-batch

Everything is a function of the arguments alone, so ranks that agree on the numbers agree on the
result.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class GraphNode:
    """Node of a computation graph. Nodes come in an order in which inputs precede their users."""

    name: str
    seconds: float  # forward and backward, of one micro-batch
    inputs: tuple[int, ...] = ()  # nodes whose values it needs
    output_bytes: float = 0.0
    activation_bytes: float = 0.0  # that its backward pass needs, per micro-batch in flight
    weights: Mapping[str, float] = field(default_factory=dict)  # bytes, with optimizer state
    group: int | None = None  # nodes of one group stay together on one rank
    trains: bool = True  # False: its weights are frozen

    @property
    def trainable(self) -> bool:
        """Whether a rank with this node alone would have something to train."""
        return self.trains and bool(self.weights)


class TransferCost(NamedTuple):
    """Cost of sending a value to another rank: latency and bandwidth."""

    seconds: float = 50e-6
    bytes_per_second: float = 2e9

    def seconds_for(self, nbytes: float) -> float:
        return self.seconds + nbytes / self.bytes_per_second


def common_calls(calls: Sequence[tuple[Hashable | None, Sequence[int]]]) -> list[int]:
    """By call (what it does, whose results it takes): the first call that returns the same.

    None: it does more than compute, and is never replaced."""
    first: list[int] = []
    seen: dict[Hashable, int] = {}
    for i, (does, inputs) in enumerate(calls):
        first.append(
            i if does is None else seen.setdefault((does, tuple(first[t] for t in inputs)), i)
        )
    return first


def priorities(
    nodes: Sequence[GraphNode], link: TransferCost, where: Sequence[int] | None = None
) -> list[int]:
    """All nodes by the longest path from them to the end, the longest first.

    In this order each node comes after its inputs. Without `where`, every value is taken to be
    sent, at half the cost."""
    path = [n.seconds for n in nodes]
    for u in range(len(nodes) - 1, -1, -1):
        for t in nodes[u].inputs:
            far = 0.5 if where is None else float(where[t] != where[u])
            sent = far * 2 * link.seconds_for(nodes[t].output_bytes)
            path[t] = max(path[t], nodes[t].seconds + path[u] + sent)
    return sorted(range(len(nodes)), key=lambda u: (-path[u], u))


class GraphSegment(NamedTuple):
    """Segment: nodes of one rank that run without waiting for another rank in between."""

    rank: int
    nodes: tuple[int, ...]


def segments(
    nodes: Sequence[GraphNode], where: Sequence[int], link: TransferCost | None = None
) -> list[GraphSegment]:
    """The segments, in an order in which each comes after those it receives from.

    A segment receives at its beginning and sends at its end, so no two segments wait for each
    other."""
    sends = {t for u, n in enumerate(nodes) for t in n.inputs if where[t] != where[u]}
    made: list[tuple[int, list[int]]] = []
    current: dict[int, list[int]] = {}
    received: set[tuple[int, int]] = set()  # (node, rank)
    for u in priorities(nodes, link or TransferCost(), where):
        rank = where[u]
        new = {(t, rank) for t in nodes[u].inputs if where[t] != rank} - received
        received |= new
        mine = current.get(rank)
        if mine is None or mine[-1] in sends or new:
            mine = current[rank] = []
            made.append((rank, mine))
        mine.append(u)
    return [GraphSegment(rank, tuple(some)) for rank, some in made]


class SegmentEdge(NamedTuple):
    """Values that one segment passes to another."""

    source: int
    sink: int
    names: tuple[str, ...]


def segment_edges(
    ranks: Sequence[int], makes: Sequence[Sequence[str]], needs: Sequence[Sequence[str]]
) -> list[SegmentEdge]:
    """The edges between segments in order, given the rank, outputs and inputs of each."""
    maker = {name: s for s, some in enumerate(makes) for name in some}
    first: dict[tuple[str, int], int] = {}  # (value, rank) -> the rank's first segment with it
    found: dict[tuple[int, int], list[str]] = {}
    for s, some in enumerate(needs):
        for name in some:
            source = first.setdefault(
                (name, ranks[s]), maker[name] if ranks[maker[name]] == ranks[s] else s
            )
            source = maker[name] if source == s else source
            found.setdefault((source, s), []).append(name)
    return [SegmentEdge(a, b, tuple(some)) for (a, b), some in sorted(found.items())]
