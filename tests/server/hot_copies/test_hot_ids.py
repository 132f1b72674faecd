"""Hot ids: found by their share of accesses, kept while copies are read, dropped when cold."""

from __future__ import annotations

import numpy as np
import pytest

from manyhands.errors import StoreError
from manyhands.server.hot_copies.hot_ids import ACCESSES, ROOM, WINDOW_S, HotIds, checked_hot


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def busy(hot: HotIds, key: int | None = 7, requests: int = 200, seed: int = 0) -> None:
    """Requests of 20 ids each, one of which is always the same."""
    rng = np.random.default_rng(seed)
    for _ in range(requests):
        some = rng.integers(1000, 1_000_000, 20)
        if key is not None:
            some[0] = key
        hot.sampled("t", some, 16.0)


def test_an_id_is_hot_from_its_share_of_accesses_on() -> None:
    clock = Clock()
    hot = HotIds(0.02, clock)
    busy(hot)
    assert hot.now() == {}  # the window is not over
    clock.now += WINDOW_S
    assert hot.now()["t"].tolist() == [7]
    strict = HotIds(0.2, clock)
    busy(strict)
    clock.now += WINDOW_S
    assert strict.now() == {}


def test_few_accesses_make_nothing_hot() -> None:
    clock = Clock()
    hot = HotIds(0.01, clock)
    hot.sampled("t", ids(7), ACCESSES / 2)
    clock.now += WINDOW_S
    assert hot.now() == {}
    for _ in range(4):  # enough accesses, but too few samples to tell
        hot.sampled("t", ids(7), ACCESSES)
    clock.now += WINDOW_S
    assert hot.now() == {}


def test_reads_of_copies_keep_a_row_hot_and_without_them_it_is_dropped() -> None:
    clock = Clock()
    hot = HotIds(0.02, clock)
    busy(hot)
    clock.now += WINDOW_S
    assert hot.now()["t"].tolist() == [7]
    for turn in range(8):  # the owner does not see the id any more, but hears of it
        busy(hot, key=None, seed=turn + 1)
        hot.read_elsewhere("t", [7], [3200])
        clock.now += WINDOW_S
        assert hot.now()["t"].tolist() == [7]
    for turn in range(8):
        busy(hot, key=None, seed=turn + 20)
        clock.now += WINDOW_S
        hot.now()
    assert hot.now() == {}


def test_a_row_between_the_two_thresholds_stays_as_it_is() -> None:
    clock = Clock()
    cold, warm = HotIds(0.08, clock), HotIds(0.08, clock)
    busy(cold)  # 1 of 20: 0.05
    for _ in range(200):
        warm.sampled("t", ids(7, 8), 16.0)
    clock.now += WINDOW_S
    assert cold.now() == {} and warm.now()["t"].tolist() == [7, 8]
    for turn in range(6):
        busy(warm, seed=turn)
        clock.now += WINDOW_S
    assert warm.now()["t"].tolist() == [7]


def test_a_table_that_nobody_uses_cools_down_by_itself() -> None:
    clock = Clock()
    hot = HotIds(0.02, clock)
    busy(hot)
    clock.now += WINDOW_S
    assert hot.now()
    clock.now += 20 * WINDOW_S
    assert hot.now() == {}
    busy(hot)
    hot.forget("t")
    clock.now += WINDOW_S
    assert hot.now() == {}


def test_many_ids_take_bounded_room() -> None:
    hot = HotIds(0.02, Clock())
    for turn in range(40):
        busy(hot, seed=turn)
    assert len(hot._tables["t"].accesses) <= ROOM + 20
    assert hot._tables["t"].accesses.most_common(1)[0][0] == 7


@pytest.mark.parametrize(("share", "age"), [(1.0, 0.1), (-0.1, 0.1), (0.1, 0.0), (0.1, -1.0)])
def test_a_share_or_age_that_means_nothing_is_refused(share: float, age: float) -> None:
    with pytest.raises(StoreError, match="a share of accesses below 1"):
        checked_hot(share, age)
