"""Ranks as threads: virtual time, determinism, and the error where real ranks would hang."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

from manyhands.core import Group
from manyhands.errors import Deadlock
from manyhands.exchange.inproc import InprocGroup, World

Trace = list[tuple[int, float, str]]


def reduce_once(group: Group, numel: int = 2) -> None:
    group.all_reduce({"w": torch.ones(numel)}).wait()


def traced(world: World) -> Trace:
    """What happens when, in the order in which it happens, with ranks of different speed and calls
    that overlap.
    """
    trace: Trace = []

    def main(group: InprocGroup) -> None:
        x = torch.full((3,), float(group.rank))
        for turn in range(4):
            world.spend(group.rank, 0.3 * (group.rank * 5 % 3) + 0.1)
            trace.append((group.rank, world.now[group.rank], f"computed {turn}"))
            work = group.all_reduce({"x": x}, "mean")
            world.spend(group.rank, 0.25)
            work.wait()
            trace.append((group.rank, world.now[group.rank], f"reduced {turn}: {x.tolist()}"))
            group.swap({"x": x}, [(group.rank - 1) % group.size, (group.rank + 1) % group.size])
            trace.append((group.rank, world.now[group.rank], f"swapped {turn}"))

    world.run(main)
    return trace


def test_the_same_run_gives_the_same_trace() -> None:
    first = traced(World(5))
    assert len(first) == 5 * 4 * 3
    assert traced(World(5)) == first
    world = World(5)
    assert traced(world) == first and traced(world) == first, "a world can be run again"


def test_the_turn_goes_to_the_smallest_time_and_then_the_smallest_rank() -> None:
    world, seen = World(3), []

    def main(group: InprocGroup) -> None:
        for _ in range(3):
            world.spend(group.rank, 3.0 - group.rank)
            seen.append((world.now[group.rank], group.rank))

    world.run(main)
    assert seen == sorted(seen)


def test_exactly_one_rank_runs_at_a_time() -> None:
    world, inside = World(4), threading.Lock()

    def main(group: InprocGroup) -> None:
        for _ in range(50):
            assert inside.acquire(blocking=False), "two ranks run at once"
            torch.ones(1000).sum()
            inside.release()
            reduce_once(group)

    world.run(main)


def test_every_rank_returns_its_own_result() -> None:
    assert World(4).run(lambda group: group.rank * 10) == [0, 10, 20, 30]


def test_one_tick_a_call() -> None:
    world = World(3)

    def main(group: InprocGroup) -> None:
        reduce_once(group)
        group.swap({"w": torch.ones(1)}, [])
        reduce_once(group)

    world.run(main)
    assert world.now == [3.0, 3.0, 3.0]
    assert [b["exchange"] for b in world.busy] == [3.0] * 3


def test_an_exchange_is_paid_for_only_as_far_as_it_is_not_hidden() -> None:
    asked = []

    def cost(what: str, nbytes: int, peers: int) -> float:
        asked.append((what, nbytes, peers))
        return 4.0

    world = World(2, cost)

    def main(group: InprocGroup) -> None:
        world.spend(
            group.rank, 1.0 + group.rank
        )  # the slower one comes at 2: the exchange lasts from 2 to 6
        work = group.all_reduce({"w": torch.ones(10)})
        world.spend(group.rank, 1.0 + 2 * group.rank)  # rank 0 waits from 2 on, rank 1 from 5 on
        work.wait()

    world.run(main)
    assert asked == [("all_reduce", 40, 2)]
    assert world.now == [6.0, 6.0]
    assert world.busy == [
        {"compute": 2.0, "exchange": 4.0, "wait": 0.0},
        {"compute": 5.0, "exchange": 1.0, "wait": 0.0},
    ]


def test_a_barrier_ends_when_the_last_rank_has_come_and_costs_no_bytes() -> None:
    asked = []

    def cost(what: str, nbytes: int, peers: int) -> float:
        asked.append((what, nbytes, peers))
        return 0.5

    world = World(3, cost)

    def main(group: InprocGroup) -> None:
        world.spend(group.rank, 1.0 + group.rank)
        group.barrier()

    world.run(main)
    assert asked == [("barrier", 0, 3)]
    assert world.now == [3.5] * 3
    assert [b["wait"] for b in world.busy] == [2.0, 1.0, 0.0]


def test_a_broadcast_travels_like_an_all_reduce() -> None:
    asked = []

    def cost(what: str, nbytes: int, peers: int) -> float:
        asked.append((what, nbytes, peers))
        return 4.0

    world = World(2, cost)

    def main(group: InprocGroup) -> float:
        world.spend(group.rank, 1.0 + group.rank)
        x = torch.full((10,), 7.0 + group.rank)
        work = group.broadcast({"x": x}, source=1)
        world.spend(group.rank, 1.0)
        work.wait()
        return x.tolist()

    assert world.run(main) == [[8.0] * 10] * 2
    assert asked == [("broadcast", 40, 2)]
    assert world.now == [6.0, 6.0]


def test_a_barrier_that_one_rank_leaves_out_is_a_deadlock() -> None:
    with pytest.raises(Deadlock, match=r"rank 0 waits in barrier #0 for rank 1; rank 1 finished"):
        World(2).run(lambda group: group.barrier() if group.rank == 0 else None)


@pytest.mark.parametrize(
    ("call", "needed"),
    [
        (
            lambda g: g.barrier(),
            "rank 0 came with all_reduce.* rank 1 with barrier: different calls",
        ),
        (
            lambda g: g.broadcast({"w": torch.ones(2)}),
            "rank 1 with broadcast from rank 0 of w .*: different calls",
        ),
    ],
)
def test_a_barrier_or_broadcast_against_another_call_is_refused(call, needed: str) -> None:
    with pytest.raises(Deadlock, match=needed):
        World(2).run(lambda group: reduce_once(group) if group.rank == 0 else call(group))


def test_broadcasts_from_different_sources_are_refused() -> None:
    with pytest.raises(Deadlock, match="different sources"):
        World(2).run(lambda group: group.broadcast({"w": torch.ones(2)}, group.rank).wait())


def test_waiting_for_a_slow_rank_is_told_from_exchange() -> None:
    world = World(2)

    def main(group: InprocGroup) -> None:
        world.spend(group.rank, 5.0 * group.rank)
        group.swap({"w": torch.ones(1)}, [1 - group.rank])

    world.run(main)
    assert world.busy == [
        {"compute": 0.0, "exchange": 1.0, "wait": 5.0},
        {"compute": 5.0, "exchange": 1.0, "wait": 0.0},
    ]


def test_all_reduces_follow_each_other_on_the_link() -> None:
    world = World(2, lambda what, nbytes, peers: 3.0)

    def main(group: InprocGroup) -> None:
        for work in [group.all_reduce({"w": torch.ones(1)}) for _ in range(4)]:
            work.wait()

    world.run(main)
    assert world.now == [12.0, 12.0]


def test_meta_tensors_travel_like_others() -> None:
    def main(group: Group) -> torch.Size:
        x = torch.empty(1000, 1000, device="meta")
        group.all_reduce({"x": x}, "mean").wait()
        return group.swap({"x": x}, [1 - group.rank])[0]["x"].shape

    assert World(2).run(main) == [(1000, 1000)] * 2


def test_a_sender_goes_on_while_its_message_travels_and_its_port_is_busy() -> None:
    asked = []

    def cost(what: str, nbytes: int, peers: int) -> float:
        asked.append((what, nbytes, peers))
        return nbytes / 4

    world = World(3, cost)

    def main(group: InprocGroup) -> float:
        if group.rank == 0:
            works = [
                group.transfer({1: torch.ones(4), 2: torch.ones(2)}, {}),
                group.transfer({1: torch.ones(1)}, {}),
            ]
            sent_at = world.now[0]
            for work in works:
                work.wait()
            return sent_at
        world.spend(group.rank, 1.0)
        group.transfer({}, {0: torch.zeros(6 - 2 * group.rank)}).wait()
        came_at = world.now[group.rank]
        if group.rank == 1:
            group.transfer({}, {0: torch.zeros(1)}).wait()
        return came_at

    # the first is on the way from 0 to 4, the second, from the same port, from 4 to 6, the third to
    # 7
    assert world.run(main) == [0.0, 4.0, 6.0]
    assert world.now == [7.0, 7.0, 6.0]
    assert asked == [("transfer", 16, 1), ("transfer", 8, 1), ("transfer", 4, 1)]
    assert world.busy[1] == {"compute": 1.0, "exchange": 6.0, "wait": 0.0}


def test_who_asks_before_anything_was_sent_waits_and_only_the_rest_is_exchange() -> None:
    world = World(2, lambda what, nbytes, peers: 2.0)

    def main(group: InprocGroup) -> None:
        if group.rank == 0:
            world.spend(0, 5.0)
            group.transfer({1: torch.ones(1)}, {})
        else:
            group.transfer({}, {0: torch.zeros(1)}).wait()

    world.run(main)
    assert world.busy[1] == {"compute": 0.0, "exchange": 2.0, "wait": 5.0}


def test_transfers_are_not_counted_among_the_calls_that_all_ranks_make() -> None:
    def main(group: Group) -> list[float]:
        x = torch.full((1,), float(group.rank))
        if group.rank < 2:
            group.transfer({1 - group.rank: x.clone()}, {1 - group.rank: x}).wait()
        group.all_reduce({"x": x}).wait()
        return x.tolist()

    assert World(3).run(main) == [[3.0]] * 3


def test_a_meta_tensor_is_transferred_like_others() -> None:
    def main(group: Group) -> None:
        x, into = torch.empty(1000, 1000, device="meta"), torch.empty(1000, 1000, device="meta")
        group.transfer({1 - group.rank: x}, {1 - group.rank: into}).wait()

    world = World(2, lambda what, nbytes, peers: nbytes)
    world.run(main)
    assert world.now == [4e6, 4e6]


# -- where a real link would hang --


def test_a_message_that_nobody_sends() -> None:
    def main(group: Group) -> None:
        if group.rank < 2:
            group.transfer({1 - group.rank: torch.ones(1)}, {1 - group.rank: torch.ones(1)}).wait()
            group.transfer({}, {r: torch.ones(1) for r in range(3) if r != group.rank}).wait()

    with pytest.raises(Deadlock) as e:
        World(3).run(main)
    assert (
        "rank 0 waits in transfer #1 for ranks [1, 2]; rank 1 waits in transfer #1 for ranks [0, "
        "2]; rank 2 finished" in str(e.value)
    )


def test_a_message_that_nobody_asks_for() -> None:
    """A link without buffers would hang, and one with small buffers would hang on long messages
    only.
    """

    def main(group: Group) -> None:
        group.transfer({1 - group.rank: torch.ones(1)}, {}).wait()
        group.transfer({}, {1 - group.rank: torch.ones(1)}).wait()

    with pytest.raises(
        Deadlock,
        match="rank 0 waits in transfer #0 for rank 1; rank 1 waits in transfer #0 for rank 0",
    ):
        World(2).run(main)


@pytest.mark.parametrize("into", [torch.ones(3), torch.ones(2, dtype=torch.int64)])
def test_the_two_ends_of_a_message_must_agree(into: torch.Tensor) -> None:
    def main(group: Group) -> None:
        group.transfer(
            {1: torch.ones(2)} if group.rank == 0 else {}, {0: into} if group.rank == 1 else {}
        ).wait()

    other = f"{into.numel()} {str(into.dtype).removeprefix('torch.')}"
    with pytest.raises(Deadlock, match=f"rank 0 gives 2 float32, rank 1 waits for {other}"):
        World(2).run(main)


def test_a_rank_that_finished_is_named_by_those_that_wait_for_it() -> None:
    def main(group: Group) -> None:
        for _ in range(4 if group.rank != 2 else 3):
            reduce_once(group)

    with pytest.raises(Deadlock) as e:
        World(4).run(main)
    assert "ranks [0, 1, 3] will wait for ever" in str(e.value)
    assert "rank 0 waits in all_reduce #3 for rank 2" in str(e.value)
    assert "rank 2 finished" in str(e.value)


def test_a_rank_that_waits_elsewhere_is_named_with_where() -> None:
    def main(group: Group) -> None:
        if group.rank == 0:
            group.all_reduce({"w": torch.ones(2)})
        if group.rank < 2:
            reduce_once(group)

    with pytest.raises(Deadlock) as e:
        World(3).run(main)
    assert (
        "rank 0 waits in all_reduce #1 for ranks [1, 2]; rank 1 waits in all_reduce #0 for rank "
        "2; rank 2 finished" in str(e.value)
    )


def test_a_swap_with_a_rank_that_does_not_come() -> None:
    def main(group: Group) -> None:
        if group.rank < 2:
            group.swap({"w": torch.ones(1)}, [(group.rank + 1) % 3, (group.rank + 2) % 3])

    with pytest.raises(
        Deadlock,
        match=r"rank 0 waits in swap #0 for rank 2; rank 1 waits in swap #0 for rank 2; rank 2 "
        r"finished",
    ):
        World(3).run(main)


def test_different_calls_name_both_ranks_and_both_calls() -> None:
    def main(group: Group) -> None:
        reduce_once(group)
        if group.rank == 0:
            reduce_once(group, 5)
        else:
            group.swap({"b": torch.ones(3, dtype=torch.int64)}, [0])

    with pytest.raises(Deadlock) as e:
        World(2).run(main)
    assert "call #1" in str(e.value)
    assert "rank 0 came with all_reduce(sum) of w [5] float32" in str(e.value)
    assert "rank 1 with swap with rank 0 of b [3] int64: different calls" in str(e.value)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"w": torch.ones(3)}, "different names, shapes or dtypes"),
        ({"v": torch.ones(2)}, "different names, shapes or dtypes"),
        ({"w": torch.ones(2, dtype=torch.float64)}, "different names, shapes or dtypes"),
        ({}, "of nothing: different names, shapes or dtypes"),
    ],
)
def test_different_tensors_do_not_match(other: dict[str, torch.Tensor], reason: str) -> None:
    with pytest.raises(Deadlock, match=reason):
        World(2).run(
            lambda group: group.all_reduce(
                {"w": torch.ones(2)} if group.rank == 0 else other
            ).wait()
        )
    with pytest.raises(Deadlock, match=reason):
        World(2).run(
            lambda group: group.swap(
                {"w": torch.ones(2)} if group.rank == 0 else other, [1 - group.rank]
            )
        )


def test_different_ops_do_not_match() -> None:
    with pytest.raises(Deadlock, match="different ops"):
        World(2).run(
            lambda group: group.all_reduce(
                {"w": torch.ones(2)}, "sum" if group.rank == 0 else "max"
            ).wait()
        )


def test_a_swap_must_be_symmetric() -> None:
    with pytest.raises(Deadlock, match="more often than it is named itself"):
        World(2).run(lambda group: group.swap({"w": torch.ones(2)}, [1] if group.rank == 0 else []))


@pytest.mark.parametrize("peer", [-1, 2])
def test_a_swap_with_a_rank_that_is_not_there(peer: int) -> None:
    with pytest.raises(ValueError, match=f"swaps with rank {peer}, but ranks are 0 to 1"):
        World(2).run(lambda group: group.swap({}, [peer]))


# -- where a rank fails --


def test_what_a_rank_raises_comes_out_as_itself_and_the_others_unwind() -> None:
    before, left, error = threading.active_count(), [], KeyError("mine")

    def main(group: Group) -> None:
        try:
            reduce_once(group)
            if group.rank == 1:
                raise error
            try:
                reduce_once(group)
            except (
                Exception
            ):  # unwinding is no Exception: a strategy's own handler does not stop it
                left.append("swallowed")
        finally:
            left.append(group.rank)

    with pytest.raises(KeyError) as e:
        World(4).run(main)
    assert e.value is error
    assert "raised on rank 1 of 4" in e.value.__notes__[0]
    assert sorted(left) == [0, 1, 2, 3]
    assert threading.active_count() == before


def test_a_call_on_the_way_out_leaves_at_once() -> None:
    before = threading.active_count()

    def main(group: Group) -> None:
        try:
            reduce_once(group)
            if group.rank == 0:
                raise ValueError("first")
            reduce_once(group)
        finally:
            reduce_once(group)

    with pytest.raises(ValueError, match="first"):
        World(3).run(main)
    assert threading.active_count() == before


def test_no_thread_outlives_a_deadlock() -> None:
    before = threading.active_count()
    with pytest.raises(Deadlock):
        World(8).run(lambda group: None if group.rank == 7 else reduce_once(group))
    assert threading.active_count() == before


def test_an_interrupt_ends_all_ranks() -> None:
    before = threading.active_count()

    def main(group: Group) -> None:
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
        while True:
            reduce_once(group)

    with pytest.raises(KeyboardInterrupt):
        World(3).run(main)
    assert threading.active_count() == before


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_time_does_not_run_backwards(seconds: float) -> None:
    with pytest.raises(ValueError, match="backwards"):
        World(1).run(lambda group: group.world.spend(0, seconds))
