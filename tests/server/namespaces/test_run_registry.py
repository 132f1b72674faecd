"""Several runs and guests on one server: clocks, worker numbers and tables of each are apart."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from manyhands.core import Table, Tensors
from manyhands.errors import StoreError
from manyhands.server.client.guest_store import GuestStore
from manyhands.server.client.server_store import ServerStore
from manyhands.server.local_store import LocalStore
from manyhands.server.namespaces.namespaced_store import NamespacedStore
from manyhands.server.namespaces.run_registry import RunRegistry
from manyhands.server.process import Server
from manyhands.server.protocol import messages as m
from support.compare import assert_same_steps
from support.servers import TABLES, TOKEN, play, servers

W = Table("w", length=3000, optimizer="sum")


def member(server: Server, rank: int, size: int, namespace: str) -> NamespacedStore:
    store = ServerStore(server.address, rank, size, TOKEN, timeout_s=20.0, namespace=namespace)
    return NamespacedStore(store, namespace)


def at_once(*bodies: Callable[[], Any]) -> list[Any]:
    """The results of functions that run beside each other."""
    found: list[Any] = [None] * len(bodies)

    def run(i: int) -> None:
        try:
            found[i] = bodies[i]()
        except BaseException as e:
            found[i] = e

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for x in found:
        if isinstance(x, BaseException):
            raise x
    return found


def merged(store: NamespacedStore, weight: float, rounds: int) -> Tensors:
    """What is there after rounds in which all ranks push pending: the mean by weight, each."""
    store.create(W, torch.zeros(3000))
    for round in range(rounds):
        grads = torch.full((3000,), float(store.rank + round))
        store.push({"w": None}, {"w": grads}, pending=True, weight=weight)
        store.tick(0)
    found = store.pull({"w": None})["w"].clone()
    store.close()
    return found


@pytest.mark.parametrize("count", [1, 2])
def test_two_runs_at_once_give_what_each_gives_alone(count: int) -> None:
    with servers(count, workers=None, keep=True) as (first, *_):  # type: ignore[arg-type]
        bodies = [
            lambda r=rank, n=name, k=rounds: merged(member(first, r, 2, n), 1.0 + r, k)
            for name, rounds in (("team-a", 5), ("team-b", 9))
            for rank in range(2)
        ]
        found = at_once(*bodies)
        mean = (0.0 * 1 + 1.0 * 2) / 3
        for x, rounds in zip(found, (5, 5, 9, 9), strict=True):
            expected = sum(round + mean for round in range(rounds))
            assert torch.allclose(x, torch.full((3000,), expected))
        assert first.coordinator is not None and not first.coordinator.over


def test_a_short_training_has_the_same_bits_in_a_namespace_and_without_a_server() -> None:
    alone = play(LocalStore())
    with servers(2, workers=None, keep=True) as (first, *_):  # type: ignore[arg-type]
        store = member(first, 0, 1, "team-a")
        assert_same_steps(alone, play(store))  # type: ignore[arg-type]
        store.close()


def test_the_next_run_of_a_namespace_starts_its_tables_and_clock_anew() -> None:
    """Its workers have the numbers of the run before, whose commits the servers remember."""
    with servers(workers=None, keep=True) as (first,):  # type: ignore[arg-type]
        for rounds in (7, 2, 4):
            one, two = at_once(
                *(lambda r=r, k=rounds: merged(member(first, r, 2, "x"), 1.0, k) for r in range(2))
            )
            expected = sum(round + 0.5 for round in range(rounds))
            assert torch.allclose(one, torch.full((3000,), expected)) and torch.equal(one, two)
        (alone,) = at_once(lambda: merged(member(first, 0, 1, "x"), 1.0, 3))
        assert torch.allclose(alone, torch.full((3000,), 3.0)), "and may have another size"


def test_a_run_does_not_take_the_place_of_one_that_runs() -> None:
    with servers(workers=None, keep=True) as (first,):  # type: ignore[arg-type]
        store = member(first, 0, 1, "x")
        with pytest.raises(StoreError, match=r"rank 0 of a run is here already, in namespace 'x'"):
            member(first, 0, 1, "x")
        store.tick(0)
        store.store.disconnect()  # type: ignore[attr-defined]
        again = member(first, 0, 1, "x")
        again.tick(0)
        again.close()


def test_another_number_of_workers_is_refused_while_a_run_lasts() -> None:
    with servers(workers=None, keep=True) as (first,):  # type: ignore[arg-type]
        store = member(first, 0, 2, "x")
        with pytest.raises(StoreError, match=r"run in namespace 'x' is for 2; give both the same"):
            member(first, 1, 3, "x")
        store.close()


def test_a_run_that_died_before_all_had_joined_is_no_obstacle() -> None:
    with servers(workers=None, keep=True) as (first,):  # type: ignore[arg-type]
        member(first, 0, 2, "x").store.disconnect()  # type: ignore[attr-defined]
        for _ in range(100):
            try:
                store = member(first, 0, 1, "x")
                break
            except StoreError:
                threading.Event().wait(0.05)
        store.tick(0)
        store.close()


def test_nobody_waits_for_a_guest_and_the_run_ends_without_it() -> None:
    with servers(workers=1) as (first,):
        guest = GuestStore(first.address, TOKEN, timeout_s=20.0)
        store = ServerStore(first.address, 0, 1, TOKEN, timeout_s=20.0)
        for table in TABLES:
            store.create(table, torch.zeros(5000) if table.length else None)
        store.tick(0)
        assert {part.table.name for part in guest.stored()} == {"users", "weights"}
        assert guest.stats()["now/guests"] == 1
        with pytest.raises(StoreError, match="TickClock of a client that is no rank of a run"):
            guest.tick(0)
        store.close()
        assert first.coordinator is not None and first.coordinator.over
        guest.push({"users": torch.tensor([1])}, {"users": torch.ones(1, 8)}).wait()
        guest.close()


def test_numbers_of_guests_that_left_are_given_again() -> None:
    with servers(workers=None, keep=True) as (first,):  # type: ignore[arg-type]
        seen = set()
        for _ in range(4):
            one = GuestStore(first.address, TOKEN, timeout_s=20.0)
            two = GuestStore(first.address, TOKEN, timeout_s=20.0)
            one.create(W)
            for store in (one, two):
                store.stored()
                store.push({"w": None}, {"w": torch.ones(3000)}).wait()
                seen.add(store._worker)
                store.close()
        last = GuestStore(first.address, TOKEN, timeout_s=20.0)
        last.stored()
        assert torch.equal(last.pull({"w": None})["w"], torch.full((3000,), 8.0))
        last.close()
        assert len(seen) == 2 and len(first.shards[0].dedup._of) == 2


def test_a_run_refuses_a_table_that_somebody_keeps_there() -> None:
    with servers(workers=None, keep=True) as (first,):  # type: ignore[arg-type]
        guest = GuestStore(first.address, TOKEN, timeout_s=20.0)
        guest.create(W)
        store = ServerStore(first.address, 0, 1, TOKEN, timeout_s=20.0)
        for _ in range(2):
            with pytest.raises(StoreError, match=r"table 'w' is on the servers already, and no"):
                store.create(W, torch.zeros(3000))
        guest.drop("w")
        store.create(W, torch.zeros(3000))
        store.create(W, torch.zeros(3000))
        store.close()
        guest.close()


@pytest.mark.parametrize("name", ["a b", "a::b", "x" * 101, "ä"])
def test_names_of_namespaces_are_plain(name: str) -> None:
    with pytest.raises(StoreError, match="letters, digits"):
        NamespacedStore(LocalStore(), name)


def test_a_guest_that_was_paused_goes_on_and_its_number_is_not_given_away() -> None:
    with servers(workers=None, keep=True, lease_s=0.2) as (first,):  # type: ignore[arg-type]
        paused = GuestStore(first.address, TOKEN, timeout_s=20.0)
        paused.create(W)
        assert paused._heartbeat is not None and first.coordinator is not None
        paused._heartbeat.close()
        while paused._worker not in first.coordinator.evicted:
            threading.Event().wait(0.02)
        other = GuestStore(first.address, TOKEN, timeout_s=20.0)
        assert other._worker != paused._worker
        paused.push({"w": None}, {"w": torch.ones(3000)}).wait()
        other.stored()
        assert paused.stats()["pushes"] == 1 and other.pull({"w": None})["w"].sum() == 3000
        paused.close()
        other.close()
        assert first.coordinator.runs.guests() == 0


def test_a_registry_goes_on_in_another_process() -> None:
    """Runs, their commits and tables, and guests are as they were."""
    before = RunRegistry(keep=True)
    for namespace in ("", "a", "b"):
        before.join(0, m.Join(1, None, namespace=namespace))
    run, rank = before.run_of(before.number_of("b", 0))
    assert run is not None
    run.start_table("t", there=False)
    tick = m.TickClock(0, 0.0, None, "drop", None, True, 0, 5.0)
    assert run.tick(rank, tick)[1] == [(1, [(before.number_of("b", 0), 0)])]
    guest, _ = before.join(0, m.Join(1, None, namespace="b", guest=True))
    before.evict(before.number_of("b", 0))
    after = RunRegistry(keep=True)
    after.load(msgspec.msgpack.decode(msgspec.msgpack.encode(before.state())))
    assert after.state() == before.state() and after.namespace_of(guest) == "b"
    number, joined = after.join(0, m.Join(1, None, namespace="b"))
    again, _ = after.run_of(number)
    assert number == before.number_of("b", 0) and joined.incarnation == 1 and joined.version == 1
    assert again is not None and again.start_table("t", there=True) == 2
    assert after.join(0, m.Join(1, None, guest=True))[0] == guest + 1
