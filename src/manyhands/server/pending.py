"""Pushes that wait for a commit, and how they become one.

    mean   sum_i w_i g_i / sum_i w_i, where weights are given          sum   sum_i g_i, where none is

Shares w_i / sum w are float64 numbers and contributions are added in rank order: one alone keeps its own bits, and the result
depends on nothing but who takes part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from manyhands.server.tables.partition import partition

BLOCK = 1 << 16  # elements of a dense table that are averaged at a time, in float64
ALL_HERE = np.zeros(1, np.uint16)  # a map of one slot to one shard


@dataclass
class PendingPush:
    """What one worker holds for one clock. Copies: the buffers that pushes come in are used again."""

    clock: int
    lrs: dict[str, float | None] = field(default_factory=dict)  # by table, like all that follows
    weights: dict[str, float | None] = field(default_factory=dict)
    ids: dict[str, list[np.ndarray]] = field(default_factory=dict)
    updates: dict[str, list[np.ndarray]] = field(default_factory=dict)


def united(ids: np.ndarray, updates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Copies, in which repeats are summed: before they are weighed, or who summed them would show in the last bits."""
    cut, dim = partition(ids, "", ALL_HERE, 1), updates.shape[1]
    total = np.empty((cut.distinct.size, dim), updates.dtype)
    cut.collect(updates.reshape(-1), 0, dim, total.reshape(-1))
    return cut.distinct.copy(), total


def shares_of(weights: Sequence[float | None]) -> list[float] | None:
    """What each contribution is multiplied by; None: nobody brought anything."""
    if all(weight is None for weight in weights):
        return [1.0] * len(weights)
    given = [1.0 if weight is None else float(weight) for weight in weights]
    total = sum(given)
    return [weight / total for weight in given] if total > 0 else None


def combine(updates: Sequence[np.ndarray], shares: Sequence[float], out: np.ndarray) -> None:
    """out = sum_i shares_i updates_i, rounded once; `out` may be one of them."""
    if len(updates) == 1 and shares[0] == 1:
        if out is not updates[0]:
            out[:] = updates[0]
        return
    for start in range(0, out.size, BLOCK):
        block = slice(start, start + BLOCK)
        total = updates[0][block] * np.float64(shares[0])
        for update, share in zip(updates[1:], shares[1:], strict=True):
            total += update[block] * np.float64(share)
        out[block] = total
