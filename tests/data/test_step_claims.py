"""Steps that ranks draw: every sample exactly once an epoch, however unevenly the ranks come, and one position at a meeting."""

from __future__ import annotations

import random

import pytest
import torch

from manyhands.core import Position
from manyhands.data.batches import IndexedBatches, TensorSource
from manyhands.data.step_claims import StepClaims
from manyhands.errors import TaskError
from manyhands.split.data import DataSplit
from support.replicas import mlp, replica, rows


class Counter:
    """One counter for all ranks, as a store has it."""

    def __init__(self) -> None:
        self.next, self.called = 0, False

    def deal(self, limit: int) -> int | None:
        if self.called or self.next >= limit:
            return None
        self.next += 1
        return self.next - 1

    def call(self) -> None:
        self.called = True


def walks(
    samples: int, batch: int, ranks: int, at: Position, counter: Counter
) -> list[tuple[StepClaims, IndexedBatches]]:
    data = TensorSource((torch.arange(samples),), torch.device("cpu"))
    split = DataSplit(samples, batch, batch, 0, 1)
    made = []
    for _ in range(ranks):
        dealer = StepClaims(split, at, counter.deal, counter.call)
        made.append(
            (
                dealer,
                IndexedBatches(data, lambda epoch: torch.arange(samples), split, at, dealer=dealer),
            )
        )
    return made


@pytest.mark.parametrize("samples, batch", [(64, 8), (61, 8), (5, 8), (17, 1)])
@pytest.mark.parametrize("start", [Position(), Position(2, 3, 100)])
def test_every_sample_of_an_epoch_is_computed_once_whoever_comes(
    samples: int, batch: int, start: Position
) -> None:
    counter, rng = Counter(), random.Random(samples)
    ranks = walks(samples, batch, 3, start, counter)
    for epoch in range(start.epoch, start.epoch + 3):
        begun = ranks[0][0].position
        seen: list[int] = []
        while True:
            dealer, walk = rng.choice(ranks)
            if not dealer.claim(dealer.steps_to(epoch + 1)):
                break
            assert dealer.claim(dealer.steps_to(epoch + 1)), "what is claimed is claimed once"
            got = walk.next()
            seen += got.values[0].tolist()
            assert walk.position == begun, "between meetings the position is that of the last one"
        assert sorted(seen) == list(range(begun.offset, samples))
        steps = max(dealer.drawn() for dealer, _ in ranks)
        for dealer, walk in ranks:
            assert not dealer.claim(dealer.steps_to(epoch + 1))
            dealer.meet(steps)
            assert walk.position == Position(
                epoch + 1, 0, begun.steps + -(-(samples - begun.offset) // batch)
            )


def test_a_meeting_that_was_called_goes_on_in_the_middle_of_the_epoch() -> None:
    counter = Counter()
    (a, walk_a), (b, walk_b) = walks(64, 8, 2, Position(), counter)
    seen = []
    for dealer, walk in ((a, walk_a), (a, walk_a), (b, walk_b)):
        assert dealer.claim(8)
        seen += walk.next().values[0].tolist()
    a.call()
    assert not a.claim(8) and not b.claim(8)
    for dealer in (a, b):
        dealer.meet(max(a.drawn(), b.drawn()))
        assert dealer.position == Position(0, 24, 3)
    counter.called = False
    while b.claim(8):
        seen += walk_b.next().values[0].tolist()
    assert sorted(seen) == list(range(64))


def test_a_part_of_an_epoch_ends_with_the_step_that_reaches_it() -> None:
    (dealer, _), *_ = walks(100, 8, 1, Position(), Counter())
    assert dealer.steps_to(1) == 13 and dealer.steps_to(0.5) == 7 and dealer.steps_to(0.08) == 1
    dealer.meet(13)
    assert dealer.position == Position(1, 0, 13) and dealer.steps_to(1.5) == 20


def test_who_was_told_to_meet_asks_no_more_before_the_meeting() -> None:
    """A block of steps ends because there is none left, and then the loop asks again: that is still the same meeting."""
    asked = []

    def deal(limit: int) -> int | None:
        asked.append(limit)
        return None if len(asked) == 2 else len(asked) - 1

    split = DataSplit(64, 8, 8, 0, 1)
    dealer = StepClaims(split, Position(), deal, lambda: None)
    assert dealer.claim(8)
    next(dealer.takes())
    assert not dealer.claim(8) and not dealer.claim(8) and len(asked) == 2
    dealer.meet(1)
    assert dealer.claim(8) and len(asked) == 3


def test_a_step_that_was_claimed_and_not_begun_is_not_counted_by_who_rests() -> None:
    (dealer, walk), *_ = walks(64, 8, 1, Position(), Counter())
    assert dealer.claim(8) and walk.next().count == 8
    assert dealer.claim(8)
    dealer.rest()
    assert not dealer.claim(8) and dealer.drawn() == 1
    with pytest.raises(TaskError, match=r"run\.step"):
        walk.next()


def test_a_schedule_goes_with_the_steps_of_all_ranks_and_not_with_those_of_one() -> None:
    """Three ranks, of which the last comes once in seven times: when it comes, its rate is that of the others."""
    counter, size, halving = (
        Counter(),
        3,
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    )
    split, ranks = DataSplit(1000, 4, 4, 0, 1), []
    for _ in range(size):
        dealer = StepClaims(split, Position(), counter.deal, counter.call)
        mine = replica(
            mlp(), [[rows(4)]] * 20, nominal=4, schedule=halving, schedule_at=lambda d=dealer: d.latest.steps // size,
            optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
        )  # fmt: skip
        ranks.append((dealer, dealer.takes(), mine))
    for number, who in enumerate([0, 1, 0, 1, 0, 1, 2, 0, 1, 0, 1, 1, 2, 0]):
        dealer, takes, mine = ranks[who]
        assert dealer.claim(1000)
        next(takes)
        mine.backward()
        mine.stepped()
        assert mine.lr == 0.5 ** ((number + 1) // size)
