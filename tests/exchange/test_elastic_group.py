"""Elastic group: reductions among those that live, bit-identical on all of them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import pytest
import torch

from manyhands.core import Op
from manyhands.exchange.elastic import PIECE_BYTES, ElasticGroup
from manyhands.server.clock import Clock


def gather(clock: Clock, rank: int, number: Iterator[int], payload: bytes) -> Mapping[int, bytes]:
    return clock.elastic.gather(rank, (0, next(number)), payload, 30.0)


def groups(size: int, dead: tuple[int, ...] = ()) -> list[ElasticGroup]:
    """Over the gatherings of a real clock."""
    clock = Clock(size)
    clock.elastic.used = True
    made = []
    for rank in range(size):
        clock.join(rank)
        made.append(ElasticGroup(rank, size))
        made[-1].gather = partial(gather, clock, rank, itertools.count())
    for rank in dead:
        clock.evict(rank, "it died")
    return [group for group in made if group.rank not in dead]


def everywhere(found: list[ElasticGroup], act: Callable[[ElasticGroup], None]) -> None:
    threads = [threading.Thread(target=act, args=(group,)) for group in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(("op", "value"), [("sum", 4.0), ("mean", 2.0), ("max", 3.0)])
def test_a_reduction_is_over_those_that_live(op: Op, value: float) -> None:
    results: dict[int, torch.Tensor] = {}

    def act(group: ElasticGroup) -> None:
        x = torch.full((2, 3), float(group.rank))
        group.all_reduce({"x": x}, op).wait()
        results[group.rank] = x
        assert group.members == (1, 3) and group.leads == (group.rank == 1)

    everywhere(groups(4, dead=(0, 2)), act)
    assert sorted(results) == [1, 3]
    assert all((x == value).all() for x in results.values())


def test_long_vectors_travel_in_pieces_and_arrive_whole() -> None:
    length = 3 * PIECE_BYTES // 8 + 5
    results = {}

    def act(group: ElasticGroup) -> None:
        x = torch.arange(length, dtype=torch.int64) * (group.rank + 1)
        group.all_reduce({"x": x}).wait()
        results[group.rank] = x

    everywhere(groups(2), act)
    for x in results.values():
        assert torch.equal(x, 3 * torch.arange(length))


def test_a_broadcast_comes_from_the_first_that_lives_where_its_source_is_gone() -> None:
    results = {}

    def act(group: ElasticGroup) -> None:
        x = torch.tensor([group.rank, 7])
        group.broadcast({"x": x, "empty": torch.empty(0)}).wait()
        group.barrier()
        results[group.rank] = x.tolist()

    everywhere(groups(3, dead=(0,)), act)
    assert results == {1: [1, 7], 2: [1, 7]}


def test_without_a_gather_a_rank_is_alone() -> None:
    group = ElasticGroup(1, 3)
    x = torch.tensor([1.5])
    group.all_reduce({"x": x}, "mean").wait()
    group.barrier()
    assert x.tolist() == [1.5] and not group.leads
    with pytest.raises(NotImplementedError, match="use all_reduce"):
        group.swap({}, [0])
