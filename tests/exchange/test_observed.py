"""What a watched link reports."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from manyhands.core import Event, Tensors
from manyhands.exchange.inproc import World
from manyhands.exchange.observed import ObservedGroup
from manyhands.exchange.shared import SharedGroup
from manyhands.exchange.solo import SoloGroup


def watched(every: int = 1) -> tuple[ObservedGroup, list[Event]]:
    """A link whose clocks advance by one second each time they are read."""
    events: list[Event] = []
    ticks, times = itertools.count(), itertools.count(100)
    return ObservedGroup(
        SoloGroup(), events.append, lambda: float(next(ticks)), lambda: float(next(times)), every
    ), events


def values() -> Tensors:
    return {"w": torch.ones(10), "b": torch.ones(3, dtype=torch.float64)}


def test_an_all_reduce_is_reported_when_its_wait_is_over() -> None:
    group, events = watched()
    group.round = 7
    work = group.all_reduce(values())
    group.round = 8
    assert events == [] and (group.calls, group.nbytes, group.seconds) == (1, 64, 1.0)
    work.wait()
    assert events == [Event(98.0, 0, 7, "all_reduce", seconds=2.0, nbytes=64)], (
        "one second in the call, one in the wait"
    )
    work.wait()
    assert len(events) == 1 and (group.calls, group.nbytes, group.seconds) == (1, 64, 2.0)


def test_a_swap_counts_its_bytes_once_a_peer() -> None:
    def main(group: object) -> list[Event]:
        events: list[Event] = []
        over = ObservedGroup(group, events.append)  # type: ignore[arg-type]
        over.swap(values(), [r for r in range(over.size) if r != over.rank])
        assert (over.calls, over.nbytes) == (1, 2 * 64)
        return events

    for rank, events in enumerate(World(3).run(main)):
        assert [(e.rank, e.name, e.nbytes) for e in events] == [(rank, "swap", 128)]


def test_a_broadcast_counts_what_its_source_gives_and_a_barrier_nothing() -> None:
    def main(group: object) -> list[Event]:
        events: list[Event] = []
        over = ObservedGroup(group, events.append)  # type: ignore[arg-type]
        over.broadcast(values(), source=1).wait()
        over.barrier()
        assert (over.calls, over.nbytes) == (2, 64 if over.rank == 1 else 0)
        return events

    for rank, events in enumerate(World(3).run(main)):
        assert [(e.rank, e.name, e.nbytes) for e in events] == [
            (rank, "broadcast", 64 if rank == 1 else 0),
            (rank, "barrier", 0),
        ]


def test_a_transfer_counts_what_is_given() -> None:
    def main(group: object) -> list[Event]:
        events: list[Event] = []
        over = ObservedGroup(group, events.append)  # type: ignore[arg-type]
        right, left = (over.rank + 1) % 3, (over.rank - 1) % 3
        over.transfer(
            {right: torch.ones(10), left: torch.ones(4)},
            {left: torch.ones(10), right: torch.ones(4)},
        ).wait()
        assert (over.calls, over.nbytes) == (1, 56)
        return events

    for rank, events in enumerate(World(3).run(main)):
        assert [(e.rank, e.name, e.nbytes) for e in events] == [(rank, "transfer", 56)]


def test_totals_count_all_rounds_and_events_come_for_some() -> None:
    group, events = watched(every=3)
    for group.round in range(7):
        group.all_reduce(values()).wait()
        group.swap(values(), [])
    assert [e.round for e in events if e.name == "all_reduce"] == [0, 3, 6]
    assert [e.round for e in events if e.name == "swap"] == [0, 3, 6]
    assert group.calls == 14 and group.seconds == 7 * 3.0


def test_memory_is_that_of_the_group() -> None:
    group = SharedGroup(0, 1, dist.HashStore())
    placed = ObservedGroup(group, print).allocate(5, torch.int64)
    assert placed.tolist() == [0] * 5 and group.own(placed) == [slice(0, 5)]
    with pytest.raises(ValueError, match="has owners"):
        group.own(ObservedGroup(SoloGroup(), print).allocate(5, torch.int64))


@pytest.mark.parametrize("every", [0, -1])
def test_every_is_at_least_one(every: int) -> None:
    with pytest.raises(ValueError, match="needed: 1"):
        watched(every)
