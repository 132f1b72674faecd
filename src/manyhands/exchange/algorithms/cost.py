"""Cost model of the all-reduce algorithms, and the choice of the cheapest.

    alpha + n beta    seconds of a message of n bytes
    n gamma           seconds to reduce n bytes              L = ceil(log2 p);  q = 2^k, p = q + r

    star                 2 (p-1) (alpha + N beta) + (p-1) N gamma
    tree                 2 L (alpha + N beta) + L N gamma
    double_tree          (sqrt(2 L alpha) + sqrt(2 N beta))^2 + N gamma
    butterfly            log2 q (alpha + N beta + N gamma) + fold
    halving_doubling     2 log2 q alpha + 2 (q-1)/q N beta + (q-1)/q N gamma + fold
    ring                 2 (p-1) alpha + 2 (p-1)/p N beta + (p-1)/p N gamma
    binary_blocks        halving_doubling on q
                         + sum over neighbours b < b' of 2 (b'/b alpha + N/b beta) + N/b' gamma
    hierarchical         ring on l + halving_doubling on p/l of N/l
    fold                 2 alpha + 2 N beta + N gamma where r > 0

Every rank has one port, all ports work at once, and the network between them is never the limit.

Paper: Thakur, Rabenseifner and Gropp 2005 (IJHPCA 19).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from manyhands.core import Group
from manyhands.exchange.algorithms.binary_blocks import blocks_of
from manyhands.exchange.algorithms.hierarchical import group_of

# of equals the first is taken; hierarchical only by name: it pays where some ranks are nearer
CANDIDATES = (
    "butterfly",
    "halving_doubling",
    "binary_blocks",
    "ring",
    "double_tree",
    "tree",
    "star",
)
SHORT_BYTES, LONG_BYTES, TURNS = 8, 1 << 20, 12


class LinkCost(NamedTuple):
    alpha: float  # seconds per message
    beta: float  # seconds per byte sent
    gamma: float  # seconds per byte reduced


def cost(
    algorithm: str,
    p: int,
    nbytes: float,
    alpha: float,
    beta: float,
    gamma: float,
    group_size: int | None = None,
) -> float:
    """Seconds that `algorithm` should take to reduce `nbytes` over `p` ranks."""
    if p == 1:
        return 0.0
    n, rounds, q = nbytes, math.ceil(math.log2(p)), 1 << (p.bit_length() - 1)
    fold = 0.0 if p == q else 2 * alpha + 2 * n * beta + n * gamma

    def halving(ranks: int, nbytes: float) -> float:
        share = (ranks - 1) / ranks * nbytes
        return 2 * math.log2(ranks) * alpha + 2 * share * beta + share * gamma

    if algorithm == "star":
        return 2 * (p - 1) * (alpha + n * beta) + (p - 1) * n * gamma
    if algorithm == "tree":
        return 2 * rounds * (alpha + n * beta) + rounds * n * gamma
    if algorithm == "double_tree":
        return (math.sqrt(2 * rounds * alpha) + math.sqrt(2 * n * beta)) ** 2 + n * gamma
    if algorithm == "butterfly":
        return math.log2(q) * (alpha + n * beta + n * gamma) + fold
    if algorithm == "halving_doubling":
        return halving(q, n) + fold
    if algorithm == "ring":
        return 2 * (p - 1) * alpha + (p - 1) / p * n * (2 * beta + gamma)
    if algorithm == "binary_blocks":
        sizes = [len(block) for block in blocks_of(p)]
        between = [
            2 * (b // s * alpha + n / s * beta) + n / b * gamma
            for b, s in itertools.pairwise(sizes)
        ]
        return halving(q, n) + sum(between)
    if algorithm == "hierarchical":
        length = group_of(p, group_size)
        inside = cost("ring", length, n, alpha, beta, gamma)
        return inside + cost("halving_doubling", p // length, n / length, alpha, beta, gamma)
    raise ValueError(
        f"no cost for algorithm {algorithm!r}; known: {', '.join(CANDIDATES)}, hierarchical"
    )


def choose(p: int, nbytes: float, alpha: float, beta: float, gamma: float) -> str:
    """The algorithm that should take the least time."""
    return min(CANDIDATES, key=lambda name: cost(name, p, nbytes, alpha, beta, gamma))


def measure(
    group: Group, device: torch.device | None = None, clock: Callable[[], float] | None = None
) -> LinkCost:
    """Measure alpha, beta and gamma: the same result on every rank.

    Neighbouring ranks send to each other, all pairs and both ways at once as the algorithms do; the
    result is the mean over ranks of the best time of each, by the group's clock.
    """
    tick = group.clock if clock is None else clock
    peer = group.rank ^ 1
    seen = torch.zeros(4, dtype=torch.float64)
    if peer < group.size:
        short, long = (
            _turn(group, peer, nbytes, tick, device) for nbytes in (SHORT_BYTES, LONG_BYTES)
        )
        seen += torch.tensor(
            [short, max(0.0, long - short) / LONG_BYTES, _reduction(tick, device), 1.0],
            dtype=torch.float64,
        )
    seen = seen.to(device or "cpu")
    group.all_reduce({"seen": seen}).wait()
    alpha, beta, gamma = (seen[:3] / seen[3].clamp(min=1.0)).tolist()
    return LinkCost(alpha, beta, gamma)


def _turn(
    group: Group, peer: int, nbytes: int, clock: Callable[[], float], device: torch.device | None
) -> float:
    given, into = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = []
    for _ in range(TURNS):
        start = clock()
        group.transfer({peer: given}, {peer: into}).wait()
        seconds.append(clock() - start)
    # not the median: load of other programs could hit one length and not the other
    return min(seconds)


def _reduction(clock: Callable[[], float], device: torch.device | None) -> float:
    a, b = (torch.zeros(LONG_BYTES // 4, device=device) for _ in range(2))
    seconds = []
    for _ in range(TURNS):
        start = clock()
        a.add_(b)
        seconds.append(clock() - start)
    return min(seconds) / LONG_BYTES
