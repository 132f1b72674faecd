"""One thread of a parameter server: 20,000 ids a batch out of 5 million rows of 64 numbers.

Adagrad; all in memory.

    pull_vs_torch    our pull (ids of any int64, looked up) against torch.index_select on a dense
                     table (row numbers known)
    pull_vs_gather   the same against a plain gather in numba from known row numbers: what lookups
                     leave of the most there is
    push_vs_torch    our push (repeated ids summed, checked for NaN, Adagrad) against unique +
                     Adagrad in torch: the fastest of torch.optim.Adagrad on a sparse gradient,
                     index_add and index_put
    two_shards       pulls and pushes of two threads on a table each against one thread

The rest (16 and 128 numbers a row, ids by Zipf's law, bytes a row) is in the table of the first
claim; there also the fastest that we could make torch: scatter_add over an expanded index, which
nobody writes, but which is what torch can do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from common import Claim, alternate, cores, median

from manyhands.core import Table
from manyhands.kernels.instructions import copy, prefetch
from manyhands.server.tables.sparse import SparseTable
from manyhands.server.tables.warm_up import warm_up

BATCH, BATCHES = 20_000, 16
LR, EPS = 0.01, 1e-10
U64 = np.uint64
USUAL = ("by_optimizer", "by_index_add", "by_index_put")
BARS = {"pull_vs_torch": 1.0, "pull_vs_gather": 0.55, "push_vs_torch": 5.0, "two_shards": 1.5}


@numba.njit(nogil=True, error_model="numpy", boundscheck=False)
def plain_gather(table, rows, out, dim, stride):
    lines = (dim * 4 + 63) // 64
    for i in range(rows.size):
        if i + 16 < rows.size:
            for j in range(lines):
                prefetch(table, U64(rows[i + 16]) * U64(stride), j)
        copy(out, U64(i) * U64(dim), table, U64(rows[i]) * U64(stride), U64(dim))


def seconds(call: Callable[[], object]) -> float:
    """Of this thread: that something else ran meanwhile does not count."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


def draws(law: str, rows: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Batches of row numbers."""
    if law == "uniform":
        return [rng.integers(0, rows, BATCH) for _ in range(BATCHES)]
    chances = np.cumsum(1.0 / np.arange(1, rows + 1) ** 1.05)
    where = rng.permutation(rows)  # the frequent ones anywhere
    return [
        where[np.searchsorted(chances, rng.random(BATCH) * chances[-1])] for _ in range(BATCHES)
    ]


def filled(name: str, ids: np.ndarray, dim: int, huge: bool) -> SparseTable:
    table = SparseTable(Table(name, dim=dim, optimizer="adagrad", options={"eps": EPS}), huge=huge)
    out = np.empty((100_000, dim), np.float32)
    for start in range(0, ids.size, out.shape[0]):
        some = ids[start : start + out.shape[0]]
        table.pull(some, out[: some.size])
    return table


class Torch:
    """Dense tables of values and of Adagrad's sums, and the ways to update some of their rows."""

    def __init__(self, rows: int, dim: int):
        self.values, self.sums = torch.full((rows, dim), 0.01), torch.full((rows, dim), 1e-3)
        self.out = torch.empty(BATCH, dim)
        self.parameter = torch.nn.Parameter(self.values)
        self.optimizer = torch.optim.Adagrad([self.parameter], lr=LR, eps=EPS)
        self.optimizer.state[self.parameter]["sum"] = self.sums  # of one memory with the other ways

    def pull(self, at: torch.Tensor) -> None:
        torch.index_select(self.values, 0, at, out=self.out)

    def _united(self, at: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        distinct, inverse = torch.unique(at, return_inverse=True)
        return distinct, torch.zeros(distinct.numel(), g.shape[1]).index_add_(0, inverse, g)

    def by_optimizer(self, at: torch.Tensor, g: torch.Tensor) -> None:
        self.parameter.grad = torch.sparse_coo_tensor(
            at[None], g, self.values.shape, check_invariants=False
        )
        self.optimizer.step()

    def by_index_add(self, at: torch.Tensor, g: torch.Tensor) -> None:
        at, g = self._united(at, g)
        n = self.sums.index_select(0, at).addcmul_(g, g)
        self.sums.index_copy_(0, at, n)
        self.values.index_add_(0, at, g.div_(n.sqrt_().add_(EPS)), alpha=-LR)

    def by_index_put(self, at: torch.Tensor, g: torch.Tensor) -> None:
        at, g = self._united(at, g)
        n = self.sums.index_select(0, at).addcmul_(g, g)
        self.sums[at] = n
        self.values[at] = self.values.index_select(0, at).addcdiv_(
            g, n.sqrt_().add_(EPS), value=-LR
        )

    def by_scatter(self, at: torch.Tensor, g: torch.Tensor) -> None:
        at, g = self._united(at, g)
        wide = at[:, None].expand(-1, g.shape[1])
        self.sums.scatter_add_(0, wide, g * g)
        n = self.sums.index_select(0, at).sqrt_().add_(EPS)
        self.values.scatter_add_(0, wide, g.div_(n).mul_(-LR))


def compare(dim: int, rows: int, times: int, huge: bool) -> dict[str, dict[str, float]]:
    """Milliseconds a batch by law and operation, in turn on the same rows; and bytes a row beyond
    values and state.
    """
    rng = np.random.default_rng(dim)
    ids = rng.permutation(np.unique(rng.integers(-(2**62), 2**62, rows + rows // 100)))[:rows]
    table, peer = filled("bench", ids, dim, huge), Torch(rows, dim)
    out, g = (
        np.empty((BATCH, dim), np.float32),
        (rng.standard_normal((BATCH, dim)) * 1e-3).astype(np.float32),
    )
    known, theirs, scratch = (
        np.empty((BATCHES, BATCH), np.int64),
        torch.from_numpy(g.copy()),
        g.copy(),
    )
    found = {}
    for law in ("uniform", "zipf"):
        at = draws(law, rows, rng)
        batches, numbers = [ids[a] for a in at], [torch.from_numpy(a) for a in at]
        for i, batch in enumerate(batches):  # the rows have the numbers in which they were made
            table.pull(batch, out)
            known[i] = at[i]
        turn = iter(range(10**9))

        def one(call: Callable[[int], Any], turn: Any = turn) -> Callable[[], float]:
            def timed() -> float:
                i = next(turn) * 5 % BATCHES
                np.copyto(scratch, g)  # as if it had just arrived; a push sums repeated ids in it
                return seconds(lambda: call(i))

            return timed

        runs = {
            "pull": one(lambda i, b=batches: table.pull(b[i], out)),
            "index_select": one(lambda i, n=numbers: peer.pull(n[i])),
            "gather": one(
                lambda i: plain_gather(
                    table.storage.slab, known[i], out.reshape(-1), dim, table.stride
                )
            ),
            "push": one(lambda i, b=batches: table.push(b[i], scratch, LR)),
            **{
                way: one(lambda i, n=numbers, way=way: getattr(peer, way)(n[i], theirs))
                for way in (*USUAL, "by_scatter")
            },
        }
        for run in runs.values():
            run()
        found[law] = {name: median(s) * 1e3 for name, s in alternate(runs, times).items()}
        found[law]["torch_push"] = min(found[law][way] for way in USUAL)
    found["bytes"] = {"overhead": (table.nbytes - table.rows * table.row_bytes) / table.rows}
    return found


def pushes(ms: dict[str, float]) -> str:
    """Torch's ways to push, and how many times ours goes into each."""
    ways = {
        "Adagrad": "by_optimizer",
        "index_add": "by_index_add",
        "index_put": "by_index_put",
        "scatter_add": "by_scatter",
    }
    return ", ".join(
        f"{name} {ms[way]:.2f}: {ms[way] / ms['push']:.1f}x" for name, way in ways.items()
    )


def two_threads(rows: int, times: int, huge: bool) -> tuple[float, float]:
    """Rounds of pull and push a second: two threads on half of the rows each, and one thread on one
    half.
    """
    rng = np.random.default_rng(9)
    shards: list[Callable[[int], None]] = []
    for s in range(2):
        ids = np.unique(rng.integers(-(2**62), 2**62, rows // 2))
        table, out = filled(f"shard {s}", ids, 64, huge), np.empty((BATCH, 64), np.float32)
        batches = [ids[rng.integers(0, ids.size, BATCH)] for _ in range(BATCHES)]
        g = np.zeros((BATCH, 64), np.float32)

        def rounds(
            n: int, table: Any = table, batches: Any = batches, out: Any = out, g: Any = g
        ) -> None:
            for i in range(n):
                table.pull(batches[i % BATCHES], out)
                table.push(batches[i % BATCHES], g, LR)

        shards.append(rounds)

    def run(count: int) -> float:
        threads = [threading.Thread(target=shards[s], args=(30,)) for s in range(count)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return count * 30 / (time.perf_counter() - start)

    run(2)
    rates = alternate({"two": lambda: run(2), "one": lambda: run(1)}, times)
    return median(rates["two"]), median(rates["one"])


def measure(quick: bool, only: list[str]) -> list[Claim]:
    threads = torch.get_num_threads()
    torch.sparse.check_sparse_tensor_invariants.disable()  # as it is; unsaid, torch warns
    torch.set_num_threads(1)
    try:
        return _measure(300_000 if quick else 5_000_000, 9 if quick else 31, only)
    finally:
        torch.set_num_threads(threads)


def _measure(rows: int, times: int, only: list[str]) -> list[Claim]:
    warm_up("float32", ["adagrad"])
    wanted = [name for name in BARS if not only or name in only]
    claims: dict[str, Claim] = {}
    if set(wanted) - {"two_shards"}:
        found = {64: compare(64, rows, times, True)}
        small = compare(64, rows, times, False)["uniform"]
        if not only:
            found |= {dim: compare(dim, rows, times // 2, True) for dim in (16, 128)}
        table = {
            f"{dim} numbers, {law}": (
                f"pull {ms['pull']:.2f} ms (index_select {ms['index_select']:.2f}, gather "
                f"{ms['gather']:.2f}), "
                f"push {ms['push']:.2f} ms ({pushes(ms)})"
            )
            for dim, laws in sorted(found.items())
            for law, ms in laws.items()
            if law != "bytes"
        }
        table["pages of 4 kB, 64 numbers, uniform"] = (
            f"pull {small['pull']:.2f} ms (index_select {small['index_select']:.2f}), "
            f"push {small['push']:.2f} ms ({pushes(small)})"
        )
        table["bytes a row beyond values and state"] = ", ".join(
            f"{laws['bytes']['overhead']:.1f} ({dim})" for dim, laws in sorted(found.items())
        )
        ms = found[64]["uniform"]
        for name, ours, peer in (
            ("pull_vs_torch", "pull", "index_select"),
            ("pull_vs_gather", "pull", "gather"),
            ("push_vs_torch", "push", "torch_push"),
        ):
            claims[name] = Claim(name, ms[ours], ms[peer], "ms", ms[peer] / ms[ours], BARS[name])
        claims[next(name for name in wanted if name in claims)].detail = table
    if "two_shards" in wanted:
        if cores() < 2:
            claims["two_shards"] = Claim("two_shards", skipped="needs two cores")
        else:
            two, one = two_threads(rows, max(3, times // 4), True)
            claims["two_shards"] = Claim(
                "two_shards", two, one, "rounds/s", two / one, BARS["two_shards"]
            )
    return [claims[name] for name in wanted]
