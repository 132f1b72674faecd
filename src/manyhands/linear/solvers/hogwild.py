"""Hogwild!: stochastic gradient steps of threads that share w, without locks.

    thread:  for row i of its part, in random order:  w_j <- w_j - eta g_j   for j in row i

Rows are sparse, so two threads seldom step the same weight at once; where they do, one step may be
lost, which costs less than waiting for a lock. One thread takes the steps of serial SGD, bit for
bit; so do several whose parts share no column. Every row of every part is visited once an epoch.

The intercept, which every row would step, is summed by each thread and added for others to see
every few rows. `writes`: "shared" as above; "atomic", which loses no step but costs a locked
instruction a weight; "locked", one lock around each step: the peer to compare with.

Ranks average their weights after each epoch: see `stochastic.epochs`.

Paper: Recht, Re, Wright & Niu 2011 (arXiv:1106.5730).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from manyhands.kernels.atomics import acquire, atomic_add, release
from manyhands.kernels.compile import compiled
from manyhands.linear.passes.rows import Array, Rows
from manyhands.linear.problem import Problem
from manyhands.linear.stochastic.epochs import State, Stochastic
from manyhands.linear.stochastic.sgd_steps import (
    AHEAD,
    ATOMIC,
    LOCKED,
    SHARED,
    Arguments,
    EpochArrays,
    lateness,
    prefetch_bounds,
    prefetch_row,
    shuffle,
    thread_seed,
    visit,
)

FLUSH = 32  # rows between two looks of a thread at the others' intercept
WRITES = {"shared": SHARED, "locked": LOCKED, "atomic": ATOMIC}


@compiled
def _part(
    mode, alone, indptr, indices, values, lo, hi, order, y, c, w, bias, first, stride, a, rare,
    shrink, paid, sums, lock,
):  # fmt: skip
    """The steps of rows order[lo:hi], numbered first + stride, first + 2 stride, ..."""
    total, b, moved, late = 0.0, bias[0], 0.0, 0.0
    for p in range(lo, hi):
        if p + 2 * AHEAD < hi:
            prefetch_bounds(indptr, y, c, order[p + 2 * AHEAD])
        if p + AHEAD < hi:
            prefetch_row(indptr, indices, values, order[p + AHEAD])
        i = order[p]
        t = first + stride * np.float64(p - lo + 1)
        if mode == LOCKED:
            acquire(lock)
            b = bias[0]
        phi, step = visit(
            mode, indptr, indices, values, i, y[i], c[i], w, b, t, a, rare, shrink, paid, sums
        )
        total += phi
        b += step
        late += lateness(t, a) * step
        if mode == LOCKED:
            bias[0] = b
            release(lock)
        elif not alone:
            moved += step
            if (p - lo) % FLUSH == FLUSH - 1:
                b = atomic_add(bias, 0, moved) + moved
                moved = 0.0
    if alone:
        bias[0] = b
    elif mode != LOCKED:
        atomic_add(bias, 0, moved)
    atomic_add(bias, 8, late)
    return total


@dataclass(frozen=True)
class LinearHogwild(Stochastic):
    writes: str = "shared"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.writes not in WRITES:
            raise ValueError(f"writes={self.writes!r}; known: {', '.join(WRITES)}")

    def lag(self, problem: Problem, state: State) -> int:
        threads = problem.threads.count
        return 1 if threads == 1 or self.writes == "locked" else FLUSH * threads

    def epoch(
        self, problem: Problem, w: Array, bias: Array, state: State, a: Arguments,
        arrays: EpochArrays,
    ) -> float:  # fmt: skip
        total, first = 0.0, float(state["t"][0])
        for rows, at in problem.blocks():
            total += self._block(problem, rows, at, w, bias, state, a, arrays, first)
            first += rows.count * problem.group.size
        return total

    def _block(
        self, problem: Problem, rows: Rows, at: slice, w: Array, bias: Array, state: State,
        a: Arguments, arrays: EpochArrays, first: float,
    ) -> float:  # fmt: skip
        threads, mode = problem.threads, WRITES[self.writes]
        parts, order = rows.parts(threads.count), np.arange(rows.count, dtype=np.int32)
        y, c, lock = problem.y[at], problem.c[at], np.zeros(16, dtype=np.int64)
        stride = float(threads.count * problem.group.size)
        visits = int(state["round"][0])

        def part(thread: int) -> float:
            lo, hi = parts[thread]
            if self.shuffle:
                shuffle(order, lo, hi, thread_seed(problem, visits, rows.start, thread))
            loss: float = _part(
                mode, threads.count == 1, *rows.csr, lo, hi, order, y, c, w, bias, first, stride,
                a, *arrays, lock,
            )  # fmt: skip
            return loss

        return float(sum(threads.run(part)))
