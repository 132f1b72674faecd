"""A request to stop ends a block of local steps after the same step on all ranks."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from manyhands.launch.stopping import block_stop
from manyhands.launch.stopping.block_stop import BlockStop

LIMIT_S = 30.0


class Blocks:
    """Ranks as threads; each merge waits for all of them, as an all-reduce does."""

    def __init__(self, size: int, agree_s: float = LIMIT_S):
        self.size, self.store = size, dist.HashStore()
        self.merge = threading.Barrier(size, timeout=LIMIT_S)
        self.flags = [SimpleNamespace(requested=0) for _ in range(size)]
        self.round = [0] * size
        self.stops = [
            BlockStop(
                flag, self.store, rank, size, lambda rank=rank: self.round[rank], agree_s=agree_s
            )
            for rank, flag in enumerate(self.flags)
        ]

    def block(self, rank: int, most: int, step: Callable[[int], None]) -> int:
        """As `ModuleReplica.steps` does it; returns how many steps were done."""
        self.round[rank] += 1
        stop, done = self.stops[rank], 0
        stop.begin(most)
        while done < most and not (done and stop.ends(done)):
            step(done)
            done += 1
        stop.over(done)
        self.merge.wait()
        return done

    def on_all(self, body: Callable[[int], Any]) -> list[Any]:
        found: list[Any] = [None] * self.size

        def main(rank: int) -> None:
            try:
                found[rank] = body(rank)
            except BaseException as e:
                found[rank] = e
                self.merge.abort()

        threads = [threading.Thread(target=main, args=(r,)) for r in range(self.size)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(LIMIT_S)
            assert not t.is_alive()
        for e in found:
            if isinstance(e, BaseException):
                raise e
        return found

    def close(self) -> None:
        for stop in self.stops:
            stop.close()


Make = Callable[..., Blocks]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(block_stop, "POLL_S", 0.005)
    monkeypatch.setattr(block_stop, "WAIT_S", 0.001)
    made: list[Blocks] = []

    def build(*args: Any, **options: Any) -> Blocks:
        made.append(Blocks(*args, **options))
        return made[-1]

    yield build
    for blocks in made:
        blocks.close()


def test_without_a_request_blocks_are_whole_and_the_store_stays_empty(make: Make) -> None:
    blocks = make(2)
    assert blocks.on_all(lambda rank: [blocks.block(rank, 7, lambda i: None) for _ in "ab"]) == [
        [7, 7],
        [7, 7],
    ]
    assert blocks.store.num_keys() == 0 and not any(s.cut for s in blocks.stops)


def test_ranks_that_are_told_at_different_steps_end_after_the_same(make: Make) -> None:
    blocks = make(3)

    def step(rank: int) -> Callable[[int], None]:
        def told(i: int) -> None:
            if i == 4 + 3 * rank:
                blocks.flags[rank].requested = 15

        return told

    done = blocks.on_all(lambda rank: blocks.block(rank, 10**9, step(rank)))
    assert len(set(done)) == 1 and done[0] >= 5
    assert all(s.cut for s in blocks.stops)


def test_one_rank_that_is_told_is_enough(make: Make) -> None:
    blocks = make(3)

    def step(rank: int, i: int) -> None:
        if rank == 1 and i == 5:
            blocks.flags[1].requested = 15

    done = blocks.on_all(lambda rank: blocks.block(rank, 10**9, lambda i: step(rank, i)))
    assert len(set(done)) == 1 and all(s.cut for s in blocks.stops)


def test_a_rank_that_waits_in_the_merge_makes_the_others_complete_the_block(make: Make) -> None:
    """It has done all steps, so nobody may do fewer; it cannot look at its flag either."""
    blocks, waiting = make(2), threading.Event()

    def body(rank: int) -> int:
        def step(i: int) -> None:
            if rank == 0 and i == 3:
                assert waiting.wait(LIMIT_S)
                blocks.flags[0].requested = 15
            if rank == 1 and i == 19:
                waiting.set()

        return blocks.block(rank, 20, step)

    assert blocks.on_all(body) == [20, 20]
    assert not any(s.cut for s in blocks.stops), "the block was not ended by the request"


def test_an_exchange_inside_the_block_is_reached_by_all_before_they_stop(make: Make) -> None:
    """Rank 1 waits in it at step 10 when rank 0, at step 3, is told to stop."""
    blocks = make(2)
    exchange, waiting = threading.Barrier(2, timeout=LIMIT_S), threading.Event()

    def body(rank: int) -> int:
        def step(i: int) -> None:
            if rank == 0 and i == 3:
                assert waiting.wait(LIMIT_S)
                blocks.flags[0].requested = 15
            if i == 10:
                waiting.set()
                exchange.wait()

        return blocks.block(rank, 10**9, step)

    done = blocks.on_all(body)
    assert done[0] == done[1] >= 11 and all(s.cut for s in blocks.stops)


def test_a_promise_that_never_comes_ends_the_block_as_usual(make: Make) -> None:
    """As of a process whose thread cannot run, or that died: then the merge says so."""
    blocks, waiting = make(2, agree_s=0.1), threading.Event()
    blocks.stops[1].store = dist.HashStore()  # what it tells reaches nobody

    def body(rank: int) -> int:
        def step(i: int) -> None:
            if rank == 0 and i == 3:
                assert waiting.wait(LIMIT_S)
                blocks.flags[0].requested = 15
            if rank == 1 and i == 8:
                waiting.set()

        return blocks.block(rank, 20, step)

    assert blocks.on_all(body) == [20, 20] and not blocks.stops[0].cut


def test_a_request_between_blocks_ends_the_next_after_one_step(make: Make) -> None:
    blocks = make(2)

    def body(rank: int) -> list[int]:
        first = blocks.block(rank, 4, lambda i: None)
        blocks.flags[rank].requested = 15
        return [first, blocks.block(rank, 4, lambda i: None)]

    found = blocks.on_all(body)
    assert found[0] == found[1] and found[0][0] == 4
    assert 1 <= found[0][1] <= 4


@pytest.mark.parametrize("seed", range(20))
def test_whenever_and_wherever_it_comes_all_ranks_do_as_many_steps(make: Make, seed: int) -> None:
    chance = random.Random(seed)
    size, most = chance.randint(2, 4), chance.randint(2, 30)
    blocks = make(size)
    told = {r: chance.randint(0, 3 * most) for r in range(size) if r == 0 or chance.random() < 0.6}
    pauses = [[chance.random() * 0.004 for _ in range(most)] for _ in range(size)]

    def body(rank: int) -> list[int]:
        counted, done = itertools.count(), []

        def step(i: int) -> None:
            threading.Event().wait(pauses[rank][i])
            if next(counted) == told.get(rank):
                blocks.flags[rank].requested = 15

        while len(done) < 6 and not blocks.stops[rank].cut:
            done.append(blocks.block(rank, most, step))
        return done

    found = blocks.on_all(body)
    assert all(each == found[0] for each in found), found
    assert len({s.cut for s in blocks.stops}) == 1


def test_one_rank_alone_stops_between_two_steps_without_a_store() -> None:
    flag = SimpleNamespace(requested=0)
    stop = BlockStop(flag, dist.HashStore(), 0, 1, lambda: 1)
    stop.begin(100)
    assert not stop.ends(1)
    flag.requested = 15
    assert stop.ends(2) and stop.cut and stop.store.num_keys() == 0
    stop.begin(100)
    assert not stop.cut
    stop.close()
