"""One server and one worker: rounds of `mh.Embedding` over 20,000 ids of 64 numbers each.

A round is what a model does with a batch: look the rows up, give every id its row, add up the
gradients of ids that repeat, push. Adagrad, out of 2 million rows. Ids are uniform (about 1%
repeat) and, in the table, Zipf's (half of them). Every pull sees the push before it. The peers do
the same work, each in its best way; while the server pushes, theirs prepares the next ids. Server
and worker have a core each. The RPC peer, which polls, is stopped while others are measured. TCP
has the same congestion control for all (`peers/tuning.py`).

    tcp_vs_rpc, shm_vs_rpc    rounds a second through TCP and through shared memory, against a
                              torch.distributed.rpc server with its fastest transport
    shm_vs_kernels            against the same tables called directly, in one process: what no
                              transport at all would give
    vs_redis                  through shared memory, against redis with the same rows, Adagrad at
                              the worker (skipped where not installed); `detail` tells what its
                              client costs beside the store, and the ratio without that
    libpython                 share of the interpreter in the server's CPU time, by perf, against
                              the 8% that we allow (shared memory)
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from common import Claim, alternate, cores, median, median_round
from peers import tuning
from torch import Tensor

import manyhands as mh
from manyhands.embedding.distinct import distinct
from manyhands.embedding.gather import rows_of
from manyhands.embedding.tables import EmbeddingTables
from manyhands.server.client.server_store import ServerStore
from manyhands.server.tables.sparse import SparseTable

ROWS, IDS, DIM = 2_000_000, 20_000, 64
TOKEN = "benchmark"
BARS = {
    "tcp_vs_rpc": 2.8,
    "shm_vs_rpc": 5.0,
    "shm_vs_kernels": 0.75,
    "vs_redis": 15.0,
    "libpython": 1.0,
}
MOST_PYTHON = 0.08


def batches(kind: str, count: int = 16) -> list[Tensor]:
    rng, found = np.random.default_rng(1), []
    for _ in range(count):
        ids = np.empty(0, np.int64)
        while ids.size < IDS:
            more = rng.integers(0, ROWS, IDS) if kind == "uniform" else rng.zipf(1.05, 4 * IDS) - 1
            ids = np.concatenate([ids, more[more < ROWS]])
        found.append(torch.from_numpy(ids[:IDS].astype(np.int64)))
    return found


class Server:
    """A process of ours, on a core of its own."""

    def __init__(self, core: int | None):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "manyhands.server.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        if core is not None:
            os.sched_setaffinity(self.process.pid, {core})
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"token": TOKEN, "workers": 2}).encode() + b"\n")
        self.process.stdin.flush()
        self.address = json.loads(self.process.stdout.readline())["address"]

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()


def embedding() -> mh.Embedding:
    return mh.Embedding("rows", DIM, optimizer="adagrad", lr=0.01)


class Worker:
    """A worker of ours: the module, attached to a store as a run attaches it."""

    def __init__(self, store: ServerStore):
        self.store, self.module = store, embedding()
        self.tables = EmbeddingTables(self.module, store, ids=lambda ids: {"rows": ids})
        self.tables.attach()

    def turn(self, ids: Tensor, grads: Tensor) -> None:
        self.tables.begin(ids)
        self.module(ids).backward(grads)
        self.tables.push()


class Bench:
    """All who are compared, ready to run."""

    def __init__(self, seconds: float, only: list[str], control: str):
        self.control = control
        need = lambda *names: not only or any(name in only for name in names)
        self.seconds, self.grads = seconds, [torch.randn(IDS, DIM) * 1e-2 for _ in range(4)]
        usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._usable, core = usable, usable[1] if len(usable) > 1 else None
        if len(usable) > 1:
            os.sched_setaffinity(0, {usable[0]})
        self.skipped: dict[str, str] = {}
        self.redis_alone: list[float] = []  # seconds of a round that redis and its socket take
        self.server = Server(core)
        self.stores = {
            "tcp": ServerStore(self.server.address, 0, 2, TOKEN, transport="tcp"),
            "shm": ServerStore(self.server.address, 1, 2, TOKEN, transport="shared"),
        }
        self.workers = {name: Worker(store) for name, store in self.stores.items()}
        for first in range(0, ROWS, 50_000):
            self.stores["shm"].pull({"rows": torch.arange(first, min(ROWS, first + 50_000))})
        self.table = SparseTable(embedding().table)
        room = np.empty((50_000, DIM), np.float32)
        for first in range(0, ROWS, 50_000):
            self.table.pull(np.arange(first, first + 50_000), room)
        from peers import rows_redis, rows_rpc

        pair = (usable[0], core) if core is not None else (None, None)
        self.rpc, self.transports = None, "not measured"
        if need("tcp_vs_rpc", "shm_vs_rpc"):
            by, tried = rows_rpc.fastest(batches("uniform", 4), self.grads, DIM, pair)
            self.transports = f"{by}; tried, rounds/s: {tried}"
            self.rpc = rows_rpc.Rows(ROWS, DIM, pair, by)
        reason = rows_redis.missing()
        self.redis = (
            rows_redis.Rows(ROWS, DIM, core) if need("vs_redis") and reason is None else None
        )
        if reason is not None:
            self.skipped["vs_redis"] = reason

    def close(self) -> None:
        for worker in self.workers.values():
            worker.tables.close()
            worker.store.close()
        self.server.close()
        for peer in (self.rpc, self.redis):
            if peer is not None:
                peer.close()
        if self._usable:
            os.sched_setaffinity(0, self._usable)

    def ours(self, name: str, ids: list[Tensor]) -> float:
        worker = self.workers[name]
        found = median_round(
            lambda i: worker.turn(ids[i % len(ids)], self.grads[i % 4]), self.seconds
        )
        worker.tables.flush()
        return found

    def kernels(self, ids: list[Tensor]) -> float:
        def turn(i: int) -> None:
            wanted, where = distinct(ids[i % len(ids)])
            rows = torch.empty(len(wanted), DIM)
            self.table.pull(wanted.numpy(), rows.numpy())
            rows.requires_grad_()
            rows_of(rows, where).backward(self.grads[i % 4])
            assert rows.grad is not None
            self.table.push(wanted.numpy(), rows.grad.numpy())

        return median_round(turn, self.seconds)

    def by_rpc(self, ids: list[Tensor]) -> float:
        assert self.rpc is not None
        return self.rpc.median_round(ids, self.grads, self.seconds)

    def by_redis(self, ids: list[Tensor]) -> float:
        assert self.redis is not None
        peer, spent = self.redis, []

        def turn(i: int) -> None:
            before = peer.waited_s
            peer.round(ids[i % len(ids)].numpy(), self.grads[i % 4].numpy())
            spent.append(peer.waited_s - before)

        found = median_round(turn, self.seconds)
        self.redis_alone.append(median(spent))  # sending, and waiting for the answers
        return found

    def runs(self, ids: list[Tensor]) -> dict[str, Callable[[], float]]:
        found = {name: lambda name=name: self.ours(name, ids) for name in self.stores}
        found["kernels"] = lambda: self.kernels(ids)
        if self.rpc is not None:
            found["rpc"] = lambda: self.by_rpc(ids)
        if self.redis is not None:
            found["redis"] = lambda: self.by_redis(ids)
        return found

    def python_share(self, name: str, ids: list[Tensor]) -> float | str:
        """Of the server's CPU time while it answers; or why that cannot be told."""
        if shutil.which("perf") is None:
            return "perf is not installed"
        with tempfile.TemporaryDirectory() as folder:
            record = [
                "perf",
                "record",
                "-q",
                "-e",
                "cpu-clock",
                "-F",
                "4999",
                "-p",
                str(self.server.process.pid),
                "-o",
                f"{folder}/perf",
            ]
            perf = subprocess.Popen(
                record, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            for _ in range(
                2
            ):  # some ten thousand samples, or the share would be known to a percent only
                self.ours(name, ids)
            perf.send_signal(2)
            _, words = perf.communicate(timeout=30)
            if not Path(f"{folder}/perf").exists():
                said = words.strip().splitlines() or ["no reason given"]
                return f"perf cannot record here: {said[-1]}"
            command = [
                "perf",
                "report",
                "-i",
                f"{folder}/perf",
                "--sort",
                "dso",
                "--stdio",
                "-q",
                "--show-total-period",
            ]
            lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
        periods = {
            line.split()[-1]: int(line.split()[1])
            for line in lines
            if len(line.split()) >= 3 and line.split()[1].isdigit()
        }
        if not periods:
            return "perf recorded nothing"
        interpreter = sum(
            n for dso, n in periods.items() if "python3" in dso
        )  # libpython, or the program that holds it
        return interpreter / sum(periods.values())


def measure(quick: bool, only: list[str]) -> list[Claim]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if cores() < 2:
        return [
            Claim(name, skipped="one core; server and worker need one each")
            for name in BARS
            if not only or name in only
        ]
    with tuning.loopback_control() as control:
        bench = Bench(0.5 if quick else 1.5, only, control)
        try:
            return _measure(bench, 2 if quick else 6, only)
        finally:
            bench.close()
            torch.set_num_threads(threads)


def _measure(bench: Bench, times: int, only: list[str]) -> list[Claim]:
    uniform, zipf = batches("uniform"), batches("zipf")
    for name in bench.stores:
        bench.ours(name, zipf)  # compiles, and takes memory
    ms = {name: median(s) * 1e3 for name, s in alternate(bench.runs(uniform), times).items()}
    also = {
        name: median(s) * 1e3 for name, s in alternate(bench.runs(zipf), max(1, times // 3)).items()
    }
    shares = {name: bench.python_share(name, uniform) for name in bench.stores}
    detail = {
        "transport of rpc": bench.transports,
        "congestion control": bench.control,
        "uniform ids": ", ".join(f"{name} {1e3 / x:.0f}" for name, x in ms.items()) + " rounds/s",
        "Zipf(1.05) ids": ", ".join(f"{name} {1e3 / x:.0f}" for name, x in also.items())
        + " rounds/s",
        "libpython of the server": ", ".join(
            f"{k} {s:.1%}" if isinstance(s, float) else f"{k}: {s}" for k, s in shares.items()
        ),
    }
    pairs = {
        "tcp_vs_rpc": ("tcp", "rpc"),
        "shm_vs_rpc": ("shm", "rpc"),
        "shm_vs_kernels": ("shm", "kernels"),
        "vs_redis": ("shm", "redis"),
    }
    if bench.redis_alone:
        alone, mine = median(bench.redis_alone), ms["shm"] / 1e3
        detail["redis without its client"] = f"{1 / alone:.1f} rounds/s, ratio {alone / mine:.1f}"
    claims = []
    for name, (ours, peer) in pairs.items():
        if only and name not in only:
            continue
        if name in bench.skipped:
            claims.append(Claim(name, skipped=bench.skipped[name]))
        else:
            claims.append(
                Claim(
                    name,
                    1e3 / ms[ours],
                    1e3 / ms[peer],
                    "rounds/s",
                    ms[peer] / ms[ours],
                    BARS[name],
                    detail,
                )
            )
            detail = None
    if not only or "libpython" in only:
        share = shares["shm"]
        if isinstance(share, str):
            claims.append(Claim("libpython", skipped=share))
        else:
            claims.append(
                Claim(
                    "libpython",
                    100 * share,
                    100 * MOST_PYTHON,
                    "% of CPU",
                    MOST_PYTHON / max(share, 1e-6),
                    1.0,
                )
            )
    return claims
