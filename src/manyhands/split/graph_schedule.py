"""Graph schedule: when every rank computes which segment of which micro-batch, and its simulator.

One global order of all actions is made. A rank computes its own actions in that order, so that
ranks never wait for each other in a circle. At most `window` micro-batches are in flight on a
rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from manyhands.split.graph import GraphNode, TransferCost, segment_edges, segments

BACKWARD = 2 / 3  # of a node's time


class SegmentAction(NamedTuple):
    """One action: the forward (F) or backward pass (B) of a micro-batch through a segment."""

    kind: Literal["F", "B"]
    micro: int
    segment: int


class GraphSchedule(NamedTuple):
    """Graph schedule: the actions of every rank in order, and when they begin."""

    time: float
    lists: list[list[SegmentAction]]  # by rank
    starts: list[list[float]]  # by rank: when each action begins
    in_flight: list[int]  # by rank: micro-batches at the most


def schedule(
    ranks: int,
    where: Sequence[int],
    seconds: Sequence[float],
    edges: Sequence[tuple[int, int, float]],
    micros: int,
    window: int,
    link: TransferCost | None = None,
    backward: bool = True,
) -> GraphSchedule:
    """The schedule of segments, given each one's rank and time, and edges (source, sink, bytes).

    The action that can begin first is next. Of those, a rank prefers backward passes, which free
    memory, then the oldest micro-batch. A segment sees micro-batches in their order."""
    made = _Scheduler(
        ranks, where, seconds, edges, micros, window, link or TransferCost(), backward
    )
    return made.run()


class _Scheduler:
    def __init__(
        self,
        ranks: int,
        where: Sequence[int],
        seconds: Sequence[float],
        edges: Sequence[tuple[int, int, float]],
        micros: int,
        window: int,
        link: TransferCost,
        backward: bool,
    ):
        self.ranks, self.where, self.seconds = ranks, where, seconds
        self.micros, self.window, self.backward = micros, window, backward
        self.ins: list[list[tuple[int, float]]] = [[] for _ in where]
        self.outs: list[list[tuple[int, float]]] = [[] for _ in where]
        for a, b, nbytes in edges:
            lasts = link.seconds_for(nbytes) if where[a] != where[b] else 0.0
            self.ins[b].append((a, lasts))
            self.outs[a].append((b, lasts))
        self.ends: dict[SegmentAction, float] = {}
        # by rank: actions that are ready, and since when
        self.ready: list[dict[SegmentAction, float]] = [{} for _ in range(ranks)]
        self.free, self.begun, self.finished = [0.0] * ranks, [0] * ranks, [0] * ranks
        # by rank and micro-batch: actions until it is finished there
        self.left = [[sum(r == rank for r in where)] * micros for rank in range(ranks)]
        self.in_flight = [0] * ranks

    def run(self) -> GraphSchedule:
        lists: list[list[SegmentAction]] = [[] for _ in range(self.ranks)]
        starts: list[list[float]] = [[] for _ in range(self.ranks)]
        fraction = {"F": 1 - BACKWARD if self.backward else 1.0, "B": BACKWARD}
        for s in range(len(self.where)):
            self._check_ready(SegmentAction("F", 0, s))
        total = len(self.where) * self.micros * (2 if self.backward else 1)
        while len(self.ends) < total:
            start, r, action = self._next()
            del self.ready[r][action]
            lists[r].append(action)
            starts[r].append(start)
            end = start + self.seconds[action.segment] * fraction[action.kind]
            self.free[r] = self.ends[action] = end
            self._count(r, action)
            for later in self._followers(action):
                self._check_ready(later)
        return GraphSchedule(max(self.free), lists, starts, self.in_flight)

    def _check_ready(self, action: SegmentAction) -> None:
        kind, micro, s = action
        if kind == "F":
            needs = [(SegmentAction("F", micro, a), lasts) for a, lasts in self.ins[s]]
        else:
            needs = [
                (SegmentAction("F", micro, s), 0.0),
                *((SegmentAction("B", micro, b), lasts) for b, lasts in self.outs[s]),
            ]
        if micro:
            needs.append((SegmentAction(kind, micro - 1, s), 0.0))
        ends = self.ends
        if action not in ends and all(n in ends for n, _ in needs):
            since = max((ends[n] + lasts for n, lasts in needs), default=0.0)
            self.ready[self.where[s]][action] = since

    def _next(self) -> tuple[float, int, SegmentAction]:
        """(start, rank, action) of the action that can begin first."""
        best: tuple[float, int, int, int, int, SegmentAction] | None = None
        for r in range(self.ranks):
            begun, free = self.begun[r], self.free[r]
            full = begun - self.finished[r] >= self.window
            for action, since in self.ready[r].items():
                fresh = action.kind == "F" and action.micro >= begun
                if fresh and (action.micro > begun or full):
                    continue
                key = (
                    max(since, free),
                    int(action.kind == "F"),
                    action.micro,
                    action.segment,
                    r,
                    action,
                )
                best = key if best is None or key < best else best
        assert best is not None, "the oldest micro-batch can always go on"
        return best[0], best[4], best[5]

    def _count(self, r: int, action: SegmentAction) -> None:
        """Count the micro-batches that are begun and finished on a rank."""
        if action.kind == "F" and action.micro == self.begun[r]:
            self.begun[r] += 1
            self.in_flight[r] = max(self.in_flight[r], self.begun[r] - self.finished[r])
        if action.kind == ("B" if self.backward else "F"):
            left = self.left[r]
            left[action.micro] -= 1
            while self.finished[r] < self.micros and not left[self.finished[r]]:
                self.finished[r] += 1

    def _followers(self, action: SegmentAction) -> list[SegmentAction]:
        """Actions that may have become ready."""
        kind, micro, s = action
        made = [SegmentAction("F", micro, b) for b, _ in self.outs[s]] if kind == "F" else []
        if self.backward:
            made.append(SegmentAction("B", micro, s))
            if kind == "B":
                made += [SegmentAction("B", micro, a) for a, _ in self.ins[s]]
        if micro + 1 < self.micros:
            made.append(SegmentAction(kind, micro + 1, s))
        return made


def simulate(
    nodes: Sequence[GraphNode],
    where: Sequence[int],
    ranks: int,
    micros: int = 1,
    window: int | None = None,
    link: TransferCost | None = None,
) -> GraphSchedule:
    """Simulate a step of `nodes`, node u on rank `where[u]`."""
    found = segments(nodes, where, link)
    segment_of = {u: s for s, segment in enumerate(found) for u in segment.nodes}
    needs = [
        list(dict.fromkeys(str(t) for u in p.nodes for t in nodes[u].inputs if segment_of[t] != s))
        for s, p in enumerate(found)
    ]
    between = segment_edges(
        [p.rank for p in found], [[str(u) for u in p.nodes] for p in found], needs
    )
    edges = [
        (e.source, e.sink, sum(nodes[int(name)].output_bytes for name in e.names)) for e in between
    ]
    seconds = [sum(nodes[u].seconds for u in p.nodes) for p in found]
    return schedule(ranks, [p.rank for p in found], seconds, edges, micros, window or ranks, link)
