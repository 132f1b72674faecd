"""What it costs that a parameter server loses nothing. Adagrad, rows of 64 numbers.

replicas       pushes of 20,000 ids to two servers, each row on both of them (replicas=2)
               against on one of them (replicas=1); the same work of the worker
recovery       1.5 s against the time from kill -9 of one of three servers to the next push
               that is sent and acknowledged (median)
snapshot       rounds (pull and push of 4,096 ids) while a server writes a 2 GB table to disk
               against before; also the largest growth of memory
increment      bytes of a full snapshot against those of one after 1% of the rows were pushed,
               as a share of 3%
move           the 99th percentile of pulls (times 5) against that while half of a 2 GB table
               moves to a new server
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Claim, alternate, median

from manyhands.core import Table
from manyhands.server.client.operator import Operator
from manyhands.server.client.server_store import ServerStore
from manyhands.server.process import Server

DIM, IDS, SOME = 64, 20_000, 4096
TOKEN = "of this benchmark"
TABLE = Table("rows", dim=DIM, optimizer="adagrad", options={"lr": 0.01}, seed=1)
BARS = {"replicas": 0.55, "recovery": 1.0, "snapshot": 0.85, "increment": 1.0, "move": 1.0}
RECOVERY_S = 1.5


@contextmanager
def server(coordinator: str, **config: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "manyhands.server.process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        told = {"token": TOKEN, "coordinator": coordinator, **config}
        process.stdin.write(json.dumps(told).encode() + b"\n")
        process.stdin.flush()
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


class Cluster:
    """A coordinator in this process, servers in their own, and one worker."""

    def __init__(self, stack: ExitStack, servers: int, replicas: int = 1, shards: int = 1):
        self.root = stack.enter_context(
            Server(shards=0, token=TOKEN, servers=servers, workers=1, replicas=replicas)
        )
        self.stack, self.shards = stack, shards
        self.processes = [self.start() for _ in range(servers)]
        self.store = ServerStore(self.root.address, 0, 1, TOKEN, timeout_s=120.0)
        stack.callback(self.store.disconnect)
        self.store.create(TABLE)

    def start(self, **config: Any) -> subprocess.Popen[bytes]:
        return self.stack.enter_context(server(self.root.address, shards=self.shards, **config))

    def fill(self, rows: int) -> None:
        for first in range(0, rows, 100_000):
            ids = torch.arange(first, min(rows, first + 100_000))
            self.store.push({"rows": ids}, {"rows": torch.full((ids.numel(), DIM), 0.01)}).wait()


def replicas(stack: ExitStack, seconds: float, times: int) -> Claim:
    chance = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 400_000, (IDS,), generator=chance) for _ in range(16)]
    grads = torch.randn(IDS, DIM, generator=chance) * 0.01
    clusters = {r: Cluster(stack, 2, r) for r in (1, 2)}

    def rounds(store: ServerStore) -> float:
        """Pushes a second, all of them acknowledged at the end."""
        work: list[Any] = []
        begun = time.perf_counter()
        count = 0
        while time.perf_counter() < begun + seconds:
            work.append(store.push({"rows": ids[count % 16]}, {"rows": grads}))
            count += 1
            if len(work) > 4:
                work.pop(0).wait()
        for each in work:
            each.wait()
        return count / (time.perf_counter() - begun)

    for cluster in clusters.values():
        cluster.fill(400_000)
        rounds(cluster.store)
    runs: dict[str, Callable[[], float]] = {
        str(r): lambda store=c.store: rounds(store) for r, c in clusters.items()
    }
    found = {name: median(x) for name, x in alternate(runs, times).items()}
    two, one = found["2"], found["1"]
    return Claim("replicas", two, one, "pushes/s", two / one, BARS["replicas"])


def recovery(stack: ExitStack, kills: int) -> Claim:
    cluster = Cluster(stack, 3, 2)
    cluster.fill(100_000)
    registry = cluster.root.coordinator.registry  # type: ignore[union-attr]
    ids, grads, found = torch.arange(SOME), torch.ones(SOME, DIM), []
    for kill in range(kills):
        while True:  # until every shard has both copies
            status = registry.status()
            whole = all(len(chain) == 2 for chain in status["chains"])
            if whole and len(status["losses"]) == kill and len(status["servers"]) == 3:
                break
            time.sleep(0.05)
        cluster.store.push({"rows": ids}, {"rows": grads}).wait()
        cluster.processes[kill % 3].kill()
        begun = time.perf_counter()
        cluster.store.push({"rows": ids}, {"rows": grads}).wait()
        found.append(time.perf_counter() - begun)
        cluster.processes[kill % 3] = cluster.start()
    detail = {"seconds": " ".join(f"{x:.2f}" for x in found)}
    ours = median(found)
    return Claim("recovery", ours, RECOVERY_S, "s", RECOVERY_S / ours, BARS["recovery"], detail)


def rss_mb(pid: int | str = "self") -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


class Load:
    """Rounds of pull and push in this thread, timed."""

    def __init__(self, store: ServerStore, rows: int):
        chance = torch.Generator().manual_seed(1)
        self.store = store
        self.ids = [torch.randint(0, rows, (SOME,), generator=chance) for _ in range(64)]
        self.grads = torch.randn(SOME, DIM, generator=chance) * 0.01
        self.rounds = self.pulls = 0

    def run(self, until: Callable[[], bool]) -> tuple[float, np.ndarray]:
        """Rounds a second, and the seconds of each pull."""
        pulls, begun, count = [], time.perf_counter(), 0
        while not until():
            rows = {"rows": self.ids[count % 64]}
            at = time.perf_counter()
            self.store.pull(rows)
            pulls.append(time.perf_counter() - at)
            self.store.push(rows, {"rows": self.grads}).wait()
            count += 1
        return count / (time.perf_counter() - begun), np.array(pulls)

    def seconds(self, seconds: float) -> tuple[float, np.ndarray]:
        end = time.perf_counter() + seconds
        return self.run(lambda: time.perf_counter() > end)


def snapshots(stack: ExitStack, rows: int, seconds: float) -> list[Claim]:
    cluster = Cluster(stack, 1)
    cluster.fill(rows)
    load, pid = Load(cluster.store, rows), cluster.processes[0].pid
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=Path.cwd())))
    load.seconds(seconds / 2)
    before, _ = load.seconds(seconds)
    memory, peak = (rss_mb(pid), rss_mb()), [0.0, 0.0]
    written: dict[str, Any] = {}

    def save(tag: str, base: str) -> None:
        (folder / tag).mkdir()
        if base:
            for old in (folder / base).iterdir():
                (folder / tag / old.name).hardlink_to(old)
        snapshot = cluster.store.snapshot(["rows"], folder / tag, tag, base, True)
        done = threading.Event()
        thread = threading.Thread(
            target=lambda: (written.update({tag: snapshot.finish()}), done.set())
        )
        thread.start()

        def over() -> bool:
            peak[0] = max(peak[0], rss_mb(pid) - memory[0])
            peak[1] = max(peak[1], rss_mb() - memory[1])
            return done.is_set()

        rates.append(load.run(over)[0])
        thread.join()
        snapshot.end(True)

    rates: list[float] = []
    save("full", "")
    # one hundredth of the rows, once
    ids = torch.arange(0, rows, 100)
    cluster.store.push({"rows": ids}, {"rows": torch.ones(ids.numel(), DIM)}).wait()
    quiet = cluster.store.snapshot  # no load: exactly those rows change
    (folder / "base").mkdir()
    base = quiet(["rows"], folder / "base", "base", "", True)
    base.finish()
    base.end(True)
    cluster.store.push({"rows": ids}, {"rows": torch.ones(ids.numel(), DIM)}).wait()
    (folder / "more").mkdir()
    more = quiet(["rows"], folder / "more", "more", "base", True)
    size = lambda files: sum(nbytes for of in files.values() for _, nbytes, _ in of)
    full, part = size(written["full"]), size(more.finish())
    more.end(True)
    detail = {
        "written": f"{full / 1e9:.2f} GB while {rates[0]:.0f} rounds/s, {before:.0f} before",
        "memory": f"server +{peak[0]:.0f} MB, worker +{peak[1]:.0f} MB",
    }
    ratio = rates[0] / before
    return [
        Claim("snapshot", rates[0], before, "rounds/s", ratio, BARS["snapshot"], detail),
        Claim("increment", part / 1e6, full / 1e6, "MB", 0.03 * full / part, BARS["increment"]),
    ]


def move(stack: ExitStack, rows: int, seconds: float) -> Claim:
    cluster = Cluster(stack, 1, shards=2)
    cluster.fill(rows)
    load = Load(cluster.store, rows)
    load.seconds(seconds / 2)
    _, calm = load.seconds(seconds)
    cluster.start(extra=True)
    operator = stack.enter_context(Operator(cluster.root.address, TOKEN))
    while len(operator.status()["servers"]) < 2:
        time.sleep(0.05)
    begun = time.perf_counter()
    operator.rebalance()
    moved = threading.Event()

    def watch() -> None:
        while any(s["learns"] or s["gives"] for s in operator.status()["servers"]):
            time.sleep(0.02)
        moved.set()

    thread = threading.Thread(target=watch)
    thread.start()
    _, moving = load.run(moved.is_set)
    took = time.perf_counter() - begun
    thread.join()
    before, during = (float(np.percentile(x, 99)) * 1e3 for x in (calm, moving))
    status = operator.status()
    held = [len(s["leads"]) for s in status["servers"]]
    detail = {
        "moved": f"{sum(c[3] for c in status['copies']) / 1e9:.2f} GB in {took:.1f} s, "
        f"shards by server: {held}",
        "longest pull": f"{moving.max() * 1e3:.1f} ms, {calm.max() * 1e3:.1f} before",
    }
    ratio = 5 * before / during
    return Claim("move", during, before, "ms (p99)", ratio, BARS["move"], detail)


def measure(quick: bool, only: list[str]) -> list[Claim]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = 100_000 if quick else 4_000_000  # of 512 bytes with their state
    seconds = 0.5 if quick else 4.0
    need = lambda *names: not only or any(name in only for name in names)
    claims: list[Claim] = []
    try:
        if need("replicas"):
            with ExitStack() as stack:
                claims.append(replicas(stack, seconds / 2, 2 if quick else 6))
        if need("recovery"):
            with ExitStack() as stack:
                claims.append(recovery(stack, 2 if quick else 10))
        if need("snapshot", "increment"):
            with ExitStack() as stack:
                claims += snapshots(stack, rows, seconds)
        if need("move"):
            with ExitStack() as stack:
                claims.append(move(stack, rows, seconds))
    finally:
        torch.set_num_threads(threads)
    return claims
