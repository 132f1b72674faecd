"""Partition of ids: deduplicates a list of ids and groups it by shard.

    ids        7 3 7 9 3 5
    distinct   7 9 | 3 5            by shard, within a shard in the order of their first appearance
    where      0 2 0 1 2 3          the position of each id among them

One pass hashes, deduplicates and counts. Updates of equal ids are summed in their order, straight
into the buffer that is sent; rows are copied straight out of the buffer that was received.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from manyhands.kernels.compile import U64, compiled, inlined
from manyhands.server.tables.hashing import mix, seed_of
from manyhands.server.tables.row_lookup import equal

NOT_HOT = np.empty(0, np.int64)


@inlined
def _among(hot, wanted):
    low, high = 0, hot.size
    while low < high:
        middle = (low + high) >> 1
        if hot[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low < hot.size and hot[low] == wanted


@compiled
def _split(ids, seed, owner, hot, buckets, distinct, first, shard, where, starts, keys):
    """Returns how many ids are distinct. `starts` and `keys` begin as zeros. Ids that are in `hot`
    (ascending) make the last group."""
    mask, slots, found = U64(buckets.size - 1), U64(owner.size - 1), 0
    buckets[:] = -1
    many = keys.size > 1
    for i in range(ids.size):
        wanted = ids[i]
        hashed = mix(U64(wanted) ^ seed)
        at = (hashed >> U64(20)) & mask
        while True:
            p = buckets[at]
            if p < 0:
                buckets[at] = found
                distinct[found] = wanted
                first[found] = i
                where[i] = found
                s = U64(owner[hashed & slots]) if many else U64(0)
                if hot.size and _among(hot, wanted):
                    s = U64(keys.size - 1)
                shard[found] = s
                keys[s] += hashed * U64(2 * starts[s + U64(1)] + 1)  # depends on the order
                starts[s + U64(1)] += 1
                found += 1
                break
            if distinct[U64(p)] == wanted:
                where[i] = p
                break
            at = (at + U64(1)) & mask
    for k in range(keys.size):
        keys[k] = mix(keys[k] ^ U64(starts[k + 1]))
        starts[k + 1] += starts[k]
    return found


@compiled
def _key(ids, seed):
    """The key of any list of ids: as `_split` makes it for the distinct ids of one shard."""
    total = U64(0)
    for i in range(ids.size):
        total += mix(U64(ids[i]) ^ seed) * U64(2 * i + 1)
    return mix(total ^ U64(ids.size))


@compiled
def _regroup(distinct, first, shard, where, starts, grouped, first_grouped, moved_to):
    """Group distinct ids by shard, where there are several shards."""
    following = starts.copy()
    for u in range(distinct.size):
        p = following[shard[u]]
        following[shard[u]] = p + 1
        moved_to[u] = p
        grouped[p] = distinct[u]
        first_grouped[p] = first[u]
    for i in range(where.size):
        where[i] = moved_to[where[i]]


@compiled
def _collect(updates, where, first, low, high, dim, out):
    """Sum updates by the position of their id, for positions in [low, high)."""
    dim = U64(dim)
    for i in range(where.size):
        p = where[i]
        if p < low or p >= high:
            continue
        x = updates[U64(i) * dim : U64(i) * dim + dim]
        o = out[U64(p - low) * dim : U64(p - low) * dim + dim]
        if first[p] == i:
            for j in range(o.size):
                o[j] = x[j]
        else:
            for j in range(o.size):
                o[j] += x[j]


@compiled
def _spread(rows, where, low, high, dim, out):
    dim = U64(dim)
    for i in range(where.size):
        p = where[i]
        if p < low or p >= high:
            continue
        x = rows[U64(p - low) * dim : U64(p - low) * dim + dim]
        o = out[U64(i) * dim : U64(i) * dim + dim]
        for j in range(o.size):
            o[j] = x[j]


@compiled
def _withhold(updates, zero, dim, bound, keep):
    """Clear updates that cannot move a zero weight; `keep` tells which rows still have any.

    Returns how many numbers were withheld.
    """
    withheld = 0
    for r in range(keep.size):
        some = False
        for j in range(r * dim, r * dim + dim):
            if zero[j] and abs(updates[j]) <= bound:
                updates[j] = 0
                withheld += 1
            else:
                some = True
        keep[r] = some
    return withheld


@dataclass(eq=False)
class Partition:
    """The distinct ids of a list, grouped by shard."""

    raw: np.ndarray  # as given
    distinct: np.ndarray
    first: np.ndarray
    where: np.ndarray
    starts: list[int]
    keys: list[int]  # hash of each shard's list
    zero: np.ndarray | None = None  # which numbers of the rows were 0 when last pulled (KKT filter)
    hot: np.ndarray | None = None  # ids that make a group of their own, after those of the shards

    def same(self, ids: np.ndarray) -> bool:
        mine = self.raw
        return mine.size == ids.size and (
            not ids.size or (mine[0] == ids[0] and bool(equal(mine, ids)))
        )

    def ids(self, shard: int) -> np.ndarray:
        return self.distinct[self.starts[shard] : self.starts[shard + 1]]

    def collect(self, updates: np.ndarray, shard: int, dim: int, out: np.ndarray) -> None:
        _collect(
            updates, self.where, self.first, self.starts[shard], self.starts[shard + 1], dim, out
        )

    def spread(self, rows: np.ndarray, shard: int, dim: int, out: np.ndarray) -> None:
        _spread(rows, self.where, self.starts[shard], self.starts[shard + 1], dim, out)


def partition(
    ids: np.ndarray, table: str, owner: np.ndarray, shards: int, hot: np.ndarray | None = None
) -> Partition:
    """`hot`, ascending: ids that make one more group, whatever their shard."""
    n, shards = ids.size, shards + (hot is not None)
    ids = ids.copy()  # the caller may change its array while this is in use
    buckets = np.empty(max(16, 1 << (2 * n - 1).bit_length() if n else 16), np.int32)
    distinct, first, shard = np.empty(n, np.int64), np.empty(n, np.int32), np.empty(n, np.uint16)
    starts, keys = np.zeros(shards + 1, np.int64), np.zeros(shards, np.uint64)
    where, seed = np.empty(n, np.int32), U64(seed_of(table))
    some = NOT_HOT if hot is None else hot
    found = _split(ids, seed, owner, some, buckets, distinct, first, shard, where, starts, keys)
    distinct, first, shard = distinct[:found], first[:found], shard[:found]
    if shards > 1:
        grouped, first_grouped = np.empty_like(distinct), np.empty_like(first)
        moved_to = np.empty(found, np.int32)
        _regroup(distinct, first, shard, where, starts, grouped, first_grouped, moved_to)
        distinct, first = grouped, first_grouped
    return Partition(ids, distinct, first, where, starts.tolist(), keys.tolist(), hot=hot)


def key_of(ids: np.ndarray, table: str) -> int:
    return int(_key(ids, U64(seed_of(table))))


def withhold(
    updates: np.ndarray, zero: np.ndarray, dim: int, bound: float
) -> tuple[np.ndarray, int]:
    keep = np.empty(updates.size // dim, np.bool_)
    return keep, _withhold(updates, zero, dim, bound, keep)
