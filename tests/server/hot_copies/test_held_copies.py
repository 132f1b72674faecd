"""Held copies: none is served that is older than asked for, or of another slot map."""

from __future__ import annotations

import numpy as np

from manyhands.server.hot_copies.held_copies import HeldCopies


def rows(*ids: int, value: float = 0.0, dim: int = 2) -> tuple[np.ndarray, np.ndarray]:
    return np.array(ids, np.int64), np.full((len(ids), dim), value, np.float32)


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def test_a_copy_is_served_until_it_is_as_old_as_the_bound() -> None:
    now = [10.0]
    held = HeldCopies(lambda: now[0])
    held.put(1, epoch=3, asked=10.0, tables={"t": rows(5, 9, value=1.0)})
    now[0] = 10.5
    found = held.read("t", ids(9, 5), epoch=3, age=0.5)
    assert found is not None and found.tolist() == [[1, 1], [1, 1]]
    assert held.read("t", ids(9), epoch=3, age=0.4) is None
    assert held.listed(0.5) == {"t": [5, 9]} and held.listed(0.4) == {}
    now[0] = 10.6
    assert held.read("t", ids(5), epoch=3, age=0.5) is None
    held.put(1, epoch=3, asked=10.6, tables={"t": rows(5, value=2.0)})
    found = held.read("t", ids(5), epoch=3, age=0.5)
    assert found is not None and found.tolist() == [[2, 2]]
    assert (held.served, held.missed) == (3, 2)


def test_all_ids_must_be_there_and_of_this_slot_map() -> None:
    held = HeldCopies(lambda: 0.0)
    held.put(1, epoch=3, asked=0.0, tables={"t": rows(5)})
    held.put(2, epoch=4, asked=0.0, tables={"t": rows(6)})
    assert held.read("t", ids(5, 7), epoch=3, age=1.0) is None
    assert held.read("t", ids(5, 6), epoch=3, age=1.0) is None
    assert held.read("t", ids(99), epoch=3, age=1.0) is None
    assert held.read("other", ids(5), epoch=3, age=1.0) is None
    assert held.read("t", ids(6), epoch=4, age=1.0) is not None


def test_what_a_source_sends_replaces_all_that_it_sent_before() -> None:
    held = HeldCopies(lambda: 0.0)
    held.put(1, 1, 0.0, {"t": rows(5, value=1.0), "u": rows(1)})
    held.put(2, 1, 0.1, {"t": rows(5, 6, value=2.0)})  # two owners, for a moment: the newer one
    found = held.read("t", ids(5), 1, 1.0)
    assert found is not None and found.tolist() == [[2, 2]]
    held.put(1, 1, 0.2, {})
    assert held.read("u", ids(1), 1, 1.0) is None
    held.drop(2)
    assert held.listed(1.0) == {}


def test_a_table_that_was_made_anew_with_other_rows_does_not_mix() -> None:
    held = HeldCopies(lambda: 0.0)
    held.put(1, 1, 0.0, {"t": rows(5, dim=2)})
    held.put(2, 1, 0.1, {"t": rows(6, dim=4)})
    assert held.listed(1.0) == {"t": [6]}


def test_reads_are_counted_once_and_reported_to_the_source() -> None:
    held = HeldCopies(lambda: 0.0)
    held.put(1, 1, 0.0, {"t": rows(5, 6)})
    held.put(2, 1, 0.0, {"t": rows(7)})
    held.read("t", ids(5, 7), 1, 1.0)
    held.put(1, 1, 0.0, {"t": rows(5, 6)})  # a refresh loses no counts
    held.read("t", ids(5), 1, 1.0)
    assert held.take_reads(1) == [("t", [5], [2])]
    assert held.take_reads(1) == []
    assert held.take_reads(2) == [("t", [7], [1])]
    assert held.take_reads(9) == []
