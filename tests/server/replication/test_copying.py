"""Copies of shards: made while pushes go on, they have the same bits, and go on with the same."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from manyhands.core import Store, Table
from manyhands.errors import StoreError
from manyhands.server.client.server_store import ServerStore
from manyhands.server.local_store import LocalStore
from manyhands.server.process import Server
from manyhands.server.protocol import arrays
from manyhands.server.protocol import messages as m
from manyhands.server.protocol import replication_messages as r
from manyhands.server.replication import copying, follower
from manyhands.server.replication.copied_state import give_state
from manyhands.server.shard import Shard
from manyhands.server.snapshots import row_pieces
from manyhands.server.table_updates import TableUpdate
from manyhands.server.tables.row_storage import INDEX_BYTES
from support.failover import settled
from support.servers import TOKEN, joined

Script = Iterator[Callable[[Any], object]]  # each step is done to both stores

LR = {"lr": 0.1}
SPARSE = [
    *(
        Table(name, dim=4, optimizer=name, options=LR, seed=i)
        for i, name in enumerate(
            ("sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "adamw", "lazy_adam", "ftrl")
        )
    ),
    Table("sums", dim=2, optimizer="sum", init="zeros"),
    Table("doubles", dim=3, dtype="float64", optimizer="adagrad", options=LR, init="normal"),
    Table("late", dim=4, optimizer="adagrad", options=LR, admit_after=3),
    Table("chosen", dim=4, options=LR, admit_after=2, admit_share=0.5),
    Table("short", dim=4, optimizer="momentum", options=LR, expire_after=8),
    Table("rare", dim=4, optimizer="adam", options=LR, expire_after=8, expire_count=2),
    Table("own", dim=4, optimizer="rules_of_this_test:Counting", options=LR),
]
DENSE = [
    Table("vector", length=3000, optimizer="adam", options=LR),
    Table("slow", length=2500, optimizer="momentum", options=LR),
]
SOON = Table("soon", dim=4, optimizer="adam", options=LR)  # created while copies are made


class Counting:
    """A rule of one's own: w -= lr g / pushes of the row"""

    state = {"pushes": "row", "last": "full"}  # noqa: RUF012

    def update(self, w: np.ndarray, g: np.ndarray, state: dict[str, np.ndarray], lr: float) -> None:
        state["pushes"] += 1
        state["last"][:] = g
        w -= lr * g / state["pushes"]


@pytest.fixture(autouse=True)
def rules(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("rules_of_this_test")
    module.Counting = Counting  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


# -- servers --


@dataclass
class Fleet:
    """Two shards on two servers; then each is replaced, so that copies of copies serve."""

    root: Server
    servers: list[Server]
    spawn: Callable[[], Server]
    losses: int = 0

    def replace(self, at: int) -> None:
        """Kill a server, and copy what the other one has to a new one."""
        self.servers[at].crash()
        self.losses += 1
        self.servers[at] = self.spawn()
        settled(self.root, self.losses)


@contextmanager
def fleet() -> Iterator[Fleet]:
    modules = ["rules_of_this_test"]
    started: list[Server] = []
    root = Server(shards=0, token=TOKEN, servers=2, workers=1, replicas=2, modules=modules).start()

    def spawn() -> Server:
        started.append(Server(token=TOKEN, coordinator=root.address, modules=modules).start())
        return started[-1]

    try:
        yield Fleet(root, [spawn(), spawn()], spawn)
    finally:
        for server in (*started, root):
            server.close()


@contextmanager
def stores() -> Iterator[tuple[Fleet, ServerStore, LocalStore]]:
    with fleet() as found, joined(found.root, timeout_s=100.0) as store:
        modules = ["rules_of_this_test"]
        yield found, store, LocalStore(shards=[Shard(i, modules=modules) for i in range(2)])


def both(do: Callable[[Any], object], *all_stores: Store) -> None:
    for store in all_stores:
        do(store)


class Meanwhile:
    """Does the steps of a script while copies are made, one before each message of a copy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, script: Script, *all_stores: Store):
        self._script, self._stores, self._lock = script, all_stores, threading.Lock()
        self.steps, send = 0, copying.Copy._send

        def patched(copy: Any, message: Any, parts: Any) -> None:
            self.step(copy._replicator)
            send(copy, message, parts)

        monkeypatch.setattr(copying.Copy, "_send", patched)

    def step(self, replicator: Any) -> None:
        if not self._lock.acquire(blocking=False):
            return  # the copy of another shard does one
        try:
            # at the end of a copy nothing may change: a push would wait for it
            if replicator.order.acquire(blocking=False):
                replicator.order.release()
                if (do := next(self._script, None)) is not None:
                    self.steps += 1
                    both(do, *self._stores)
        finally:
            self._lock.release()


# -- what both stores do --


def create(store: Store) -> None:
    for table in SPARSE:
        store.create(table)
    for table in DENSE:
        assert table.length is not None
        store.create(table, torch.linspace(-1, 1, table.length))


def push(seed: int, names: list[str], **options: Any) -> Callable[[Store], None]:
    """Some ids often, some once; `lr` differs from push to push."""

    def do(store: Store) -> None:
        chance = torch.Generator().manual_seed(seed)
        rows: dict[str, Any] = {}
        updates = {}
        for table in (*SPARSE, *DENSE, SOON):
            if table.name not in names:
                continue
            dtype = getattr(torch, table.dtype)
            if table.length is not None:
                rows[table.name] = None
                updates[table.name] = torch.randn(table.length, generator=chance)
                continue
            few = torch.randint(0, 60, (40,), generator=chance)
            many = torch.randint(-(10**6), 10**6, (60,), generator=chance)
            rows[table.name] = torch.cat([few, many])
            updates[table.name] = torch.randn(100, table.dim, generator=chance).to(dtype)
        store.push(rows, updates, **options).wait()

    return do


def pushes(count: int, first: int, names: list[str]) -> Script:
    return (push(first + i, names, lr=0.01 * (i % 5 + 1)) for i in range(count))


NAMES = [table.name for table in (*SPARSE, *DENSE)]


def check(fleet: Fleet, store: ServerStore, local: LocalStore, names: list[str]) -> None:
    for name in names:
        here, there = local.dump(name), store.dump(name)
        assert here.keys() - {"marks"} == there.keys() - {"marks"}
        order = [x["ids"].argsort() if "ids" in x else slice(None) for x in (here, there)]
        for key in here.keys() - {"marks", "version"}:
            assert torch.equal(here[key][order[0]], there[key][order[1]]), (name, key)
        assert torch.equal(here["version"], there["version"]), name
    same_copies(fleet)


def same_copies(fleet: Fleet) -> None:
    """All that a server keeps of a shard, not only tables, is the same on both."""
    for one, other in zip(*(server.held.shards for server in fleet.servers), strict=True):
        states = [give_state(shard, 0) for shard in (one, other)]
        a, b = (message for message, _ in states)
        assert (a.committed, a.version) == (b.committed, b.version)
        assert a.tables == b.tables
        for x, y in zip(states[0][1], states[1][1], strict=True):
            assert np.array_equal(x, y)


# -- tests --


def test_copies_that_were_made_under_load_have_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_pieces, "ROWS", 64)  # many pieces, a push before each
    with stores() as (servers, store, local):
        both(create, store, local)
        for do in pushes(20, 0, NAMES):
            both(do, store, local)
        for at in (0, 1):
            script = Meanwhile(monkeypatch, pushes(60, 100 * (at + 1), NAMES), store, local)
            servers.replace(at)
            assert script.steps > 10
            monkeypatch.undo()
            rules_again(monkeypatch)
            for do in pushes(10, 1000 * (at + 1), NAMES):
                both(do, store, local)
            check(servers, store, local, NAMES)


def rules_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rules.__wrapped__(monkeypatch)  # type: ignore[attr-defined]
    monkeypatch.setattr(row_pieces, "ROWS", 64)


def test_tables_that_are_created_and_restored_during_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_pieces, "ROWS", 64)
    names = ["adam", "short", "late", "vector"]
    with stores() as (servers, store, local):
        both(create, store, local)
        for do in pushes(20, 0, names):
            both(do, store, local)
        kept = {name: local.dump(name) for name in ("adam", "short", "vector")}
        for content in kept.values():
            content.pop("marks", None)

        def script() -> Script:
            yield from pushes(3, 50, names)
            yield lambda s: s.create(SOON)
            yield from pushes(3, 60, [*names, "soon"])
            yield lambda s: s.restore("adam", kept["adam"])
            yield from pushes(2, 70, [*names, "soon"])
            yield lambda s: s.restore("short", kept["short"])
            yield lambda s: s.restore("vector", kept["vector"])
            yield from pushes(10, 80, [*names, "soon"])

        steps = Meanwhile(monkeypatch, script(), store, local)
        servers.replace(0)
        assert steps.steps > 12
        servers.replace(1)
        for do in steps._script:
            both(do, store, local)
        check(servers, store, local, [*names, "soon"])


def test_pending_pushes_and_what_workers_remember_survive_the_first_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ["sgd", "late", "vector", "slow"]
    with stores() as (servers, store, local):
        both(create, store, local)
        for clock in range(2):
            both(push(clock, names), store, local)
            both(lambda s: s.pull({"vector": None, "slow": None}, remember=True), store, local)
            both(push(30 + clock, names), store, local)
            both(push(40 + clock, names, pending=True, weight=2.0), store, local)
            both(push(45 + clock, names, pending=True, weight=2.0), store, local)
            servers.replace(clock)  # in the middle of the clock
            # what a worker has pulled is not told to followers: it pulls again, see docs
            both(lambda s: s.pull({"sgd": torch.arange(60)}), store, local)
            both(push(10 + clock, ["sgd"]), store, local)
            both(push(20 + clock, ["sgd"]), store, local)
            both(push(50 + clock, ["sgd"], adapt=True), store, local)
            both(push(60 + clock, ["vector", "slow"], compensate=0.5), store, local)
            decay = {"compensate": 0.5, "decay": 0.9}
            both(push(70 + clock, ["vector", "slow"], **decay), store, local)
            both(lambda s: s.tick(0), store, local)
            check(servers, store, local, names)


def test_a_refused_commit_leaves_out_the_push_behind_it_on_every_copy() -> None:
    """As on the first server: there the refusal ends the request."""
    ones = [Shard(0), Shard(0)]
    for shard in ones:
        shard.create(Table("w", length=2, optimizer="sum"))
    push_message = m.PushMessage(pending=True, clock=0)
    huge = np.full(2, 3e38, np.float32)
    for worker in (0, 1):
        for shard in ones:
            shard.push(worker, 0, 0, [TableUpdate("w", None, huge.copy())], push_message)
    commits = [(1, [(0, 0), (1, 0)])]
    update = np.ones(2, np.float32)
    with pytest.raises(StoreError):
        for version, members in commits:
            ones[0].commit(version, members)
        ones[0].push(0, 0, 1, [TableUpdate("w", None, update.copy())], m.PushMessage())
    request = m.TableRequest("w", 2, m.DENSE)
    change = r.Forward(1, 0, 0, 1, [request], m.PushMessage(), commits, {}, [])
    memory = np.zeros(64, np.uint8)
    memory[:8] = update.view(np.uint8)
    follower.apply_push(ones[1], change, memory)
    a, b = (shard.dump("w") for shard in ones)
    assert all(np.array_equal(a[key], b[key]) for key in a)


def test_a_full_table_whose_rows_expire_is_copied_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner has as little room: rows that were erased meanwhile must go first."""
    monkeypatch.setattr(row_pieces, "ROWS", 8)
    table = Table("t", dim=4, options=LR, expire_after=8)
    most = 36 * (table.dim * 4 + INDEX_BYTES)  # what eight pushes and a half make
    shard, copy = (Shard(0, memory_bytes=most, warn=lambda _: None) for _ in range(2))
    shard.create(table)
    refused: list[StoreError] = []

    class Wire:
        sent_bytes = 0

    goes_on = True

    def send(_: Any, message: Any, parts: Any) -> None:
        if goes_on:
            push_some()
        try:
            follower.change_table(copy, message, arrays.joined(parts))
        except StoreError as e:
            refused.append(e)

    at = iter(range(10**6))

    def push_some() -> None:
        n = next(at)
        ids = np.arange(n * 4, n * 4 + 4, dtype=np.int64)
        grads = np.ones((4, 4), np.float32)
        shard.push(0, 0, n, [TableUpdate("t", ids, grads)], m.PushMessage())

    for _ in range(30):
        push_some()
    monkeypatch.setattr(copying.Copy, "_send", send)
    monkeypatch.setattr(copying.Copy, "_answered", lambda self: None)
    wire: Any = Wire()
    wire.send = lambda *_: None
    replicator: Any = None
    copied = copying.Copy(shard, replicator, 1, wire, 1, lambda *_: None)
    seen = copied._send_rows({})
    for _ in range(5):
        seen = copied._send_rows(seen)
    goes_on = False
    copied._send_rows(seen, last=True)
    assert not refused, refused[0]
    a, b = (x.dump("t") for x in (shard, copy))
    rows = [dict(zip(x["ids"].tolist(), x["values"].tolist(), strict=True)) for x in (a, b)]
    assert rows[0] == rows[1] and len(rows[0]) > 10
