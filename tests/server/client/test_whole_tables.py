"""Whole tables through connections: dumps above the frame limit, and snapshots of servers."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from manyhands.core import Table, Tensors
from manyhands.errors import ServerLost, StoreError
from manyhands.server.client import whole_tables
from manyhands.server.client.server_store import ServerStore
from manyhands.server.local_store import LocalStore
from manyhands.server.protocol import frame
from manyhands.server.shard import Shard
from manyhands.server.snapshots.table_reader import TableReader
from support.servers import USERS, WEIGHTS, create, joined, servers

WIDE = Table("wide", dim=64, optimizer="adam", options={"lr": 0.1})
BIG = Table("big", length=400_000, optimizer="adam", options={"lr": 0.1})


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def push(store: ServerStore | LocalStore, seed: int, n: int = 3000, ids: int = 5000) -> None:
    g = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, ids, (n,), generator=g)
    store.push({"users": rows}, {"users": torch.randn(n, 8, generator=g)}).wait()


def test_a_table_above_the_frame_limit_is_dumped_and_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = LocalStore()
    with servers(shards=2) as (server,), joined(server, transport="tcp") as store:
        for each in (store, expected):
            each.create(WIDE)
            each.create(BIG, torch.arange(400_000.0))
            for i in range(6):
                ids = torch.arange(i * 1000, (i + 1) * 1000)
                each.push({"wide": ids}, {"wide": torch.ones(1000, 64) * i}).wait()
            each.push({"big": None}, {"big": torch.ones(400_000)}).wait()
        monkeypatch.setattr(frame, "PAYLOAD_BYTES", 1 << 20)
        for name in ("wide", "big"):
            content = store.dump(name)
            assert sum(x.nbytes for x in content.values()) > 4 << 20
            assert same(content, expected.dump(name))
        store.push({"wide": torch.arange(500)}, {"wide": torch.ones(500, 64)}).wait()
        for name in ("wide", "big"):
            store.restore(name, expected.dump(name))
            assert same(store.dump(name), expected.dump(name))
        # a dump in one frame is what the limit does not allow
        monkeypatch.setattr(whole_tables, "_frame_bytes", lambda: 1 << 30)
        store.timeout_s = 0.5
        for connection in store._sender.connections:
            connection.timeout_s = 0.5
        with pytest.raises((ServerLost, StoreError)):
            store.dump("wide")


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2)])
def test_a_snapshot_of_servers_is_restored_into_another_number(
    tmp_path: Path, before: int, after: int
) -> None:
    """While another worker pushes; full and incremental."""
    layers: list[list[Path]] = []
    with (
        servers(before, workers=2) as (server, *_),
        joined(server, size=2) as store,
        joined(server, 1, 2) as other,
    ):
        create(store)
        create(other)
        base = ""
        for n in range(3):
            push(store, n)
            expected = store.dump("users")
            snapshot = store.snapshot(
                ["users", "weights"], tmp_path / str(n), f"cut-{n}", base, incremental=True
            )
            assert snapshot.base == base
            busy = threading.Thread(target=push, args=(other, 10 + n))
            busy.start()
            files = snapshot.finish()["users"]
            busy.join()
            snapshot.end(good=True)
            base = f"cut-{n}"
            assert len(files) == before
            layers.append([tmp_path / str(n) / f.name for f in files])
            other.flush()
            found = restored(layers, LocalStore(shards=[Shard() for _ in range(after)]))
            assert same(found, expected)
    with servers(after) as (server, *_), joined(server) as store:
        assert same(restored(layers, store), expected)


def restored(layers: list[list[Path]], store: ServerStore | LocalStore) -> Tensors:
    store.create(USERS)
    push(store, 99)  # rows that were there before are gone
    store.restore_pieces("users", TableReader(layers).contents())
    return store.dump("users")


def test_a_dense_table_of_a_snapshot_is_that_of_a_dump(tmp_path: Path) -> None:
    with servers(2) as (server, *_), joined(server) as store:
        create(store)
        store.push({"weights": None}, {"weights": torch.randn(5000)}).wait()
        expected = store.dump(WEIGHTS.name)
        snapshot = store.snapshot(["weights"], tmp_path, "cut-0")
        store.push({"weights": None}, {"weights": torch.randn(5000)}).wait()
        files = snapshot.finish()["weights"]
        snapshot.end(good=True)
        reader = TableReader([[tmp_path / f.name for f in files]])
        whole = {k: torch.from_numpy(np.ascontiguousarray(x)) for k, x in reader.whole().items()}
        assert same(whole, expected)
