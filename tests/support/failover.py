"""Kills of servers under load: workers push, servers die, and every sum is counted at the end.

As a command: `python -m support.failover KILLS [SERVERS [REPLICAS]]` over real processes.
"""

from __future__ import annotations

import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from manyhands.core import Table
from manyhands.server.client.server_store import ServerStore
from manyhands.server.process import Server
from support.servers import TOKEN, process

SUMS = Table("sums", dim=4, optimizer="sum", init="zeros")
ADA = Table("ada", dim=4, optimizer="adagrad", options={"lr": 0.1}, seed=1)
DENSE = Table("dense", length=3000, optimizer="sum")


@dataclass
class Ledger:
    """What workers know: pushes that were acknowledged, by worker, and when."""

    pushes: dict[int, int] = field(default_factory=dict)
    acknowledged: list[tuple[float, float]] = field(default_factory=list)  # sent, acknowledged
    kills: list[float] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)

    def recoveries(self) -> list[float]:
        """From each kill to the first push that was sent after it and acknowledged."""
        found = []
        for kill in self.kills:
            later = [end for sent, end in self.acknowledged if sent > kill]
            if later:
                found.append(min(later) - kill)
        return found


class Servers:
    """Servers that can be killed and replaced. `spawn` starts one and returns how to kill it."""

    def __init__(self, spawn: Callable[[], Callable[[], None]], count: int):
        self._spawn = spawn
        self.kill = [spawn() for _ in range(count)]

    def kill_one(self, chance: random.Random) -> None:
        at = chance.randrange(len(self.kill))
        self.kill[at]()
        self.kill[at] = self._spawn()


@contextmanager
def processes(count: int, replicas: int, workers: int) -> Iterator[tuple[Server, Servers]]:
    """A coordinator in this process, servers in their own; each dies by kill -9."""
    with ExitStack() as stack:
        root = stack.enter_context(
            Server(shards=0, token=TOKEN, servers=count, workers=workers, replicas=replicas)
        )

        def spawn() -> Callable[[], None]:
            started, _ = stack.enter_context(process(coordinator=root.address))
            return started.kill

        yield root, Servers(spawn, count)


@contextmanager
def threads(
    count: int, replicas: int, workers: int, **words: Any
) -> Iterator[tuple[Server, Servers]]:
    """All servers in threads of this process; a kill ends their sockets without a word."""
    with ExitStack() as stack:
        root = stack.enter_context(
            Server(
                shards=0, token=TOKEN, servers=count, workers=workers, replicas=replicas, **words
            )
        )

        def spawn() -> Callable[[], None]:
            server = stack.enter_context(Server(token=TOKEN, coordinator=root.address))
            return server.crash

        yield root, Servers(spawn, count)


def settled(root: Server, losses: int, timeout_s: float = 30.0) -> None:
    """Wait until the coordinator knows of the losses and every shard has all its copies again."""
    assert root.coordinator is not None
    registry, until = root.coordinator.registry, time.monotonic() + timeout_s
    while time.monotonic() < until:
        status = registry.status()
        assert not status["lost_shards"], status
        whole = len(status["losses"]) == losses and all(
            server["connected"] for server in status["servers"]
        )
        whole = whole and all(len(chain) == status["replicas"] for chain in status["chains"])
        if whole and not any(server["learns"] for server in status["servers"]):
            return
        time.sleep(0.01)
    raise AssertionError(f"copies are missing: {registry.status()}")


def work(store: ServerStore, ledger: Ledger, stop: threading.Event) -> None:
    chance = torch.Generator().manual_seed(store.rank)
    rows = {"sums": torch.arange(400), "ada": torch.arange(100), "dense": None}
    try:
        while not stop.is_set():
            updates = {
                "sums": torch.ones(400, 4),
                "ada": torch.randn(100, 4, generator=chance),
                "dense": torch.ones(3000),
            }
            sent = time.monotonic()
            store.push(rows, updates).wait()
            ledger.acknowledged.append((sent, time.monotonic()))
            ledger.pushes[store.rank] = ledger.pushes.get(store.rank, 0) + 1
    except BaseException as e:
        ledger.errors.append(e)


def join(root: Server, workers: int, stack: ExitStack) -> list[ServerStore]:
    """Stores of all ranks, with their tables."""
    stores: list[ServerStore] = []

    def enter(rank: int) -> None:
        stores.append(ServerStore(root.address, rank, workers, TOKEN, timeout_s=60.0))

    joining = [threading.Thread(target=enter, args=(r,)) for r in range(workers)]
    for thread in joining:
        thread.start()
    for thread in joining:
        thread.join()
    stores.sort(key=lambda store: store.rank)
    for store in stores:
        stack.callback(store.disconnect)
        for table in (SUMS, ADA):
            store.create(table)
        store.create(DENSE, torch.zeros(3000))
    return stores


def run(started: Any, kills: int, seed: int = 0, workers: int = 2, pause_s: float = 0.3) -> Ledger:
    """Kill servers one after the other; raises where a sum is wrong."""
    root, servers = started
    ledger, stop, chance = Ledger(), threading.Event(), random.Random(seed)
    with ExitStack() as stack:
        stores = join(root, workers, stack)
        at_work = [threading.Thread(target=work, args=(s, ledger, stop)) for s in stores]
        for thread in at_work:
            thread.start()
        for _ in range(kills):
            settled(root, len(ledger.kills))
            time.sleep(chance.random() * pause_s)
            ledger.kills.append(time.monotonic())
            servers.kill_one(chance)
        settled(root, len(ledger.kills))
        stop.set()
        for thread in at_work:
            thread.join()
        if ledger.errors:
            raise ledger.errors[0]
        check(stores, ledger)
    return ledger


def check(stores: list[ServerStore], ledger: Ledger) -> None:
    """Every acknowledged push exactly once, on what workers read and on every copy."""
    total = sum(ledger.pushes.values())
    found = stores[0].pull({"sums": torch.arange(400), "dense": None})
    for name, values in found.items():
        assert (values == total).all(), (name, values.unique().tolist(), total)


if __name__ == "__main__":
    given = [int(x) for x in sys.argv[1:]]
    kills, count, replicas = [*given, *[20, 3, 2][len(given) :]]
    with processes(count, replicas, 2) as started:
        found = run(started, kills)
    times = found.recoveries()
    print(
        f"{kills} kills, {sum(found.pushes.values())} pushes, every sum right; recovery "
        f"median {statistics.median(times):.3f} s, longest {max(times):.3f} s: "
        + " ".join(f"{t:.2f}" for t in times)
    )
