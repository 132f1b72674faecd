"""Step claims: every sample exactly once an epoch, however unevenly ranks claim steps.

All ranks have one position at a sync point.
"""

from __future__ import annotations

import random

import pytest
import torch

from manyhands.core import Position
from manyhands.data.batches import IndexedBatches
from manyhands.data.sources import TensorSource
from manyhands.data.step_claims import StepClaims
from manyhands.errors import TaskError
from manyhands.split.data import DataSplit
from support.replicas import mlp, replica, rows


class Counter:
    """One counter for all ranks, as a store has it."""

    def __init__(self) -> None:
        self.next, self.requested = 0, False

    def claim_step(self, limit: int) -> int | None:
        if self.requested or self.next >= limit:
            return None
        self.next += 1
        return self.next - 1

    def request_sync(self) -> None:
        self.requested = True


def iterators(
    samples: int, batch: int, ranks: int, at: Position, counter: Counter
) -> list[tuple[StepClaims, IndexedBatches]]:
    data = TensorSource((torch.arange(samples),), torch.device("cpu"))
    split = DataSplit(samples, batch, batch, 0, 1)
    made = []
    for _ in range(ranks):
        claims = StepClaims(split, at, counter.claim_step, counter.request_sync)
        made.append(
            (
                claims,
                IndexedBatches(data, lambda epoch: torch.arange(samples), split, at, claims=claims),
            )
        )
    return made


@pytest.mark.parametrize("samples, batch", [(64, 8), (61, 8), (5, 8), (17, 1)])
@pytest.mark.parametrize("start", [Position(), Position(2, 3, 100)])
def test_every_sample_of_an_epoch_is_computed_once_whoever_comes(
    samples: int, batch: int, start: Position
) -> None:
    counter, rng = Counter(), random.Random(samples)
    ranks = iterators(samples, batch, 3, start, counter)
    for epoch in range(start.epoch, start.epoch + 3):
        begun = ranks[0][0].position
        seen: list[int] = []
        while True:
            claims, batches = rng.choice(ranks)
            if not claims.claim(claims.steps_to(epoch + 1)):
                break
            assert claims.claim(claims.steps_to(epoch + 1)), "what is claimed is claimed once"
            got = batches.next()
            seen += got.values[0].tolist()
            assert batches.position == begun, (
                "between sync points the position is that of the last one"
            )
        assert sorted(seen) == list(range(begun.offset, samples))
        steps = max(claims.claimed_steps() for claims, _ in ranks)
        for claims, batches in ranks:
            assert not claims.claim(claims.steps_to(epoch + 1))
            claims.sync(steps)
            assert batches.position == Position(
                epoch + 1, 0, begun.steps + -(-(samples - begun.offset) // batch)
            )


def test_after_a_requested_sync_ranks_continue_in_the_middle_of_the_epoch() -> None:
    counter = Counter()
    (a, batches_a), (b, batches_b) = iterators(64, 8, 2, Position(), counter)
    seen = []
    for claims, batches in ((a, batches_a), (a, batches_a), (b, batches_b)):
        assert claims.claim(8)
        seen += batches.next().values[0].tolist()
    a.request_sync()
    assert not a.claim(8) and not b.claim(8)
    for claims in (a, b):
        claims.sync(max(a.claimed_steps(), b.claimed_steps()))
        assert claims.position == Position(0, 24, 3)
    counter.requested = False
    while b.claim(8):
        seen += batches_b.next().values[0].tolist()
    assert sorted(seen) == list(range(64))


def test_a_part_of_an_epoch_ends_with_the_step_that_reaches_it() -> None:
    (claims, _), *_ = iterators(100, 8, 1, Position(), Counter())
    assert claims.steps_to(1) == 13 and claims.steps_to(0.5) == 7 and claims.steps_to(0.08) == 1
    claims.sync(13)
    assert claims.position == Position(1, 0, 13) and claims.steps_to(1.5) == 20


def test_a_rank_that_must_sync_claims_no_more_before_the_sync_point() -> None:
    """A block of steps ends because there is none left, and then the loop asks again: that is still
    the same sync point.
    """
    asked = []

    def claim_step(limit: int) -> int | None:
        asked.append(limit)
        return None if len(asked) == 2 else len(asked) - 1

    split = DataSplit(64, 8, 8, 0, 1)
    claims = StepClaims(split, Position(), claim_step, lambda: None)
    assert claims.claim(8)
    next(claims.claimed_samples())
    assert not claims.claim(8) and not claims.claim(8) and len(asked) == 2
    claims.sync(1)
    assert claims.claim(8) and len(asked) == 3


def test_a_step_claimed_but_not_begun_is_left_out_when_a_rank_stops_claiming() -> None:
    (claims, batches), *_ = iterators(64, 8, 1, Position(), Counter())
    assert claims.claim(8) and batches.next().count == 8
    assert claims.claim(8)
    claims.stop_claiming()
    assert not claims.claim(8) and claims.claimed_steps() == 1
    with pytest.raises(TaskError, match=r"run\.step"):
        batches.next()


def test_a_schedule_goes_with_the_steps_of_all_ranks_and_not_with_those_of_one() -> None:
    """Three ranks, of which the last comes once in seven times: when it comes, its rate is that of
    the others.
    """
    counter, size, halving = (
        Counter(),
        3,
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    )
    split, ranks = DataSplit(1000, 4, 4, 0, 1), []
    for _ in range(size):
        claims = StepClaims(split, Position(), counter.claim_step, counter.request_sync)
        mine = replica(
            mlp(),
            [[rows(4)]] * 20,
            nominal=4,
            schedule=halving,
            schedule_at=lambda c=claims: c.latest.steps // size,
            optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
        )
        ranks.append((claims, claims.claimed_samples(), mine))
    for number, who in enumerate([0, 1, 0, 1, 0, 1, 2, 0, 1, 0, 1, 1, 2, 0]):
        claims, samples, mine = ranks[who]
        assert claims.claim(1000)
        next(samples)
        mine.backward()
        mine.stepped()
        assert mine.lr == 0.5 ** ((number + 1) // size)


# -- leases --


class Ledger:
    """Answers as a step ledger gives them: (step, again, sync_at)."""

    def __init__(self, *answers: tuple[int | None, bool, int | None]):
        self.answers, self.begun = list(answers), list[int]()
        self.sync_at: int | None = None
        self._again = self._computes_again = False

    @property
    def alone(self) -> bool:
        return self._again or self._computes_again

    def claim_step(self, limit: int) -> int | None:
        step, self._again, self.sync_at = self.answers.pop(0)
        return step

    def begin(self, step: int) -> None:
        self.begun.append(step)
        self._computes_again, self._again = self._again, False


def leased(*answers: tuple[int | None, bool, int | None]) -> tuple[StepClaims, Ledger]:
    ledger = Ledger(*answers)
    split = DataSplit(20, 2, 2, 0, 1)
    return StepClaims(split, Position(), ledger.claim_step, lambda: None, ledger), ledger


def test_a_step_of_a_dead_rank_is_a_block_of_its_own() -> None:
    claims, ledger = leased((0, False, None), (1, False, None), (5, True, None), (2, False, None))
    steps = claims.claimed_samples()
    alone = []
    for _ in range(4):
        assert claims.claim(10)
        alone.append(claims.alone)  # whether a block ends before this step
        next(steps)
    assert alone == [False, False, True, True] and ledger.begun == [0, 1, 5, 2]
    assert not claims.alone
    assert claims.latest.steps == 6, "the run does not go back to an earlier step"


def test_push_first_is_no_sync_point_and_a_sync_point_counts_steps_of_the_dead() -> None:
    claims, _ = leased((0, False, None), (None, False, None), (None, False, 7))
    assert claims.claim(10)
    next(claims.claimed_samples())
    assert not claims.claim(10) and claims.claimed_steps() == 1
    assert not claims.claim(10) and claims.claimed_steps() == 7
    claims.sync(7)
    assert claims.position == Position(0, 14, 7)
