"""The Store protocol without servers: one rank, several that are threads, one shard or several."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from manyhands.core import (
    Store,
    Table,
    Tensors,
    Tick,
)
from manyhands.errors import PeerLost, StoreError
from manyhands.server.clock import Clock
from manyhands.server.local_store import LocalStore
from manyhands.server.shard import Shard

ROWS = Table("rows", dim=3, optimizer="adagrad", options={"lr": 0.1}, seed=1)


def store_of(shards: int = 1, **words: float) -> LocalStore:
    return LocalStore(0, 1, [Shard(i) for i in range(shards)], Clock(1), **words)


def together(
    size: int, main: Callable[[LocalStore], object], shards: int = 2, timeout_s: float = 60.0
) -> list[object]:
    """Run `main` on `size` ranks that are threads; raise what the first of them raises."""
    held, clock = [Shard(i) for i in range(shards)], Clock(size)
    results: dict[int, object] = {}
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            results[rank] = main(LocalStore(rank, size, held, clock, timeout_s=timeout_s))
        except BaseException as e:
            errors.append(e)
            clock.evict(rank)

    threads = [threading.Thread(target=body, args=(r,)) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[r] for r in range(size)]


@pytest.mark.parametrize("shards", [1, 3])
def test_a_dense_table_goes_on_from_what_was_dumped_as_if_it_had_never_stopped(shards: int) -> None:
    """Two workers whose pushes are one pull late, so that what compensation keeps matters."""
    g = torch.Generator().manual_seed(0)
    grads = torch.randn(8, 40, generator=g, dtype=torch.float64)
    table = Table(
        "w", length=40, dtype="float64", optimizer="momentum", options={"lr": 0.1, "momentum": 0.9}
    )

    def opened(values: Tensor, state: Tensors) -> list[LocalStore]:
        held, clock = [Shard(i) for i in range(shards)], Clock(2)
        stores = [LocalStore(rank, 2, held, clock) for rank in range(2)]
        for store in stores:
            store.create(table, values, state)
        return stores

    def play(stores: list[LocalStore], some: Tensor) -> Tensors:
        for pair in some.view(-1, 2, 40):
            for store in stores:
                store.pull({"w": None}, remember=True)
            for store, grad in zip(stores, pair, strict=True):
                store.push({"w": None}, {"w": grad.clone()}, compensate=2.0, decay=0.9).wait()
        return stores[0].dump("w")

    first = opened(torch.ones(40, dtype=torch.float64), {})
    half = play(first, grads[:4])
    whole = play(first, grads[4:])
    state = {k.removeprefix("state/"): v for k, v in half.items() if k.startswith("state/")}
    again = play(opened(half["values"], state), grads[4:])
    assert (
        all(torch.equal(again[k], whole[k]) for k in whole if k != "version")
        and again.keys() == whole.keys()
    )
    forgetful = {k: v for k, v in state.items() if not k.startswith("compensate/")}
    assert not torch.equal(
        play(opened(half["values"], forgetful), grads[4:])["values"], whole["values"]
    )


def test_it_is_a_store() -> None:
    assert isinstance(LocalStore(), Store)


# -- one rank --


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}]
)
def test_one_worker_is_serial_sgd_to_the_bit(
    shards: int, dtype: torch.dtype, options: dict[str, float]
) -> None:
    torch.manual_seed(0)
    w, n = torch.nn.Parameter(torch.randn(5000, dtype=dtype)), str(dtype).removeprefix("torch.")
    optimizer = torch.optim.SGD([w], lr=0.05, **options)  # type: ignore[arg-type]
    store = store_of(shards)
    served = {"decay" if k == "weight_decay" else k: float(v) for k, v in options.items()}
    rule = "momentum" if "momentum" in options else "sgd"
    store.create(
        Table("w", length=5000, dtype=n, optimizer=rule, options={"lr": 0.05, **served}),
        w.detach().clone(),
    )  # type: ignore[arg-type]
    for step in range(5):
        optimizer.param_groups[0]["lr"] = 0.05 / (1 + step)
        w.grad = torch.randn(5000, dtype=dtype)
        optimizer.step()
        store.push({"w": None}, {"w": w.grad}, lr=0.05 / (1 + step)).wait()
        store.tick(0)
        assert torch.equal(store.pull({"w": None})["w"], w), "and it reads what it wrote"


def test_pushing_leaves_what_was_given_as_it_was() -> None:
    store = store_of()
    store.create(ROWS)
    store.create(Table("w", length=4), torch.ones(4))
    ids, g, d = torch.tensor([5, 5, 6]), torch.ones(3, 3), torch.ones(4)
    store.pull({"w": None}, remember=True)
    store.push({"w": None}, {"w": d})
    store.push({"w": None}, {"w": d}, compensate=1.0)
    store.push({"rows": ids}, {"rows": g})
    assert (
        torch.equal(g, torch.ones(3, 3))
        and torch.equal(d, torch.ones(4))
        and ids.tolist() == [5, 5, 6]
    )


@pytest.mark.parametrize("shards", [1, 4])
def test_pull_writes_where_it_is_wanted(shards: int) -> None:
    store = store_of(shards)
    store.create(ROWS)
    store.create(Table("w", length=6000), torch.arange(6000.0))
    ids = torch.tensor([9, -1, 9, 2**62, 0])
    into: Tensors = {"rows": torch.empty(5, 3), "w": torch.empty(60, 100)}
    found = store.pull({"rows": ids, "w": None}, into)
    assert found["rows"].data_ptr() == into["rows"].data_ptr()
    assert torch.equal(into["w"].view(-1), torch.arange(6000.0))
    fresh = store.pull({"rows": ids})["rows"]
    assert (
        torch.equal(fresh, into["rows"])
        and torch.equal(fresh[0], fresh[2])
        and not torch.equal(fresh[0], fresh[1])
    )
    assert 0 < fresh.abs().max() <= 0.01
    assert store.pull({"rows": torch.empty(0, dtype=torch.int64)})["rows"].shape == (0, 3)


def test_ids_that_repeat_are_summed_before_the_rule_sees_them() -> None:
    one, two = store_of(2), store_of(2)
    for store in (one, two):
        store.create(ROWS)
    one.push({"rows": torch.tensor([4, 4])}, {"rows": torch.tensor([[1.0, 2, 3], [3, 2, 1]])})
    two.push({"rows": torch.tensor([4])}, {"rows": torch.full((1, 3), 4.0)})
    assert torch.equal(
        one.pull({"rows": torch.tensor([4])})["rows"], two.pull({"rows": torch.tensor([4])})["rows"]
    )


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam", "lazy_adam", "ftrl"])
@pytest.mark.parametrize("held", [False, True])
def test_the_number_of_shards_changes_nothing(rule: str, held: bool) -> None:
    def train(shards: int) -> list[Tensor]:
        store, random = store_of(shards), torch.Generator().manual_seed(3)
        store.create(Table("rows", dim=4, optimizer=rule, options={"lr": 0.1}))
        store.create(Table("w", length=3000, optimizer=rule, options={"lr": 0.1}), torch.ones(3000))
        for _ in range(6):
            ids = torch.randint(-20, 20, (7,), generator=random)
            updates = {
                "rows": torch.randn(7, 4, generator=random),
                "w": torch.randn(3000, generator=random),
            }
            store.push(
                {"rows": ids, "w": None}, updates, pending=held, weight=2.0 if held else None
            )
            store.tick(0)
        return [x for name in ("rows", "w") for x in store.dump(name).values()]

    expected = train(1)
    for shards in (2, 5):
        for got, wanted in zip(train(shards), expected, strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    "rule", ["sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "lazy_adam"]
)
def test_a_restored_store_goes_on_to_the_bit(shards: int, rule: str) -> None:
    tables = [
        Table("rows", dim=4, optimizer=rule, options={"lr": 0.1}),
        Table("w", dim=4, length=4096, optimizer=rule, options={"lr": 0.1}),
    ]
    random = torch.Generator().manual_seed(4)

    def step() -> tuple[dict[str, Tensor | None], Tensors]:
        ids, rows = (
            torch.randint(0, 50, (30,), generator=random),
            torch.randn(30, 4, generator=random),
        )
        return {"rows": ids, "w": None}, {"rows": rows, "w": torch.randn(4096, generator=random)}

    store, again = store_of(2), store_of(shards)
    for table in tables:
        store.create(table, torch.ones(4096) if table.length else None)
        again.create(table)
    again.push(
        {"rows": torch.tensor([1000])}, {"rows": torch.ones(1, 4)}
    )  # not in the other: must be gone
    for _ in range(4):
        store.push(*step())
    for name in ("rows", "w"):
        again.restore(name, store.dump(name))
        for key, value in store.dump(name).items():
            assert torch.equal(again.dump(name)[key], value), key
    for _ in range(3):
        given = step()
        store.push(*given)
        again.push(*given)
    for name in ("rows", "w"):
        content = store.dump(name)
        assert {"values", "version"} <= content.keys() and ("ids" in content) == (name == "rows")
        for key, value in content.items():
            assert torch.equal(again.dump(name)[key], value), key


def test_a_dense_table_starts_from_given_state() -> None:
    store = store_of(2)
    state = {"momentum_buffer": torch.full((3000,), 2.0)}
    store.create(
        Table("w", length=3000, optimizer="momentum", options={"lr": 1.0, "momentum": 0.5}),
        torch.zeros(3000),
        state,
    )
    store.push({"w": None}, {"w": torch.ones(3000)})
    assert torch.equal(store.pull({"w": None})["w"], torch.full((3000,), -2.0))


def test_stats_count_what_happened_since_the_last_call() -> None:
    store = store_of(2)
    store.create(ROWS)
    store.push({"rows": torch.arange(10)}, {"rows": torch.ones(10, 3)})
    first, second = store.stats(), store.stats()
    assert (first["pushed_rows"], second["pushed_rows"]) == (10, 0)
    assert first["now/rows"] == second["now/rows"] == 10


def test_steps_are_claimed_up_to_a_limit_or_a_requested_sync() -> None:
    store = store_of()
    assert [store.claim_step(3, True) for _ in range(4)] == [0, 1, 2, None]
    store.request_sync()
    assert store.claim_step(20, True) is None
    assert store.claim_step(20, True) == 3


def test_a_second_store_of_a_rank_goes_on_where_the_first_was() -> None:
    """It numbers its pushes from 0 again: as another incarnation, or they would be duplicates."""
    shards, clock = [Shard()], Clock(1)
    for round in range(3):
        store = LocalStore(0, 1, shards, clock)
        store.create(Table("w", length=2, optimizer="sum"))
        store.push({"w": None}, {"w": torch.ones(2)}, pending=round == 1)
        store.tick(0)
        assert store.pull({"w": None})["w"].tolist() == [round + 1] * 2
        store.close()


# -- several ranks --


def test_staleness_0_with_held_pushes_applies_the_weighted_mean() -> None:
    def main(store: LocalStore) -> Tensor:
        store.create(
            Table("w", length=3000, dtype="float64", optimizer="sum"),
            torch.zeros(3000, dtype=torch.float64),
        )
        for step in range(5):
            g = torch.full((3000,), float(store.rank + step), dtype=torch.float64)
            store.push({"w": None}, {"w": g}, pending=True, weight=1.0 + store.rank)
            assert store.tick(0) == Tick(step + 1)
            store.pull({"w": None})
        return store.pull({"w": None})["w"]

    mean = [sum((1 + r) * (r + step) for r in range(4)) / 10 for step in range(5)]
    for got in together(4, main):
        assert isinstance(got, Tensor)
        torch.testing.assert_close(
            got, torch.full((3000,), sum(mean), dtype=torch.float64), rtol=1e-14, atol=0
        )


def test_held_training_is_a_function_of_its_inputs_however_threads_interleave() -> None:
    def main(store: LocalStore) -> list[Tensor]:
        store.create(ROWS)
        store.create(
            Table("w", length=2000, optimizer="momentum", options={"lr": 0.1}), torch.ones(2000)
        )
        random = torch.Generator().manual_seed(store.rank)
        for _ in range(10):
            ids = torch.randint(0, 30, (12,), generator=random)
            store.pull({"rows": ids, "w": None})
            updates = {
                "rows": torch.randn(12, 3, generator=random),
                "w": torch.randn(2000, generator=random),
            }
            store.push(
                {"rows": ids, "w": None}, updates, pending=True, weight=float(store.rank + 1)
            )
            store.tick(0)
        store.tick(0)
        return [store.dump("rows")["values"], store.dump("w")["values"]]

    runs = [result for shards in (1, 1, 3) for result in together(3, main, shards)]
    for result in runs:
        for got, wanted in zip(result, runs[0], strict=True):  # type: ignore[call-overload]
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("staleness", [0, 2, math.inf])
def test_threads_obey_the_bound(staleness: float) -> None:
    lock, done = threading.Lock(), [0] * 4

    def main(store: LocalStore) -> None:
        for _ in range(50):
            with lock:  # it runs: nobody is further behind than the bound
                assert done[store.rank] - min(done) <= staleness
                done[store.rank] += 1
            store.tick(staleness)

    together(4, main)
    assert done == [50] * 4


def test_reads_contain_what_the_bound_promises() -> None:
    """After its clock c a rank sees all updates of clocks up to c - s - 1, and its own."""

    def main(store: LocalStore) -> None:
        store.create(Table("w", length=3, dtype="float64", optimizer="sum"))
        for clock in range(30):
            seen = store.pull({"w": None})["w"]
            assert seen[store.rank] == clock and seen.min() >= clock - 2
            mine = torch.zeros(3, dtype=torch.float64)
            mine[store.rank] = 1
            store.push({"w": None}, {"w": mine})
            store.tick(2)

    together(3, main)


def test_rank_0_gives_the_values_and_the_others_wait_for_them() -> None:
    def main(store: LocalStore) -> list[float]:
        store.create(Table("w", length=3), torch.full((3,), float(store.rank + 7)))
        return store.pull({"w": None})["w"].tolist()

    assert together(3, main) == [[7, 7, 7]] * 3


def test_a_table_that_differs_between_ranks_is_refused() -> None:
    with pytest.raises(StoreError, match="is there with dim=2; given: dim=3"):
        together(2, lambda store: store.create(Table("rows", dim=2 + store.rank)))


def test_a_rank_that_waits_too_long_says_for_whom() -> None:
    store = LocalStore(1, 3, [Shard()], Clock(3), timeout_s=0.01)
    with pytest.raises(PeerLost, match="rank 0 to create table 'rows'"):
        store.create(ROWS)
    with pytest.raises(PeerLost, match=r"for workers \[0, 2\]"):
        store.tick(0)


def test_steps_are_shared_out_among_threads() -> None:
    def main(store: LocalStore) -> list[int]:
        found = []
        while (number := store.claim_step(300, True)) is not None:
            found.append(number)
            store.tick(3)
        return found

    dealt = together(4, main)
    assert sorted(n for some in dealt for n in some) == list(range(300))  # type: ignore


# -- bad input --


@pytest.fixture(scope="module", params=[1, 3])
def bad(request: pytest.FixtureRequest) -> LocalStore:
    store = store_of(request.param)
    store.create(ROWS)
    store.create(Table("w", length=4000), torch.zeros(4000))
    return store


IDS = torch.tensor([3, 4])


@pytest.mark.parametrize(
    ("rows", "updates", "says"),
    [
        (
            {"rows": IDS.int()},
            {"rows": torch.ones(2, 3)},
            r"'rows': ids are int32 of shape \(2,\) on cpu; int64 of one axis",
        ),
        ({"rows": IDS.double()}, {"rows": torch.ones(2, 3)}, "ids are float64"),
        ({"rows": IDS.view(1, 2)}, {"rows": torch.ones(2, 3)}, r"ids are int64 of shape \(1, 2\)"),
        ({"rows": [3, 4]}, {"rows": torch.ones(2, 3)}, "ids are list"),
        ({"rows": None}, {"rows": torch.ones(2, 3)}, "ids are NoneType"),
        (
            {"rows": IDS},
            {"rows": torch.ones(2, 4)},
            r"updates: float32 of shape \(2, 4\).*of shape \(2, 3\)",
        ),
        ({"rows": IDS}, {"rows": torch.ones(3, 3)}, r"updates: float32 of shape \(3, 3\)"),
        ({"rows": IDS}, {"rows": torch.ones(2, 3).double()}, r"updates: float64 of shape \(2, 3\)"),
        ({"rows": IDS}, {"rows": torch.ones(3, 2).t()}, "not contiguous"),
        ({"w": IDS}, {"w": torch.ones(4000)}, "'w' is dense"),
        (
            {"w": None},
            {"w": torch.ones(3999)},
            "4000 contiguous float32 numbers on the CPU are needed",
        ),
        (
            {"v": None},
            {"v": torch.ones(4)},
            "table 'v' is unknown; the store has 'rows', 'w'; create it first",
        ),
        (
            {"w": None},
            {"rows": torch.ones(2, 3)},
            r"rows name the tables \['w'\], but updates name \['rows'\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    bad: LocalStore, rows: object, updates: Tensors, says: str
) -> None:
    with pytest.raises(StoreError, match=says):
        bad.push(rows, updates)  # type: ignore[arg-type]
    assert not bad.pull({"w": None})["w"].any()


@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("number", [math.nan, -math.inf])
def test_what_is_not_finite_is_refused_and_no_shard_has_any_of_it(
    bad: LocalStore, pending: bool, number: float
) -> None:
    before = bad.dump("rows")
    g, w = torch.ones(200, 3), torch.ones(4000)
    g[150, 2] = number
    with pytest.raises(StoreError, match=r"table 'rows'.*ids 150"):
        bad.push({"rows": torch.arange(200), "w": None}, {"rows": g, "w": w}, pending=pending)
    w[3333] = number
    with pytest.raises(StoreError, match=r"table 'w'.*3333"):
        bad.push(
            {"rows": torch.arange(200), "w": None},
            {"rows": torch.ones(200, 3), "w": w},
            pending=pending,
        )
    bad.tick(0)
    assert not bad.pull({"w": None})["w"].any()
    after = bad.dump("rows")
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_tables_that_cannot_be_are_refused(bad: LocalStore) -> None:
    with pytest.raises(StoreError, match="optimizer 'adagrid' is unknown; known: "):
        bad.create(Table("x", optimizer="adagrid"))
    with pytest.raises(StoreError, match="has no option 'momentum'"):
        bad.create(Table("x", options={"momentum": 0.9}))
    with pytest.raises(StoreError, match="may not import the module 'mod'"):
        bad.create(Table("x", optimizer="mod:Rule"))
    with pytest.raises(StoreError, match=r"'x': values: float32 of shape \(5,\).*6 contiguous"):
        bad.create(Table("x", length=6), torch.zeros(5))
    with pytest.raises(StoreError, match="'x' is sparse, so its rows are made on first touch"):
        bad.create(Table("x"), torch.zeros(5))
    with pytest.raises(StoreError, match="is there with dim=3; given: dim=4"):
        bad.create(Table("rows", dim=4, optimizer="adagrad", options={"lr": 0.1}, seed=1))
    with pytest.raises(StoreError, match="table 'x' is unknown"):
        bad.pull({"x": None})
    with pytest.raises(StoreError, match=r"the tensor to pull into: float32 of shape \(3,\)"):
        bad.pull({"w": None}, {"w": torch.empty(3)})
    with pytest.raises(StoreError, match=r"ids of a sparse table; given: \['values'\]"):
        bad.restore("rows", {"values": torch.zeros(1, 3)})


def test_ranks_share_tables_only_where_they_are_given_the_same() -> None:
    with pytest.raises(StoreError, match="a store of 2 ranks needs shards and a clock"):
        LocalStore(1, 2)
    with pytest.raises(StoreError, match="a store of 2 ranks was given a clock of 3"):
        LocalStore(1, 2, [Shard()], Clock(3))
