"""Deletions on shards with copies: every server of a chain makes them, and new copies have them."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest
import torch

from manyhands.core import Table
from manyhands.server.client.guest_store import GuestStore
from manyhands.server.process import Server
from support.servers import TOKEN, USERS, servers

IDS = torch.arange(200)


def guest(server: Server) -> GuestStore:
    return GuestStore(server.address, TOKEN, timeout_s=30.0)


def until(what: str, true: object) -> None:
    begun = time.monotonic()
    while not true():  # type: ignore[operator]
        assert time.monotonic() - begun < 30, what
        threading.Event().wait(0.02)


def test_what_was_deleted_stays_deleted_when_a_server_is_lost() -> None:
    words = {"replicas": 2, "keep": True, "lease_s": 1.0}
    with servers(3, workers=None, **words) as (first, second, _):  # type: ignore[arg-type]
        store = guest(first)
        store.create(USERS)
        store.create(Table("gone", dim=3))
        store.push({"users": IDS, "gone": IDS}, {"users": ones(8), "gone": ones(3)}).wait()
        assert store.delete("users", IDS[:150]) == 150 and store.drop("gone")
        store.create(Table("gone", dim=5, optimizer="sum", init="zeros"))
        store.push({"gone": IDS}, {"gone": ones(5)}).wait()
        kept = store.pull({"users": IDS})["users"].clone()
        second.crash()
        assert torch.equal(store.pull({"users": IDS})["users"], kept)
        assert store.pull({"gone": IDS})["gone"].eq(1).all()
        assert {p.table.name: p.rows for p in store.stored()} == {"users": 50, "gone": 200}
        assert store.delete("users", IDS) == 50
        store.close()


def ones(dim: int) -> torch.Tensor:
    return torch.ones(IDS.numel(), dim)


@pytest.mark.parametrize("remade", [False, True])
def test_a_copy_made_later_has_the_tables_as_they_are(remade: bool) -> None:
    """A server is lost, and another takes its place while tables are dropped and made anew."""
    words = {"replicas": 2, "keep": True, "lease_s": 1.0}
    with servers(3, workers=None, **words) as (first, second, third):  # type: ignore[arg-type]
        store = guest(first)
        store.create(USERS)
        store.push({"users": IDS}, {"users": ones(8)}).wait()
        second.crash()
        if remade:
            store.drop("users")
            store.create(dataclasses.replace(USERS, dim=4))
            store.push({"users": IDS}, {"users": ones(4)}).wait()
        assert store.delete("users", IDS[:100]) == 100

        def copied() -> bool:
            assert first.coordinator is not None and first.coordinator.slots is not None
            return all(len(chain.members) == 2 for chain in first.coordinator.slots.chains)

        until("all shards have two copies again", copied)
        kept = store.pull({"users": IDS})["users"].clone()
        dim = 4 if remade else 8
        for server in (first, third):
            for shard in server.shards:
                assert shard.spec("users").dim == dim
        third.crash()
        assert torch.equal(store.pull({"users": IDS})["users"], kept)
        assert store.delete("users", IDS) == 100
        store.close()
