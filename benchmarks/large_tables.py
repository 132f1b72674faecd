"""One server with a large table: pull and push of 20,000 ids at 5, 20 and 100 million rows.

Rows of 16 numbers, Adagrad, uniform ids: nothing is found in a cache, which is the worst that a
table can meet. Each size and page size is measured in a process of its own, on one thread, and in
it in turn:

    pull_5m, pull_20m, pull_100m    a pull (ids of any int64, looked up) against a plain gather
                                    from known row numbers of the same table
    push_5m, push_20m, push_100m    a push (ids that repeat are summed, Adagrad) against a kernel
                                    that knows the rows and only adds to them
    shared_100m                     rounds of pull and push through a server process and shared
                                    memory, against the same at 5 million rows

`longest` is the longest call while the table was filled, 100,000 rows a call: the index is built
anew each time it has grown by a quarter, and such a call waits for that.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from common import Claim, alternate, cores, median, median_round

from manyhands.core import Table
from manyhands.kernels.instructions import prefetch
from manyhands.server.client.server_store import ServerStore
from manyhands.server.tables.sparse import SparseTable
from manyhands.server.tables.warm_up import warm_up

DIM, IDS, FILL, BATCHES = 16, 20_000, 100_000, 16
SIZES = {"5m": 5_000_000, "20m": 20_000_000, "100m": 100_000_000}
ROW_BYTES = 2 * 4 * DIM + 45  # values, optimizer state, and the index while it grows
BARS = {"pull": 0.5, "push": 0.4, "shared": 0.5}
TOKEN = "benchmark"
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
U64 = np.uint64


def ids_of(numbers: np.ndarray) -> np.ndarray:
    """Distinct ids all over int64: an odd number has an inverse modulo 2 to the 64."""
    return (numbers.astype(np.uint64) * GOLDEN).view(np.int64)


def table_of(name: str) -> Table:
    return Table(name, dim=DIM, optimizer="adagrad", options={"lr": 0.01})


@numba.njit(nogil=True, error_model="numpy", boundscheck=False)
def gather(slab, rows, out, dim, stride):
    lines = (dim * 4 + 63) // 64
    for i in range(rows.size):
        if i + 16 < rows.size:
            for j in range(lines):
                prefetch(slab, U64(rows[i + 16]) * U64(stride), j)
        for k in range(dim):
            out[i * dim + k] = slab[rows[i] * stride + k]


@numba.njit(nogil=True, error_model="numpy", boundscheck=False)
def update(slab, rows, grads, dim, stride):
    lines = (stride * 4 + 63) // 64
    for i in range(rows.size):
        if i + 16 < rows.size:
            for j in range(lines):
                prefetch(slab, U64(rows[i + 16]) * U64(stride), j)
        for k in range(dim):
            g = grads[i * dim + k]
            at = rows[i] * stride + k
            slab[at + dim] += g * g
            slab[at] -= 0.01 * g


def kernels(rows: int, huge: bool, times: int) -> dict[str, float]:
    """Milliseconds a batch, and what filling took."""
    warm_up("float32", ["adagrad"])
    table, out = SparseTable(table_of("rows"), huge=huge), np.empty((FILL, DIM), np.float32)
    longest, start = 0.0, time.perf_counter()
    for first in range(0, rows, FILL):
        ids, before = ids_of(np.arange(first, min(rows, first + FILL))), time.perf_counter()
        table.pull(ids, out[: ids.size])
        longest = max(longest, time.perf_counter() - before)
    filled = time.perf_counter() - start
    rng = np.random.default_rng(1)
    known = [rng.integers(0, rows, IDS) for _ in range(BATCHES)]  # rows are numbered as made
    batches = [ids_of(k) for k in known]
    room, g = out[:IDS], (rng.standard_normal((IDS, DIM)) * 1e-3).astype(np.float32)
    turn = iter(range(10**9))

    def timed(call: Callable[[int, np.ndarray], Any]) -> Callable[[], float]:
        def one() -> float:
            i, fresh = next(turn) * 5 % BATCHES, g.copy()  # a push sums repeated ids in it
            start = time.perf_counter()
            call(i, fresh)
            return time.perf_counter() - start

        return one

    slab, stride = table.storage.slab, table.stride
    runs = {
        "pull": timed(lambda i, _: table.pull(batches[i], room)),
        "gather": timed(lambda i, _: gather(slab, known[i], room.reshape(-1), DIM, stride)),
        "push": timed(lambda i, fresh: table.push(batches[i], fresh)),
        "update": timed(lambda i, fresh: update(slab, known[i], fresh.reshape(-1), DIM, stride)),
    }
    for run in runs.values():
        run()
    found = {name: 1e3 * median(s) for name, s in alternate(runs, times).items()}
    return {
        **found,
        "fill": rows / filled / 1e6,
        "longest": 1e3 * longest,
        "bytes": table.nbytes / table.rows - table.row_bytes,
    }


def served(rows: int, times: int) -> dict[str, float]:
    """Rounds a second of pull and push through a server process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "manyhands.server.process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps({"token": TOKEN, "workers": 1}).encode() + b"\n")
    process.stdin.flush()
    store = ServerStore(json.loads(process.stdout.readline())["address"], 0, 1, TOKEN)
    try:
        store.create(table_of("rows"))
        for first in range(0, rows, FILL):
            numbers = np.arange(first, min(rows, first + FILL))
            store.pull({"rows": torch.from_numpy(ids_of(numbers))})
        rng, g = np.random.default_rng(1), torch.randn(IDS, DIM) * 1e-3
        numbers = [rng.integers(0, rows, IDS) for _ in range(BATCHES)]
        batches = [{"rows": torch.from_numpy(ids_of(k))} for k in numbers]

        def turn(i: int) -> None:
            store.pull(batches[i % BATCHES])
            store.push(batches[i % BATCHES], {"rows": g.clone()})

        found = 1 / median_round(turn, times / 20)
        store.flush()
    finally:
        store.close()
        process.stdin.close()
        process.wait(60)
        process.stdout.close()
    return {"rounds": found}


def apart(*arguments: Any) -> dict[str, float]:
    """What this file prints for `arguments`: its memory goes back before the next one starts."""
    command = [sys.executable, str(Path(__file__).resolve()), *map(str, arguments)]
    return dict(json.loads(subprocess.run(command, capture_output=True, check=True).stdout))


def available() -> int:
    """Bytes of memory that could be had; 0: this system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable"))


def lacking(rows: int) -> str | None:
    needed, there = rows * ROW_BYTES, available()
    if needed <= there:
        return None
    return f"{needed / 2**30:.1f} GiB of memory needed, {there / 2**30:.1f} available"


def measure(quick: bool, only: list[str]) -> list[Claim]:
    times = 5 if quick else 61
    sizes = {k: n // 100 if quick else n for k, n in SIZES.items()}
    claims: list[Claim] = []
    for name, rows in sizes.items():
        if only and not {f"pull_{name}", f"push_{name}"} & set(only):
            continue
        if reason := lacking(rows):
            claims += [Claim(f"{kind}_{name}", skipped=reason) for kind in ("pull", "push")]
            continue
        huge, small = apart("kernels", rows, 1, times), apart("kernels", rows, 0, times)
        detail = {
            f"{name}, pages of {size}": ", ".join(
                f"{k} {ms[k]:.2f} ms" for k in ("pull", "gather", "push", "update")
            )
            + f"; filled at {ms['fill']:.1f} million rows/s, longest call {ms['longest']:.0f} ms, "
            f"{ms['bytes']:.1f} bytes a row beyond values and state"
            for size, ms in (("2 MB", huge), ("4 kB", small))
        }
        for kind, limit in (("pull", "gather"), ("push", "update")):
            ratio = huge[limit] / huge[kind]
            claim = Claim(
                f"{kind}_{name}", huge[kind], huge[limit], "ms", ratio, BARS[kind], detail
            )
            claims.append(claim)
            detail = None
    return [c for c in claims if not only or c.name in only] + _shared(sizes, times, only)


def _shared(sizes: dict[str, int], times: int, only: list[str]) -> list[Claim]:
    name = "shared_100m"
    if only and name not in only:
        return []
    if reason := "two cores needed" if cores() < 2 else lacking(sizes["100m"]):
        return [Claim(name, skipped=reason)]
    found = {size: apart("served", rows, times)["rounds"] for size, rows in sizes.items()}
    ours, least = found["100m"], found["5m"]
    detail = {"rounds/s": ", ".join(f"{size} {x:.0f}" for size, x in found.items())}
    return [Claim(name, ours, least, "rounds/s", ours / least, BARS["shared"], detail)]


def main(kind: str, rows: str, *rest: str) -> None:
    torch.set_num_threads(1)
    if kind == "kernels":
        print(json.dumps(kernels(int(rows), rest[0] == "1", int(rest[1]))))
    else:
        print(json.dumps(served(int(rows), int(rest[0]))))


if __name__ == "__main__":
    main(*sys.argv[1:])
