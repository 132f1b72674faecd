"""Shard claims: every shard is claimed, the outstanding ones once more, and each counts once."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from manyhands.data.shard_claims import BITS, ShardClaims


def ranks(size: int, shards: int, store: dist.Store | None = None) -> list[ShardClaims]:
    store = store or dist.HashStore()
    made = [ShardClaims(store, r, size) for r in range(size)]
    for claims in made:
        claims.begin(shards)
    return made


def test_shards_are_claimed_in_order_each_by_one_rank() -> None:
    a, b = ranks(2, 4)
    assert [a.claim(), b.claim(), b.claim(), a.claim()] == [0, 1, 2, 3]


def test_an_idle_rank_gets_a_copy_of_the_oldest_that_is_not_finished() -> None:
    a, b = ranks(2, 3)
    assert [a.claim(), b.claim(), b.claim()] == [0, 1, 2]
    assert b.finish(1) and b.finish(2)
    assert b.claim() == 0  # which rank a is slow with
    assert b.claim() is None  # two are at work on it
    assert b.finish(0)
    assert a.finished(0) and not a.finish(0)
    assert a.claim() is None


def test_of_three_ranks_only_one_copies_a_shard() -> None:
    a, b, c = ranks(3, 3)
    assert [a.claim(), b.claim(), c.claim()] == [0, 1, 2]
    assert c.finish(2)
    assert c.claim() == 0
    assert b.finish(1)
    assert b.claim() is None  # shard 0 is at work on two ranks


@pytest.mark.parametrize("shards", [1, BITS - 1, BITS, BITS + 1, 3 * BITS + 5])
def test_more_shards_than_a_word_has_bits(shards: int) -> None:
    a, b = ranks(2, shards)
    assert [a.claim() for _ in range(shards)] == list(range(shards))
    late = shards - 1
    assert all(a.finish(k) for k in range(late))
    assert [a.finished(k) for k in range(shards)] == [True] * late + [False]
    assert b.claim() == late and b.finish(late)
    assert not a.finish(late)


def test_evaluations_do_not_see_each_other_and_leave_no_keys() -> None:
    store = dist.HashStore()
    made = ranks(2, 5, store)
    a, b = made
    keys = []
    for shards in (5, 3, 5):
        while (shard := b.claim()) is not None:
            b.finish(shard)
        assert a.claim() is None
        keys.append(store.num_keys())
        for claims in made:
            claims.begin(shards)
    assert keys == [7, 7, 5]  # one a shard, the counter, and a word of bits
    assert store.num_keys() == 0


def test_every_shard_counts_once_whoever_races_for_it() -> None:
    made, shards = ranks(4, 200), 200
    counted: list[list[int]] = [[] for _ in made]

    def work(rank: int) -> None:
        claims = made[rank]
        while (shard := claims.claim()) is not None:
            if claims.finish(shard):
                counted[rank].append(shard)

    threads = [threading.Thread(target=work, args=(r,)) for r in range(len(made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(k for mine in counted for k in mine) == list(range(shards))
