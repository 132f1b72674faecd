"""Balanced stages: the cut against all cuts there are, within memory, and refusals."""

from __future__ import annotations

import math
import random

import pytest

from manyhands.errors import PlanError
from manyhands.split.stages import balance_stages
from support.stage_cuts import brute_force, slowest


def test_no_contiguous_cut_is_better() -> None:
    chance = random.Random(0)
    for n in range(1, 10):
        for stages in range(1, min(n, 5) + 1):
            for _ in range(5):
                costs = [
                    chance.choice([0.0, chance.random(), 10 * chance.random()]) for _ in range(n)
                ]
                cut = balance_stages(costs, stages)
                assert len(cut) == stages - 1 and sorted(set(cut)) == cut
                assert slowest(costs, cut) == pytest.approx(brute_force(costs, stages))


def test_of_cuts_that_are_about_as_good_the_one_that_sends_least_is_taken() -> None:
    assert balance_stages([1, 1, 1, 1], 2, crossing=[0, 8, 8, 8]) == [2]
    assert balance_stages([5, 0, 0, 5], 2, crossing=[0, 8, 2, 8]) == [2]
    assert balance_stages([5, 0.4, 5.1], 2, crossing=[0, 1, 8]) == [
        1
    ]  # 5.5 against 5.4: within 5 in a hundred
    assert balance_stages([5, 2, 5], 2, crossing=[0, math.inf, 8]) == [2]


def test_every_stage_has_one_of_the_pieces_that_count() -> None:
    cut = balance_stages([1, 1, 9, 9, 9, 1], 3, trainable=[True, True, False, False, False, True])
    assert cut[0] == 1 and cut[1] > 1


def test_a_stage_stays_within_its_memory_however_uneven_the_times_get() -> None:
    costs, memory = [1.0, 1, 1, 1, 6], [4.0, 4, 4, 1, 1]
    assert balance_stages(costs, 2) == [4]
    assert balance_stages(costs, 2, memory=memory, limit=10) == [2]
    # the first stage keeps more micro-batches than the last
    assert balance_stages([1.0] * 6, 2, activations=[2.0] * 6, in_flight=[2, 1], limit=9) == [2]


def test_a_cut_that_cannot_be_is_refused_with_numbers() -> None:
    with pytest.raises(PlanError, match=r"5 stages are wanted, but no more than 3 .*; set pipe=3"):
        balance_stages([1.0, 1, 1], 5)
    with pytest.raises(PlanError, match=r"4 stages are wanted, but no more than 2 "):
        balance_stages([1.0, 1, 1, 1], 4, crossing=[0, math.inf, 1, math.inf])
    with pytest.raises(
        PlanError,
        match=r"no cut into 2 stages keeps each within 4\.0 MiB: the model takes 12\.0 MiB",
    ):
        balance_stages([1.0, 1, 1], 2, memory=[4.0 * 2**20] * 3, limit=4 * 2**20)
