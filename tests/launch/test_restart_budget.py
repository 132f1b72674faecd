"""A restart budget: how often, how soon, and when never again."""

from __future__ import annotations

import dataclasses

import pytest

from manyhands.launch.restart_budget import LONGEST_S, Failure, RestartBudget


@dataclasses.dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


KILLED = Failure()


def test_each_restart_waits_twice_as_long_as_the_one_before() -> None:
    budget = RestartBudget(8, 600.0, clock=Clock())
    assert [budget.allow(KILLED) for _ in range(7)] == [1, 2, 4, 8, 16, LONGEST_S, LONGEST_S]


def test_a_replacement_may_come_at_once_and_waits_only_if_it_dies_too() -> None:
    budget = RestartBudget(8, 600.0, first_s=0.0, clock=Clock())
    assert [budget.allow(KILLED) for _ in range(4)] == [0, 1, 2, 4]


def test_ranks_wait_for_their_own_failures_only_but_share_the_budget() -> None:
    budget = RestartBudget(3, 600.0, clock=Clock())
    first, second = Failure(who="rank 0"), Failure(who="rank 1")
    assert [budget.allow(f) for f in (first, first, second)] == [1, 2, 1]
    assert budget.allow(second) == "restarts=3 within 600 s is used up"


def test_restarts_before_the_window_do_not_count() -> None:
    clock = Clock()
    budget = RestartBudget(2, 60.0, clock=clock)
    assert [budget.allow(KILLED), budget.allow(KILLED)] == [1, 2]
    clock.now = 59.0
    assert isinstance(budget.allow(KILLED), str)
    clock.now = 60.0
    assert budget.allow(KILLED) == 1, "a run that went well for a while starts with a short pause"


def test_no_restarts_at_all_can_be_asked_for() -> None:
    assert RestartBudget(0, 600.0).allow(KILLED) == "restarts=0 within 600 s is used up"


def test_a_large_budget_still_waits_for_a_finite_time() -> None:
    budget = RestartBudget(5000, 1e9, clock=Clock())
    assert {budget.allow(KILLED) for _ in range(5000)} == {1, 2, 4, 8, 16, LONGEST_S}


@pytest.mark.parametrize("round", [None, 0, 120])
def test_the_same_error_at_the_same_round_is_not_tried_a_third_time(round: int | None) -> None:
    budget = RestartBudget(9, 600.0, clock=Clock())
    assert budget.allow(Failure("KeyError: 'x' in <Table at 0x7f01>, pid 12", round)) == 1
    refused = budget.allow(Failure("KeyError: 'x' in <Table at 0x7fff>, pid 345", round))
    assert isinstance(refused, str) and "failed twice" in refused
    assert ("round 120" if round else "before its first round") in refused
    assert "with the same error: a restart would fail again" in refused


@pytest.mark.parametrize(
    "second", [Failure("KeyError: 'y'", 120), Failure("KeyError: 'x'", 121), KILLED]
)
def test_another_error_or_another_round_may_pass(second: Failure) -> None:
    budget = RestartBudget(9, 600.0, clock=Clock())
    budget.allow(Failure("KeyError: 'x'", 120))
    assert budget.allow(second) == 2


def test_a_kill_may_come_about_twice_at_the_same_round() -> None:
    budget = RestartBudget(9, 600.0, clock=Clock())
    budget.allow(Failure(round=7))
    assert budget.allow(Failure(round=7)) == 2


def test_the_same_error_of_another_rank_is_compared_with_its_own() -> None:
    budget = RestartBudget(9, 600.0, clock=Clock())
    budget.allow(Failure("ValueError", 3, "rank 0"))
    assert budget.allow(Failure("ValueError", 3, "rank 1")) == 1
    refused = budget.allow(Failure("ValueError", 3, "rank 1"))
    assert refused == (
        "rank 1 failed twice at round 3 with the same error: a restart would fail again"
    )
