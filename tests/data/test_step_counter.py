"""Step counter in shared memory: every part of a step is claimed once, and sync points are between
steps, the same on all ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from manyhands.core import Goal, Position
from manyhands.data.batches import IndexedBatches
from manyhands.data.sources import TensorSource
from manyhands.data.step_claims import StepClaims
from manyhands.data.step_counter import WORDS, SharedStepCounter
from manyhands.exchange.inproc import InprocGroup, World
from manyhands.limits import Limits
from manyhands.split.data import DataSplit

SIZES = pytest.mark.parametrize("size", [1, 2, 3, 5])


@dataclass
class Worker:
    """One rank: claims, computes for a while, and syncs when it is told to."""

    group: InprocGroup
    seed: int = 0
    counter: SharedStepCounter = field(init=False)

    def __post_init__(self) -> None:
        words = self.group.allocate(WORDS, torch.int64, common=True).numpy()
        free: Any = contextlib.nullcontext()  # in a World one rank at a time has the turn
        self.counter = SharedStepCounter(words, self.group.size, free, self.group.barrier)
        self._dice = random.Random(1000 * self.seed + self.group.rank)

    def compute(self) -> None:
        self.group.world.spend(self.group.rank, self._dice.random())

    def claim_all(self, limit: int, also: Callable[[int], None] = lambda n: None) -> list[int]:
        """Up to the next sync point."""
        mine: list[int] = []
        while (number := self.counter.claim(limit)) is not None:
            self.compute()
            mine.append(number)
            also(number)
        return mine


def all_of(found: list[list[int]]) -> list[int]:
    return sorted(itertools.chain.from_iterable(found))


@SIZES
def test_every_part_below_the_limit_is_claimed_once_and_a_fast_rank_claims_more(size: int) -> None:
    def main(group: InprocGroup) -> list[list[int]]:
        worker, limits = Worker(group), (4 * size, 4 * size, 9 * size)
        return [worker.claim_all(limit) for limit in limits]

    found = World(size).run(main)
    assert all_of([rank[0] for rank in found]) == list(range(4 * size))
    assert not all_of([rank[1] for rank in found]), "the second limit is reached already"
    assert all_of([rank[2] for rank in found]) == list(range(4 * size, 9 * size))
    if size > 2:
        assert len({len(rank[2]) for rank in found}) > 1


@SIZES
@pytest.mark.parametrize("seed", range(4))
def test_a_request_stops_all_ranks_at_the_end_of_the_step_that_has_begun(
    size: int, seed: int
) -> None:
    def main(group: InprocGroup) -> tuple[list[int], list[int]]:
        worker, asks = Worker(group, seed), random.Random(seed).randrange(size)

        def request(number: int) -> None:
            if group.rank == asks and number > 2 * size:
                worker.counter.request_sync()

        first = worker.claim_all(100 * size, request)
        return first, worker.claim_all(102 * size)  # an old request does not stop the next segment

    found = World(size).run(main)
    first = all_of([rank[0] for rank in found])
    assert first == list(range(len(first))) and len(first) % size == 0
    assert 2 * size < len(first) < 100 * size
    assert all_of([rank[1] for rank in found]) == list(range(len(first), 102 * size))


def test_a_request_at_a_sync_point_is_of_the_past() -> None:
    def main(group: InprocGroup) -> int:
        worker = Worker(group)
        worker.counter.request_sync()
        first = worker.claim_all(4)
        worker.counter.request_sync()
        return len(first) + len(worker.claim_all(8))

    assert sum(World(2).run(main)) == 8


def test_a_rank_that_ends_early_stops_the_others_at_the_end_of_the_step() -> None:
    """As one whose own loop was left: it claims nothing below a limit of 0."""

    def main(group: InprocGroup) -> list[int]:
        worker = Worker(group)
        if group.rank != 1:
            return worker.claim_all(3000)
        mine = [worker.counter.claim(3000) for _ in range(2)]
        assert worker.counter.claim(0) is None
        return [n for n in mine if n is not None]

    found = all_of(World(3).run(main))
    assert found == list(range(len(found))) and len(found) % 3 == 0 and len(found) < 3000


def test_nobody_claims_before_all_have_come_to_the_sync_point() -> None:
    """So that no rank trains while another still evaluates."""
    evaluating = [False] * 3

    def main(group: InprocGroup) -> None:
        worker = Worker(group)
        for segment in range(3):
            worker.claim_all(6 * (segment + 1), lambda n: check())
            group.barrier()  # all agree on where they are
            evaluating[group.rank] = True
            group.world.spend(group.rank, 5.0 * group.rank)
            evaluating[group.rank] = False

    def check() -> None:
        assert not any(evaluating)

    World(3).run(main)


# -- claims of parts --

N = 101


def batches_of(split: DataSplit, at: Position) -> IndexedBatches:
    data = TensorSource((torch.arange(split.samples),), torch.device("cpu"))
    return IndexedBatches(data, lambda epoch: torch.arange(split.samples), split, at)


def taken(batches: IndexedBatches) -> list[int]:
    """The samples of one whole step of this rank."""
    found: list[int] = []
    while True:
        batch = batches.next()
        found += [] if batch.count == 0 else batch.values[0].tolist()
        if batch.last:
            return found


@SIZES
@pytest.mark.parametrize("micro", [8, 3])
def test_claims_that_begin_and_end_in_the_middle_of_an_epoch_give_each_sample_once(
    size: int, micro: int
) -> None:
    """Three steps together, four or so by claims, and the rest of the epoch together again."""

    def main(group: InprocGroup) -> tuple[list[int], Position]:
        worker = Worker(group)
        split = DataSplit(N, 8 * size if size < 4 else 10, micro, group.rank, size)
        batches = batches_of(split, Position())
        together = min(2, split.steps_per_epoch)
        seen = [i for _ in range(together) for i in taken(batches)]
        parts = batches.claim_parts(worker.counter.claim, worker.counter.request_sync, size)
        stop = min(together + 4, split.steps_per_epoch)
        for limit in (stop - 1, stop):  # a sync point between them
            while parts.claim(limit):
                worker.compute()
                seen += taken(batches)
                assert batches.position.steps < limit
            parts.sync(sync(group, parts.claimed_steps()))
        batches.stop_claiming()
        while batches.position.epoch == 0:
            seen += taken(batches)
        return seen, batches.position

    found = World(size).run(main)
    assert all_of([seen for seen, _ in found]) == list(range(N))
    assert {at.epoch for _, at in found} == {1} and len({at.steps for _, at in found}) == 1


def sync(group: InprocGroup, steps: int) -> int:
    reached = torch.tensor([steps])
    group.all_reduce({"steps": reached}, op="max").wait()
    return int(reached)


def test_the_strategy_changes_at_its_step_and_not_later() -> None:
    split = DataSplit(96, 16, 8, 0, 2)
    claims = StepClaims(split, Position(), iter(range(1000)).__next__, lambda: None, parts=2)
    batches = batches_of(split, Position())
    batches._claims = claims
    for goal, due in (
        (Goal("step", 3.0), 3),
        (Goal("epoch", 0.5), 3),
        (Goal("epoch", 0.4), 3),
        (Goal("step", 40.0), 40),
        (Goal("accuracy", 0.5), float("inf")),
    ):
        limits = Limits(batches, 9.0, 1e9, claims=claims, change_at=goal)
        assert limits._change_due(claims) == due, goal
