"""Hot reads: when a worker may read a copy, and of which ids."""

from __future__ import annotations

import math

import numpy as np

from manyhands.server.hot_copies.hot_reads import MOST_IDS, HotReads
from manyhands.server.protocol.messages import ShardAddress
from manyhands.server.slots import SlotMap


class Clock:
    now = 5.0

    def __call__(self) -> float:
        return self.now


def reads(age: float = 0.5, shards: int = 4, rank: int = 6) -> tuple[HotReads, Clock]:
    clock = Clock()
    return HotReads(rank, shards, age, clock), clock


def test_a_copy_must_be_able_to_hold_all_that_was_pushed_before_the_last_sync() -> None:
    hot, clock = reads()
    assert hot.shard == 2 and not hot.usable
    clock.now += 0.5
    assert hot.usable
    hot.ticked(4.0)
    assert not hot.usable
    clock.now += 0.5
    assert hot.usable
    hot.ticked(math.inf)
    assert hot.usable
    hot.settle()
    assert not hot.usable


def test_with_staleness_0_no_copy_is_read() -> None:
    hot, clock = reads()
    hot.ticked(0.0)
    clock.now += 100.0
    assert not hot.usable


def test_one_shard_age_0_or_adapt_read_no_copies() -> None:
    for hot, clock in (reads(shards=1), reads(age=0.0)):
        clock.now += 100.0
        assert not hot.usable
    hot, clock = reads()
    clock.now += 100.0
    hot.stop()
    assert not hot.usable


def test_rows_of_the_worker_s_own_shard_are_no_copies() -> None:
    hot, _ = reads()
    slots = SlotMap.start([ShardAddress("host", s) for s in range(4)])
    ids = list(range(100))
    owners = slots.shard_of("t", np.arange(100))
    hot.learn({"t": ids, "own": [i for i in ids if slots.shard_of("own", [i])[0] == 2]}, slots)
    found = hot.ids("t", 10)
    assert found is not None and found.tolist() == [i for i in ids if owners[i] != 2]
    assert hot.ids("own", 10) is None
    assert hot.ids("t", MOST_IDS + 1) is None
    hot.learn({"t": ids[::-1]}, slots)
    assert hot.ids("t", 10) is found  # the same array, as long as the ids are the same
    hot.missed("t")
    assert hot.ids("t", 10) is None
    hot.learn({"t": ids}, slots)
    hot.moved()
    assert hot.ids("t", 10) is None
