"""The share of a pipeline's time in which ranks wait, from events whose answer is known."""

from __future__ import annotations

import pytest

from manyhands.core import Event
from manyhands.observe.bubble import bubble, waits
from manyhands.split.schedules import bubble_fraction, simulate

NAMES = {"F": "forward", "B": "backward", "W": "weight"}


def simulated(schedule: str, p: int, m: int, round: int = 0, start: float = 100.0) -> list[Event]:
    """One step as its ranks would report it: tF, tB, tW = 2, 3, 1 seconds."""
    seconds = {"F": 2.0, "B": 3.0 if schedule == "zero_bubble" else 4.0, "W": 1.0}
    done = simulate(schedule, p, m, 2.0, 3.0, 1.0)
    return [
        Event(
            start + at,
            rank,
            round,
            NAMES[a.kind],
            seconds[a.kind],
            0,
            {"micro": a.micro, "stage": rank},
        )
        for rank, mine in enumerate(done.starts)
        for at, a in mine
    ]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("m", [4, 8, 16])
def test_a_simulated_step_has_the_bubble_of_the_formula(schedule: str, p: int, m: int) -> None:
    events = simulated(schedule, p, m)
    assert bubble(events) == pytest.approx((p - 1) / (m + p - 1))
    assert bubble(events) == pytest.approx(bubble_fraction(schedule, p, m, 2.0, 3.0, 1.0))


def test_steps_are_measured_one_by_one_and_the_time_between_them_counts_for_nothing() -> None:
    events = simulated("1f1b", 2, 4, 0, 0.0) + simulated("1f1b", 2, 4, 1, 1000.0)
    assert bubble(events) == pytest.approx(1 / 5)
    assert waits(events) == pytest.approx({0: 1 / 5, 1: 1 / 5})


def test_sending_and_waiting_are_no_work() -> None:
    events = simulated("gpipe", 2, 2)
    assert bubble(
        [*events, Event(101.0, 0, 0, "receive", 5.0, 8, {"micro": 0, "stage": 0})]
    ) == bubble(events)


def test_a_run_without_a_pipeline_has_none() -> None:
    assert bubble([Event(0.0, 0, 0, "forward", 1.0)]) is None and waits([]) == {}
