"""Schedules against their formulas, all small cases; cuts against all cuts there are."""

from __future__ import annotations

import math
import random

import pytest

from manyhands.errors import PlanError
from manyhands.split.schedules import (
    SCHEDULES,
    StageAction,
    actions,
    bubble,
    bubble_fraction,
    max_in_flight,
    simulate,
    simulate_actions,
)
from manyhands.split.stages import balance_stages
from support.stage_cuts import brute_force, slowest

TIMES = [(1.0, 1.0, 1.0), (1.0, 1.5, 0.5), (2.0, 3.0, 1.0), (1.0, 1.0, 2.0)]
CASES = [
    (schedule, p, m, v)
    for schedule in SCHEDULES
    for p in range(1, 7)
    for m in range(1, 13)
    for v in ((1, 2, 3) if schedule == "interleaved" else (1,))
    if schedule != "interleaved" or m % p == 0
]


@pytest.mark.parametrize("times", TIMES, ids=str)
def test_the_simulator_finds_the_bubble_of_the_formula(times: tuple[float, float, float]) -> None:
    for schedule, p, m, v in CASES:
        if m >= p:  # with fewer micro-batches than ranks there is no steady state to speak of
            seen = simulate(schedule, p, m, *times, chunks=v)
            assert seen.bubble == pytest.approx(bubble(schedule, p, m, *times, chunks=v)), (
                schedule,
                p,
                m,
                v,
            )
            assert seen.bubble / seen.time == pytest.approx(
                bubble_fraction(schedule, p, m, *times, chunks=v)
            )


def test_every_rank_does_everything_once_and_nobody_waits_for_ever() -> None:
    for schedule, p, m, v in CASES:
        kinds = "FBW" if schedule == "zero_bubble" else "FB"
        for rank in range(p):
            mine = actions(schedule, p, rank, m, v)
            assert sorted(mine) == sorted(
                StageAction(k, i, c) for k in kinds for i in range(m) for c in range(v)
            )  # type: ignore[arg-type]
        simulate(schedule, p, m, chunks=v)  # raises where ranks wait for each other


def test_no_rank_keeps_more_micro_batches_than_the_formula_says() -> None:
    for schedule, p, m, v in CASES:
        bounds = [max_in_flight(schedule, p, r, m, v) for r in range(p)]
        assert simulate(schedule, p, m, chunks=v).in_flight == bounds, (schedule, p, m, v)


def test_zero_bubble_waits_a_third_of_1f1b_where_all_passes_take_the_same_time() -> None:
    assert simulate("zero_bubble", 4, 8).bubble == pytest.approx(simulate("1f1b", 4, 8).bubble / 3)


def test_the_share_of_the_whole_time_is_not_the_ratio_to_the_ideal_time() -> None:
    assert bubble_fraction("gpipe", 4, 8) == pytest.approx(3 / 11)


def test_lists_that_wait_for_each_other_are_an_error_that_names_the_ranks() -> None:
    lists = [[StageAction("B", 0), StageAction("F", 0)], [StageAction("F", 0), StageAction("B", 0)]]
    with pytest.raises(PlanError, match=r"rank 0 at .*rank 1 at"):
        simulate_actions(lists, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("interleaved", 4, 6, 2), "micro=6 is no multiple.*micro=8"),
        (("1f1b", 4, 8, 2), "2 chunks.*interleaved"),
        (("1f1b", 4, 0, 1), "micro=0"),
        (("pipedream", 4, 8, 1), "unknown; take one of gpipe"),
    ],
)
def test_what_cannot_be_scheduled_is_said(given: tuple[str, int, int, int], said: str) -> None:
    schedule, p, m, v = given
    with pytest.raises(PlanError, match=said):
        actions(schedule, p, 0, m, v)


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
