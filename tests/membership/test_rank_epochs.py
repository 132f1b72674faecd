"""Membership epochs of ranks: who sits where, and which replicas are complete."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.membership.rank_epochs import RankEpoch, complete_replicas, decode, filled


@st.composite
def rosters(draw: st.DrawFn) -> tuple[dict[int, int], list[int], int, int]:
    """Members in seats, also beyond the last, and free ones; ranks of a replica; most replicas."""
    inner, most = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    seats = draw(st.sets(st.integers(0, (most + 1) * inner - 1)))
    members = draw(st.permutations(range(len(seats) + draw(st.integers(0, 5)))))
    seated = dict(zip(sorted(seats), members, strict=False))
    return seated, list(members[len(seats) :]), inner, most


Given = tuple[dict[int, int], list[int], int, int]


@given(rosters())
def test_no_member_sits_twice_and_none_is_made_up(given: Given) -> None:
    seated, free, inner, most = given
    found = filled(seated, free, inner, most)
    assert len(set(found.values())) == len(found)
    assert set(found.values()) <= {*seated.values(), *free}
    assert all(0 <= seat < most * inner for seat in found)


@given(rosters())
def test_who_loses_a_seat_had_one_beyond_the_last(given: Given) -> None:
    seated, free, inner, most = given
    found = filled(seated, free, inner, most)
    kept = {m for seat, m in seated.items() if seat < most * inner}
    assert kept <= set(found.values())


@given(rosters())
def test_as_many_replicas_are_complete_as_there_are_members_for(given: Given) -> None:
    seated, free, inner, most = given
    found = complete_replicas(filled(seated, free, inner, most), inner)
    present = len(free) + sum(seat < most * inner for seat in seated)
    assert len(found) == min(most, present // inner)


@given(rosters())
def test_members_of_complete_replicas_keep_their_seats(given: Given) -> None:
    seated, free, inner, most = given
    before = {s: m for s, m in seated.items() if s < most * inner}
    complete = {m for replica in complete_replicas(before, inner) for m in replica}
    found = filled(seated, free, inner, most)
    assert all(found[s] == m for s, m in before.items() if m in complete)


@given(rosters())
def test_filling_a_second_time_changes_nothing(given: Given) -> None:
    seated, free, inner, most = given
    once = filled(seated, free, inner, most)
    rest = [m for m in free if m not in once.values()]
    assert filled(once, rest, inner, most) == once


@given(rosters())
def test_what_is_given_stays_as_it_is(given: Given) -> None:
    seated, free, inner, most = given
    before = dict(seated), list(free)
    filled(seated, free, inner, most)
    assert (seated, free) == before


@pytest.mark.parametrize(
    ("seated", "free", "inner", "most", "expected"),
    [
        ({0: 0, 2: 2}, [], 1, 3, {0: 0, 2: 2}),
        ({0: 0, 2: 2}, [7], 1, 3, {0: 0, 1: 7, 2: 2}),
        # one lacks a rank, the other two: the first is filled
        ({0: 0, 1: 1, 3: 3}, [7], 3, 2, {0: 0, 1: 1, 2: 7, 3: 3}),
        # a replica that stays incomplete gives its member away
        ({1: 1, 2: 2}, [], 2, 2, {0: 2, 1: 1}),
        ({0: 0, 3: 3}, [], 2, 2, {0: 0, 1: 3}),
        # free members go first
        ({0: 0, 2: 2}, [9], 2, 2, {0: 0, 1: 9, 2: 2}),
        ({0: 0, 1: 1}, [], 1, 1, {0: 0}),
        ({}, [5, 4], 2, 3, {0: 5, 1: 4}),
        ({}, [], 2, 3, {}),
    ],
)
def test_seats_are_filled_where_the_fewest_are_lacking(
    seated: dict[int, int], free: list[int], inner: int, most: int, expected: dict[int, int]
) -> None:
    assert filled(seated, free, inner, most) == expected


def test_every_loss_of_a_small_run_leaves_as_many_replicas_as_possible() -> None:
    for inner, most in itertools.product((1, 2, 3), (1, 2, 3)):
        everyone = range(inner * most)
        for count in range(len(everyone) + 1):
            for alive in itertools.combinations(everyone, count):
                found = filled({s: s for s in alive}, [], inner, most)
                assert len(complete_replicas(found, inner)) == count // inner


def test_ranks_are_in_the_order_of_seats() -> None:
    assert complete_replicas({3: 30, 2: 20, 0: 0, 1: 10, 5: 50}, 2) == [(0, 10), (20, 30)]
    assert complete_replicas({}, 2) == []


def test_an_epoch_is_the_same_after_it_was_sent() -> None:
    epoch = RankEpoch(3, (4, 1, 2), 3, planned=True, why="rank 1 (pid 7) died", left=(9,))
    assert decode(epoch.encode()) == epoch
