"""Hierarchical: reduce-scatter in groups of l ranks, all-reduce of equal parts across groups.

    time     RS_l(N) + AR_m(N/l) + AG_l(N),  m = p/l
    bytes    across groups 2 (m-1)/m N/l per rank

For hosts of l ranks each: the slow network between hosts carries each byte once per host, not once
per rank.

Papers: Cho et al. 2019 (BlueConnect, MLSys), Mikami et al. 2018 (arXiv:1811.05233).
"""

from __future__ import annotations

import math

from manyhands.errors import PlanError
from manyhands.exchange.algorithms.halving_doubling import halving_doubling
from manyhands.exchange.algorithms.ring import all_gather, reduce_scatter
from manyhands.exchange.algorithms.vector import Vector


def hierarchical(v: Vector, group_size: int | None = None) -> None:
    length = group_of(v.size, group_size)
    first, position = v.rank // length * length, v.rank % length
    inside = v.among(range(first, first + length))
    own = reduce_scatter(inside)
    halving_doubling(v.within(own).among(range(position, v.size, length)))
    all_gather(inside)


def group_of(size: int, group_size: int | None) -> int:
    """Ranks in a group: as asked for, or the divisor of `size` next below its root."""
    if group_size is None:
        return next(n for n in range(math.isqrt(size), 0, -1) if size % n == 0)
    if group_size < 1 or size % group_size:
        fitting = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
        raise PlanError(
            f"algorithm=hierarchical with groups of {group_size} among {size} ranks; "
            f"groups must be equal: use one of {fitting}"
        )
    return group_size
