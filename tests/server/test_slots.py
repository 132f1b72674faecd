"""Slots: which shard holds which id.

The same for all clients, evenly, and changed by few moves; repeated ids are sent once.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

from manyhands.server.protocol.messages import ShardAddress
from manyhands.server.protocol.row_encoding import BLOCK
from manyhands.server.slots import (
    SLOTS,
    SlotMap,
    even,
    ranges,
)
from manyhands.server.tables.partition import partition, withhold


def slot_map(shards: int) -> SlotMap:
    return SlotMap.start([ShardAddress("host", 9000 + i) for i in range(shards)])


def test_the_shard_of_a_row_is_the_same_in_every_process() -> None:
    code = """
import numpy as np
from manyhands.server.protocol.messages import ShardAddress
from manyhands.server.slots import SlotMap
slots = SlotMap.start([ShardAddress("host", i) for i in range(5)])
print(*slots.shard_of("users", np.arange(50) * 7919))
"""
    there = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert [int(x) for x in there.split()] == slot_map(5).shard_of(
        "users", np.arange(50) * 7919
    ).tolist()


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_rows_lie_evenly_and_tables_differently(shards: int) -> None:
    ids = np.arange(200_000)
    slots = slot_map(shards)
    counts = np.bincount(slots.shard_of("users", ids), minlength=shards)
    assert counts.max() / counts.mean() < 1.1
    if shards > 1:
        assert (slots.shard_of("users", ids) != slots.shard_of("items", ids)).mean() > 0.3


def test_a_map_survives_its_journey() -> None:
    slots = slot_map(3)
    again = SlotMap.of(slots.message())
    assert (
        again.epoch == slots.epoch
        and np.array_equal(again.owner, slots.owner)
        and again.shards == slots.shards
    )


def test_by_load_evens_measured_loads_and_moves_few_slots() -> None:
    slots = slot_map(4)
    loads = np.random.default_rng(0).pareto(1.5, SLOTS)
    loads[slots.owner == 1] *= 4  # one shard is hot
    better = slots.by_load(loads)
    assert better.epoch == slots.epoch + 1
    assert slots.balance(loads) > 1.5 and better.balance(loads) < 1.01
    moved = (better.owner != slots.owner).mean()
    assert 0 < moved < 0.35  # what is above the mean has to go, and hardly more
    assert np.array_equal(better.by_load(np.zeros(SLOTS)).owner, better.owner)


def test_one_slot_that_is_hotter_than_all_others_together_ends_it() -> None:
    loads = np.ones(SLOTS)
    loads[7] = 1e6
    slots = slot_map(2).by_load(loads)
    hot = slots.owner[7]
    assert (slots.owner == hot).sum() == 1


@pytest.mark.parametrize("length", [1, 1000, 5000, 100_003])
@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_ranges_cover_a_dense_table_once_and_are_cut_at_blocks(length: int, shards: int) -> None:
    cuts = ranges(length, shards)
    assert (
        cuts[0][0] == 0 and cuts[-1][1] == length and all(a[1] == b[0] for a, b in pairwise(cuts))
    )
    assert all(start % BLOCK == 0 or start == length for start, _ in cuts)
    assert max(b - a for a, b in cuts) <= -(-length // shards) + BLOCK
    assert all(start % 3 == 0 or start == length for start, _ in ranges(length, shards, dim=3))


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("n", [0, 1, 1000])
def test_a_partition_unites_sums_and_spreads(shards: int, n: int) -> None:
    rng, dim = np.random.default_rng(n), 3
    ids = rng.integers(-50, 50, n) * (1 << 40)
    slots = slot_map(shards)
    cut = partition(ids, "users", slots.owner, shards)
    assert sorted(cut.distinct.tolist()) == np.unique(ids).tolist()
    assert np.array_equal(cut.distinct[cut.where], ids)
    updates, out = rng.integers(-9, 9, (n, dim)).astype(np.float32), np.empty((n, dim), np.float32)
    expected = {i: updates[ids == i].sum(0) for i in np.unique(ids)}
    for s in range(shards):
        mine = cut.ids(s)
        assert (slots.shard_of("users", mine) == s).all()
        sums = np.empty((mine.size, dim), np.float32)
        cut.collect(updates.reshape(-1), s, dim, sums.reshape(-1))
        assert all(np.array_equal(sums[j], expected[i]) for j, i in enumerate(mine))
        cut.spread(sums.reshape(-1), s, dim, out.reshape(-1))
    assert all(np.array_equal(out[i], expected[ids[i]]) for i in range(n))


def test_the_hash_of_a_list_depends_on_its_order_and_content_alone() -> None:
    owner = even(2)
    ids = np.arange(100)
    keys = [
        partition(x, "users", owner, 2).keys
        for x in (ids, ids.copy(), ids[::-1].copy(), np.arange(1, 101))
    ]
    assert keys[0] == keys[1] and len({tuple(k) for k in keys}) == 3
    assert partition(np.concatenate([ids, ids]), "users", owner, 2).keys == keys[0]


def test_a_partition_knows_its_ids_also_when_the_callers_change() -> None:
    ids = np.arange(10)
    cut = partition(ids, "users", even(1), 1)
    assert cut.same(np.arange(10)) and not cut.same(np.arange(9))
    ids[5] = 99
    assert not cut.same(ids)


def test_what_cannot_move_a_zero_weight_is_withheld() -> None:
    updates = np.array([0.5, -2.0, 0.1, 0.2, 3.0, 0.1], np.float32)
    zero = np.array([True, True, True, True, False, False])
    keep, withheld = withhold(updates, zero, 2, 1.0)
    assert keep.tolist() == [True, False, True] and withheld == 3
    assert updates.tolist() == [0.0, -2.0, 0.0, 0.0, 3.0, np.float32(0.1)]
    again = np.array([0.5, 0.5], np.float32)
    assert withhold(again, np.array([True, True]), 2, -np.inf)[1] == 0 and again.tolist() == [
        0.5,
        0.5,
    ]
