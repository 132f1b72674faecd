"""Servers in threads or processes, workers, and a short training that all stores agree on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from manyhands.core import Store, Table, Tensors
from manyhands.server.client.server_store import ServerStore
from manyhands.server.process import Server

TOKEN = "a secret of this test"
USERS = Table("users", dim=8, optimizer="adagrad", options={"lr": 0.1}, seed=3)
WEIGHTS = Table("weights", length=5000, optimizer="momentum", options={"lr": 0.1, "momentum": 0.9})
TABLES = [USERS, WEIGHTS]


@contextmanager
def servers(
    count: int = 1, shards: int = 1, workers: int = 1, **words: object
) -> Iterator[list[Server]]:
    """The first of them coordinates."""
    with ExitStack() as stack:
        first = stack.enter_context(
            Server(shards=shards, token=TOKEN, servers=count, workers=workers, **words)
        )  # type: ignore[arg-type]
        rest = [
            stack.enter_context(Server(shards=shards, token=TOKEN, coordinator=first.address))
            for _ in range(count - 1)
        ]
        yield [first, *rest]


@contextmanager
def joined(
    server: Server | str, rank: int = 0, size: int = 1, **words: object
) -> Iterator[ServerStore]:
    address = server if isinstance(server, str) else server.address
    store = ServerStore(address, rank, size, TOKEN, **{"timeout_s": 20.0, **words})  # type: ignore
    try:
        yield store
    finally:
        store.disconnect()  # what a test did not close must not wait for a server that is gone


def batches(steps: int = 8, n: int = 200) -> list[tuple[Tensors, Tensors]]:
    g = torch.Generator().manual_seed(1)
    return [
        (
            {"users": torch.randint(-300, 300, (n,), generator=g), "weights": None},
            {"users": torch.randn(n, 8, generator=g), "weights": torch.randn(5000, generator=g)},
        )
        for _ in range(steps)
    ]


def create(store: Store) -> None:
    store.create(USERS)
    store.create(
        WEIGHTS,
        torch.arange(5000.0) / 100,
        {"momentum_buffer": torch.ones(5000)} if store.rank == 0 else None,
    )


def play(store: Store) -> list[Tensors]:
    """All that a worker sees of a short training."""
    create(store)
    seen = []
    for rows, updates in batches():
        seen.append({k: x.clone() for k, x in store.pull(rows).items()})
        store.push(rows, updates, lr=0.05)
    store.tick(0)
    rows, updates = batches()[0]
    store.push(rows, updates, pending=True, weight=2.0)
    store.tick(0)
    seen.append(store.pull(rows))
    return [*seen, *(store.dump(table.name) for table in TABLES)]


@contextmanager
def process(**config: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server as the launcher starts it, and its address."""
    started = subprocess.Popen(
        [sys.executable, "-m", "manyhands.server.process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert started.stdin is not None and started.stdout is not None
        started.stdin.write(json.dumps({"token": TOKEN, **config}) + "\n")
        started.stdin.flush()
        line = started.stdout.readline()
        yield started, json.loads(line)["address"] if line else ""
    finally:
        started.kill()
        started.wait()
        for pipe in (started.stdin, started.stdout, started.stderr):
            if pipe is not None:
                pipe.close()
