"""A watched store: the same rows, and an account of bytes and of time on a clock that is read."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from manyhands.core import (
    Event,
    Table,
    TableStore,
)
from manyhands.exchange.observed import ObservedGroup
from manyhands.exchange.solo import SoloGroup
from manyhands.server.client.cached_store import CachedStore
from manyhands.server.client.observed_store import ObservedStore
from manyhands.server.local_store import LocalStore

W, USERS = (
    Table("w", length=300, optimizer="sum"),
    Table("users", dim=4, dtype="float64", optimizer="sum", init="zeros"),
)
IDS = torch.tensor([7, 8, -3])


def watched(store: TableStore, **words: Any) -> tuple[Any, ObservedGroup, list[Event]]:
    """Its clock goes on by one second each time it is read."""
    events: list[Event] = []
    link, ticks = ObservedGroup(SoloGroup(), events.append), itertools.count()
    made = ObservedStore(store, link, clock=lambda: float(next(ticks)), **words)
    made.create(W, torch.zeros(300))
    made.create(USERS)
    return made, link, events


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*shape, dtype=dtype)


def test_what_is_pulled_and_pushed_is_counted_with_its_ids_and_reported_in_its_round() -> None:
    store, link, events = watched(LocalStore())
    link.round = 3
    work = store.push(
        {"w": None, "users": IDS}, {"w": ones(300), "users": ones(3, 4, dtype=torch.float64)}
    )
    moved = 300 * 4 + 3 * 4 * 8 + 3 * 8
    assert (link.calls, link.nbytes, link.seconds) == (1, moved, 1.0), "one second in the call"
    link.round = 4
    work.wait()
    work.wait()
    assert (link.calls, link.nbytes, link.seconds) == (1, moved, 2.0), "and one in the wait, once"
    assert store.pull({"w": None})["w"].eq(1).all()
    assert [(e.round, e.name, e.seconds, e.nbytes) for e in events] == [
        (3, "push", 1.0, moved),
        (4, "push", 1.0, 0),
        (4, "pull", 1.0, 1200),
    ]


def test_waiting_for_others_is_time_without_bytes() -> None:
    store, link, events = watched(LocalStore())
    assert store.claim_step(5, True) == 0 and store.tick(0).clock == 1
    store.flush()
    assert [(e.name, e.seconds, e.nbytes) for e in events] == [
        ("deal", 1.0, 0),
        ("tick", 1.0, 0),
        ("flush", 1.0, 0),
    ]
    assert link.seconds == 3.0 and link.nbytes == 0


@pytest.mark.parametrize(("code", "numbers"), [("none", 1200), ("bf16", 600), ("int8", 300 + 64)])
def test_numbers_count_as_they_travel(code: str, numbers: int) -> None:
    store, link, _ = watched(LocalStore(), code=code)
    store.pull({"w": None})
    assert link.nbytes == numbers


def test_what_comes_in_the_background_is_waited_for_when_it_is_wanted() -> None:
    store, link, _ = watched(LocalStore())
    reply = store.pull_async({"w": None})
    assert (link.nbytes, link.seconds) == (1200, 1.0)
    assert reply.result()["w"].eq(0).all() and link.seconds == 2.0
    reply = store.exchange({"w": None}, {"w": ones(300)}, wants={"users": IDS})
    assert link.nbytes == 2 * 1200 + 3 * 4 * 8 + 3 * 8
    assert (
        reply.result()["users"].eq(0).all()
        and reply.result()["users"].shape == (3, 4)
        and link.seconds == 4.0
    )


def test_it_can_what_the_store_behind_it_can() -> None:
    link = ObservedGroup(SoloGroup(), lambda event: None)
    plain = ObservedStore(LocalStore(), link)
    background = ObservedStore(CachedStore(LocalStore(), 8), link)
    assert isinstance(plain, TableStore) and not plain.background
    assert isinstance(background, TableStore) and background.background
