"""Cached store: no row is older than `cache_age`, and hot rows are kept.

With an age of 0 nothing changes.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from manyhands.core import (
    Rows,
    Table,
    TableStore,
    Tensors,
)
from manyhands.errors import PlanError
from manyhands.server.client.cached_store import CachedStore
from manyhands.server.local_store import LocalStore

DIM = 3


class Asked(LocalStore):
    """Remembers which ids were asked for."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.asked: list[list[int]] = []

    def pull(self, rows: Rows, into: Tensors | None = None, *, remember: bool = False) -> Tensors:
        self.asked.append([i for ids in rows.values() if ids is not None for i in ids.tolist()])
        return super().pull(rows, into, remember=remember)


class InBackground(Asked):
    """Rows are read when they are asked for and handed out later."""

    background = True


def ids(*some: int) -> Tensor:
    return torch.tensor(some, dtype=torch.int64)


def made(
    rows: int = 1000,
    age: int = 8,
    optimizer: str = "sgd",
    store: Asked | None = None,
    **options: float,
) -> tuple[CachedStore, Asked]:
    inner = store or Asked()
    cached = CachedStore(inner, rows, age)
    cached.create(Table("t", DIM, optimizer=optimizer, options={"lr": 0.5, **options}))
    return cached, inner


def step(store: TableStore, some: Tensor, grad: float = 1.0) -> Tensor:
    rows = store.pull({"t": some})["t"].clone()
    store.push({"t": some}, {"t": torch.full((len(some), DIM), grad)}).wait()
    return rows


# -- age --


@pytest.mark.parametrize("age", [1, 2, 5])
def test_nothing_is_served_that_is_older_than_the_age(age: int) -> None:
    cached, inner = made(age=age, optimizer="adagrad")
    for _ in range(3 * (age + 1)):
        cached.pull({"t": ids(7)})
    assert inner.asked == [[7]] * 3
    other = LocalStore(0, 1, inner.shards, inner.clock)
    other.create(Table("t", DIM, optimizer="adagrad", options={"lr": 0.5}))
    served = []
    for _ in range(4 * (age + 1)):
        served.append(float(cached.pull({"t": ids(7)})["t"][0, 0]))
        other.push({"t": ids(7)}, {"t": torch.ones(1, DIM)}).wait()
        served[-1] -= float(other.pull({"t": ids(7)})["t"][0, 0])
    behind = [round(d, 6) for d in served]
    assert len(set(behind)) > 1  # it did serve old rows
    truth = [float(x) for x in np.cumsum(1 / np.sqrt(np.arange(1, 4 * (age + 1) + 1))) * 0.5]
    for at, distance in enumerate(
        behind
    ):  # at most `age` pulls, so as many pushes, and the one just made
        assert distance <= truth[at] - (truth[at - age - 1] if at > age else 0.0) + 1e-5


def test_only_what_is_missing_is_asked_for_and_rows_come_in_the_order_wanted() -> None:
    cached, inner = made()
    first = cached.pull({"t": ids(1, 2, 3)})["t"].clone()
    got = cached.pull({"t": ids(4, 2, 5, 1, 2)})["t"]
    assert inner.asked == [[1, 2, 3], [4, 5]]
    fresh = inner.pull({"t": ids(4, 2, 5, 1, 2)})["t"]
    assert torch.equal(got, fresh) and torch.equal(got[3], first[0])
    into = {"t": torch.zeros(2, DIM)}
    assert cached.pull({"t": ids(5, 9)}, into)["t"] is into["t"] and torch.equal(
        into["t"], inner.pull({"t": ids(5, 9)})["t"]
    )


@pytest.mark.parametrize(("rows", "age"), [(0, 8), (1000, 0)])
def test_without_rows_or_without_age_it_is_not_there(rows: int, age: int) -> None:
    cached, inner = made(rows, age)
    for _ in range(3):
        step(cached, ids(1, 2))
    assert inner.asked == [[1, 2]] * 3 and cached.stats()["cache_hits"] == 0


@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
def test_a_synchronous_run_is_the_same_with_it_and_without(rule: str) -> None:
    def run(cache: int) -> Tensor:
        store = CachedStore(LocalStore(0, 1), cache, 8)
        store.create(Table("t", DIM, optimizer=rule, options={"lr": 0.5}))
        dice = torch.Generator().manual_seed(0)
        for _ in range(20):
            some = torch.randint(0, 10, (6,), generator=dice).unique()
            rows = store.pull({"t": some})["t"]
            store.push({"t": some}, {"t": rows.cos()}).wait()
            store.tick(0)
        return store.pull({"t": torch.arange(10)})["t"]

    assert torch.equal(run(0), run(1000))


def test_a_tick_with_a_smaller_bound_counts() -> None:
    cached, inner = made(age=8, optimizer="adagrad")
    for _ in range(9):
        cached.pull({"t": ids(1)})
        cached.tick(2)
    assert len(inner.asked) == 3


# -- own pushes --


def test_plain_sgd_steps_are_made_here_too() -> None:
    cached, inner = made(age=100)
    for _ in range(5):
        step(cached, ids(1, 2, 2), grad=0.25)
    assert len(inner.asked) == 1
    assert torch.allclose(
        cached.pull({"t": ids(1, 2)})["t"], inner.pull({"t": ids(1, 2)})["t"], atol=1e-6
    )
    cached.push({"t": ids(1)}, {"t": torch.ones(1, DIM)}, lr=0.1).wait()
    assert torch.allclose(
        cached.pull({"t": ids(1)})["t"], inner.pull({"t": ids(1)})["t"], atol=1e-6
    )


def test_what_is_pending_or_of_another_optimizer_is_seen_when_it_is_fetched_again() -> None:
    for rule, options, pending in (
        ("adagrad", {}, False),
        ("sgd", {"decay": 0.1}, False),
        ("sgd", {}, True),
    ):
        cached, _ = made(age=1, optimizer=rule, **options)
        before = cached.pull({"t": ids(1)})["t"].clone()
        cached.push({"t": ids(1)}, {"t": torch.ones(1, DIM)}, pending=pending).wait()
        if pending:
            cached.tick()
        assert torch.equal(cached.pull({"t": ids(1)})["t"], before)
        assert not torch.equal(cached.pull({"t": ids(1)})["t"], before)


def test_flush_and_restore_leave_nothing_old() -> None:
    cached, inner = made(age=100, optimizer="adagrad")
    step(cached, ids(1))
    cached.flush()
    assert torch.equal(cached.pull({"t": ids(1)})["t"], inner.pull({"t": ids(1)})["t"])
    content = {k: v.clone() for k, v in cached.dump("t").items()}
    step(cached, ids(1))
    cached.restore("t", content)
    assert torch.equal(cached.pull({"t": ids(1)})["t"][0], content["values"][0])


# -- in the background --


def test_rows_that_come_in_the_background_are_served_and_kept_as_others_are() -> None:
    cached, inner = made(age=100, optimizer="adagrad", store=InBackground())
    cached.pull({"t": ids(1)})
    reply = cached.pull_async({"t": ids(1, 2)})
    assert inner.asked == [[1], [2]]
    assert (
        torch.equal(reply.result()["t"], inner.pull({"t": ids(1, 2)})["t"])
        and reply.result() is reply.result()
    )
    cached.pull_async({"t": ids(2, 1)}).result()
    assert inner.asked[-1] == [1, 2]  # of the line above: nothing was missing
    late = cached.pull_async({"t": ids(3)})
    cached.flush()
    late.result()
    cached.pull({"t": ids(3)})
    assert inner.asked[-1] == [3] and inner.asked[-2] == [
        3
    ]  # what came after a flush was asked for before it


@pytest.mark.parametrize("store", [Asked, InBackground])
@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
def test_a_push_and_the_pull_after_it_may_go_together(store: type[Asked], rule: str) -> None:
    cached, inner = made(age=1, optimizer=rule, store=store())
    cached.pull({"t": ids(1, 2)})
    one = torch.ones(2, DIM)
    reply = cached.exchange({"t": ids(1, 2)}, {"t": one.clone()}, wants={"t": ids(2, 3)})
    assert inner.asked == [[1, 2], [3]]
    fresh = inner.pull({"t": ids(2, 3)})["t"]
    found = reply.result()["t"]
    assert torch.equal(found[1], fresh[1]) and torch.allclose(found[0], fresh[0]) is (rule == "sgd")
    nothing_missing = cached.exchange({"t": ids(3)}, {"t": one[:1].clone()}, wants={"t": ids(3)})
    assert len(nothing_missing.result()["t"]) == 1 and inner.asked[-1] == [2, 3]
    assert not torch.equal(inner.pull({"t": ids(3)})["t"], fresh[1:])  # it was pushed all the same


def test_a_store_without_a_background_answers_at_once() -> None:
    cached, inner = made()
    reply = cached.pull_async({"t": ids(1)})
    assert inner.asked == [[1]] and reply.result()["t"].shape == (1, DIM)


# -- what is kept --


def zipf(n: int, size: int, dice: np.random.Generator) -> Tensor:
    share = 1 / np.arange(1, n + 1) ** 1.05
    return torch.from_numpy(dice.choice(n, size, p=share / share.sum()).astype(np.int64) * 7919 - 5)


def test_power_law_ids_are_mostly_served_from_a_small_part_of_the_rows() -> None:
    cached, _ = made(rows=1000, age=1000, optimizer="adagrad")
    dice = np.random.default_rng(0)
    for _ in range(100):
        cached.pull({"t": zipf(100_000, 1000, dice)})
    cached.stats()
    for _ in range(100):
        cached.pull({"t": zipf(100_000, 1000, dice)})
    counts = cached.stats()
    share = np.sort(1 / np.arange(1, 100_001) ** 1.05)[::-1]
    best = share[:1000].sum() / share.sum()  # what holding exactly the hottest would serve
    assert (
        counts["cache_lookups"] == 100_000
        and counts["cache_hits"] / counts["cache_lookups"] > 0.85 * best
    )
    assert cached.stats()["cache_lookups"] == 0


def test_a_stream_of_rows_seen_once_does_not_push_out_the_hot_ones() -> None:
    cached, _ = made(rows=128, age=10_000, optimizer="adagrad")
    hot = torch.arange(40)
    for i in range(50):
        cached.pull({"t": hot})
        cached.pull({"t": torch.arange(1000 + 200 * i, 1200 + 200 * i)})
    cached.stats()
    cached.pull({"t": hot})
    assert cached.stats()["cache_hits"] >= 38


def test_what_was_hot_once_makes_room() -> None:
    cached, _ = made(rows=64, age=10_000, optimizer="adagrad")
    for start in (0, 1000):
        for _ in range(200):
            cached.pull({"t": torch.arange(start, start + 48)})
    cached.stats()
    cached.pull({"t": torch.arange(1000, 1048)})
    assert cached.stats()["cache_hits"] >= 40


def test_dense_tables_and_tables_it_does_not_know_pass_through() -> None:
    cached, inner = made()
    cached.create(Table("w", length=4, optimizer="sgd", options={"lr": 1.0}), torch.zeros(4))
    inner.create(Table("u", 2))
    for _ in range(2):
        got = cached.pull({"w": None, "t": ids(1), "u": ids(1)})
        cached.push({"w": None}, {"w": torch.ones(4)}).wait()
    assert got["w"].tolist() == [-1.0] * 4 and got["u"].shape == (1, 2)
    assert inner.asked == [[1, 1], [1]]
    assert isinstance(cached, TableStore)


@pytest.mark.parametrize(("rows", "age"), [(-1, 8), (10, -1)])
def test_negative_numbers_are_refused(rows: int, age: int) -> None:
    with pytest.raises(PlanError, match="neither can be negative"):
        CachedStore(LocalStore(0, 1), rows, age)
