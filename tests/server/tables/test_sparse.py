"""Contract of a sparse table, whatever its optimizer.

Rows are found by any id, initialised from (table, id, seed), summed, erased, refused.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from manyhands.core import Table
from manyhands.errors import StoreError
from manyhands.server.tables import (
    gradient_kernels,
    index_kernels,
    index_maintenance,
    row_kernels,
)
from manyhands.server.tables.dense import DenseTable
from manyhands.server.tables.hashing import hash64, seed_of, slot_of
from manyhands.server.tables.sparse import SparseTable
from manyhands.server.tables.warm_up import warm_up

EDGES = np.array([0, 1, -1, 2, -2, 2**63 - 1, -(2**63), 2**32, -(2**32), 2**31], np.int64)


def dice(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def any_ids(n: int, seed: int = 0) -> np.ndarray:
    return dice(seed).integers(-(2**63), 2**63 - 1, n, dtype=np.int64)


def make(memory_bytes: int | None = None, **words: Any) -> SparseTable:
    return SparseTable(Table("t", **{"dim": 3, **words}), memory_bytes)


def pulled(table: SparseTable, ids: Any) -> np.ndarray:
    ids = np.asarray(ids, np.int64)
    out = np.full((ids.size, table.dim), np.nan, table.dtype)
    table.pull(ids, out)
    return out


def ones(ids: Any, table: SparseTable) -> np.ndarray:
    return np.ones((len(ids), table.dim), table.dtype)


def content(table: SparseTable, slot: int | None = None) -> dict[int, tuple[float, ...]]:
    """All of it by id, to be compared: values, state, count, last."""
    ids, values, state, meta = table.items(slot)
    return {
        int(i): (
            *values[j].tolist(),
            *(x for s in state.values() for x in s[j].tolist()),
            *meta[j].tolist(),
        )
        for j, i in enumerate(ids)
    }


# -- rows --


@pytest.mark.parametrize("dim", [1, 3, 16, 33])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_int64_is_an_id(dim: int, dtype: str) -> None:
    table = make(dim=dim, dtype=dtype, optimizer="adagrad")
    first = pulled(table, EDGES)
    assert table.rows == EDGES.size and np.unique(first[:, 0]).size == EDGES.size
    np.testing.assert_array_equal(pulled(table, EDGES[::-1]), first[::-1])
    assert table.push(EDGES, ones(EDGES, table), 0.1) == EDGES.size
    np.testing.assert_allclose(pulled(table, EDGES), first - 0.1, atol=1e-6)
    assert sorted(table.items()[0].tolist()) == sorted(EDGES.tolist())


def test_rows_start_as_a_function_of_name_id_and_seed() -> None:
    ids = any_ids(50)
    first = pulled(make(), ids)
    np.testing.assert_array_equal(pulled(make(), ids[::-1])[::-1], first)
    np.testing.assert_array_equal(pulled(make(optimizer="adam"), ids), first)
    assert (pulled(make(seed=1), ids) != first).any(axis=1).all()
    assert (pulled(SparseTable(Table("u", dim=3)), ids) != first).any(axis=1).all()
    script = (
        "import numpy as np; from manyhands.core import Table; from "
        "manyhands.server.tables.sparse import SparseTable\n"
        "t, out = SparseTable(Table('t', dim=3)), np.empty((2, 3), np.float32); "
        "t.pull(np.array([5, -7]), out); print(out.tobytes().hex())"
    )
    other = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert (
        other == pulled(make(), [5, -7]).tobytes().hex()
    )  # another process, with another salt of hash()


def test_first_values_have_the_distribution_that_was_asked_for() -> None:
    ids = np.arange(20_000)
    uniform, normal = (
        pulled(make(init=init, scale=0.5, dim=4), ids) for init in ("uniform", "normal")
    )
    assert (
        np.abs(uniform).max() <= 0.5
        and abs(uniform.mean()) < 0.01
        and abs(uniform.std() - 0.5 / 3**0.5) < 0.01
    )
    assert (
        abs(normal.mean()) < 0.01
        and abs(normal.std() - 0.5) < 0.01
        and 1.5 < np.abs(normal).max() < 3.5
    )
    within = (np.abs(normal) < 0.5).mean()
    assert abs(within - 0.6827) < 0.01
    assert (
        np.abs(np.corrcoef(uniform.T) - np.eye(4)).max() < 0.05
        and np.abs(np.corrcoef(normal.T) - np.eye(4)).max() < 0.05
    )
    assert not pulled(make(init="zeros"), ids).any() and not pulled(make(scale=0.0), ids).any()


def test_growing_keeps_everything() -> None:
    table, rng = make(optimizer="momentum", dim=5), dice(3)
    known: dict[int, np.ndarray] = {}
    for step in range(12):
        ids = any_ids(2000, step)
        g = rng.standard_normal((2000, 5)).astype(np.float32)
        before = pulled(table, ids)
        table.push(ids, g.copy(), 0.5)
        after = pulled(table, ids)
        np.testing.assert_allclose(after, before - 0.5 * g, rtol=1e-5, atol=1e-6)
        known.update(zip(ids.tolist(), after, strict=True))
    assert table.rows == len(known) == 24_000
    ids = np.array(list(known))
    np.testing.assert_array_equal(pulled(table, ids), np.stack(list(known.values())))


def test_rows_are_copied_where_address_space_was_short(monkeypatch: pytest.MonkeyPatch) -> None:
    table = make(memory_bytes=64 * 40)  # room for few rows, and later for more
    ids = np.arange(5000)
    pulled(table, ids)
    few = table.rows
    assert 0 < few < 64 and table.full
    first = pulled(table, ids)
    table.limit(10**7)
    np.testing.assert_array_equal(pulled(table, ids), first)
    assert table.rows == 5000


def test_untouched_rows_keep_their_bits() -> None:
    for optimizer in ("adam", "ftrl", "momentum"):
        table, ids = make(optimizer=optimizer), np.arange(100)
        table.push(ids, dice().standard_normal((100, 3)).astype(np.float32), 0.1)
        before = content(table)
        table.push(ids[:50], ones(ids[:50], table), 0.1)
        after = content(table)
        width = 3 * (1 + len(table.optimizer.state))
        assert all(before[i][:width] == after[i][:width] for i in range(50, 100))
        assert all(before[i][:3] != after[i][:3] for i in range(50))


def test_repeated_ids_are_summed_before_the_optimizer() -> None:
    rng = dice(5)
    for n, distinct in ((40, 5), (3000, 1), (3000, 700)):
        ids = any_ids(distinct)[rng.integers(0, distinct, n)]
        g = rng.standard_normal((n, 3))
        one, other = (make(optimizer="adagrad", dtype="float64") for _ in range(2))
        assert one.push(ids, g.copy(), 0.1) == np.unique(ids).size
        unique, inverse = np.unique(ids, return_inverse=True)
        total = np.zeros((unique.size, 3))
        np.add.at(total, inverse, g)
        other.push(unique, total, 0.1)
        np.testing.assert_allclose(pulled(one, unique), pulled(other, unique), rtol=1e-12)
    separately = make(optimizer="adagrad", dtype="float64")
    for _ in range(2):
        separately.push(np.array([1]), np.array([[1.0, 2.0, 3.0]]), 0.1)
    together = make(optimizer="adagrad", dtype="float64")
    together.push(np.array([1, 1]), np.array([[1.0, 2.0, 3.0]] * 2), 0.1)
    assert (pulled(separately, [1]) != pulled(together, [1])).all()


def test_a_push_of_nothing_counts_as_a_push() -> None:
    """So that the count of steps does not depend on how ids are spread over servers."""
    table = make(optimizer="adam")
    assert table.push(np.empty(0, np.int64), np.empty((0, 3), np.float32)) == 0
    assert table.version == table.optimizer.step == 1
    table.pull(np.empty(0, np.int64), np.empty((0, 3), np.float32))
    assert table.rows == 0 and len(table.items()[0]) == 0


# -- a random life against a dictionary --


@pytest.mark.parametrize("spread", [40, 3000, 2**62])
def test_a_random_life_equals_a_dictionary(spread: int) -> None:
    """Pulls, pushes and erasures of ids that often meet, some of which share buckets for long
    stretches.
    """
    rng, table, model = dice(spread % 1000), make(dim=2, dtype="float64"), {}
    fresh = make(dim=2, dtype="float64")
    pool = np.unique(np.append(rng.integers(-spread, spread, 1500), EDGES))
    for _ in range(300):
        ids = rng.choice(pool, rng.integers(1, 200))
        match rng.integers(4):
            case 0:
                np.testing.assert_array_equal(
                    pulled(table, ids),
                    [model.setdefault(i, pulled(fresh, [i])[0]) for i in ids.tolist()],
                )
            case 1:
                ids = np.unique(ids)
                g = rng.standard_normal((ids.size, 2))
                for i, x in zip(ids.tolist(), g, strict=True):
                    model[i] = model.get(i, pulled(fresh, [i])[0]) - x
                table.push(ids, g, 1.0)
            case 2 | 3:
                gone = set(ids.tolist()) & set(model)
                assert table.erase(ids) == len(gone)
                for i in gone:
                    del model[i]
        assert table.rows == len(model)
    ids, values, _, _ = table.items()
    assert sorted(ids.tolist()) == sorted(model)
    np.testing.assert_array_equal(values, [model[i] for i in ids.tolist()])


def test_erased_rows_start_again_as_they_once_did_and_their_memory_is_used_again() -> None:
    table, ids = make(optimizer="adagrad"), np.arange(1000)
    first = pulled(table, ids)
    for _ in range(3):
        table.push(ids, ones(ids, table), 0.1)
        assert table.erase(ids[:600]) == 600 and table.erase(ids[:600]) == 0
        held = table.nbytes
        np.testing.assert_array_equal(pulled(table, ids[:600]), first[:600])
        state = table.items()[2]["sum"][np.argsort(table.items()[0])]
        assert not state[:600].any() and state[600:].all()
        assert table.nbytes == held


def test_erasing_in_a_full_index_loses_nothing() -> None:
    """Ids chosen for one bucket go far past it; whatever is erased, the rest is found."""
    table = make(dim=1)
    every = any_ids(200_000, 9)
    buckets = table.storage.entries.size // 8
    home = np.array([hash64("t", int(i)) >> 32 for i in every[:20_000]]) * buckets >> 32
    crowd = every[:20_000][(home == buckets - 1) | (home == 0)][
        :100
    ]  # around the end, which is next to the beginning
    assert crowd.size == 100
    first = pulled(table, crowd)
    assert table.storage.entries.size // 8 == buckets
    rng = dice(2)
    for _ in range(30):
        gone = rng.choice(crowd, 40, replace=False)
        assert table.erase(gone) == 40
        left = np.setdiff1d(crowd, gone)
        assert sorted(table.items()[0].tolist()) == sorted(left.tolist())
        assert table.erase(left[:1]) == 1
        np.testing.assert_array_equal(pulled(table, crowd), first)


# -- admission and expiry --


def test_a_row_is_made_when_its_id_was_pushed_so_many_times() -> None:
    table, ids = make(admit_after=3, init="zeros"), np.array([1, 2])
    for seen in range(1, 5):
        assert not pulled(table, ids).any() or seen > 3
        changed = table.push(ids, ones(ids, table), 1.0)
        assert changed == table.rows == (2 if seen >= 3 else 0)
    assert table.unadmitted == 4
    np.testing.assert_array_equal(pulled(table, ids), -2 * np.ones((2, 3)))
    np.testing.assert_array_equal(
        pulled(make(admit_after=3), ids), pulled(make(), ids)
    )  # reads as it would start


def test_sightings_are_never_counted_too_few() -> None:
    """A count that shares its place can only come too early; also when the places become more."""
    table, every = make(admit_after=4, dim=1), any_ids(30_000)
    seen = np.zeros(every.size, int)
    rng = dice(1)
    for _ in range(40):
        at = np.unique(rng.integers(0, every.size, 3000))
        table.push(every[at], ones(at, table), 0.1)
        seen[at] += 1
        rows = set(table.items()[0].tolist())
        due = every[seen >= 4]
        assert rows.issuperset(due.tolist())
    early = len(rows) - due.size
    assert due.size > 10_000 and early < 0.05 * every.size


def test_the_share_that_is_admitted_is_decided_by_the_id() -> None:
    ids = any_ids(20_000)
    one, other = make(admit_share=0.25, dim=1), make(admit_share=0.25, dim=1)
    one.push(ids, ones(ids, one), 0.1)
    other.push(ids[::-1].copy(), ones(ids, other), 0.1)
    assert set(one.items()[0].tolist()) == set(other.items()[0].tolist())
    assert abs(one.rows / ids.size - 0.25) < 0.02 and one.unadmitted == ids.size - one.rows
    one.push(ids, ones(ids, one), 0.1)
    assert one.rows == other.rows
    np.testing.assert_array_equal(pulled(make(admit_share=0.01), ids), pulled(make(), ids))


def test_rows_expire_by_age_count_and_norm() -> None:
    old, rare, short = (
        make(expire_after=3),
        make(expire_count=2),
        make(expire_norm=1.0, init="zeros"),
    )
    for table in (old, rare, short):
        for ids in ([1, 2], [1], [1, 3], [1]):
            table.push(np.array(ids), ones(ids, table), 0.5)
    before = content(old)
    assert old.expire() == 1 and content(old) == {
        i: before[i] for i in (1, 3)
    }  # 2: in none of the last three pushes
    assert rare.expire() == 2 and list(content(rare)) == [1]
    assert short.expire() == 2 and list(content(short)) == [1]  # 0.5 in each of three directions
    assert old.expire() == rare.expire() == make().expire() == 0
    first = pulled(make(expire_after=3), [2])
    np.testing.assert_array_equal(pulled(old, [2]), first)


def test_age_is_told_apart_also_after_very_many_pushes() -> None:
    for after, jump in ((3, 3_000_000), (4_000_000, 50_000_000)):
        table = make(expire_after=after)
        for start in (0, jump, jump + jump // 3):
            table.version = start
            table.push(np.array([1]), ones([1], table), 0.1)
            for _ in range(3):
                table.push(np.array([2]), ones([2], table), 0.1)
            last = {
                int(i): int(m[1]) for i, m in zip(table.items()[0], table.items()[3], strict=True)
            }
            unit = max(1, after // (index_kernels.LATEST // 8))
            assert abs(last[2] - (start + 4)) <= unit and abs(last[1] - (start + 1)) <= unit
        table.version += after + after // 1000 + 1
        assert table.expire() == 2


def test_counts_and_times_of_rows_are_kept() -> None:
    table = make()
    for ids in ([1], [1, 2], [1, 1, 3]):
        table.push(np.array(ids), ones(ids, table), 0.1)
    pulled(table, [4])
    assert {i: x[-2:] for i, x in content(table).items()} == {
        1: (3, 3),
        2: (1, 2),
        3: (1, 3),
        4: (0, 3),
    }
    for _ in range(5000):
        table.push(np.array([9]), ones([9], table), 0.1)
    assert content(table)[9][-2:] == (4095, 5003)  # as far as it counts


# -- memory --


def test_no_row_is_made_beyond_the_memory_limit_and_none_is_lost() -> None:
    limit = 200_000
    table, ids = make(memory_bytes=limit, optimizer="adagrad"), np.arange(10_000)
    first = pulled(make(), ids)
    np.testing.assert_array_equal(pulled(table, ids), first)
    assert table.full and 0 < table.rows < 10_000 and table.nbytes <= limit
    there = table.items()[0]
    changed = table.push(ids, ones(ids, table), 0.1)
    assert changed == there.size and table.refused == 10_000 - changed and table.nbytes <= limit
    assert sorted(table.items()[0].tolist()) == sorted(there.tolist())
    inside = np.isin(ids, there)
    np.testing.assert_array_equal(pulled(table, ids[~inside]), first[~inside])
    assert (pulled(table, ids[inside]) != first[inside]).all()
    table.erase(there[:10])
    assert not table.full
    pulled(table, ids[~inside])
    assert table.full


def test_what_a_row_costs_beyond_its_values_and_state_is_little() -> None:
    for n in (70_000, 150_000, 300_000):
        table = make(dim=1, optimizer="adagrad")
        pulled(table, any_ids(n))
        assert (table.nbytes - table.rows * 8) / table.rows <= 32


# -- whole tables --


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "lazy_adam", "adam"])
def test_items_and_load_are_a_round_trip(optimizer: str) -> None:
    table, ids = make(optimizer=optimizer), any_ids(3000)
    for _ in range(3):
        table.push(ids, dice().standard_normal((3000, 3)).astype(np.float32), 0.1)
    slots = [table.items(s) for s in range(1024)]
    assert sum(len(x[0]) for x in slots) == 3000
    other = make(optimizer=optimizer, admit_after=9)
    for part in slots:
        other.load(*part)
    assert content(other) == content(table)
    g = dice(1).standard_normal((3000, 3)).astype(np.float32)
    for each in (table, other):
        each.push(ids, g.copy(), 0.1)
    assert content(other) == content(table)


def test_slots_are_the_same_everywhere_and_balanced() -> None:
    assert (seed_of("users"), hash64("users", -1)) == (
        0x2CE51F80EA7BDE77,
        0x2B0908FB84E1902F,
    )  # written down: rows must be found again by later releases
    ids = any_ids(200_000)
    slots = slot_of(ids, seed_of("t"), 64)
    assert all(slots[i] == hash64("t", int(ids[i])) % 64 for i in range(100))
    loads = np.bincount(slots, minlength=64)
    assert loads.max() / loads.mean() < 1.1
    in_order = np.bincount(slot_of(np.arange(200_000), seed_of("t"), 64), minlength=64)
    assert in_order.max() / in_order.mean() < 1.1
    assert (slots != slot_of(ids, seed_of("u"), 64)).mean() > 0.9
    table = make()
    pulled(table, ids[:1000])
    for slot in (0, 63):
        found = table.items(slot, 64)[0]
        assert sorted(found.tolist()) == sorted(ids[:1000][slots[:1000] == slot].tolist())


def test_a_dense_table_is_pulled_in_ranges_and_goes_through_dump_and_load() -> None:
    spec = Table("d", length=100, optimizer="adam")
    table = DenseTable(spec, 40, 100, np.arange(40, 100).astype(np.float32))
    out = np.empty(5, np.float32)
    table.pull(out, 50, 55)
    np.testing.assert_array_equal(out, np.arange(50, 55))
    for _ in range(3):
        table.push(np.ones(60, np.float32), 0.1)
    values, state = table.dump()
    assert int(state["step"][0]) == table.version == 3
    other = DenseTable(spec, 40, 100, values, state)
    for each in (table, other):
        each.push(np.ones(60, np.float32), 0.1)
    np.testing.assert_array_equal(table.values, other.values)
    assert (values != table.values).all()  # a copy


# -- refusals: the table is as before --


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_that_are_not_finite_are_refused_by_their_ids(bad: float, dtype: str) -> None:
    table = make(optimizer="adagrad", dtype=dtype, dim=5)
    ids = np.append(np.arange(100), [7, 7])
    table.push(ids, ones(ids, table), 0.1)
    before, version = content(table), table.version
    for at in ([3, 4], [99, 2], [101, 0]):
        g = ones(ids, table)
        g[tuple(at)] = bad
        with pytest.raises(
            StoreError,
            match=rf"table 't': gradients of 1 ids are not finite \(ids {ids[at[0]]}\).*unchanged",
        ):
            table.push(ids, g, 0.1)
    with pytest.raises(
        StoreError, match=r"of 100 ids are not finite \(ids 0, 1, 2, 3, 4, \.\.\.\)"
    ):
        table.push(ids, ones(ids, table) * bad, 0.1)
    with pytest.raises(StoreError, match=r"\(ids 1000\)"):
        table.push(np.array([1000]), ones([0], table) * bad, 0.1)
    assert content(table) == before and table.version == version


def test_a_sum_of_repeated_ids_that_overflows_is_refused() -> None:
    table = make()
    with pytest.raises(StoreError, match=r"ids 5\)"):
        table.push(np.array([4, 5, 5]), np.full((3, 3), 3e38, np.float32))
    assert table.rows == 0


def test_a_dense_gradient_that_is_not_finite_is_refused() -> None:
    table = DenseTable(Table("d", length=9000), 1000, 9000)
    g = np.ones(8000, np.float32)
    g[[5000, 7999]] = np.nan, np.inf
    with pytest.raises(StoreError, match=r"table 'd': 2 of 8000 numbers .* \(at 6000, 8999\)"):
        table.push(g)
    assert not table.values.any() and table.version == 0


def test_what_does_not_fit_is_refused() -> None:
    table, ids, g = make(), np.arange(4), np.ones((4, 3), np.float32)
    for wrong, given in (
        (ids.astype(np.int32), "int32"),
        (ids.reshape(2, 2), r"\(2, 2\)"),
        ([1, 2], "list"),
    ):
        with pytest.raises(StoreError, match=f"table 't': ids are .*{given}.*int64 of one axis"):
            table.push(wrong, g)
    for grads, given in (
        (g.astype(np.float64), "float64"),
        (g[:, :2].copy(), r"\(4, 2\)"),
        (g[:3], r"\(3, 3\)"),
        (g.T, r"\(3, 4\)"),
    ):
        with pytest.raises(
            StoreError, match=rf"gradients are .*{given}.*float32 of shape \(4, 3\)"
        ):
            table.push(ids, grads)
        with pytest.raises(StoreError, match="out are"):
            table.pull(ids, grads)
    with pytest.raises(StoreError, match="read-only"):
        table.pull(ids, np.frombuffer(g.tobytes(), np.float32).reshape(4, 3))
    with pytest.raises(StoreError, match="optimizer 'sgd' keeps"):
        table.load(ids, g, {"sum": g})
    with pytest.raises(StoreError, match="memory limit of 1000 bytes has room for"):
        make(memory_bytes=1000).load(np.arange(100), np.ones((100, 3), np.float32), {})
    dense = DenseTable(Table("d", length=10), 0, 10)
    for call in (
        lambda: dense.push(np.ones(9, np.float32)),
        lambda: dense.pull(np.ones(11, np.float32)),
    ):
        with pytest.raises(StoreError, match=r"table 'd': .*\(10,\)"):
            call()
    with pytest.raises(StoreError, match="5 to 11 was asked for, 0 to 10 is stored here"):
        dense.pull(np.ones(6, np.float32), 5, 11)
    assert table.rows == 0 and table.version == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"dim": 0}, "dim=0"),
        ({"dtype": "float16"}, "float32 or float64 is needed"),
        ({"init": "ones"}, "zeros, uniform, normal"),
        ({"scale": -1.0}, "scale=-1"),
        ({"admit_after": 0}, "1 to 65535"),
        ({"admit_share": 1.5}, "admit_share=1.5"),
        ({"expire_after": 0}, "expire_after=0"),
        ({"expire_count": 5000}, "0 to 4095 is needed"),
        ({"optimizer": "sdg"}, "'sdg' is unknown"),
    ],
)
def test_specs_that_cannot_be_are_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(StoreError, match=message):
        make(**words)


def test_memory_that_is_read_only_or_oddly_aligned_is_taken_as_it_comes() -> None:
    ids = np.frombuffer(np.arange(4).tobytes(), np.int64)
    raw = b"x" + np.ones((4, 3), np.float32).tobytes()
    g = np.frombuffer(raw, np.float32, offset=1).reshape(4, 3)
    table = make(init="zeros")
    table.push(ids, g, 1.0)
    np.testing.assert_array_equal(pulled(table, ids), -np.ones((4, 3)))
    dense = DenseTable(Table("d", length=12), 0, 12)
    dense.push(g.reshape(-1), 1.0)
    np.testing.assert_array_equal(dense.values, -np.ones(12))


def test_warming_up_compiles_what_tables_run() -> None:
    warm_up("float32", ["sgd"])
    compiled = [
        index_kernels.find_rows,
        index_kernels.insert_rows,
        row_kernels.gather,
        gradient_kernels.sum_duplicates,
        index_maintenance.rebuild,
        index_maintenance.list_expired,
        index_maintenance.erase,
        gradient_kernels.finite,
    ]
    counts = [len(f.signatures) for f in compiled]
    assert all(counts)
    table = make(dim=2)
    pulled(table, any_ids(5000))
    table.push(EDGES, ones(EDGES, table))
    assert [len(f.signatures) for f in compiled] == counts


def test_a_push_of_what_was_pulled_is_a_push_like_any_other() -> None:
    """What pulls found is remembered: growing, forgetting, repeats and other pulls in between must
    not show.
    """
    rng = np.random.default_rng(5)
    table = SparseTable(Table("t", dim=3, optimizer="adagrad", options={"lr": 0.1}))
    other = SparseTable(Table("t", dim=3, optimizer="adagrad", options={"lr": 0.1}))
    lists = [rng.integers(0, 400, 150) for _ in range(3)] + [np.arange(5000)]
    for step in range(120):
        ids = lists[rng.integers(len(lists) if step > 60 else 3)]
        grads, gone = rng.normal(size=(ids.size, 3)).astype(np.float32), rng.integers(0, 400, 20)
        for each in (table, other):
            each.pull(ids, np.empty((ids.size, 3), np.float32))
            if step % 3 == 0:  # another worker's
                each.pull(lists[0], np.empty((150, 3), np.float32))
            if step % 7 == 0:
                each.erase(gone)
            if each is other:
                other._lookups.clear()
            each.push(ids, grads.copy())
    for mine, theirs in zip(table.items(), other.items(), strict=True):
        for a, b in (
            zip(mine.items(), theirs.items(), strict=True)
            if isinstance(mine, dict)
            else [(("", mine), ("", theirs))]
        ):
            assert np.array_equal(a[1], b[1])
