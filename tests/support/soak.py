"""Soak: servers under clients that are killed all the time.

    python tests/support/soak.py --minutes 10 [--servers 2] [--clients 4] [--seed 0]

Nothing may leak, and every acknowledged push counts exactly once. Each client keeps a journal:
"begin n amount" before a push, "done n" once it is acknowledged. It adds to rows that no other
client and no other incarnation touches, so every row at the end has one owner:

    row = sum of acknowledged amounts + sum over some of those in flight when it was killed

A client has several pushes in flight, with amounts 1, 2, 4, ..., so that any sum of them shows
which of them arrived. It also pulls and pushes rows that all clients use, pulls a dense table, and
ticks, so that others wait for it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from manyhands.core import ProcessInfo, Table
from manyhands.exchange import segments
from manyhands.launch import servers as processes

UNDER_WAY = 8  # pushes of a client that are not acknowledged yet
HOT = 5000  # rows that all clients share
DENSE = 20_000
OWN = Table("own", dim=4, dtype="float64", optimizer="sum", init="zeros")
SHARED = Table("shared", dim=16, optimizer="adagrad", options={"lr": 0.1})
VECTOR = Table("vector", length=DENSE, dtype="float64", optimizer="sum")
STALENESS = 3
RSS_SLACK = 24 << 20  # what an allocator keeps: it must not grow with the length of the soak


# -- a client --


def client(
    coordinator: str, token: str, rank: int, size: int, life: int, journal: str, until: float
) -> None:
    """Push, pull and tick until the time is over, then leave as one should; or be killed."""
    from manyhands.server.client.server_store import ServerStore

    torch.set_num_threads(1)
    log = os.open(journal, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    store = ServerStore(
        coordinator, rank, size, token, timeout_s=60.0, transport=("auto", "tcp")[rank % 2]
    )
    store.create(OWN)
    store.create(SHARED)
    store.create(VECTOR, torch.zeros(DENSE, dtype=torch.float64))
    own = own_ids(rank, life)
    chance = torch.Generator().manual_seed(rank * 100_003 + life)
    waiting: list[tuple[int, Any]] = []
    n, given = 0, 0.0
    while time.time() < until:
        amount = float(1 << (n % UNDER_WAY))
        os.write(log, f"begin {n} {amount}\n".encode())
        wanted = (
            torch.randint(HOT, (400,), generator=chance) ** 2 % HOT
        )  # some much more often than others
        rows = {"own": own, "shared": wanted, "vector": None}
        updates = {
            "own": torch.full((len(own), 4), amount, dtype=torch.float64),
            "shared": torch.randn(len(wanted), 16, generator=chance),
            "vector": torch.zeros(DENSE, dtype=torch.float64),
        }
        updates["vector"][rank] = amount  # the dense one must add up over all lives of a rank
        waiting.append((n, store.push(rows, updates)))
        n, given = n + 1, given + amount
        while len(waiting) >= UNDER_WAY:
            _acknowledged(log, *waiting.pop(0))
        if n % 3 == 0:
            seen = store.pull({"shared": wanted, "own": own})
            assert torch.isfinite(seen["shared"]).all() and (seen["own"] == given).all(), (
                "a client sees all that it pushed"
            )
        if n % 5 == 0:
            store.pull({"vector": None})
        if n % 4 == 0:
            for entry in waiting:
                _acknowledged(log, *entry)
            waiting.clear()
            store.tick(staleness=STALENESS)
    for entry in waiting:
        _acknowledged(log, *entry)
    store.close()
    os.close(log)


def own_ids(rank: int, life: int) -> torch.Tensor:
    """Eight rows of one life of one client, spread over all servers."""
    return torch.arange(8) + 8 * (life + 1_000_000 * rank) - (1 << 40)


def _acknowledged(log: int, n: int, work: Any) -> None:
    work.wait()
    os.write(log, f"done {n}\n".encode())


def read_journal(path: Path) -> tuple[float, list[float]]:
    """The sum of what was acknowledged, and the amounts that were not."""
    begun: dict[int, float] = {}
    total = 0.0
    for line in path.read_text().splitlines():
        kind, n, *amount = line.split()
        if kind == "begin":
            begun[int(n)] = float(amount[0])
        else:
            total += begun.pop(int(n))
    return total, list(begun.values())


def possible(extra: float, pending: list[float]) -> bool:
    """Whether `extra` is the sum of some of the amounts under way, each of them once."""
    sums = {0.0}
    for amount in pending:
        sums |= {s + amount for s in sums}
    return extra in sums


# -- what a process holds --


@dataclass(frozen=True)
class Footprint:
    rss_bytes: int
    threads: int
    descriptors: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        return cls(
            int(status["VmRSS"].split()[0]) << 10,
            int(status["Threads"]),
            len(os.listdir(f"/proc/{pid}/fd")),
        )


def shared_memory() -> set[str]:
    return {p.name for p in segments.directory().glob(f"{segments.PREFIX}*")}


def settled(
    pids: list[int], wanted: list[Footprint] | None = None, limit_s: float = 10.0
) -> list[Footprint]:
    """Footprints once the servers have noticed that all clients are gone; those of the end of
    `limit_s` if they do not.
    """
    deadline = time.monotonic() + limit_s
    now = [Footprint.of(p) for p in pids]
    while time.monotonic() < deadline:
        time.sleep(0.2)
        before, now = now, [Footprint.of(p) for p in pids]
        counts = [(f.threads, f.descriptors) for f in now]
        if counts == [(f.threads, f.descriptors) for f in (before if wanted is None else wanted)]:
            break
    return now


# -- the soak --


@dataclass
class Outcome:
    minutes: float
    clients: int
    kills: int
    pushes: int  # acknowledged
    unacknowledged: int
    arrived: int  # of those
    before: list[Footprint]
    after: list[Footprint]
    wrong: list[str] = field(default_factory=list)


class Soak:
    def __init__(self, folder: Path, servers: int = 2, clients: int = 4, seed: int = 0):
        self.folder, self.size, self.chance = folder, clients, random.Random(seed)
        self.servers = processes.start(
            servers, ProcessInfo(), dist.HashStore(), workers=clients, timeout_s=120.0, env={}
        )
        self.pids = [child.process.pid for child in self.servers.children]
        self._context = _fast_context()
        self.lives = [0] * clients
        self.running: dict[int, Any] = {}
        self.kills = 0

    def spawn(self, rank: int, until: float) -> None:
        life = self.lives[rank]
        self.lives[rank] += 1
        journal = str(self.folder / f"{rank}-{life}.journal")
        words = (
            self.servers.coordinator,
            self.servers.token,
            rank,
            self.size,
            life,
            journal,
            until,
        )
        process = self._context.Process(target=client, args=words, daemon=True)
        process.start()
        self.running[rank] = process

    def all_clients(self, until: float) -> None:
        for rank in range(self.size):
            self.spawn(rank, until)

    def kill_some(self, until: float) -> None:
        """Kill a client every now and then, and start it again."""
        while time.time() < until - 2.0:
            time.sleep(self.chance.uniform(0.1, 1.0))
            rank = self.chance.randrange(self.size)
            victim = self.running[rank]
            if victim.exitcode is not None:
                raise AssertionError(
                    f"client {rank} ended by itself with {victim.exitcode}; its words are above"
                )
            os.kill(victim.pid, signal.SIGKILL)
            victim.join()
            self.kills += 1
            self.spawn(rank, until)

    def finish(self) -> list[str]:
        wrong = []
        for rank, process in self.running.items():
            process.join(90.0)
            if process.exitcode != 0:
                wrong.append(f"client {rank} ended with {process.exitcode} instead of 0")
                process.kill()
                process.join()
        self.running.clear()
        return wrong

    def check_sums(self) -> tuple[list[str], int, int, int]:
        """Each row against the journals."""
        from manyhands.server.client.server_store import ServerStore

        wrong, acknowledged, unacknowledged, arrived = [], 0, 0, 0
        store = ServerStore(
            self.servers.coordinator, 0, self.size, self.servers.token, timeout_s=60.0
        )
        try:
            store.create(OWN)
            store.create(VECTOR, torch.zeros(DENSE, dtype=torch.float64))
            vector = store.pull({"vector": None})["vector"]
            for rank in range(self.size):
                sure, open_ = 0.0, 0.0
                for path in sorted(self.folder.glob(f"{rank}-*.journal")):
                    life = int(path.stem.partition("-")[2])
                    total, pending = read_journal(path)
                    text = path.read_text()
                    acknowledged += text.count("done")
                    unacknowledged += len(pending)
                    sure, open_ = sure + total, open_ + sum(pending)
                    found = store.pull({"own": own_ids(rank, life)})["own"]
                    for row in found.tolist():
                        if len(set(row)) != 1 or not possible(row[0] - total, pending):
                            wrong.append(
                                f"client {rank} life {life}: {total} acknowledged, {pending} "
                                f"open, but a row is {row}"
                            )
                    arrived += bin(int(found[0, 0] - total)).count("1")
                extra = float(vector[rank]) - sure
                if not 0 <= extra <= open_:
                    wrong.append(
                        f"client {rank}: {sure} acknowledged and {open_} open in the dense table, "
                        f"but it holds {vector[rank]}"
                    )
        finally:
            store.close()
        return wrong, acknowledged, unacknowledged, arrived

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.join()
        self.servers.close()


def _fast_context() -> Any:
    """Clients are forked from a process that has loaded everything, so that they start in
    milliseconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["soak_preload"])
    # it is told where to find that by a variable alone: Python 3.11 passes our sys.path on, and
    # does not use it
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), *filter(None, [before])]
    )
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return context


def soak(minutes: float, servers: int = 2, clients: int = 4, seed: int = 0) -> Outcome:
    """Run it all; `wrong` of what comes back says what must not have happened."""
    with _folder() as folder, contextlib.closing(Soak(folder, servers, clients, seed)) as run:
        memory = shared_memory()
        # once through everything, kills included, so that what is made once is there: kernels,
        # buffers, arenas of the allocator,
        # and its caches as full as they get
        warm = time.time() + max(6.0, 6.0 * minutes)
        run.all_clients(warm)
        run.kill_some(warm)
        wrong = run.finish()
        before = settled(run.pids)
        until = time.time() + 60 * minutes
        run.all_clients(until)
        run.kill_some(until)
        wrong += run.finish()
        after = settled(run.pids, before)
        wrong += [
            f"server {i} ended: {run.servers.fate()}"
            for i, c in enumerate(run.servers.children)
            if not c.alive
        ]
        sums, pushes, unacknowledged, arrived = run.check_sums()
        wrong += sums
        for i, (one, two) in enumerate(zip(before, after, strict=True)):
            if two.threads > one.threads or two.descriptors > one.descriptors:
                wrong.append(f"server {i}: threads or descriptors grew from {one} to {two}")
            if two.rss_bytes > one.rss_bytes + RSS_SLACK:
                wrong.append(
                    f"server {i}: memory grew from {one.rss_bytes >> 20} to {two.rss_bytes >> 20} "
                    "MiB"
                )
        left = {
            name
            for name in shared_memory() - memory
            if not segments.alive(int(name.removeprefix(segments.PREFIX).split("-")[0]))
        }
        if left:
            wrong.append(f"shared memory left behind: {sorted(left)}")
        return Outcome(
            minutes,
            sum(run.lives),
            run.kills,
            pushes,
            unacknowledged,
            arrived,
            before,
            after,
            wrong,
        )


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    outcome = soak(given.minutes, given.servers, given.clients, given.seed)
    print(json.dumps(asdict(outcome), indent=1))
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
