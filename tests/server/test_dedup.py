"""Dedup marks: lost, repeated and reordered pushes are each applied once."""

from __future__ import annotations

import random

import numpy as np
import pytest

from manyhands.errors import StoreError
from manyhands.server.dedup import WINDOW, DedupMarks


def apply(marks: DedupMarks, worker: int, incarnation: int, sequence: int) -> bool:
    if fresh := marks.fresh(worker, incarnation, sequence):
        marks.add(worker, incarnation, sequence)
    return fresh


@pytest.mark.parametrize("seed", range(20))
def test_random_duplicates_and_reorderings_are_applied_once_each(seed: int) -> None:
    chance, marks, applied = random.Random(seed), DedupMarks(), []
    stream = [
        (w, s) for w in range(3) for s in range(200) for _ in range(chance.choice((1, 1, 2, 3)))
    ]
    stream.sort(
        key=lambda sent: sent[1] + chance.uniform(0, 40)
    )  # as far out of order as 40 pushes on the way allow
    for worker, sequence in stream:
        if apply(marks, worker, 0, sequence):
            applied.append((worker, sequence))
        if chance.random() < 0.02:  # a server that starts again from what was dumped knows as much
            again = DedupMarks()
            again.load(marks.dump())
            marks = again
    assert sorted(applied) == [(w, s) for w in range(3) for s in range(200)]


def test_pushes_in_order_keep_nothing_but_a_number() -> None:
    marks = DedupMarks()
    for sequence in range(10_000):
        assert apply(marks, 7, 0, sequence)
    assert marks.dump().tolist() == [7, 0, 10_000, 0]


def test_numbers_that_never_come_do_not_make_the_window_grow() -> None:
    marks = DedupMarks()
    for sequence in range(0, 20 * WINDOW, 2):
        assert apply(marks, 0, 0, sequence)
        assert not marks.fresh(0, 0, sequence)
    assert marks.dump().size <= 4 + WINDOW
    assert marks.fresh(0, 0, 20 * WINDOW - 3), "missing, but young enough to be still on its way"
    assert not marks.fresh(0, 0, 1), "too old to be on its way"


@pytest.mark.parametrize("first", [0, 5])  # the first number that is missing
@pytest.mark.parametrize("jump", [0, 1, 3 * WINDOW])  # past the window's end
def test_a_push_is_too_old_exactly_one_window_after_it(first: int, jump: int) -> None:
    marks = DedupMarks()
    for sequence in range(first):
        marks.add(0, 0, sequence)
    marks.add(0, 0, first + WINDOW - 1)
    assert marks.fresh(0, 0, first), "WINDOW - 1 younger ones: it may still be on its way"
    newest = first + WINDOW + jump
    marks.add(0, 0, newest)
    assert not marks.fresh(0, 0, newest - WINDOW)
    assert marks.fresh(0, 0, newest - WINDOW + 1)
    if jump < WINDOW:
        assert not marks.fresh(0, 0, first + WINDOW - 1), "applied, and within the window"
    marks.add(0, 0, newest - WINDOW + 1)
    assert not marks.fresh(0, 0, newest - WINDOW + 1) and marks.fresh(0, 0, newest - WINDOW + 2)


def test_a_newer_incarnation_begins_anew_and_the_older_is_refused() -> None:
    marks = DedupMarks()
    assert apply(marks, 3, 1, 0) and apply(marks, 3, 1, 1)
    assert marks.replaces(3, 2) and not marks.replaces(3, 1) and not marks.replaces(4, 9)
    assert marks.fresh(3, 2, 0)
    assert not marks.fresh(3, 1, 0), "asking notes nothing"
    assert apply(marks, 3, 2, 0) and not apply(marks, 3, 2, 0)
    with pytest.raises(
        StoreError, match="worker 3, incarnation 1, but incarnation 2 took its place"
    ):
        marks.fresh(3, 1, 2)


def test_dedup_marks_survive_a_dump() -> None:
    marks = DedupMarks()
    for sequence in (0, 1, 5, 9):
        marks.add(4, 2, sequence)
    marks.add(1, 0, 0)
    again = DedupMarks()
    again.load(marks.dump())
    assert np.array_equal(again.dump(), marks.dump())
    assert [s for s in range(12) if not again.fresh(4, 2, s)] == [0, 1, 5, 9]


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(StoreError, match="push number -1 of worker 0"):
        DedupMarks().fresh(0, 0, -1)
