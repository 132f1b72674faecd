"""Any computation without cycles over the ranks of a group: who computes what, in which order, and what goes from whom to whom.

    common      calls that compute the same are computed once
    place       a rank for every node: critical path first (HEFT), and contiguous shares as in a pipeline; then single nodes move
                as long as that makes a step shorter; of both results, the one that the simulator below finds to be quicker
    segments    runs of one rank's nodes that need nothing from elsewhere after their beginning and give nothing before their end
    wires       which values go from segment to segment; a value goes to a rank once, and from there on is passed on locally
    schedule    when every rank computes which segment of which micro-batch: its own part of one order of all, so that nobody
                ever waits in a circle; at most `window` micro-batches are begun and not finished on a rank

The time of a step is taken for  path of one micro-batch + (micro-batches - 1) x work of the busiest rank.  Topcuoglu et al. 2002
(HEFT). Everything is a function of the arguments alone, so that ranks that agree on numbers agree on all that follows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from manyhands.errors import PlanError

LOOKS = 4000  # how many placements are tried in the search for a better one
BACK = 2 / 3  # of the time of a node is its way back


@dataclass(frozen=True)
class Node:
    """What is computed in one piece. Nodes come in an order in which each only takes from those before it."""

    name: str
    seconds: float  # forward and back, of one micro-batch
    takes: tuple[int, ...] = ()  # nodes whose values it needs
    nbytes: float = 0.0  # of what it gives
    kept: float = 0.0  # bytes that its way back needs, for each micro-batch under way
    weights: Mapping[str, float] = field(
        default_factory=dict
    )  # bytes of parameters (and what belongs to them) by name
    group: int | None = None  # nodes of one group stay together on one rank
    trains: bool = True  # False: its weights are frozen

    @property
    def counts(self) -> bool:
        """Whether a rank with nothing else would have something to train."""
        return self.trains and bool(self.weights)


class TransferCost(NamedTuple):
    """What it takes to send something to another rank."""

    seconds: float = 50e-6
    bytes_per_second: float = 2e9

    def lasts(self, nbytes: float) -> float:
        return self.seconds + nbytes / self.bytes_per_second


def common(calls: Sequence[tuple[Hashable | None, Sequence[int]]]) -> list[int]:
    """For every call, (what it does, whose results it takes), the first one that gives the same. None: it does more than to
    compute, and stays what it is."""
    first: list[int] = []
    seen: dict[Hashable, int] = {}
    for i, (does, takes) in enumerate(calls):
        first.append(
            i if does is None else seen.setdefault((does, tuple(first[t] for t in takes)), i)
        )
    return first


# -- who --


@dataclass(frozen=True)
class Placement:
    where: list[int]  # by node: its rank
    window: int  # micro-batches under way on a rank at the most
    seconds: float  # of a step, by the simulator
    alone: float  # ... on one rank
    memory: list[float]  # bytes by rank


def place(
    nodes: Sequence[Node], ranks: int, micros: int = 1, *, limit: float | None = None, link: TransferCost | None = None, window: int | None = None
) -> Placement:  # fmt: skip
    """The last node, of which the result is, goes to the last rank. Every rank gets weights to train. `limit`: bytes that a
    rank may hold; where they are short, fewer micro-batches are under way at a time."""
    search = _Search(nodes, ranks, micros, link or TransferCost())
    able = sum(any(nodes[u].counts for u in g) for g in search.groups)
    if able < ranks:
        raise PlanError(
            f"pipe={ranks}, but the model has {able} pieces with parameters to train that can be parted; set pipe={able} or less"
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
            if len({where[u] for u, n in enumerate(nodes) if n.counts}) < ranks:
                continue
            where = _numbered(where, ranks)
            time = simulate(nodes, where, ranks, micros, within, search.link).time
            if best is None or time < best.seconds:
                best = Placement(
                    where,
                    within,
                    time,
                    micros * sum(n.seconds for n in nodes),
                    search.memory(where, within),
                )
        if best is not None:
            return best
    assert limit is not None, "without a limit, every rank gets something"
    held = search.memory([0] * len(nodes), 0)[0]
    kept = sum(n.kept for n in nodes)
    raise PlanError(
        f"no placement over pipe={ranks} ranks keeps each within {limit / 2**20:.1f} MiB: the model takes {held / 2**20:.1f} MiB and "
        f"{kept / 2**20:.1f} MiB per micro-batch under way, and the fullest rank {least / 2**20:.1f} MiB at the least; "
        "use more ranks, smaller micro-batches or recompute=true"
    )


def _numbered(where: Sequence[int], ranks: int) -> list[int]:
    """The same, with ranks in the order of their first nodes, but the one of the last node last."""
    seen = [r for r in dict.fromkeys([*where, *range(ranks)]) if r != where[-1]]
    number = {r: i for i, r in enumerate([*seen, where[-1]])}
    return [number[r] for r in where]


class _Search:
    def __init__(self, nodes: Sequence[Node], ranks: int, micros: int, link: TransferCost):
        self.nodes, self.ranks, self.micros, self.link = nodes, ranks, micros, link
        by_group: dict[tuple[str, int], list[int]] = {}
        for u, n in enumerate(nodes):
            by_group.setdefault(("alone", u) if n.group is None else ("group", n.group), []).append(
                u
            )
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

    # -- what a placement is worth --

    def worth(
        self, where: Sequence[int], limit: float | None, window: int
    ) -> tuple[int, float, float]:
        """Less is better: ranks with nothing to train, bytes over the limit, seconds of a step."""
        nodes, lasts = self.nodes, self.link.lasts
        free, load, finish = [0.0] * self.ranks, [0.0] * self.ranks, [0.0] * len(nodes)
        sent: dict[tuple[int, int], float] = {}
        for u in self.order:
            r, n = where[u], nodes[u]
            start = free[r]
            for t in n.takes:
                at = finish[t]
                if where[t] != r:
                    if (t, r) not in sent:
                        copy = nodes[t].nbytes / self.link.bytes_per_second
                        sent[t, r] = at + 2 * lasts(nodes[t].nbytes)  # there, and its gradient back
                        load[r] += copy
                        load[where[t]] += copy
                    at = sent[t, r]
                start = max(start, at)
            free[r] = finish[u] = start + n.seconds
            load[r] += n.seconds
        tied = sum(
            2 * lasts(nbytes) for users, nbytes in self.tied if len({where[u] for u in users}) > 1
        )
        missing = self.ranks - len({where[u] for u, n in enumerate(nodes) if n.counts})
        over = (
            0.0 if limit is None else sum(max(0.0, m - limit) for m in self.memory(where, window))
        )
        return missing, over, max(finish) + (self.micros - 1) * max(load) + tied

    def memory(self, where: Sequence[int], window: int) -> list[float]:
        held: list[dict[str, float]] = [{} for _ in range(self.ranks)]
        kept = [0.0] * self.ranks
        for r, n in zip(where, self.nodes, strict=True):
            held[r].update(n.weights)
            kept[r] += n.kept
        return [sum(h.values()) + window * k for h, k in zip(held, kept, strict=True)]

    # -- where to begin --

    def starts(self, limit: float | None, window: int) -> Iterator[list[int]]:
        yield self._by_path(limit, window)
        yield self._contiguous()
        if limit is not None:
            yield self._by_memory(window)

    def _by_path(self, limit: float | None, window: int) -> list[int]:
        """HEFT: by the longest way to the end, each to the rank on which it is over first."""
        where: list[int] = [-1] * len(self.nodes)
        free, finish, held = [0.0] * self.ranks, [0.0] * len(self.nodes), [0.0] * self.ranks
        for u in self.order:
            n, choices = self.nodes[u], range(self.ranks)
            mine = self.groups[self.group_of[u]]
            if where[u] >= 0:
                choices = range(where[u], where[u] + 1)
            needs = sum(
                sum(self.nodes[v].weights.values()) + window * self.nodes[v].kept for v in mine
            )
            best: tuple[float, float, int] | None = None
            for r in choices:
                came = [
                    finish[t]
                    + (0.0 if where[t] == r else 2 * self.link.lasts(self.nodes[t].nbytes))
                    for t in n.takes
                ]
                end = max([free[r], *came]) + n.seconds
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
        """In the order of the nodes, as much work for each."""
        total, where, before = sum(n.seconds for n in self.nodes) or 1.0, [0] * len(self.nodes), 0.0
        for some in self.groups:
            seconds = sum(self.nodes[u].seconds for u in some)
            rank = min(self.ranks - 1, int((before + seconds / 2) / total * self.ranks))
            before += seconds
            for u in some:
                where[u] = rank
        return where

    def _by_memory(self, window: int) -> list[int]:
        """The largest first, each to the emptiest rank."""
        needs = [
            sum(sum(self.nodes[u].weights.values()) + window * self.nodes[u].kept for u in some)
            for some in self.groups
        ]
        held, where = [0.0] * self.ranks, [0] * len(self.nodes)
        for g in sorted(range(len(needs)), key=lambda g: -needs[g]):
            rank = min(range(self.ranks), key=lambda r: held[r])
            held[rank] += needs[g]
            for u in self.groups[g]:
                where[u] = rank
        return where

    def improve(self, where: list[int], limit: float | None, window: int) -> None:
        """Move one group after the other to where it makes the step shortest, until none can be moved."""
        best, looks, better = self.worth(where, limit, window), 0, True
        while better and looks < LOOKS:
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
                    if (now := self.worth(where, limit, window)) < best:
                        best = now
                        continue
                    for u in some:
                        where[u] = back
                better = better or where[some[0]] != home


def priorities(
    nodes: Sequence[Node], link: TransferCost, where: Sequence[int] | None = None
) -> list[int]:
    """All nodes by the longest way from them to the end, the longest first: an order in which each comes after what it takes.
    Without `where`, every value is thought to travel, at half the price."""
    way = [n.seconds for n in nodes]
    for u in range(len(nodes) - 1, -1, -1):
        for t in nodes[u].takes:
            far = 0.5 if where is None else float(where[t] != where[u])
            way[t] = max(way[t], nodes[t].seconds + way[u] + far * 2 * link.lasts(nodes[t].nbytes))
    return sorted(range(len(nodes)), key=lambda u: (-way[u], u))


# -- what goes where --


class GraphSegment(NamedTuple):
    rank: int
    nodes: tuple[int, ...]


def segments(
    nodes: Sequence[Node], where: Sequence[int], link: TransferCost | None = None
) -> list[GraphSegment]:
    """In an order in which each comes after those it takes from. What comes from elsewhere is taken at the beginning and what goes
    elsewhere is given at the end, so no two segments wait for each other."""
    gives = {t for u, n in enumerate(nodes) for t in n.takes if where[t] != where[u]}
    made: list[tuple[int, list[int]]] = []
    current: dict[int, list[int]] = {}
    there: set[tuple[int, int]] = set()  # (node, rank): has come from elsewhere
    for u in priorities(nodes, link or TransferCost(), where):
        rank = where[u]
        comes = {(t, rank) for t in nodes[u].takes if where[t] != rank} - there
        there |= comes
        mine = current.get(rank)
        if mine is None or mine[-1] in gives or comes:
            mine = current[rank] = []
            made.append((rank, mine))
        mine.append(u)
    return [GraphSegment(rank, tuple(some)) for rank, some in made]


class SegmentEdge(NamedTuple):
    """Values that one segment hands to another."""

    source: int
    sink: int
    names: tuple[str, ...]


def wires(
    ranks: Sequence[int], makes: Sequence[Sequence[str]], needs: Sequence[Sequence[str]]
) -> list[SegmentEdge]:
    """Of segments in order, each with its rank, what it makes, and what it needs of others."""
    maker = {name: s for s, some in enumerate(makes) for name in some}
    there: dict[tuple[str, int], int] = {}  # (value, rank) -> the first of its segments that has it
    found: dict[tuple[int, int], list[str]] = {}
    for s, some in enumerate(needs):
        for name in some:
            source = there.setdefault(
                (name, ranks[s]), maker[name] if ranks[maker[name]] == ranks[s] else s
            )
            source = maker[name] if source == s else source
            found.setdefault((source, s), []).append(name)
    return [SegmentEdge(a, b, tuple(some)) for (a, b), some in sorted(found.items())]


# -- when --


class SegmentAction(NamedTuple):
    """A segment's way there (F) or back (B) of one micro-batch."""

    kind: Literal["F", "B"]
    micro: int
    segment: int


class Schedule(NamedTuple):
    time: float
    lists: list[list[SegmentAction]]  # by rank
    starts: list[list[float]]  # by rank: when each action begins
    under_way: list[int]  # by rank: micro-batches at the most


def schedule(
    ranks: int, where: Sequence[int], seconds: Sequence[float], edges: Sequence[tuple[int, int, float]], micros: int, window: int,
    link: TransferCost | None = None, back: bool = True,
) -> Schedule:  # fmt: skip
    """Of segments by rank (`where`), time and edges (source, sink, bytes): whoever can begin first, begins; of what a rank could
    do, it prefers ways back, which free memory, then the oldest micro-batch. A segment sees micro-batches in their order."""
    link, share = link or TransferCost(), {"F": 1 - BACK if back else 1.0, "B": BACK}
    ins: list[list[tuple[int, float]]] = [[] for _ in where]
    outs: list[list[tuple[int, float]]] = [[] for _ in where]
    for a, b, nbytes in edges:
        lasts = link.lasts(nbytes) if where[a] != where[b] else 0.0
        ins[b].append((a, lasts))
        outs[a].append((b, lasts))
    own = [sum(r == rank for r in where) for rank in range(ranks)]
    over: dict[SegmentAction, float] = {}
    free, begun, finished = [0.0] * ranks, [0] * ranks, [0] * ranks
    left = [
        [own[r]] * micros for r in range(ranks)
    ]  # what a micro-batch has yet to do on a rank until it is finished
    lists: list[list[SegmentAction]] = [[] for _ in range(ranks)]
    starts: list[list[float]] = [[] for _ in range(ranks)]
    most, waiting = (
        [0] * ranks,
        [dict[SegmentAction, float]() for _ in range(ranks)],
    )  # ready, and since when

    def ready(action: SegmentAction) -> None:
        kind, micro, s = action
        if kind == "F":
            needs = [(SegmentAction("F", micro, a), lasts) for a, lasts in ins[s]]
        else:
            needs = [
                (SegmentAction("F", micro, s), 0.0),
                *((SegmentAction("B", micro, b), lasts) for b, lasts in outs[s]),
            ]
        if micro:
            needs.append((SegmentAction(kind, micro - 1, s), 0.0))
        if action not in over and all(n in over for n, _ in needs):
            waiting[where[s]][action] = max((over[n] + lasts for n, lasts in needs), default=0.0)

    for s in range(len(where)):
        ready(SegmentAction("F", 0, s))
    total = len(where) * micros * (2 if back else 1)
    while len(over) < total:
        best: tuple[float, int, int, int, int, SegmentAction] | None = None
        for r in range(ranks):
            for action, since in waiting[r].items():
                fresh = action.kind == "F" and action.micro >= begun[r]
                if fresh and (action.micro > begun[r] or begun[r] - finished[r] >= window):
                    continue
                key = (
                    max(since, free[r]),
                    int(action.kind == "F"),
                    action.micro,
                    action.segment,
                    r,
                    action,
                )
                best = key if best is None or key < best else best
        assert best is not None, "the oldest micro-batch can always go on"
        start, _, micro, s, r, action = best
        del waiting[r][action]
        lists[r].append(action)
        starts[r].append(start)
        free[r] = over[action] = start + seconds[s] * share[action.kind]
        if action.kind == "F" and micro == begun[r]:
            begun[r] += 1
            most[r] = max(most[r], begun[r] - finished[r])
        if action.kind == ("B" if back else "F"):
            left[r][micro] -= 1
            while finished[r] < micros and not left[r][finished[r]]:
                finished[r] += 1
        follows = (
            [*(SegmentAction("F", micro, b) for b, _ in outs[s])] if action.kind == "F" else []
        )
        if back:
            follows.append(SegmentAction("B", micro, s))
            follows += (
                [SegmentAction("B", micro, a) for a, _ in ins[s]] if action.kind == "B" else []
            )
        if micro + 1 < micros:
            follows.append(SegmentAction(action.kind, micro + 1, s))
        for later in follows:
            ready(later)
    return Schedule(max(free), lists, starts, most)


def simulate(
    nodes: Sequence[Node],
    where: Sequence[int],
    ranks: int,
    micros: int = 1,
    window: int | None = None,
    link: TransferCost | None = None,
) -> Schedule:
    """A step of `nodes` placed so."""
    parts = segments(nodes, where, link)
    of = {u: s for s, part in enumerate(parts) for u in part.nodes}
    needs = [
        list(dict.fromkeys(str(t) for u in p.nodes for t in nodes[u].takes if of[t] != s))
        for s, p in enumerate(parts)
    ]
    found = wires([p.rank for p in parts], [[str(u) for u in p.nodes] for p in parts], needs)
    edges = [(w.source, w.sink, sum(nodes[int(name)].nbytes for name in w.names)) for w in found]
    seconds = [sum(nodes[u].seconds for u in p.nodes) for p in parts]
    return schedule(ranks, [p.rank for p in parts], seconds, edges, micros, window or ranks, link)
