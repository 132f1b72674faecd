"""The contract of Store and TableStore, checked on every store: one list of checks over one table.

local      one shard and three, ranks are threads        inproc    ranks of a World
server     one shard over TCP, 2 x 2 over shared memory  cached, observed    around local, server
namespaced around local, server
device     on the CPU and, marked gpu, on CUDA: the calls of `Store`, around a local store
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from manyhands.core import Rows, Store, Table, TableStore, Tensors, Tick
from manyhands.errors import NotFinite, StoreError
from manyhands.exchange.inproc import World
from manyhands.exchange.observed import ObservedGroup
from manyhands.exchange.solo import SoloGroup
from manyhands.server.client.cached_store import CachedStore
from manyhands.server.client.observed_store import ObservedStore
from manyhands.server.clock import Clock
from manyhands.server.device_store import DeviceStore
from manyhands.server.inproc_store import InprocStore
from manyhands.server.local_store import LocalStore
from manyhands.server.namespaces.namespaced_store import NamespacedStore
from manyhands.server.shard import Shard
from support.servers import joined, servers

# plain sgd with lr=1: what was pushed can be read off, and a cache makes these steps too
ROWS = Table("rows", dim=3, optimizer="sgd", options={"lr": 1.0}, init="zeros")
W = Table("w", length=6000, optimizer="sgd", options={"lr": 1.0})
IDS = torch.tensor([9, -1, 2**62, 0])
CPU = torch.device("cpu")


@dataclass
class Rank:
    """One rank of a check: `store` is what strategies use, `tables` what a run uses."""

    store: Store
    tables: TableStore
    device: torch.device = CPU
    cut: Callable[[], None] = lambda: None  # break the connections, where there are some

    @property
    def rank(self) -> int:
        return self.store.rank

    def create(self) -> None:
        self.tables.create(ROWS)
        self.tables.create(W, torch.zeros(6000))

    def push(self, rows: Rows, updates: Tensors, **options: Any) -> Any:
        return self.store.push(self._here(rows), self._here(updates), **options)

    def pull(self, rows: Rows) -> Tensors:
        return {k: v.cpu() for k, v in self.store.pull(self._here(rows)).items()}

    def _here(self, values: Any) -> Any:
        return {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in values.items()}


Main = Callable[[Rank], Any]
Wrap = Callable[[TableStore], TableStore]


def in_threads(size: int, body: Callable[[int], Any]) -> list[Any]:
    """Run `body` on ranks that are threads; raise what the first of them raises."""
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(r,)) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[r] for r in range(size)]


def bare(store: TableStore) -> TableStore:
    return store


def cached(store: TableStore) -> TableStore:
    return CachedStore(store, 100, age=1)


def namespaced(store: TableStore) -> TableStore:
    return NamespacedStore(store, "team-a")


def observed(store: TableStore) -> TableStore:
    return ObservedStore(store, ObservedGroup(SoloGroup(), lambda event: None))


@dataclass
class Local:
    shards: int = 1
    wrap: Wrap = bare
    device: str | None = None

    def run(self, size: int, main: Main) -> list[Any]:
        shards, clock = [Shard(i) for i in range(self.shards)], Clock(size)

        def body(rank: int) -> Any:
            tables = self.wrap(LocalStore(rank, size, shards, clock, timeout_s=20.0))
            try:
                if self.device is None:
                    return main(Rank(tables, tables))
                device = torch.device(self.device)
                return main(Rank(DeviceStore(tables, device), tables, device))
            except BaseException:
                clock.evict(rank)
                raise

        return in_threads(size, body)


@dataclass
class Inproc:
    shards: int = 2

    def run(self, size: int, main: Main) -> list[Any]:
        world, shards, clock = World(size), [Shard(i) for i in range(self.shards)], Clock(size)

        def body(rank: int) -> Any:
            store = InprocStore(world, rank, shards, clock)
            return main(Rank(store, store))

        return world.run(lambda group: body(group.rank))


@dataclass
class Servers:
    count: int = 1
    shards: int = 1
    words: dict[str, Any] = field(default_factory=dict)
    wrap: Wrap = bare

    def run(self, size: int, main: Main) -> list[Any]:
        with ExitStack() as stack:
            started = stack.enter_context(servers(self.count, self.shards, workers=size))

            def body(rank: int) -> Any:
                with joined(started[0], rank, size, **self.words) as store:

                    def cut() -> None:
                        for connection in store._sender.connections:
                            connection._channel.stop()  # type: ignore[union-attr]

                    tables = self.wrap(store)
                    found = main(Rank(tables, tables, cut=cut))
                    tables.close()
                    return found

            return in_threads(size, body)


STORES: dict[str, Local | Inproc | Servers] = {
    "local": Local(),
    "local-3": Local(3),
    "inproc": Inproc(),
    "server": Servers(words={"transport": "tcp"}),
    "server-4": Servers(2, 2, {"transport": "shared"}),
    "cached-local": Local(wrap=cached),
    "cached-server": Servers(1, 2, wrap=cached),
    "observed-local": Local(2, wrap=observed),
    "observed-server": Servers(wrap=observed),
    "namespaced-local": Local(2, wrap=namespaced),
    "namespaced-server": Servers(1, 2, {"namespace": "team-a"}, wrap=namespaced),
    "device": Local(2, device="cpu"),
    "device-cuda": Local(2, device="cuda"),
}


def store_cases() -> list[Any]:
    marks = {"device-cuda": (pytest.mark.gpu,)}
    return [pytest.param(s, id=name, marks=marks.get(name, ())) for name, s in STORES.items()]


every_store = pytest.mark.parametrize("case", store_cases())
Case = Local | Inproc | Servers


def ones(n: int, dim: int = 3) -> Tensor:
    return torch.ones(n, dim)


@every_store
def test_it_has_every_call_of_the_protocol(case: Case) -> None:
    def main(me: Rank) -> None:
        assert isinstance(me.store, Store) and isinstance(me.tables, TableStore)
        assert (me.store.rank, me.store.size) == (me.tables.rank, me.tables.size) == (0, 1)

    case.run(1, main)


# -- rows --


@every_store
def test_a_pull_sees_what_this_rank_pushed_before_it(case: Case) -> None:
    def main(me: Rank) -> None:
        me.create()
        for step in range(1, 6):
            me.push({"rows": IDS, "w": None}, {"rows": ones(4), "w": torch.ones(6000)})
            found = me.pull({"rows": IDS, "w": None})
            assert found["rows"].eq(-step).all() and found["w"].eq(-step).all()

    case.run(1, main)


@every_store
def test_a_push_is_applied_exactly_once(case: Case) -> None:
    """Also over a connection that breaks while pushes are under way, where there is one."""

    def main(me: Rank) -> None:
        me.create()
        for step in range(40):
            me.push({"rows": IDS, "w": None}, {"rows": ones(4), "w": torch.ones(6000)})
            if step % 10 == 5:
                me.cut()
        me.store.flush()
        assert me.pull({"rows": IDS})["rows"].eq(-40).all()
        for name in ("rows", "w"):
            content = me.tables.dump(name)
            assert content["values"].eq(-40).all() and int(content["version"][0]) == 40

    case.run(1, main)


@every_store
def test_repeated_ids_are_summed_before_the_optimizer_sees_them(case: Case) -> None:
    one, two = (
        Table(name, dim=3, optimizer="adagrad", options={"lr": 0.1}, init="zeros")
        for name in ("one", "two")
    )

    def main(me: Rank) -> None:
        me.tables.create(one)
        me.tables.create(two)
        me.push({"one": torch.tensor([4, 4])}, {"one": torch.tensor([[1.0, 2, 3], [3, 2, 1]])})
        me.push({"two": torch.tensor([4])}, {"two": torch.full((1, 3), 4.0)})
        found = me.pull({"one": torch.tensor([4, 4]), "two": torch.tensor([4])})
        assert torch.equal(found["one"], found["two"].expand(2, 3)) and found["two"].all()

    case.run(1, main)


@every_store
def test_a_pull_writes_into_given_tensors(case: Case) -> None:
    rows = Table("rows", dim=3)
    ids = torch.tensor([9, -1, 9, 2**62, 0])

    def main(me: Rank) -> None:
        me.tables.create(rows)
        me.tables.create(W, torch.arange(6000.0))
        into = {
            "rows": torch.empty(5, 3, device=me.device),
            "w": torch.empty(60, 100, device=me.device),
        }
        found = me.store.pull({"rows": ids, "w": None}, into)
        assert found["rows"].data_ptr() == into["rows"].data_ptr()
        assert torch.equal(into["w"].view(-1).cpu(), torch.arange(6000.0))
        fresh = me.pull({"rows": ids})["rows"]
        assert torch.equal(fresh, into["rows"].cpu()) and torch.equal(fresh[0], fresh[2])
        assert not torch.equal(fresh[0], fresh[1]) and 0 < fresh.abs().max() <= 0.01
        assert me.pull({"rows": torch.empty(0, dtype=torch.int64)})["rows"].shape == (0, 3)

    case.run(1, main)


@every_store
def test_a_push_leaves_the_given_tensors_as_they_were(case: Case) -> None:
    def main(me: Rank) -> None:
        me.create()
        ids, g, d = torch.tensor([5, 5, 6]), ones(3), torch.ones(6000)
        me.store.pull({"w": None}, remember=True)
        for options in ({}, {"compensate": 1.0}, {"pending": True}):
            me.push({"w": None}, {"w": d}, **options).wait()
        me.push({"rows": ids}, {"rows": g}).wait()
        assert g.eq(1).all() and d.eq(1).all() and ids.tolist() == [5, 5, 6]

    case.run(1, main)


@every_store
def test_an_exchange_is_a_push_and_then_a_pull(case: Case) -> None:
    def main(me: Rank) -> None:
        me.create()
        ids, more = torch.tensor([5, 7, 5]), torch.tensor([7, 9])
        reply = me.tables.exchange({"rows": ids}, {"rows": ones(3)}, wants={"rows": more})
        assert reply.result()["rows"].tolist() == [[-1] * 3, [0] * 3]
        reply = me.tables.exchange({"rows": ids}, {"rows": ones(3)}, wants={"rows": ids}, lr=0.5)
        assert reply.result()["rows"].tolist() == [[-3] * 3, [-1.5] * 3, [-3] * 3]
        assert reply.result() is reply.result()

    case.run(1, main)


@every_store
def test_a_pull_in_the_background_sees_the_pushes_before_it_and_no_later_ones(case: Case) -> None:
    def main(me: Rank) -> None:
        me.create()
        replies = []
        for _ in range(3):
            me.tables.push({"w": None}, {"w": torch.ones(6000)})
            replies.append(me.tables.pull_async({"w": None}))
        for step, reply in enumerate(replies, 1):
            assert reply.result()["w"].eq(-step).all()

    case.run(1, main)


@every_store
def test_flushed_pushes_are_seen_by_every_rank(case: Case) -> None:
    def main(me: Rank) -> None:
        me.create()
        if me.rank == 0:
            me.push({"rows": IDS, "w": None}, {"rows": ones(4), "w": torch.ones(6000)})
            me.store.flush()
        me.store.tick(0)
        found = me.pull({"rows": IDS, "w": None})
        assert found["rows"].eq(-1).all() and found["w"].eq(-1).all()

    case.run(2, main)


# -- clocks and steps --


@every_store
def test_pending_pushes_are_committed_together_as_their_weighted_mean(case: Case) -> None:
    table = Table("w", length=3000, dtype="float64", optimizer="sum")

    def main(me: Rank) -> Tensor:
        me.tables.create(table, torch.zeros(3000, dtype=torch.float64))
        for step in range(4):
            before = me.pull({"w": None})["w"]
            g = torch.full((3000,), float(me.rank + step), dtype=torch.float64)
            me.push({"w": None}, {"w": g}, pending=True, weight=1.0 + 3.0 * me.rank).wait()
            assert torch.equal(me.pull({"w": None})["w"], before), "nothing yet"
            assert me.store.tick(0) == Tick(step + 1)
            me.store.flush()
        return me.pull({"w": None})["w"]

    mean = sum((step + 4.0 * (1 + step)) / 5 for step in range(4))
    one, two = case.run(2, main)
    assert torch.equal(one, two)
    torch.testing.assert_close(
        one, torch.full((3000,), mean, dtype=torch.float64), rtol=1e-14, atol=0
    )


@every_store
@pytest.mark.parametrize("staleness", [0, 2])
def test_no_rank_gets_further_ahead_than_the_staleness(case: Case, staleness: int) -> None:
    """After its clock c a rank sees all updates of clocks up to c - s - 1, and its own."""
    table = Table("v", length=3, dtype="float64", optimizer="sum")

    def main(me: Rank) -> None:
        me.tables.create(table)
        for clock in range(12):
            seen = me.pull({"v": None})["v"]
            assert seen[me.rank] == clock and seen.min() >= clock - staleness
            mine = torch.zeros(3, dtype=torch.float64)
            mine[me.rank] = 1
            me.push({"v": None}, {"v": mine})
            assert me.store.tick(staleness) == Tick(clock + 1)

    case.run(3, main)


@every_store
def test_steps_are_claimed_up_to_a_limit_or_a_requested_sync(case: Case) -> None:
    def main(me: Rank) -> None:
        claim = me.tables.claim_step
        assert [claim(3, True) for _ in range(4)] == [0, 1, 2, None]
        me.tables.request_sync()
        assert (claim(20, True), claim(20, True)) == (None, 3)

    case.run(1, main)


@every_store
@pytest.mark.parametrize("shared", [True, False])
def test_a_step_is_claimed_once_from_a_shared_counter_and_by_all_from_their_own(
    case: Case, shared: bool
) -> None:
    def main(me: Rank) -> list[int]:
        mine = []
        while (step := me.tables.claim_step(20, shared)) is not None:
            mine.append(step)
            me.store.tick(3)
        return mine

    claimed = case.run(3, main)
    if shared:
        assert sorted(step for mine in claimed for step in mine) == list(range(20))
    else:
        assert claimed == [list(range(20))] * 3


# -- whole tables --


@every_store
def test_dense_tables_start_from_the_values_and_state_of_rank_0(case: Case) -> None:
    table = Table("m", length=3000, optimizer="momentum", options={"lr": 1.0, "momentum": 0.5})

    def main(me: Rank) -> Tensor:
        buffer = {"momentum_buffer": torch.full((3000,), 2.0 + me.rank)}
        me.tables.create(table, torch.full((3000,), float(me.rank)), buffer)
        me.store.tick(0)
        if me.rank == 0:
            me.push({"m": None}, {"m": torch.ones(3000)}).wait()
        me.store.tick(0)
        return me.pull({"m": None})["m"]

    for found in case.run(2, main):
        assert found.eq(-2).all()


@every_store
def test_a_table_that_differs_between_ranks_is_refused(case: Case) -> None:
    def main(me: Rank) -> None:
        me.tables.create(Table("rows", dim=2 + me.rank))

    with pytest.raises(StoreError, match="is there with dim=2; given: dim=3"):
        case.run(2, main)


@every_store
@pytest.mark.parametrize(
    "optimizer", ["sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "lazy_adam"]
)
def test_a_restored_table_goes_on_to_the_bit(case: Case, optimizer: str) -> None:
    tables = [
        Table("rows", dim=4, optimizer=optimizer, options={"lr": 0.1}),
        Table("w", dim=4, length=4096, optimizer=optimizer, options={"lr": 0.1}),
    ]

    def step(random: torch.Generator) -> tuple[Rows, Tensors]:
        ids = torch.randint(0, 50, (30,), generator=random)
        rows, w = torch.randn(30, 4, generator=random), torch.randn(4096, generator=random)
        return {"rows": ids, "w": None}, {"rows": rows, "w": w}

    def main(me: Rank) -> None:
        random = torch.Generator().manual_seed(4)
        other = LocalStore(0, 1, [Shard(0), Shard(1)], Clock(1))
        for store in (me.tables, other):
            for table in tables:
                store.create(table, torch.ones(4096) if table.length else None)
        # not in the other store: the restore must remove it
        me.push({"rows": torch.tensor([1000])}, {"rows": torch.ones(1, 4)})
        for _ in range(4):
            other.push(*step(random))
        for again in (True, False):
            for name in ("rows", "w"):
                expected = other.dump(name)
                if again:
                    me.tables.restore(name, expected)
                found = me.tables.dump(name)
                assert found.keys() == expected.keys() >= {"values", "version"}
                assert ("ids" in found) == (name == "rows")
                assert all(torch.equal(found[key], expected[key]) for key in expected)
            for _ in range(3 * again):
                given = step(random)
                me.push(*given)
                other.push(*given)

    case.run(1, main)


@every_store
def test_stats_count_since_the_last_call(case: Case) -> None:
    def main(me: Rank) -> None:
        me.create()
        me.push({"rows": torch.arange(10)}, {"rows": ones(10)}).wait()
        first, second = me.tables.stats(), me.tables.stats()
        assert (first["pushed_rows"], second["pushed_rows"]) == (10, 0)
        assert first["now/rows"] == second["now/rows"] == 10

    case.run(1, main)


# -- refusals --

PAIR = torch.tensor([3, 4])
BAD_PUSHES: list[tuple[Any, Tensors, str]] = [
    ({"rows": PAIR.int()}, {"rows": ones(2)}, r"'rows': ids are int32 of shape \(2,\) on cpu; int"),
    ({"rows": PAIR.double()}, {"rows": ones(2)}, "ids are float64"),
    ({"rows": PAIR.view(1, 2)}, {"rows": ones(2)}, r"int64 of shape \(1, 2\).*int64 of one axis"),
    ({"rows": [3, 4]}, {"rows": ones(2)}, "ids are list"),
    ({"rows": None}, {"rows": ones(2)}, "ids are NoneType"),
    ({"rows": PAIR}, {"rows": ones(2, 4)}, r"updates: float32 of shape \(2, 4\).*shape \(2, 3\)"),
    ({"rows": PAIR}, {"rows": ones(3)}, r"updates: float32 of shape \(3, 3\)"),
    ({"rows": PAIR}, {"rows": ones(2).double()}, r"updates: float64 of shape \(2, 3\)"),
    ({"rows": PAIR}, {"rows": ones(3, 2).t()}, "not contiguous"),
    ({"w": PAIR}, {"w": torch.ones(6000)}, "'w' is dense"),
    ({"w": None}, {"w": torch.ones(5999)}, "6000 contiguous float32 numbers on the CPU"),
    ({"v": None}, {"v": torch.ones(4)}, "'v' is unknown; the store has 'rows', 'w'; create it"),
    ({"w": None}, {"rows": ones(2)}, r"rows name the tables \['w'\], but updates name \['rows'\]"),
]
BAD_PULLS: list[tuple[Rows, str]] = [
    ({"rows": PAIR.int()}, "int64"),
    ({"rows": PAIR.view(1, 2)}, "int64 of one axis"),
    ({"rows": None}, "ids are"),
    ({"w": PAIR}, "is dense"),
    ({"v": PAIR}, "'v' is unknown"),
]


@every_store
def test_bad_arguments_are_refused_and_change_nothing(case: Case) -> None:
    def main(me: Rank) -> None:
        me.create()
        me.push({"rows": PAIR}, {"rows": ones(2)})
        for rows, updates, says in BAD_PUSHES:
            with pytest.raises(StoreError, match=says) as refused:
                me.push(rows, updates)
            assert not isinstance(refused.value, NotFinite)
        for rows, says in BAD_PULLS:
            with pytest.raises(StoreError, match=says):
                me.pull(rows)
        found = me.pull({"rows": PAIR, "w": None})
        assert found["rows"].eq(-1).all() and not found["w"].any()
        with pytest.raises(StoreError, match=r"'w'.*\(3,\)"):
            me.tables.pull({"w": None}, {"w": torch.empty(3)})
        with pytest.raises(StoreError, match="rows are made by their first push"):
            me.tables.create(Table("x"), torch.zeros(5))
        with pytest.raises(StoreError, match=r"'x': values: float32 of shape \(5,\)"):
            me.tables.create(Table("x", length=6), torch.zeros(5))
        with pytest.raises(StoreError, match=r"ids of a sparse table; given: \['values'\]"):
            me.tables.restore("rows", {"values": torch.zeros(1, 3)})
        with pytest.raises(StoreError, match="'x' is unknown"):
            me.tables.dump("x")

    case.run(1, main)


@every_store
@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("number", [math.nan, -math.inf])
def test_updates_that_are_not_finite_are_refused_and_change_nothing(
    case: Case, pending: bool, number: float
) -> None:
    def main(me: Rank) -> None:
        me.create()
        ids, g, w = torch.arange(200), ones(200), torch.ones(6000)
        me.push({"rows": ids}, {"rows": g}).wait()
        before = me.tables.dump("rows")
        g[150, 2] = number
        with pytest.raises(NotFinite, match=r"table 'rows'.*not finite.*150"):
            me.push({"rows": ids, "w": None}, {"rows": g, "w": w}, pending=pending).wait()
        w[3333] = number
        with pytest.raises(NotFinite, match=r"table 'w'.*3333"):
            me.push({"rows": ids, "w": None}, {"rows": ones(200), "w": w}, pending=pending).wait()
        me.store.tick(0)
        me.store.flush()
        assert not me.pull({"w": None})["w"].any()
        after = me.tables.dump("rows")
        assert all(torch.equal(after[key], before[key]) for key in before)

    case.run(1, main)
