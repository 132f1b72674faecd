"""Hot rows: eight workers that all want one row in every batch, on four servers.

Workers and servers are processes; rows of 64 numbers, Adagrad, shared memory. Without copies, the
one server that owns the row answers every pull and applies every push of it; with `hot_rows=0.01`
each worker pulls it from the server that its rank chooses, at most 0.1 s old. Pushes always go to
the owner, and with nothing for them to the others. Servers with and without copies are measured in
turn, medians.

    one_row         steps/s of all workers, a pull and then a push of the same one id in each
    one_row_pulls   pulls/s of it alone
    among_others    steps/s, the same one id and 64 others, uniform out of a million: these need
                    all four servers with copies or without, so copies must only do no harm
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from common import Claim, alternate, cores, median

from manyhands.core import Table
from manyhands.server.client.server_store import ServerStore

WORKERS, SERVERS, DIM, ROWS = 8, 4, 64, 1_000_000
HOT = 12345
TABLE = Table("rows", dim=DIM, optimizer="adagrad", options={"lr": 0.01})
TOKEN = "benchmark"
BARS = {"one_row": 1.2, "one_row_pulls": 2.0, "among_others": 0.97}
SETTLE_S = 1.5  # for the row to get hot and the workers to hear of it


def batches(kind: str, seed: int) -> list[torch.Tensor]:
    if kind != "among_others":
        return [torch.tensor([HOT])]
    chance = torch.Generator().manual_seed(seed)
    hot = torch.tensor([HOT])
    return [torch.cat([hot, torch.randint(0, ROWS, (64,), generator=chance)]) for _ in range(64)]


def work(pipe: Connection, address: str, rank: int) -> None:
    """One worker: runs what it is told for so many seconds and answers how many steps that were."""
    torch.set_num_threads(1)
    store = ServerStore(address, rank, WORKERS, TOKEN)
    store.create(TABLE)
    grads = {n: torch.randn(n, DIM) * 1e-3 for n in (1, 65)}
    pipe.send("ready")
    while (told := pipe.recv()) is not None:
        kind, seconds = told
        wanted = batches(kind, rank)
        steps, until = 0, time.perf_counter() + seconds
        while time.perf_counter() < until:
            rows = {"rows": wanted[steps % len(wanted)]}
            store.pull(rows)
            if kind != "one_row_pulls":
                store.push(rows, {"rows": grads[len(rows["rows"])]})
            steps += 1
        store.flush()
        pipe.send(steps)
    pipe.send(store.stats() if rank == 0 else {})
    store.close()


class Group:
    """Servers with all their workers; only one group works at a time."""

    def __init__(self, hot_rows: float):
        self._servers = [self._server({"servers": SERVERS, "workers": WORKERS}, hot_rows)]
        root = self._servers[0][1]
        self._servers += [self._server({"coordinator": root}, 0.0) for _ in range(SERVERS - 1)]
        context = multiprocessing.get_context("spawn")
        self._workers = []
        for rank in range(WORKERS):
            here, there = context.Pipe()
            process = context.Process(target=work, args=(there, root, rank), daemon=True)
            process.start()
            self._workers.append((process, here))
        for _, pipe in self._workers:
            pipe.recv()

    def _server(self, config: dict[str, Any], hot_rows: float) -> tuple[Any, str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "manyhands.server.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None and process.stdout is not None
        line = json.dumps({"token": TOKEN, "hot_rows": hot_rows, **config})
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()
        return process, json.loads(process.stdout.readline())["address"]

    def run(self, kind: str, seconds: float) -> float:
        """Steps a second of all workers together, after as long as it takes for a row to be hot."""
        for told in (SETTLE_S, seconds):
            for _, pipe in self._workers:
                pipe.send((kind, told))
            steps = sum(pipe.recv() for _, pipe in self._workers)
        return steps / seconds

    def close(self) -> dict[str, float]:
        for _, pipe in self._workers:
            pipe.send(None)
        stats, *_ = [pipe.recv() for _, pipe in self._workers]
        for process, _ in self._workers:
            process.join(20)
        for process, _ in self._servers:
            process.stdin.close()
        for process, _ in self._servers:
            process.wait(20)
            process.stdout.close()
        return stats  # type: ignore[no-any-return]


def measure(quick: bool, only: list[str]) -> list[Claim]:
    wanted = [name for name in BARS if not only or name in only]
    if cores() < WORKERS + SERVERS and not quick:
        needed = f"{cores()} cores; eight workers and four servers need one each"
        return [Claim(name, skipped=needed) for name in wanted]
    groups = {"copies": Group(0.01), "plain": Group(0.0)}
    claims = []
    try:
        for name in wanted:
            runs: dict[str, Callable[[], float]] = {
                each: lambda group=group, name=name: group.run(name, 0.5 if quick else 3.0)  # type: ignore
                for each, group in groups.items()
            }
            found = alternate(runs, 1 if quick else 5)
            ours, peer = (median(found[each]) for each in ("copies", "plain"))
            detail = {each: ", ".join(f"{x:,.0f}" for x in found[each]) + " /s" for each in groups}
            claims.append(Claim(name, ours, peer, "/s", ours / peer, BARS[name], detail=detail))
    finally:
        stats = {each: group.close() for each, group in groups.items()}
    if claims:
        read, missed = (stats["copies"].get(f"copies_{what}", 0.0) for what in ("read", "missed"))
        assert claims[0].detail is not None
        claims[0].detail["rows read from copies"] = f"{read:,.0f}; parts missed {missed:,.0f}"
    return claims
