"""Hot copies: read at the shard of a worker's choice, never older than the bound, sums exact."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from manyhands.core import Table
from manyhands.server.client.guest_store import GuestStore
from manyhands.server.client.server_store import ServerStore
from manyhands.server.process import Server
from support.failover import Servers, settled, threads
from support.servers import TOKEN, joined, play, servers

SUMS = Table("sums", dim=4, optimizer="sum", init="zeros")
AGE = 0.05
ONES = torch.ones(1, 4)


def at_once(work: Callable[[int], Any], count: int) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


def owner(store: ServerStore, key: int) -> int:
    return int(store._router.slots.shard_of("sums", np.array([key]))[0])


def key_of(store: ServerStore, shard: int) -> int:
    return next(key for key in range(1000) if owner(store, key) == shard)


def hot(store: ServerStore, key: int, turn: Callable[[], object] = lambda: None) -> None:
    """Ask for one id until this worker reads copies of it."""
    rows, until = {"sums": torch.tensor([key])}, time.monotonic() + 20
    while store._sender.hot.ids("sums", 1) is None:
        assert time.monotonic() < until, "no row got hot"
        store.pull(rows)
        turn()


@contextmanager
def workers(server: Server, size: int) -> Iterator[list[ServerStore]]:
    with ExitStack() as stack:
        found = at_once(lambda r: stack.enter_context(joined(server, r, size)), size)
        for store in found:
            store.create(SUMS)
        yield found


def served(running: list[Server]) -> list[int]:
    """Copies that were read, by shard; servers register in any order."""
    by_shard = {s.shards[0].index: s._status.copies for s in running}
    found = [copies for _, copies in sorted(by_shard.items())]
    return [0 if copies is None else copies.served for copies in found]


def test_a_hot_row_is_read_from_the_shard_of_the_worker_and_sums_are_exact() -> None:
    with (
        servers(3, workers=3, hot=(0.05, AGE)) as running,
        workers(running[0], 3) as stores,
    ):
        key = key_of(stores[0], 0)
        rows, pushes = {"sums": torch.tensor([key])}, [0, 0, 0]

        def work(rank: int) -> None:
            store = stores[rank]
            until = time.monotonic() + 20
            while pushes[rank] < 200 or (rank and store._sender.hot.ids("sums", 1) is None):
                assert time.monotonic() < until, "no row got hot"
                pushes[rank] += 1
                store.push(rows, {"sums": ONES})
                value = store.pull(rows)["sums"]
                assert (value == value[0, 0]).all() and value[0, 0] <= sum(pushes)
            store.flush()

        at_once(work, 3)
        time.sleep(AGE)  # since all was flushed: no copy that is served misses a push now
        before, until = served(running), time.monotonic() + 20
        for rank in (1, 2):
            while served(running)[rank] == before[rank]:
                assert time.monotonic() < until, "no copy is read"
                assert (stores[rank].pull(rows)["sums"] == sum(pushes)).all()
        assert served(running)[0] == 0  # of rank 0, whose shard owns the row
        stores[2].push(rows, {"sums": ONES}).wait()
        stores[1].flush()  # what all have pushed, from now on
        assert (stores[1].pull(rows)["sums"] == sum(pushes) + 1).all()


def test_a_batch_of_hot_rows_is_one_request_and_others_go_with_it() -> None:
    with (
        servers(3, workers=1, hot=(0.05, 10 * AGE)) as running,
        joined(running[0]) as store,
    ):
        store.create(SUMS)
        keys = [key_of(store, 1), key_of(store, 2)]
        own = key_of(store, 0)
        store.push(
            {"sums": torch.tensor([*keys, own])}, {"sums": torch.arange(12.0).view(3, 4)}
        ).wait()
        until = time.monotonic() + 20
        both = {"sums": torch.tensor([keys[1], own, keys[0], keys[1]])}
        while (found := store._sender.hot.ids("sums", 2)) is None or found.size < 2:
            assert time.monotonic() < until, "no row got hot"
            values = store.pull(both)["sums"]
        posted = [endpoint.stats()["server_requests"] for s in running for endpoint in s.endpoints]
        for _ in range(3):
            assert torch.equal(store.pull(both)["sums"], values)
        assert values.tolist() == torch.arange(12.0).view(3, 4)[[1, 2, 0, 1]].tolist()
        after = [endpoint.stats()["server_requests"] for s in running for endpoint in s.endpoints]
        assert after[1:] == posted[1:] and after[0] >= posted[0] + 3
        assert store.stats()["copies_read"] > 0


@pytest.mark.parametrize("transport", ["tcp", "shared"])
@pytest.mark.parametrize("payload", ["none", "bf16"])
def test_a_copy_that_is_too_old_is_not_served(transport: str, payload: str) -> None:
    """The bound, with a clock that a test moves: the owner answers in place of an old copy."""
    with (
        servers(2, workers=1, hot=(0.9, AGE)) as running,
        joined(running[0], transport=transport, payload=payload) as store,
    ):
        store.create(SUMS)
        key, other = key_of(store, 1), key_of(store, 0)
        ids = torch.tensor([key, other])
        store.push({"sums": ids}, {"sums": torch.full((2, 4), 8.0)}).wait()
        copies, now = running[0]._status.copies, [50.0]
        assert copies is not None
        copies._clock = lambda: now[0]
        epoch = store._sender.epoch
        old = np.array([key]), np.full((1, 4), 3.0, np.float32)
        copies.put(99, epoch, 50.0, {"sums": old})
        time.sleep(AGE)
        learn = lambda: store._sender.hot.learn({"sums": [key]}, store._router.slots)
        for later, wanted in ((0.0, 3.0), (AGE, 3.0), (1.01 * AGE, 8.0)):
            learn()
            now[0] = 50.0 + later
            found = store.pull({"sums": ids})["sums"]
            assert found.tolist() == [[wanted] * 4, [8.0] * 4]
        assert store._sender.hot.ids("sums", 1) is None  # until the next list
        learn()
        into = {"sums": torch.zeros(2, 4)}
        assert store.pull({"sums": ids}, into)["sums"].tolist() == [[8.0] * 4] * 2
        for wrong in (
            (epoch + 1, old),  # of another slot map
            (epoch, (old[0], old[1][:, :2].copy())),  # of a table that had other rows
        ):
            copies.put(99, wrong[0], now[0], {"sums": wrong[1]})
            learn()
            assert store.pull({"sums": ids})["sums"].tolist() == [[8.0] * 4] * 2
        copies.put(99, epoch, now[0], {"sums": old})
        learn()
        coming = store.exchange({"sums": ids}, {"sums": torch.ones(2, 4)}, wants={"sums": ids})
        assert coming.result()["sums"].tolist() == [[3.0] * 4, [9.0] * 4]
        store.flush()
        learn()
        assert store.pull({"sums": ids})["sums"].tolist() == [[9.0] * 4] * 2


def test_a_row_that_is_not_wanted_any_more_is_dropped() -> None:
    with (
        servers(2, workers=1, hot=(0.2, AGE)) as running,
        joined(running[0]) as store,
    ):
        store.create(SUMS)
        key = key_of(store, 1)
        hot(store, key)
        copies, until = running[0]._status.copies, time.monotonic() + 20
        assert copies is not None and copies.listed(10.0) == {"sums": [key]}
        chance = torch.Generator().manual_seed(0)
        while copies.listed(10.0):
            assert time.monotonic() < until, "a cold row stays"
            store.pull({"sums": torch.randint(1000, 100_000, (50,), generator=chance)})
        assert (store.pull({"sums": torch.tensor([key])})["sums"] == 0).all()


def test_a_synchronous_run_is_the_same_with_copies_and_without() -> None:
    """Lockstep of two workers that want one id all the time: what they see, to the bit."""

    def run(share: float) -> tuple[list[torch.Tensor], list[int]]:
        seen: list[list[torch.Tensor]] = [[], []]
        with (
            servers(2, workers=2, hot=(share, 0.001)) as running,
            workers(running[0], 2) as stores,
        ):
            ada = Table("ada", dim=4, optimizer="adagrad", options={"lr": 0.1}, seed=3)
            at_once(lambda r: stores[r].create(ada), 2)
            key = torch.tensor([key_of(stores[0], 1)])

            def work(rank: int) -> None:
                store, chance = stores[rank], torch.Generator().manual_seed(rank)
                for _ in range(300):
                    rows = {"sums": key, "ada": key}
                    seen[rank] += [store.pull(rows)[name].clone() for name in rows]
                    grads = {name: torch.randn(1, 4, generator=chance) for name in rows}
                    store.push(rows, grads, pending=True)
                    store.tick(0)

            at_once(work, 2)
            return seen[0] + seen[1], served(running)

    (plain, _), (copied, reads) = run(0.0), run(0.01)
    assert all(torch.equal(a, b) for a, b in zip(plain, copied, strict=True))
    assert sum(reads) == 0


def test_a_single_worker_sees_the_same_training_as_without() -> None:
    found = []
    for share in (0.0, 0.01):
        with servers(2, hot=(share, 0.1)) as running, joined(running[0]) as store:
            found.append(play(store))
    for a, b in zip(*found, strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_a_guest_reads_what_it_wrote() -> None:
    with servers(2, workers=1, hot=(0.01, AGE)) as running, joined(running[0]) as store:
        store.create(SUMS)
        key = torch.tensor([key_of(store, 1)])
        hot(store, int(key))
        guest = GuestStore(running[0].address, TOKEN)
        guest.stored()
        for n in range(50):
            guest.push({"sums": key}, {"sums": ONES})
            assert (guest.pull({"sums": key})["sums"] == n + 1).all()
        guest.close()


def test_an_owner_dies_while_its_row_is_hot_and_no_push_is_lost() -> None:
    with (
        threads(3, 2, 2, hot=(0.05, AGE)) as (root, running),
        workers(root, 2) as stores,
    ):
        key = key_of(stores[0], 1)
        rows, pushes = {"sums": torch.tensor([key])}, 0

        def push() -> None:
            nonlocal pushes
            stores[1].push(rows, {"sums": ONES}).wait()
            pushes += 1

        for crash in (1, 2):
            hot(stores[0], key, push)
            settled(root, crash - 1)
            head = stores[0]._router.slots.chains[1].members[0]
            kill(running, head)
            for _ in range(20):
                push()
                assert (stores[0].pull(rows)["sums"] <= pushes).all()
            settled(root, crash)
            hot(stores[0], key, push)
        time.sleep(2 * AGE)
        for store in stores:
            assert (store.pull(rows)["sums"] == pushes).all()
            store.flush()
            assert (store.pull(rows)["sums"] == pushes).all()


def kill(running: Servers, number: int) -> None:
    """Kill the server of this number and start another."""
    numbers = [end.__self__.held.me for end in running.kill]  # of bound methods
    at = numbers.index(number)
    running.kill[at]()
    running.kill[at] = running._spawn()
