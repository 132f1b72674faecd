"""The Store protocol without servers: one rank, several that are threads, one shard or several."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from manyhands.core import (
    Table,
    Tensors,
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
    shared, clock = [Shard(i) for i in range(shards)], Clock(size)
    results: dict[int, object] = {}
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            results[rank] = main(LocalStore(rank, size, shared, clock, timeout_s=timeout_s))
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
        shared, clock = [Shard(i) for i in range(shards)], Clock(2)
        stores = [LocalStore(rank, 2, shared, clock) for rank in range(2)]
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
    kind = "momentum" if "momentum" in options else "sgd"
    store.create(
        Table("w", length=5000, dtype=n, optimizer=kind, options={"lr": 0.05, **served}),
        w.detach().clone(),
    )  # type: ignore[arg-type]
    for step in range(5):
        optimizer.param_groups[0]["lr"] = 0.05 / (1 + step)
        w.grad = torch.randn(5000, dtype=dtype)
        optimizer.step()
        store.push({"w": None}, {"w": w.grad}, lr=0.05 / (1 + step)).wait()
        store.tick(0)
        assert torch.equal(store.pull({"w": None})["w"], w), "and it reads what it wrote"


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam", "lazy_adam", "ftrl"])
@pytest.mark.parametrize("pending", [False, True])
def test_the_number_of_shards_changes_nothing(optimizer: str, pending: bool) -> None:
    def train(shards: int) -> list[Tensor]:
        store, random = store_of(shards), torch.Generator().manual_seed(3)
        store.create(Table("rows", dim=4, optimizer=optimizer, options={"lr": 0.1}))
        store.create(
            Table("w", length=3000, optimizer=optimizer, options={"lr": 0.1}), torch.ones(3000)
        )
        for _ in range(6):
            ids = torch.randint(-20, 20, (7,), generator=random)
            updates = {
                "rows": torch.randn(7, 4, generator=random),
                "w": torch.randn(3000, generator=random),
            }
            store.push(
                {"rows": ids, "w": None}, updates, pending=pending, weight=2.0 if pending else None
            )
            store.tick(0)
        return [x for name in ("rows", "w") for x in store.dump(name).values()]

    expected = train(1)
    for shards in (2, 5):
        for got, wanted in zip(train(shards), expected, strict=True):
            assert torch.equal(got, wanted)


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


def test_training_with_pending_pushes_is_a_function_of_its_inputs_however_threads_interleave() -> (
    None
):
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


def test_a_rank_that_waits_too_long_says_for_whom() -> None:
    store = LocalStore(1, 3, [Shard()], Clock(3), timeout_s=0.01)
    with pytest.raises(PeerLost, match="rank 0 to create table 'rows'"):
        store.create(ROWS)
    with pytest.raises(PeerLost, match=r"for workers \[0, 2\]"):
        store.tick(0)


# -- bad input --


@pytest.fixture(scope="module", params=[1, 3])
def bad(request: pytest.FixtureRequest) -> LocalStore:
    store = store_of(request.param)
    store.create(ROWS)
    store.create(Table("w", length=4000), torch.zeros(4000))
    return store


def test_tables_that_cannot_be_are_refused(bad: LocalStore) -> None:
    with pytest.raises(StoreError, match="optimizer 'adagrid' is unknown; known: "):
        bad.create(Table("x", optimizer="adagrid"))
    with pytest.raises(StoreError, match="has no option 'momentum'"):
        bad.create(Table("x", options={"momentum": 0.9}))
    with pytest.raises(StoreError, match="may not import the module 'mod'"):
        bad.create(Table("x", optimizer="mod:Rule"))
    with pytest.raises(StoreError, match=r"'x': values: float32 of shape \(5,\).*6 contiguous"):
        bad.create(Table("x", length=6), torch.zeros(5))
    with pytest.raises(StoreError, match="'x' is sparse, so its rows are made by their first push"):
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
