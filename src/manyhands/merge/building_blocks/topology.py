"""Gossip topologies: graphs over ranks as weight matrices, checked before training starts.

    W_ij    weight of what rank i receives from rank j;    gossip is  x_i <- sum_j W_ij x_j

A graph is a word or a list of edges, `0-1,1-2` (both directions) or `0>1` (from 0 to 1), each with
a weight if wished: `0-1:0.25`. Undirected edges without weights get Metropolis weights,
W_ij = 1 / (1 + max(d_i, d_j)), which are doubly stochastic on any graph. The rank itself has the
rest of its row. The spectral gap 1 - |lambda_2| says how fast replicas agree: a round of gossip
shrinks their distance from the mean by at least that share.

    ring 1/3:           (2/3)(1 - cos(2 pi / n))      exponential, n even:   2 / (1 + ceil(log2 n))
    q x q torus 1/5:    (2/5)(1 - cos(2 pi / q))      star: 1/n;   complete: 1

Papers: Xiao, Boyd and Lall 2005 (Metropolis weights, IPSN), Ying et al. 2021 (exponential graphs,
arXiv:2110.13363).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.errors import PlanError

Pairs = set[tuple[int, int]]  # i < j
EDGE = re.compile(r"(\d+)([->])(\d+)(?::([0-9.eE+-]+))?")
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Turn:
    """One rank's sends and receives in one round, with the weights of what it receives."""

    own: float
    recipients: tuple[int, ...]
    senders: tuple[tuple[int, float], ...]  # (rank, weight), in rank order


@functools.lru_cache(maxsize=64)
def turns(graph: str, size: int, rank: int, push: bool = False) -> tuple[Turn, ...]:
    """This rank's turns, one a round, repeated from the start. Receivers apply the weights."""
    return tuple(_turn(w, rank) for w in schedule(graph, size, push))


@functools.lru_cache(maxsize=16)
def schedule(graph: str, size: int, push: bool = False) -> tuple[Tensor, ...]:
    """The weight matrices of a graph, one a round; most graphs have one.

    `push`: columns sum to 1 instead of rows.
    """
    if size == 1:
        return (torch.ones(1, 1, dtype=torch.float64, device="cpu"),)
    if graph == "one_peer":
        return tuple(_circulant(size, [2**k]) for k in range(_hops(size)))
    if graph == "exponential":
        return (_circulant(size, [2**k for k in range(_hops(size))]),)
    if graph in UNDIRECTED:
        return (metropolis(size, UNDIRECTED[graph](size)),)
    return (_custom(graph, size, push),)


def check(graph: str, size: int, push: bool = False) -> None:
    """Raise PlanError for a graph on which `size` ranks would not converge to their mean."""
    matrices = schedule(graph, size, push)
    for w in matrices:
        check_weights(w, graph, push)
    check_connected(functools.reduce(torch.add, matrices), graph)
    if (
        size > 1
        and graph not in WORDS
        and float(torch.linalg.eigvals(matrices[0]).abs().sort().values[-2]) > 1 - TOLERANCE
    ):
        raise PlanError(
            f"merge.graph={graph}: ranks would swap values for ever and never agree (spectral gap "
            "0); lower the weights, so that each rank keeps a part of its own"
        )


# -- graphs --


def ring(size: int) -> Pairs:
    return _pairs((i, (i + 1) % size) for i in range(size))


def torus(size: int) -> Pairs:
    """A grid as square as possible, with its rows and columns closed to rings."""
    rows = max(r for r in range(1, math.isqrt(size) + 1) if size % r == 0)
    if rows == 1 and size > 3:
        raise PlanError(
            f"merge.graph=torus needs rows x columns of ranks, but {size} is prime; "
            f"set merge.graph=ring or data={size + 1}"
        )
    columns = size // rows
    down = ((i, (i + columns) % size) for i in range(size))
    right = ((i, i - i % columns + (i + 1) % columns) for i in range(size))
    return _pairs([*down, *right])


def star(size: int) -> Pairs:
    return _pairs((0, i) for i in range(size))


def complete(size: int) -> Pairs:
    return _pairs((i, j) for i in range(size) for j in range(i))


UNDIRECTED: dict[str, Callable[[int], Pairs]] = {
    "ring": ring,
    "torus": torus,
    "star": star,
    "complete": complete,
}
WORDS = (*UNDIRECTED, "exponential", "one_peer")


# -- weights --


def metropolis(size: int, pairs: Pairs) -> Tensor:
    degree = [0] * size
    for i, j in pairs:
        degree[i] += 1
        degree[j] += 1
    w = torch.zeros(size, size, dtype=torch.float64, device="cpu")
    for i, j in pairs:
        w[i, j] = w[j, i] = 1 / (1 + max(degree[i], degree[j]))
    return _filled(w)


def spectral_gap(w: Tensor) -> float:
    """1 - |lambda_2| of a doubly stochastic matrix."""
    apart = w - 1 / len(w)  # without the eigenvalue 1 of the mean
    values = torch.linalg.eigvalsh(apart) if torch.equal(w, w.T) else torch.linalg.eigvals(apart)
    return 1 - float(values.abs().max())


def check_weights(w: Tensor, graph: str = "", push: bool = False) -> None:
    """Check for doubly stochastic weights, with `push` only columns: else the mean would drift."""
    named = f"merge.graph={graph}" if graph else "these weights"
    least = int(w.min(1).values.argmin())
    if float(w[least].min()) < -TOLERANCE:
        raise PlanError(
            f"{named}: rank {least} would keep {float(w[least, least]):.6g} of its own, but no "
            "weight may be below 0; lower the weights of its edges"
        )
    lines = [("column", w.sum(0))] if push else [("row", w.sum(1)), ("column", w.sum(0))]
    for what, sums in lines:
        worst = int((sums - 1).abs().argmax())
        if abs(float(sums[worst]) - 1) > TOLERANCE:
            who = "what rank {} gets"
            if what == "column":
                who = "what rank {} gives, its own part included,"
            raise PlanError(
                f"{named} is not doubly stochastic: {what} {worst} ({who.format(worst)}) sums to "
                f"{float(sums[worst]):.6g}, but 1 is needed; leave the weights out (0-1,1-2) for "
                "Metropolis weights, or take merge=sgp for a directed graph"
            )


def check_connected(w: Tensor, graph: str = "") -> None:
    """Raise PlanError unless every rank reaches every other along the edges."""
    reach = _reach(w > 0)
    both = reach & reach.T
    if bool(both.all()):
        return
    groups = sorted({tuple(row.nonzero().flatten().tolist()) for row in both})
    named = f"merge.graph={graph}" if graph else "this graph"
    how = (
        "are connected in one direction only" if bool((reach | reach.T).all()) else "never exchange"
    )
    apart = " and ".join(f"{{{','.join(map(str, g))}}}" for g in groups)
    raise PlanError(
        f"{named} is not connected: ranks {apart} {how}, so they would not agree; "
        f"add an edge such as {groups[0][-1]}-{groups[1][0]}"
    )


# -- arithmetic --


def _turn(w: Tensor, rank: int) -> Turn:
    row, column = w[rank].tolist(), w[:, rank].tolist()
    senders = tuple((j, weight) for j, weight in enumerate(row) if weight and j != rank)
    return Turn(
        row[rank], tuple(i for i, weight in enumerate(column) if weight and i != rank), senders
    )


def _pairs(edges: Iterable[tuple[int, int]]) -> Pairs:
    return {(min(i, j), max(i, j)) for i, j in edges if i != j}


def _hops(size: int) -> int:
    return (size - 1).bit_length()  # ceil(log2 n)


def _circulant(size: int, hops: list[int]) -> Tensor:
    """Every rank sends to the ranks at these distances, all with the same weight."""
    w = torch.zeros(size, size, dtype=torch.float64, device="cpu")
    for hop in hops:
        for j in range(size):
            w[(j + hop) % size, j] = 1 / (1 + len(hops))
    return _filled(w)


def _filled(w: Tensor, push: bool = False) -> Tensor:
    """The diagonal fills each row (with `push` each column) up to 1."""
    w.diagonal().copy_(1 - w.sum(0 if push else 1))
    return w


def _custom(graph: str, size: int, push: bool) -> Tensor:
    edges = _edges(graph, size)
    given = [weight is not None for *_, weight in edges]
    if any(given) and not all(given):
        raise PlanError(
            f"merge.graph={graph}: some edges have a weight and some have none; "
            "give all of them one, or none"
        )
    both_ways = all((b, a, weight) in edges for a, b, weight in edges)
    if not any(given) and both_ways and not push:
        return metropolis(size, _pairs((a, b) for a, b, _ in edges))
    w = torch.zeros(size, size, dtype=torch.float64, device="cpu")
    for a, b, _ in edges:
        w[b, a] = 1
    # equal shares of what a rank sends, or of what it receives
    w = w / (1 + w.sum(0 if push else 1, keepdim=True))
    for a, b, weight in edges:
        w[b, a] = w[b, a] if weight is None else weight
    return _filled(w, push)


def _edges(graph: str, size: int) -> list[tuple[int, int, float | None]]:
    """(from, to, weight) of each edge; `0-1` gives two."""
    found: list[tuple[int, int, float | None]] = []
    for word in graph.split(","):
        match = EDGE.fullmatch(word.strip())
        if match is None:
            raise PlanError(
                f"merge.graph={graph}: {word.strip()!r} is neither an edge such as 0-1, 0>1 or "
                f"0-1:0.25, nor one of {', '.join(WORDS)}"
            )
        a, b, weight = int(match[1]), int(match[3]), None if match[4] is None else float(match[4])
        if max(a, b) >= size or a == b:
            raise PlanError(
                f"merge.graph={graph}: {word.strip()} is no edge between two of the ranks 0 to "
                f"{size - 1} of data={size}"
            )
        found += [(a, b, weight)] if match[2] == ">" else [(a, b, weight), (b, a, weight)]
    if len({(a, b) for a, b, _ in found}) < len(found):
        raise PlanError(
            f"merge.graph={graph}: an edge is given twice; give each once, 0-1 for both directions"
        )
    return found


def _reach(edges: Tensor) -> Tensor:
    """Which ranks each rank receives from, over any number of hops: squaring doubles the hops."""
    reach = edges | torch.eye(len(edges), dtype=torch.bool, device="cpu")
    for _ in range(_hops(len(edges)) + 1):
        reach = (reach.double() @ reach.double()) > 0
    return reach
