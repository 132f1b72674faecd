"""Graph placement: a rank for every node of a computation graph, so that a step is short.

Starts are HEFT (Topcuoglu et al. 2002: critical path first) and contiguous runs as in a pipeline.
From each, single nodes move as long as that makes the estimated step shorter:

    time of a step = path of one micro-batch + (micro-batches - 1) x work of the busiest rank

Of the results, the one with the shortest step in the simulator (`graph_schedule`) is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from manyhands.errors import PlanError
from manyhands.split.graph import GraphNode, TransferCost, priorities
from manyhands.split.graph_schedule import simulate

MAX_PLACEMENTS = 4000  # that a search looks at


@dataclass(frozen=True)
class Placement:
    """Placement of a graph's nodes on ranks, and its estimated cost."""

    where: list[int]  # by node: its rank
    window: int  # micro-batches in flight on a rank at the most
    seconds: float  # of a step, by the simulator
    alone: float  # ... on one rank
    memory: list[float]  # bytes by rank


def place_nodes(
    nodes: Sequence[GraphNode],
    ranks: int,
    micros: int = 1,
    *,
    limit: float | None = None,
    link: TransferCost | None = None,
    window: int | None = None,
) -> Placement:
    """The last node, the output, goes to the last rank. Every rank gets weights to train.

    `limit`: bytes of a rank at the most; where they are short, fewer micro-batches are in
    flight."""
    search = _Search(nodes, ranks, micros, link or TransferCost())
    able = sum(any(nodes[u].trainable for u in g) for g in search.groups)
    if able < ranks:
        raise PlanError(
            f"pipe={ranks}, but the model has {able} pieces with parameters to train that can be "
            f"separated; set pipe={able} or less"
        )
    best: Placement | None = None
    least = float("inf")
    for within in range(min(micros, window or ranks), 0, -1):
        for where in search.starts(limit, within):
            search.improve(where, limit, within)
            memory = search.memory(where, within)
            least = min(least, max(memory))
            if limit is not None and max(memory) > limit:
                continue
            if len({where[u] for u, n in enumerate(nodes) if n.trainable}) < ranks:
                continue
            where = _renumbered(where, ranks)
            time = simulate(nodes, where, ranks, micros, within, search.link).time
            if best is None or time < best.seconds:
                alone = micros * sum(n.seconds for n in nodes)
                best = Placement(where, within, time, alone, search.memory(where, within))
        if best is not None:
            return best
    assert limit is not None, "without a limit, every rank gets something"
    held, mib = search.memory([0] * len(nodes), 0)[0], 2**20
    activations = sum(n.activation_bytes for n in nodes)
    raise PlanError(
        f"no placement over pipe={ranks} ranks keeps each within {limit / mib:.1f} MiB: the model "
        f"takes {held / mib:.1f} MiB and {activations / mib:.1f} MiB per micro-batch in flight, "
        f"and the fullest rank {least / mib:.1f} MiB at the least; "
        "use more ranks, smaller micro-batches or recompute=true"
    )


def _renumbered(where: Sequence[int], ranks: int) -> list[int]:
    """The same placement with ranks in the order of their first nodes, that of the output last."""
    seen = [r for r in dict.fromkeys([*where, *range(ranks)]) if r != where[-1]]
    number = {r: i for i, r in enumerate([*seen, where[-1]])}
    return [number[r] for r in where]


class _Search:
    def __init__(self, nodes: Sequence[GraphNode], ranks: int, micros: int, link: TransferCost):
        self.nodes, self.ranks, self.micros, self.link = nodes, ranks, micros, link
        by_group: dict[tuple[str, int], list[int]] = {}
        for u, n in enumerate(nodes):
            key = ("alone", u) if n.group is None else ("group", n.group)
            by_group.setdefault(key, []).append(u)
        self.groups = list(by_group.values())
        self.group_of = {u: g for g, some in enumerate(self.groups) for u in some}
        self.order = priorities(nodes, link)
        users: dict[str, list[int]] = {}
        for u, n in enumerate(nodes):
            for name in n.weights:
                users.setdefault(name, []).append(u)
        self.tied = [
            (some, nodes[some[0]].weights[name]) for name, some in users.items() if len(some) > 1
        ]

    # -- cost of a placement --

    def cost(
        self, where: Sequence[int], limit: float | None, window: int
    ) -> tuple[int, float, float]:
        """Less is better: ranks with nothing to train, bytes over the limit, seconds of a step."""
        nodes, seconds_for = self.nodes, self.link.seconds_for
        free, load, finish = [0.0] * self.ranks, [0.0] * self.ranks, [0.0] * len(nodes)
        sent: dict[tuple[int, int], float] = {}
        for u in self.order:
            r, n = where[u], nodes[u]
            start = free[r]
            for t in n.inputs:
                at = finish[t]
                if where[t] != r:
                    if (t, r) not in sent:
                        nbytes = nodes[t].output_bytes
                        copy = nbytes / self.link.bytes_per_second
                        sent[t, r] = at + 2 * seconds_for(nbytes)  # there, and its gradient back
                        load[r] += copy
                        load[where[t]] += copy
                    at = sent[t, r]
                start = max(start, at)
            free[r] = finish[u] = start + n.seconds
            load[r] += n.seconds
        tied = sum(
            2 * seconds_for(nbytes)
            for users, nbytes in self.tied
            if len({where[u] for u in users}) > 1
        )
        missing = self.ranks - len({where[u] for u, n in enumerate(nodes) if n.trainable})
        over = (
            0.0 if limit is None else sum(max(0.0, m - limit) for m in self.memory(where, window))
        )
        return missing, over, max(finish) + (self.micros - 1) * max(load) + tied

    def memory(self, where: Sequence[int], window: int) -> list[float]:
        """Bytes by rank, with `window` micro-batches in flight."""
        held: list[dict[str, float]] = [{} for _ in range(self.ranks)]
        activations = [0.0] * self.ranks
        for r, n in zip(where, self.nodes, strict=True):
            held[r].update(n.weights)
            activations[r] += n.activation_bytes
        return [sum(h.values()) + window * a for h, a in zip(held, activations, strict=True)]

    def _group_bytes(self, some: Sequence[int], window: int) -> float:
        return sum(
            sum(self.nodes[u].weights.values()) + window * self.nodes[u].activation_bytes
            for u in some
        )

    # -- starts --

    def starts(self, limit: float | None, window: int) -> Iterator[list[int]]:
        yield self._by_path(limit, window)
        yield self._contiguous()
        if limit is not None:
            yield self._by_memory(window)

    def _by_path(self, limit: float | None, window: int) -> list[int]:
        """HEFT: by the longest path to the end, each node to the rank that finishes it first."""
        where: list[int] = [-1] * len(self.nodes)
        free, finish, held = [0.0] * self.ranks, [0.0] * len(self.nodes), [0.0] * self.ranks
        for u in self.order:
            n, choices = self.nodes[u], range(self.ranks)
            mine = self.groups[self.group_of[u]]
            if where[u] >= 0:
                choices = range(where[u], where[u] + 1)
            needs = self._group_bytes(mine, window)
            best: tuple[float, float, int] | None = None
            for r in choices:
                ready = [
                    finish[t]
                    + (
                        0.0
                        if where[t] == r
                        else 2 * self.link.seconds_for(self.nodes[t].output_bytes)
                    )
                    for t in n.inputs
                ]
                end = max([free[r], *ready]) + n.seconds
                full = 0.0 if limit is None or where[u] >= 0 else max(0.0, held[r] + needs - limit)
                best = min(best, (full, end, r)) if best is not None else (full, end, r)
            assert best is not None
            _, finish[u], r = best
            free[r] = finish[u]
            if where[u] < 0:
                held[r] += needs
                for v in mine:
                    where[v] = r
        return where

    def _contiguous(self) -> list[int]:
        """In the order of the nodes, equal work for each rank."""
        total, where, before = sum(n.seconds for n in self.nodes) or 1.0, [0] * len(self.nodes), 0.0
        for some in self.groups:
            seconds = sum(self.nodes[u].seconds for u in some)
            rank = min(self.ranks - 1, int((before + seconds / 2) / total * self.ranks))
            before += seconds
            for u in some:
                where[u] = rank
        return where

    def _by_memory(self, window: int) -> list[int]:
        """The largest group first, each to the emptiest rank."""
        needs = [self._group_bytes(some, window) for some in self.groups]
        held, where = [0.0] * self.ranks, [0] * len(self.nodes)
        for g in sorted(range(len(needs)), key=lambda g: -needs[g]):
            rank = min(range(self.ranks), key=lambda r: held[r])
            held[rank] += needs[g]
            for u in self.groups[g]:
                where[u] = rank
        return where

    def improve(self, where: list[int], limit: float | None, window: int) -> None:
        """Move one group after the other to its best rank, until no move makes the step shorter."""
        best, looks, better = self.cost(where, limit, window), 0, True
        while better and looks < MAX_PLACEMENTS:
            better = False
            for some in self.groups:
                home = where[some[0]]
                for rank in range(self.ranks):
                    if rank == where[some[0]]:
                        continue
                    back = where[some[0]]
                    for u in some:
                        where[u] = rank
                    looks += 1
                    if (now := self.cost(where, limit, window)) < best:
                        best = now
                        continue
                    for u in some:
                        where[u] = back
                better = better or where[some[0]] != home
