"""Server shard: a push is applied once and whole, or not at all.

Pending pushes that a commit applies together, staleness, and counters.
"""

from __future__ import annotations

import itertools
import math
import random
import threading

import numpy as np
import pytest

from manyhands.core import Table
from manyhands.errors import NotFinite, StoreError
from manyhands.server.counters import since, together
from manyhands.server.protocol.messages import PushMessage
from manyhands.server.shard import Shard
from manyhands.server.slots import SLOTS, even, ranges
from manyhands.server.table_updates import TablePull, TableUpdate
from manyhands.server.tables.hashing import seed_of, slot_of

DENSE = Table("w", length=6, dtype="float64", optimizer="sum")
ROWS = Table("rows", dim=2, dtype="float64", optimizer="sum", init="zeros")
numbers = itertools.count(1000)  # of pushes that do not say theirs


def shard_with(*tables: Table, **words: object) -> Shard:
    shard = Shard(**words)  # type: ignore[arg-type]
    for table in tables:
        shard.create(table, None if table.length is None else (0, table.length))
    return shard


def dense(shard: Shard, worker: int = 0, name: str = "w", remember: bool = False) -> np.ndarray:
    table = shard.spec(name)
    out = np.empty(table.length or 0, table.dtype)
    shard.pull(worker, [TablePull(name)], [out], remember=remember)
    return out


def rows(shard: Shard, *ids: int, worker: int = 0, name: str = "rows") -> np.ndarray:
    table = shard.spec(name)
    out = np.empty((len(ids), table.dim), table.dtype)
    shard.pull(worker, [TablePull(name, np.array(ids, np.int64))], [out])
    return out


def vector(value: float, name: str = "w", n: int = 6) -> TableUpdate:
    return TableUpdate(name, None, np.full(n, float(value)))


def block(ids: list[int], value: float, name: str = "rows") -> TableUpdate:
    return TableUpdate(name, np.array(ids, np.int64), np.full((len(ids), 2), float(value)))


def push(
    shard: Shard, *parts: TableUpdate, worker: int = 0, sequence: int | None = None, **how: object
) -> bool:
    return shard.push(
        worker, 0, next(numbers) if sequence is None else sequence, parts, PushMessage(**how)
    )  # type: ignore[arg-type]


# -- exactly once --


@pytest.mark.parametrize("seed", range(10))
def test_duplicated_reordered_and_retried_pushes_give_the_state_of_once_only(seed: int) -> None:
    chance = random.Random(seed)
    updates = {(w, s): chance.randint(-9, 9) for w in range(3) for s in range(40)}

    def parts(w: int, s: int) -> list[TableUpdate]:
        return [vector(updates[w, s]), block([s % 7, w, s % 7], updates[w, s])]

    once = shard_with(DENSE, ROWS)
    for w, s in updates:
        assert push(once, *parts(w, s), worker=w, sequence=s)

    stream = [sent for sent in updates for _ in range(chance.choice((1, 1, 2, 4)))]
    stream.sort(key=lambda sent: sent[1] + chance.uniform(0, 12))
    shard, applied = shard_with(DENSE, ROWS), 0
    for w, s in stream:
        applied += push(shard, *parts(w, s), worker=w, sequence=s)
    assert applied == len(updates) and shard.stats()["duplicates"] == len(stream) - applied
    assert np.array_equal(dense(shard), dense(once)), (
        "whole numbers: their sum does not depend on the order"
    )
    assert np.array_equal(rows(shard, *range(7)), rows(once, *range(7)))


def test_a_dump_carries_the_dedup_marks_so_that_a_copy_refuses_what_the_original_had() -> None:
    shard = shard_with(DENSE)
    assert push(shard, vector(1), sequence=0) and push(shard, vector(2), sequence=2)
    copy = shard_with(DENSE)
    copy.load("w", shard.dump("w"))
    assert not push(copy, vector(2), sequence=2)
    assert push(copy, vector(4), sequence=1)
    assert dense(copy).tolist() == [7] * 6


def test_a_newer_incarnation_replaces_what_the_older_had_pending() -> None:
    shard = shard_with(DENSE)
    shard.push(0, 0, 0, [vector(5)], PushMessage(clock=3, pending=True))
    assert shard.push(0, 1, 0, [vector(1)], PushMessage())
    shard.commit(1, [(0, 3)])
    assert dense(shard).tolist() == [1] * 6
    with pytest.raises(StoreError, match="incarnation 0, but incarnation 1 took its place"):
        shard.push(0, 0, 1, [vector(1)], PushMessage())
    dense(shard, remember=True)
    assert shard.push(0, 2, 0, [vector(1)], PushMessage(compensate=1.0)), (
        "what the newest pulled before its first push is its own"
    )


# -- whole or not at all --


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("turn", [1, -1])
def test_what_is_not_finite_changes_no_table(bad: float, pending: bool, turn: int) -> None:
    shard = shard_with(DENSE, ROWS)
    push(shard, vector(1), block([1, 2], 1), sequence=0)
    poisoned = block([8, 9, 9], 1)
    poisoned.updates[2, 1] = bad
    with pytest.raises(NotFinite, match=r"'rows'.*9"):
        push(shard, *[vector(1), poisoned][::turn], sequence=1, pending=pending)
    assert dense(shard).tolist() == [1] * 6 and rows(shard, 1, 2, 8).tolist() == [
        [1, 1],
        [1, 1],
        [0, 0],
    ]
    assert shard.stats()["refused"] == 1
    assert push(shard, vector(1), block([8], 1), sequence=1), (
        "what was refused was not marked as had"
    )
    wrong = vector(1)
    wrong.updates[4] = bad
    with pytest.raises(NotFinite, match=r"'w'.*4"):
        push(shard, wrong, pending=pending)
    assert dense(shard).tolist() == [2] * 6


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (TableUpdate("v", None, np.zeros(6)), "table 'v' is unknown; the store has 'w', 'rows'"),
        (
            TableUpdate("w", None, np.zeros(5)),
            r"'w' gets updates float64 of shape \(5,\); float64 of shape \(6,\) is needed",
        ),
        (TableUpdate("w", None, np.zeros(6, np.float32)), r"float32 of shape \(6,\); float64"),
        (TableUpdate("w", np.arange(6), np.zeros(6)), "'w' is dense"),
        (TableUpdate("rows", None, np.zeros((1, 2))), "'rows' is sparse and needs ids"),
        (TableUpdate("rows", np.arange(3, dtype=np.int32), np.zeros((3, 2))), "ids are int32"),
        (
            TableUpdate("rows", np.arange(4).reshape(2, 2), np.zeros((4, 2))),
            r"ids are int64 of shape \(2, 2\)",
        ),
        (
            TableUpdate("rows", np.arange(3), np.zeros((3, 4))),
            r"of shape \(3, 4\); float64 of shape \(3, 2\) is needed",
        ),
        (
            TableUpdate("rows", np.arange(3), np.zeros((2, 2))),
            r"of shape \(2, 2\); float64 of shape \(3, 2\) is needed",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused_before_others_are_applied(
    part: TableUpdate, says: str
) -> None:
    shard = shard_with(DENSE, ROWS)
    first = block([1], 1) if part.table != "rows" else vector(1)
    with pytest.raises(StoreError, match=says):
        push(shard, first, part)
    assert not dense(shard).any() and not rows(shard, 1).any()
    with pytest.raises(StoreError):
        shard.pull(0, [TablePull(part.table, part.ids)], [part.updates])


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (PushMessage(lr=-1.0), "lr=-1.0 of a push"),
        (PushMessage(lr=math.nan), "lr=nan"),
        (PushMessage(weight=1.0), "weight=1.0 without pending"),
        (PushMessage(weight=-1.0, pending=True), "weight=-1.0; a finite number"),
        (PushMessage(pending=True, adapt=True), "pending with adapt or compensate"),
        (PushMessage(pending=True, compensate=1.0), "pending with adapt or compensate"),
        (PushMessage(decay=0.9), "decay=0.9; it belongs to compensate"),
        (PushMessage(compensate=1.0, decay=1.0), r"lies in \[0, 1\)"),
        (
            PushMessage(compensate=1.0),
            "worker 0 has nothing to compare with; pull it with remember=True",
        ),
    ],
)
def test_words_that_mean_nothing_are_refused(how: PushMessage, says: str) -> None:
    shard = shard_with(DENSE)
    with pytest.raises(StoreError, match=says):
        shard.push(0, 0, 0, [vector(1)], how)
    assert not dense(shard).any()


def test_only_dense_tables_are_remembered_and_compensated() -> None:
    shard = shard_with(ROWS)
    with pytest.raises(StoreError, match="'rows' is sparse; remember is for dense tables"):
        shard.pull(0, [TablePull("rows", np.arange(2))], [np.empty((2, 2))], remember=True)
    with pytest.raises(StoreError, match="compensate is for dense tables, and 'rows' is sparse"):
        push(shard, block([1], 1), compensate=1.0)


def test_one_push_names_a_table_once() -> None:
    shard = shard_with(ROWS)
    with pytest.raises(StoreError, match="names a table twice"):
        push(shard, block([1], 1), block([2], 1))
    assert not rows(shard, 1, 2).any()


def test_a_table_that_is_there_is_compared() -> None:
    shard = shard_with(DENSE)
    push(shard, vector(1))
    shard.create(DENSE, (0, 6), np.full(6, 9.0))
    assert dense(shard).tolist() == [1] * 6, "the same again changes nothing"
    with pytest.raises(
        StoreError,
        match="is there with length=6, optimizer='sum'; given: length=7, optimizer='sgd'",
    ):
        shard.create(Table("w", length=7, dtype="float64"), (0, 7))
    with pytest.raises(StoreError, match=r"the range \(0, 3\) was given, but \(0, 6\)"):
        shard.create(DENSE, (0, 3))
    with pytest.raises(StoreError, match="optimizer 'sgdd' is unknown"):
        shard.create(Table("x", optimizer="sgdd"))
    assert shard.tables() == ["w"]


# -- pending and commit --


def test_a_commit_applies_the_weighted_mean_of_its_members_once() -> None:
    shard = shard_with(DENSE, ROWS)
    for worker, (value, weight) in enumerate([(1.0, 1.0), (2.0, 3.0), (100.0, 5.0)]):
        push(
            shard,
            vector(value),
            block([worker, 7], value),
            worker=worker,
            pending=True,
            weight=weight,
        )
    assert not dense(shard).any() and shard.stats()["now/held"] == 3
    shard.commit(1, [(0, 0), (1, 0)])
    shard.commit(1, [(0, 0), (1, 0), (2, 0)])  # an older news of the same
    assert dense(shard).tolist() == [1.75] * 6
    assert rows(shard, 0, 1, 2, 7)[:, 0].tolist() == [0.25, 1.5, 0, 1.75]
    assert shard.stats()["now/held"] == 1, "what was not a member's is kept"
    shard.commit(2, [(2, 0)])
    assert dense(shard).tolist() == [101.75] * 6


def test_without_weights_a_commit_applies_the_sum() -> None:
    shard = shard_with(DENSE)
    for worker in range(3):
        push(shard, vector(worker + 1), worker=worker, pending=True)
    shard.commit(1, [(0, 0), (1, 0), (2, 0)])
    assert dense(shard).tolist() == [6] * 6


def test_a_single_member_gives_its_own_bits() -> None:
    generator = np.random.default_rng(0)
    g = generator.standard_normal(1000).astype(np.float32)
    table = Table("w", length=1000, optimizer="sum")
    for weight in (None, 0.3, 7.0):
        shard = shard_with(table)
        shard.push(
            4, 0, 0, [TableUpdate("w", None, g.copy())], PushMessage(pending=True, weight=weight)
        )
        shard.commit(1, [(4, 0)])
        assert np.array_equal(dense(shard), g)


def test_a_mean_of_float32_is_rounded_once() -> None:
    generator, n = np.random.default_rng(1), 70_000  # more than one block
    parts = generator.standard_normal((5, n)).astype(np.float32)
    shard = shard_with(Table("w", length=n, optimizer="sum"))
    for worker in (3, 1, 4, 0, 2):
        shard.push(
            worker,
            0,
            0,
            [TableUpdate("w", None, parts[worker].copy())],
            PushMessage(pending=True, weight=2.0),
        )
    shard.commit(1, [(w, 0) for w in range(5)])
    exact = sum(0.2 * p.astype(np.float64) for p in parts)
    assert np.array_equal(dense(shard), exact.astype(np.float32))


@pytest.mark.parametrize("pending", [False, True])
def test_results_depend_neither_on_who_came_first_nor_on_the_number_of_shards(
    pending: bool,
) -> None:
    table = Table("rows", dim=3, optimizer="adam", options={"lr": 0.1}, seed=5)
    long = Table("w", length=4096, optimizer="momentum", options={"lr": 0.1})
    generator = np.random.default_rng(2)
    steps = [
        [
            (
                generator.integers(0, 40, 25),
                generator.standard_normal((25, 3)).astype("f4"),
                generator.standard_normal(4096).astype("f4"),
            )
            for _ in range(3)
        ]
        for _ in range(4)
    ]

    def train(count: int, order: list[int]) -> tuple[np.ndarray, np.ndarray]:
        shards, owner = [Shard(i) for i in range(count)], even(count)
        cuts = ranges(4096, count)
        for shard, cut in zip(shards, cuts, strict=True):
            shard.create(table)
            shard.create(long, cut, np.ones(cut[1] - cut[0], np.float32))
        for clock, step in enumerate(steps):
            for worker in order if pending else range(3):
                ids, g, d = step[worker]
                where = owner[slot_of(ids, seed_of("rows"), SLOTS)]
                for s, shard in enumerate(shards):
                    mine = where == s
                    sparse = TableUpdate(
                        "rows", np.ascontiguousarray(ids[mine]), np.ascontiguousarray(g[mine])
                    )
                    parts = [sparse, TableUpdate("w", None, d[slice(*cuts[s])].copy())]
                    words = PushMessage(
                        clock, pending=pending, weight=1.0 + worker if pending else None
                    )
                    assert shard.push(worker, 0, clock, parts, words)
            if pending:
                for shard in shards:
                    shard.commit(clock + 1, [(w, clock) for w in range(3)])
        dumps = [shard.dump("rows") for shard in shards]
        ids = np.concatenate([d["ids"] for d in dumps])
        values = np.concatenate(
            [np.hstack([d["values"], d["state/exp_avg_sq"], d["meta"]]) for d in dumps]
        )
        return values[np.argsort(ids)], np.concatenate(
            [shard.dump("w")["values"] for shard in shards]
        )

    expected = train(1, [0, 1, 2])
    for count, order in ((1, [2, 0, 1]), (2, [0, 1, 2]), (3, [1, 2, 0]), (7, [2, 1, 0])):
        for got, wanted in zip(train(count, order), expected, strict=True):
            assert np.array_equal(got, wanted)


def test_the_newest_pending_push_of_a_worker_replaces_its_older() -> None:
    shard = shard_with(DENSE)
    push(shard, vector(1), sequence=0, clock=0, pending=True)
    push(shard, vector(2), sequence=2, clock=5, pending=True)
    push(shard, vector(4), sequence=1, clock=0, pending=True)  # overtaken on the way
    shard.commit(1, [(0, 0)])
    assert not dense(shard).any(), "clock 0 was given up"
    shard.commit(2, [(0, 5)])
    assert dense(shard).tolist() == [2] * 6


def test_pushes_of_one_clock_to_several_tables_are_pending_together() -> None:
    shard = shard_with(DENSE, ROWS)
    push(shard, vector(1), pending=True)
    push(shard, block([3, 3], 2), pending=True)
    push(shard, vector(10), pending=True)
    push(shard, block([4], 5), pending=True)
    shard.commit(1, [(0, 0)])
    assert dense(shard).tolist() == [11] * 6 and rows(shard, 3, 4)[:, 1].tolist() == [4, 5]


def test_each_table_is_committed_with_the_lr_that_its_pushes_gave() -> None:
    tables = [
        Table(name, length=6, dtype="float64", optimizer="sgd", options={"lr": 9.0})
        for name in ("w", "v")
    ]
    shard = shard_with(*tables)
    for worker in range(2):
        push(shard, vector(-1), worker=worker, pending=True, lr=0.5, weight=1.0)
        push(shard, vector(-1, "v"), worker=worker, pending=True, lr=2.0, weight=1.0)
    shard.commit(1, [(0, 0), (1, 0)])
    assert dense(shard).tolist() == [0.5] * 6 and dense(shard, name="v").tolist() == [2] * 6


def test_pending_pushes_are_copies() -> None:
    shard = shard_with(DENSE, ROWS)
    one, two = vector(1), block([3], 1)
    push(shard, one, two, pending=True)
    one.updates[:] = two.updates[:] = 99
    two.ids[:] = 4  # type: ignore[index]
    shard.commit(1, [(0, 0)])
    assert dense(shard).tolist() == [1] * 6 and rows(shard, 3, 4)[:, 0].tolist() == [1, 0]


def test_members_without_samples_weigh_nothing() -> None:
    shard = shard_with(DENSE)
    push(shard, vector(3), worker=0, pending=True, weight=2.0)
    push(shard, vector(0), worker=1, pending=True, weight=0.0)
    shard.commit(1, [(0, 0), (1, 0), (2, 0)])
    assert dense(shard).tolist() == [3] * 6
    push(shard, vector(0), worker=1, clock=1, pending=True, weight=0.0)
    shard.commit(2, [(1, 1)])
    assert dense(shard).tolist() == [3] * 6 and int(shard.dump("w")["version"][0]) == 1, (
        "no push at all"
    )


# -- staleness --


@pytest.mark.parametrize(("between", "divisor"), [(0, 1), (1, 1), (2, 2), (5, 5)])
def test_adapt_divides_by_the_updates_since_the_pull(between: int, divisor: int) -> None:
    shard = shard_with(Table("w", length=6, dtype="float64", optimizer="sgd", options={"lr": 0.5}))
    dense(shard, worker=1)
    for _ in range(between):
        push(shard, vector(0), worker=0)
    push(shard, vector(1), worker=1, adapt=True, lr=2.0)
    assert dense(shard).tolist() == [-2 / divisor] * 6
    dense(shard, worker=1)
    push(shard, vector(1), worker=1, adapt=True)
    assert dense(shard).tolist() == [-2 / divisor - 0.5] * 6, "fresh again, and the table's own lr"


def test_updates_are_counted_by_table() -> None:
    shard = shard_with(
        DENSE,
        Table("s", dim=2, dtype="float64", optimizer="sgd", init="zeros", options={"lr": 1.0}),
    )
    rows(shard, 1, worker=1, name="s")
    for _ in range(4):
        push(shard, vector(1))
    push(shard, block([1], 1, "s"), worker=1, adapt=True)
    assert rows(shard, 1, name="s").tolist() == [[-1, -1]]
    for _ in range(2):
        push(shard, block([], 1, "s"))  # a push of which no row lies here counts all the same
    push(shard, block([2], 1, "s"), worker=1, adapt=True)
    assert rows(shard, 2, name="s").tolist() == [[-1 / 3, -1 / 3]]


def test_the_histogram_of_staleness() -> None:
    shard = shard_with(DENSE)
    for tau in (0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 40):
        dense(shard, worker=1)
        for _ in range(tau):
            dense(shard, worker=0)
            push(shard, vector(0), worker=0)
        push(shard, vector(0), worker=1)
    stats = shard.stats()
    assert [stats[f"stale_{name}"] for name in ("1", "2", "3_4", "5_8", "9_16", "more")] == [
        1,
        1,
        2,
        2,
        2,
        2,
    ]
    assert stats["stale_0"] == 1 + sum((1, 2, 3, 4, 5, 8, 9, 16, 17, 40)), (
        "and those of the worker that pulls before each push"
    )


def test_workers_of_equal_speed_are_as_stale_as_there_are_others() -> None:
    shard = shard_with(DENSE)
    for worker in range(5):
        dense(shard, worker)
    before = shard.stats()
    for _ in range(10):
        for worker in range(5):
            push(shard, vector(0), worker=worker)
            dense(shard, worker)
    counted = since(before, shard.stats())
    assert (counted["stale_3_4"], counted["pushes"]) == (47, 50), "but for the first round"


SGD = Table("w", length=6, dtype="float64", optimizer="sgd", options={"lr": 0.5})


def test_compensation_with_lambda_0_or_without_delay_changes_no_bit() -> None:
    generator = np.random.default_rng(3)
    g, h, start = (generator.standard_normal(6) for _ in range(3))

    def run(delay: bool, **words: float) -> np.ndarray:
        shard = Shard()
        shard.create(SGD, (0, 6), start.copy())
        dense(shard, worker=1, remember=True)
        if delay:
            push(shard, TableUpdate("w", None, h.copy()))
        push(shard, TableUpdate("w", None, g.copy()), worker=1, **words)
        return dense(shard)

    assert np.array_equal(run(False, compensate=2.0), run(False))
    assert np.array_equal(run(True, compensate=0.0), run(True))
    assert not np.array_equal(run(True, compensate=2.0), run(True))


def test_compensation_adds_the_diagonal_term() -> None:
    shard = Shard()
    shard.create(SGD, (0, 6), np.full(6, 3.0))
    dense(shard, worker=1, remember=True)
    dense(shard, worker=2, remember=True)
    push(shard, vector(2.0))  # w = 2, 1 less than what 1 and 2 saw
    push(shard, vector(0.5), worker=1, compensate=0.4)
    step = 0.5 * (0.5 + 0.4 * 0.25 * -1)
    assert np.allclose(dense(shard), 2 - step, rtol=1e-15)
    push(shard, vector(0.5), worker=2, compensate=0.4)
    assert np.allclose(
        dense(shard), 2 - step - 0.5 * (0.5 + 0.4 * 0.25 * (-1 - step)), rtol=1e-15
    ), "each compares with its own"


def test_for_a_log_likelihood_lambda_1_is_the_first_order_term() -> None:
    """l = -log x has l'' = (l')^2, so what is added is exactly l''(x_seen) (x - x_seen)."""
    x, moved = 2.0, 2.01
    shard = Shard()
    shard.create(Table("w", length=1, dtype="float64", optimizer="sum"), (0, 1), np.array([x]))
    dense(shard, worker=1, remember=True)
    push(shard, vector(moved - x, n=1))
    before = dense(shard)
    push(shard, vector(-1 / x, n=1), worker=1, compensate=1.0)
    told = float((dense(shard) - before)[0])
    assert abs(told - -1 / moved) < 1e-4 < abs(-1 / x - -1 / moved)


def test_adaptive_compensation_follows_the_running_mean_of_squares() -> None:
    shard = Shard()
    shard.create(SGD, (0, 6), np.full(6, 3.0))
    w, mean_square, seen = 3.0, 0.0, 3.0
    for g, remembers in ((1.0, True), (0.5, False), (-2.0, False), (0.25, True), (1.0, False)):
        if remembers:
            dense(shard, remember=True)
            seen = w
        push(shard, vector(g), compensate=2.0, decay=0.95)
        mean_square = 0.95 * mean_square + 0.05 * g * g
        w -= 0.5 * (g + 2.0 / math.sqrt(mean_square + 1e-7) * g * g * (w - seen))
        assert np.allclose(dense(shard), w, rtol=1e-13)
    copy = shard_with(SGD)
    copy.load("w", shard.dump("w"))
    for one in (shard, copy):
        dense(one, worker=3, remember=True)
        push(one, vector(1.0), worker=4)
        push(one, vector(1.0), worker=3, compensate=2.0, decay=0.95)
    assert np.array_equal(dense(shard), dense(copy)), "the mean is dumped with the table"


def test_one_copy_is_remembered_for_each_worker_and_table() -> None:
    shard = shard_with(DENSE)
    for _ in range(10):
        for worker in range(3):
            dense(shard, worker=worker, remember=True)
    assert len(shard.compensation) == 3


# -- limits and counts --


def test_a_full_table_says_so_once_and_goes_on_with_the_rows_it_has() -> None:
    said: list[str] = []
    shard = shard_with(ROWS, memory_bytes=20_000, warn=said.append)
    for start in range(0, 1000, 100):
        push(shard, block(list(range(start, start + 100)), 1))
    held = int(shard.stats()["now/rows"])
    assert 100 <= held < 1000 and shard.stats()["dropped_rows"] == 1000 - held
    assert (
        len(said) == 1
        and "'rows' on shard 0 has reached its memory limit of 20000 bytes" in said[0]
    )
    push(shard, block([0, 999], 1))
    assert rows(shard, 0, 999).tolist() == [[2, 2], [0, 0]]


def test_tables_of_a_shard_share_its_memory() -> None:
    said: list[str] = []
    shard = shard_with(
        ROWS,
        Table("more", dim=2, dtype="float64", optimizer="sum"),
        memory_bytes=40_000,
        warn=said.append,
    )
    for name in ("rows", "more"):
        for start in range(0, 3000, 100):
            push(shard, block(list(range(start, start + 100)), 1, name))
    alone = shard_with(ROWS, memory_bytes=40_000, warn=said.append)
    for start in range(0, 3000, 100):
        push(alone, block(list(range(start, start + 100)), 1))
    assert shard.stats()["now/rows"] <= alone.stats()["now/rows"] < 3000
    assert len(said) == 3, "each table says so, once"


def test_rows_expire_while_pushes_go_on() -> None:
    shard = shard_with(
        Table("rows", dim=2, dtype="float64", optimizer="sum", init="zeros", expire_after=4)
    )
    push(shard, block([1], 1))
    for _ in range(20):
        push(shard, block([2], 1))
    assert shard.stats()["now/rows"] == 1 and shard.stats()["expired_rows"] == 1
    assert rows(shard, 2).tolist() == [[20, 20]] and rows(shard, 1).tolist() == [[0, 0]]


def test_rows_and_bytes_are_counted() -> None:
    shard = shard_with(DENSE, ROWS)
    before = shard.stats()
    push(shard, vector(1), block([1, 2, 2], 1))
    rows(shard, 1, 2)
    dense(shard)
    counted = since(before, shard.stats())
    assert (counted["pushed_rows"], counted["pushed_bytes"]) == (3, 48 + 48)
    assert (counted["pulled_rows"], counted["pulled_bytes"]) == (2, 32 + 48)
    assert since(shard.stats(), shard.stats())["pushed_rows"] == 0
    both = together([shard.stats(), shard.stats()])
    assert both["pushed_rows"] == 6 and both["now/rows"] == 4 and both["now/shards"] == 1


def test_the_hottest_keys_are_found() -> None:
    shard, generator = shard_with(ROWS), np.random.default_rng(4)
    for _ in range(2000):
        ids = generator.integers(10, 1_000_000, 20)
        ids[:2] = 7
        ids[2] = 8
        shard.pull(0, [TablePull("rows", ids)], [np.empty((20, 2))])
    hot = {name: share for name, share in shard.stats().items() if name.startswith("hot/")}
    assert list(hot)[:2] == ["hot/rows/7", "hot/rows/8"]
    assert 0.08 < hot["hot/rows/7"] <= 0.1 and 0.04 < hot["hot/rows/8"] <= 0.05
    loads = shard.slot_loads()
    assert (
        loads.shape == (SLOTS,)
        and loads.argmax() == slot_of(np.array([7]), seed_of("rows"), SLOTS)[0]
    )
    assert loads.sum() == pytest.approx(40_000, rel=0.01)
    assert shard.stats()["now/balance"] > 2


def test_threads_that_push_at_once_lose_nothing() -> None:
    shard = shard_with(DENSE, ROWS)

    def work(worker: int) -> None:
        for s in range(200):
            shard.push(worker, 0, s, [vector(1), block([s % 5, worker], 1)], PushMessage())
            dense(shard, worker)

    threads = [threading.Thread(target=work, args=(w,)) for w in range(10, 14)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dense(shard).tolist() == [800] * 6
    assert rows(shard, *range(5))[:, 0].tolist() == [160] * 5 and rows(shard, 10, 13)[
        :, 0
    ].tolist() == [200, 200]


# -- whole tables --


@pytest.mark.parametrize(
    "optimizer", ["sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "lazy_adam", "ftrl"]
)
@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_a_table_goes_on_from_its_dump_to_the_bit(optimizer: str, kind: str) -> None:
    table = Table(
        "t", dim=2, length=64 if kind == "dense" else None, optimizer=optimizer, options={"lr": 0.1}
    )
    shard, generator = shard_with(table), np.random.default_rng(5)

    def part() -> TableUpdate:
        if kind == "dense":
            return TableUpdate("t", None, generator.standard_normal(64).astype(np.float32))
        return TableUpdate(
            "t",
            generator.integers(0, 30, 40),
            generator.standard_normal((40, 2)).astype(np.float32),
        )

    for _ in range(5):
        push(shard, part())
    copy, one_by_one = shard_with(table), shard_with(table)
    copy.load("t", shard.dump("t"))
    if kind == "sparse":
        for slot in range(8):
            content = shard.dump("t", slot, 8)
            assert (slot_of(content["ids"], seed_of("t"), 8) == slot).all()
            one_by_one.load("t", content)
    else:
        one_by_one.load("t", shard.dump("t"))
    for _ in range(3):
        next_part = part()
        for one in (shard, copy, one_by_one):
            push(one, TableUpdate("t", next_part.ids, next_part.updates.copy()))
    dumps = [one.dump("t") for one in (shard, copy, one_by_one)]
    for dump in dumps:
        if "ids" in dump:
            order = np.argsort(dump["ids"])
            dump |= {k: v[order] for k, v in dump.items() if len(v) == len(order)}
        for key in dumps[0].keys() - {"marks"}:
            assert np.array_equal(dump[key], dumps[0][key]), key


def test_clear_and_load_replace_all_rows() -> None:
    shard, other = shard_with(ROWS), shard_with(ROWS)
    push(shard, block([1, 2], 1))
    push(other, block([2, 3], 5))
    shard.clear("rows")
    shard.load("rows", other.dump("rows"))
    assert sorted(shard.dump("rows")["ids"].tolist()) == [2, 3]
    assert rows(shard, 2).tolist() == [[5, 5]]
    with pytest.raises(
        StoreError, match="'values' is missing in the content to restore, which has"
    ):
        shard.load("rows", {"ids": np.arange(2)})
