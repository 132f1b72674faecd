"""Clients that come and go: deletions exactly once, tables that others made, dropped or remade."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator

import pytest
import torch

from manyhands.core import Table
from manyhands.errors import StoreError
from manyhands.server.client.guest_store import GuestStore
from manyhands.server.process import Server
from support.lost_answers import LosesAnswers
from support.servers import TOKEN, USERS, servers

IDS = torch.arange(-40, 60)


@pytest.fixture(params=[(1, 1), (2, 2)], ids=["one shard", "four shards"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    count, shards = request.param
    with servers(count, shards, workers=None, keep=True) as (first, *_):  # type: ignore[arg-type]
        yield first


def guest(server: Server, **words: object) -> GuestStore:
    return GuestStore(server.address, TOKEN, **{"timeout_s": 20.0, **words})  # type: ignore


@pytest.mark.parametrize("transport", ["tcp", "unix", "shared"])
def test_deleted_rows_are_gone_with_their_state_and_made_anew(
    server: Server, transport: str
) -> None:
    store = guest(server, transport=transport)
    store.create(USERS)
    fresh = store.pull({"users": IDS})["users"].clone()
    grads = torch.randn(IDS.numel(), 8)
    store.push({"users": IDS}, {"users": grads})
    once = store.pull({"users": IDS})["users"].clone()
    store.push({"users": IDS}, {"users": grads})
    assert store.delete("users", torch.cat([IDS[:30], IDS[:30], torch.tensor([10**12])])) == 30
    assert store.delete("users", IDS[:30]) == 0 and store.stored()[0].rows == 70
    assert torch.equal(store.pull({"users": IDS[:30]})["users"], fresh[:30])
    store.push({"users": IDS[:30]}, {"users": grads[:30]})
    assert torch.equal(store.pull({"users": IDS[:30]})["users"], once[:30]), "Adagrad forgot them"
    store.close()


def test_a_deletion_whose_answer_was_lost_is_done_once() -> None:
    """Sent again, it gets the answer of the first time."""
    with Server(token=TOKEN, keep=True) as server:
        proxy = LosesAnswers(server.port)
        try:
            store = guest(server, transport="tcp")
            store._sender.connections[0].where.port = proxy.port
            store.create(USERS)
            store.push({"users": IDS}, {"users": torch.ones(IDS.numel(), 8)}).wait()
            proxy.lose_next()
            assert store.delete("users", IDS[:10]) == 10
            assert proxy.lost == 1 and store.stored()[0].rows == IDS.numel() - 10
            proxy.lose_next()
            assert store.drop("users") and proxy.lost == 2 and store.stored() == []
            assert server.shards[0].stats()["duplicates"] == 2
            store.close()
        finally:
            proxy.close()


def test_a_push_before_a_deletion_comes_before_it(server: Server) -> None:
    store = guest(server)
    store.create(USERS)
    for _ in range(20):
        store.push({"users": IDS}, {"users": torch.ones(IDS.numel(), 8)})
        assert store.delete("users", IDS) == IDS.numel()
    store.close()


def test_rows_are_deleted_where_the_slot_map_has_moved_them() -> None:
    with servers(2, workers=None, keep=True) as (first, _):  # type: ignore[arg-type]
        store = guest(first)
        store.create(USERS)
        store.push({"users": IDS}, {"users": torch.ones(IDS.numel(), 8)}).wait()
        assert first.coordinator is not None and first.coordinator.slots is not None
        old = first.coordinator.slots
        first.coordinator.registry.assign(dataclasses.replace(old, epoch=old.epoch + 1))
        assert store.delete("users", IDS) == IDS.numel()
        store.close()


def test_a_client_uses_tables_that_another_has_made(server: Server) -> None:
    one, two = guest(server), guest(server)
    one.create(USERS)
    one.create(Table("w", length=9000, optimizer="sum"), torch.arange(9000.0))
    one.push({"users": IDS}, {"users": torch.ones(IDS.numel(), 8)}).wait()
    one.close()
    assert {p.table.name: p.rows for p in two.stored()} == {"users": 100, "w": 9000}
    assert torch.equal(two.pull({"w": None})["w"], torch.arange(9000.0))
    assert two.pull({"users": IDS})["users"].shape == (100, 8)
    two.close()


def test_one_of_those_who_create_a_table_at_once_gives_its_values(server: Server) -> None:
    stores = [guest(server) for _ in range(4)]
    for number in range(10):
        table = Table(f"w{number}", length=50_000, optimizer="sum")
        threads = [
            threading.Thread(target=s.create, args=(table, torch.full((50_000,), float(i))))
            for i, s in enumerate(stores)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = stores[0].pull({table.name: None})[table.name]
        assert torch.equal(found, torch.full((50_000,), found[0].item()))
    for store in stores:
        store.close()


@pytest.mark.parametrize("transport", ["tcp", "shared"])
def test_a_table_that_was_remade_is_not_read_with_its_old_shape(
    server: Server, transport: str
) -> None:
    one, two = guest(server, transport=transport), guest(server, transport=transport)
    one.create(USERS)
    two.stored()
    two.push({"users": IDS}, {"users": torch.ones(IDS.numel(), 8)}).wait()
    one.drop("users")
    with pytest.raises(StoreError, match="table 'users' is unknown"):
        two.pull({"users": IDS})
    one.create(dataclasses.replace(USERS, dim=4))
    with pytest.raises(StoreError, match="was dropped and made anew, with dim=4"):
        two.pull({"users": IDS})
    with pytest.raises(StoreError, match="was dropped and made anew, with dim=4"):
        two.push({"users": IDS}, {"users": torch.ones(IDS.numel(), 8)}).wait()
    two.stored()
    assert two.pull({"users": IDS})["users"].shape == (100, 4)
    assert one.pull({"users": IDS})["users"].shape == (100, 4)
    one.close()
    two.close()


def test_what_was_pending_for_a_dropped_table_is_forgotten() -> None:
    with servers(workers=1) as (first,):
        store, other = guest(first), guest(first)
        store.create(USERS)
        other.create(Table("w", length=10, optimizer="sum"), torch.zeros(10))
        store.push({"users": IDS}, {"users": torch.ones(IDS.numel(), 8)}, pending=True).wait()
        store.drop("users")
        for shard in first.shards:
            shard.commit(1, [(store._worker, 0)])
            assert len(shard.pending) == 0
        assert [p.table.name for p in store.stored()] == ["w"]
        store.close()
        other.close()
