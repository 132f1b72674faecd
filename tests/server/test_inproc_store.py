"""In-process store: the shards and the clock of real servers, on a World's virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from manyhands.core import Table
from manyhands.errors import Deadlock, StoreError
from manyhands.exchange.inproc import (
    Cost,
    InprocGroup,
    World,
    one_tick,
)
from manyhands.server.clock import Clock
from manyhands.server.inproc_store import InprocStore
from manyhands.server.shard import Shard

VECTOR = Table("v", length=4, dtype="float64", optimizer="sum")
ROWS = Table("rows", dim=2, optimizer="sum", init="zeros")


def stores(
    size: int,
    main: Callable[[InprocStore, InprocGroup], Any],
    cost: Cost = one_tick,
    shards: int = 1,
) -> tuple[World, list[Any]]:
    world, servers, clock = World(size, cost), [Shard(i) for i in range(shards)], Clock(size)
    return world, world.run(
        lambda group: main(InprocStore(world, group.rank, servers, clock), group)
    )


def one(size: int, at: int) -> dict[str, Tensor]:
    return {"v": torch.nn.functional.one_hot(torch.tensor(at), 4).double()}


def test_calls_take_the_time_that_the_cost_says_and_act_when_it_has_passed() -> None:
    asked: list[tuple[str, int, int]] = []

    def cost(what: str, nbytes: int, peers: int) -> float:
        asked.append((what, nbytes, peers))
        return {"pull": 5.0, "push": 2.0, "tick": 1.0}[what]

    def main(store: InprocStore, group: InprocGroup) -> float:
        store.create(VECTOR)
        store.create(ROWS)
        store.pull({"v": None})
        store.push(
            {"v": None, "rows": torch.tensor([7, 7, 9])},
            {"v": torch.ones(4).double(), "rows": torch.ones(3, 2)},
        )
        store.tick()
        return group.clock()

    world, (end,) = stores(1, main, cost)
    assert asked == [("pull", 32, 1), ("push", 32 + 24 + 24, 1), ("tick", 0, 1)]
    assert end == 8.0 == world.busy[0]["exchange"]


def test_who_pulls_before_a_push_is_done_does_not_see_it() -> None:
    """A push takes 2: rank 1, whose pull takes 1, reads at 1 and at 2.5."""
    cost = lambda what, nbytes, peers: 2.0 if what == "push" else 1.0

    def main(store: InprocStore, group: InprocGroup) -> list[float]:
        store.create(VECTOR)
        if store.rank == 0:
            store.push({"v": None}, one(4, 0))
            return []
        first = store.pull({"v": None})["v"]
        store.world.spend(1, 0.5)
        return [float(first[0]), float(store.pull({"v": None})["v"][0])]

    assert stores(2, main, cost)[1][1] == [0.0, 1.0]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_read_has_all_that_it_wrote_and_of_others_what_staleness_promises(staleness: int) -> None:
    """Rank r adds 1 at r in every clock: at the beginning of clock c it finds c there, and at the
    others' at least c - s.
    """
    clocks, freshest = 12, []

    def main(store: InprocStore, group: InprocGroup) -> None:
        store.create(VECTOR)
        for c in range(clocks):
            seen = store.pull({"v": None})["v"]
            assert seen[store.rank] == c, "read my writes"
            assert float(seen[:3].min()) >= c - staleness
            freshest.append(c - float(seen[:3].min()))
            store.world.spend(store.rank, 1.0 + (4 if store.rank == 1 else 0))
            store.push({"v": None}, one(4, store.rank))
            store.tick(staleness)

    stores(3, main)
    assert max(freshest) == staleness, "and the promise is used up"


def test_a_tick_waits_exactly_until_the_last_whom_it_waits_for() -> None:
    free = lambda what, nbytes, peers: 0.0

    def main(store: InprocStore, group: InprocGroup) -> list[float]:
        times = []
        for seconds in ((3, 10, 4), (5, 1, 2)):
            store.world.spend(store.rank, float(seconds[store.rank]))
            store.tick(0)
            times.append(group.clock())
        return times

    world, times = stores(3, main, free)
    assert times == [[10.0, 15.0]] * 3
    assert [busy["wait"] for busy in world.busy] == [7.0, 4.0, 9.0]


def test_a_commit_comes_at_the_moment_its_quorum_is_there_and_the_late_one_is_told() -> None:
    free = lambda what, nbytes, peers: 0.0

    def main(store: InprocStore, group: InprocGroup) -> tuple[float, bool, list[float]]:
        store.create(VECTOR)
        store.world.spend(store.rank, (3.0, 9.0, 5.0)[store.rank])
        store.push({"v": None}, one(4, store.rank), pending=True)
        tick = store.tick(0, quorum=2)
        return group.clock(), tick.counted, store.pull({"v": None})["v"].tolist()

    _, found = stores(3, main, free)
    assert found == [
        (5.0, True, [1, 0, 1, 0]),
        (9.0, False, [1, 0, 1, 0]),
        (5.0, True, [1, 0, 1, 0]),
    ]


def test_a_wait_that_cannot_end_names_who_waits_for_whom() -> None:
    def main(store: InprocStore, group: InprocGroup) -> None:
        if store.rank != 1:
            store.tick(0)
            store.tick(0)

    with pytest.raises(Deadlock) as said:
        stores(3, main)
    assert "rank 0 waits in tick after clock 0 for rank 1" in str(
        said.value
    ) and "rank 1 finished" in str(said.value)


def test_a_table_that_rank_0_never_makes_is_waited_for_by_name() -> None:
    def main(store: InprocStore, group: InprocGroup) -> None:
        if store.rank:
            store.create(VECTOR)

    with pytest.raises(Deadlock, match="rank 1 waits in create of table 'v' for rank 0"):
        stores(2, main)


def test_nobody_waits_for_a_rank_that_syncs() -> None:
    def main(store: InprocStore, group: InprocGroup) -> int:
        done = 0
        while store.claim_step(2 if store.rank else 5, shared=False) is not None:
            done += 1
            store.tick(0)
        return done

    _, done = stores(3, main)
    assert done[0] >= 2 == done[1] == done[2]


def test_what_a_rank_may_not_do_is_raised_where_it_did_it() -> None:
    def main(store: InprocStore, group: InprocGroup) -> None:
        store.create(VECTOR)
        store.push({"v": None}, {"v": torch.full((4,), math.nan).double()})

    with pytest.raises(StoreError, match="'v'") as said:
        stores(2, main)
    assert "rank 0 of 2 at virtual time 1" in said.value.__notes__[0]


@pytest.mark.parametrize("shards", [1, 3])
def test_it_runs_the_same_way_every_time(shards: int) -> None:
    def main(store: InprocStore, group: InprocGroup) -> tuple[Tensor, Tensor, float]:
        store.create(
            Table(
                "x",
                length=7,
                dtype="float64",
                optimizer="momentum",
                options={"lr": 0.1, "momentum": 0.9},
            ),
            torch.ones(7).double(),
        )
        store.create(ROWS)
        ids = torch.arange(5) * (store.rank + 1)
        for n in range(6):
            x = store.pull({"x": None})["x"]
            store.world.spend(store.rank, float((3 * store.rank + 5 * n) % 4))
            store.push(
                {"x": None, "rows": ids},
                {"x": x * (store.rank + 1), "rows": torch.ones(5, 2)},
                lr=0.01 * (n + 1),
            )
            store.tick(2)
        group.all_reduce({"end": torch.zeros(1)}).wait()
        return (
            store.pull({"x": None})["x"],
            store.pull({"rows": torch.arange(20)})["rows"],
            group.clock(),
        )

    (_, first), (_, second), (_, whole) = (
        stores(3, main, shards=shards),
        stores(3, main, shards=shards),
        stores(3, main),
    )
    for a, b, c in zip(first, second, whole, strict=True):
        assert torch.equal(a[0], b[0]) and torch.equal(a[0], c[0]), (
            "nor does the number of shards change a bit"
        )
        assert torch.equal(a[1], b[1]) and torch.equal(a[1], c[1]) and a[2] == b[2] == c[2]
