"""Pending pushes: pushes that wait for a commit, and how a commit merges them into one push.

    mean   sum_i w_i g_i / sum_i w_i, where weights are given
    sum    sum_i g_i, where none is

The factors w_i / sum w are float64 numbers and contributions are added in rank order: a single push
keeps its own bits, and the result depends only on which pushes take part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from manyhands.server.protocol.messages import PushMessage
from manyhands.server.table_updates import TableUpdate
from manyhands.server.tables.partition import partition

BLOCK = 1 << 16  # elements of a dense table that are averaged at a time, in float64
ONE_SHARD = np.zeros(1, np.uint16)  # a map of one slot to one shard


@dataclass
class PendingPush:
    """The pending push of one worker for one clock. It holds copies: the buffers that pushes come
    in are used again.
    """

    clock: int
    lrs: dict[str, float | None] = field(default_factory=dict)  # by table, like all that follows
    weights: dict[str, float | None] = field(default_factory=dict)
    ids: dict[str, list[np.ndarray]] = field(default_factory=dict)
    updates: dict[str, list[np.ndarray]] = field(default_factory=dict)


class PendingPushes:
    """The pending push of each worker. Not thread-safe: the caller holds the shard's lock."""

    def __init__(self) -> None:
        self._of: dict[int, PendingPush] = {}
        # (worker, table) -> a buffer of a push before: fresh memory costs more than the copy
        self._spare: dict[tuple[int, str], np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._of)

    def add(self, worker: int, parts: Sequence[TableUpdate], push: PushMessage) -> None:
        """Add a push to its clock's; a push of a later clock replaces an earlier one."""
        mine = self._of.get(worker)
        if mine is not None and mine.clock > push.clock:
            return  # overtaken on the way by the push that replaces it
        if mine is None or mine.clock < push.clock:
            if mine is not None:
                self.release(worker, mine)
            mine = self._of[worker] = PendingPush(push.clock)
        for part in parts:
            name = part.table
            mine.lrs[name], mine.weights[name] = push.lr, push.weight
            if part.ids is not None:
                ids, updates = merge_duplicates(part.ids, part.updates)
                mine.ids.setdefault(name, []).append(ids)
                mine.updates.setdefault(name, []).append(updates)
            elif name in mine.updates:
                mine.updates[name][0] += part.updates
            else:
                copy = self._spare.pop((worker, name), None)
                copy = np.empty(part.updates.size, part.updates.dtype) if copy is None else copy
                copy[:] = part.updates
                mine.updates[name] = [copy]

    def take(self, members: Sequence[tuple[int, int]]) -> list[tuple[int, PendingPush]]:
        """Remove and return, in rank order, the pending pushes of `members` (worker, clock)."""
        return [
            (worker, self._of.pop(worker))
            for worker, clock in sorted(members)
            if worker in self._of and self._of[worker].clock == clock
        ]

    def all(self) -> list[tuple[int, PendingPush]]:
        return sorted(self._of.items())

    def replace(self, pushes: dict[int, PendingPush]) -> None:
        self._of = pushes

    def drop(self, worker: int) -> None:
        self._of.pop(worker, None)

    def forget(self, name: str) -> None:
        """Drop what was pushed to a table that is no more."""
        for push in self._of.values():
            for kept in (push.lrs, push.weights, push.ids, push.updates):
                kept.pop(name, None)
        for key in [key for key in self._spare if key[1] == name]:
            del self._spare[key]

    def release(self, worker: int, push: PendingPush) -> None:
        """Keep the buffers of a push for the next one."""
        for name, updates in push.updates.items():
            if name not in push.ids:
                self._spare[worker, name] = updates[0]


def merge_duplicates(ids: np.ndarray, updates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Copies in which updates of equal ids are summed. They are summed before they are weighted:
    otherwise the last bits would depend on whether the worker had summed them already.
    """
    cut, dim = partition(ids, "", ONE_SHARD, 1), updates.shape[1]
    total = np.empty((cut.distinct.size, dim), updates.dtype)
    cut.collect(updates.reshape(-1), 0, dim, total.reshape(-1))
    return cut.distinct.copy(), total


def factors_of(weights: Sequence[float | None]) -> list[float] | None:
    """What each contribution is multiplied by; None: all weights are 0."""
    if all(weight is None for weight in weights):
        return [1.0] * len(weights)
    given = [1.0 if weight is None else float(weight) for weight in weights]
    total = sum(given)
    return [weight / total for weight in given] if total > 0 else None


def merge_dense(pushes: Sequence[PendingPush], name: str, factors: Sequence[float]) -> np.ndarray:
    """The weighted sum of the pushes to a dense table, in the buffer of the first."""
    updates = [push.updates[name][0] for push in pushes]
    combine(updates, factors, updates[0])
    return updates[0]


def merge_rows(
    pushes: Sequence[PendingPush], name: str, factors: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Ids and weighted updates of the pushes to a sparse table, in rank order."""
    ids = np.concatenate([some for push in pushes for some in push.ids[name]])
    updates = np.concatenate([some for push in pushes for some in push.updates[name]])
    lengths = [sum(some.size for some in push.ids[name]) for push in pushes]
    updates *= np.repeat(np.array(factors, updates.dtype), lengths)[:, None]
    return ids, updates


def combine(updates: Sequence[np.ndarray], factors: Sequence[float], out: np.ndarray) -> None:
    """out = sum_i factors_i updates_i, rounded once; `out` may be one of them."""
    if len(updates) == 1 and factors[0] == 1:
        if out is not updates[0]:
            out[:] = updates[0]
        return
    for start in range(0, out.size, BLOCK):
        block = slice(start, start + BLOCK)
        total = updates[0][block] * np.float64(factors[0])
        for update, factor in zip(updates[1:], factors[1:], strict=True):
            total += update[block] * np.float64(factor)
        out[block] = total
