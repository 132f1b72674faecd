"""Cuts of a chain into stages, judged by looking at all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise


def slowest(costs: Sequence[float], cut: Sequence[int]) -> float:
    """The cost of the costliest stage."""
    edges = [0, *cut, len(costs)]
    return max(sum(costs[a:b]) for a, b in pairwise(edges))


def brute_force(costs: Sequence[float], stages: int) -> float:
    """The cost of the costliest stage in the best of all cuts."""
    return min(slowest(costs, cut) for cut in combinations(range(1, len(costs)), stages - 1))
