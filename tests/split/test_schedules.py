"""Pipeline schedules against their formulas: bubble, micro-batches in flight, no deadlock."""

from __future__ import annotations

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
