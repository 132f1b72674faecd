"""Stragglers: who is slow, and whose fault the waiting is."""

from __future__ import annotations

import dataclasses

import pytest

from manyhands.exchange.activity import Activity
from manyhands.observe.rank_heartbeat import RankHeartbeat
from manyhands.observe.stragglers import Stragglers, caused

BEAT = RankHeartbeat(0, "a", "m", 4000, 9, 512, "compute", "", 0.0, 9, 0.1, 0.4, 0.4, rounds=30)


def beats(*own_s: float) -> list[RankHeartbeat]:
    return [
        dataclasses.replace(BEAT, rank=r, own_s=s, waited_s=max(own_s) - s)
        for r, s in enumerate(own_s)
    ]


def test_a_rank_slow_for_a_minute_is_told_once_with_its_share_of_the_waiting() -> None:
    watch = Stragglers()
    assert not any(watch.look(t, beats(0.1, 0.1, 0.1, 0.2)) for t in range(60))
    (found,) = watch.look(60.0, beats(0.1, 0.1, 0.1, 0.2))
    assert found.text == (
        "rank 3 (host a, pid 4000) needs 0.2 s a round without waiting, 2.0 times the median "
        "(0.1 s), for 1:00, and caused 100% of all waiting"
    )
    assert not watch.look(61.0, beats(0.1, 0.1, 0.1, 0.2))


def test_a_rank_that_was_fast_in_between_is_slow_anew() -> None:
    watch = Stragglers()
    slow, fast = beats(0.1, 0.1, 0.2), beats(0.1, 0.1, 0.1)
    for t in range(0, 300, 40):
        assert not watch.look(t, slow) and not watch.look(t + 20, fast)
    watch.look(300, slow)
    assert [s.beat.rank for s in watch.look(360, slow)] == [2]
    watch.look(361, fast)
    watch.look(362, slow)
    assert watch.look(422, slow)


def test_of_two_ranks_the_slower_one_is_compared_with_the_faster() -> None:
    watch = Stragglers(after_s=0.0)
    assert [s.beat.rank for s in watch.look(0.0, beats(0.3, 0.1))] == [0]


def test_ranks_that_wait_are_never_stragglers() -> None:
    """A rank's time inside collectives is not its own, however long it is."""
    clock = [0.0]
    activity = Activity(lambda: clock[0])
    waited = 0.0
    for round in range(1, 20):
        clock[0] += 10.0  # of which the rank computes for 0.1 s
        waited += 9.9
        activity.end_round(round, waited)
    own = (activity.rounds_s - activity.waited_s) / activity.rounds
    assert activity.rounds == 18 and own == pytest.approx(0.1)
    watch = Stragglers(after_s=0.0)
    assert not watch.look(0.0, beats(own, 0.1, 0.1, 0.1))


def test_a_rank_of_which_nothing_is_known_is_left_out() -> None:
    watch = Stragglers(after_s=0.0)
    new = dataclasses.replace(beats(9.0)[0], rank=5, rounds=0)
    assert not watch.look(0.0, [*beats(0.1, 0.1), new])


def test_waiting_is_the_fault_of_the_slower_ranks_in_equal_parts() -> None:
    assert caused({0: 1.0, 1: 1.0, 2: 1.0, 3: 2.0}) == {0: 0.0, 1: 0.0, 2: 0.0, 3: 1.0}
    # both slow ranks hold up the first by 1; the slowest holds up two by 1 more: 3 of waiting
    assert caused({0: 1.0, 1: 2.0, 2: 3.0}) == pytest.approx({0: 0.0, 1: 1 / 6, 2: 5 / 6})
    assert sum(caused({0: 0.3, 1: 0.7, 2: 0.9, 3: 0.4, 4: 1.7}).values()) == pytest.approx(1.0)
    assert caused({0: 1.0, 1: 1.001}) == {} == caused({})


def test_rounds_with_another_phase_among_them_are_not_counted() -> None:
    clock = [0.0]
    activity = Activity(lambda: clock[0])
    for round in range(1, 4):
        clock[0] += 1.0
        activity.end_round(round, 0.0)
    with activity.during("evaluation"):
        clock[0] += 50.0
    clock[0] += 1.0
    activity.end_round(4, 0.0)
    assert (activity.rounds, activity.rounds_s) == (2, 2.0)  # nor the first: it is start-up
    assert activity.longest == {"rounds": 1.0, "evaluation": 50.0}
