"""Hogwild!: stochastic gradient steps of threads that share w, without locks.

    thread:  for row i of its part, in random order:  w_j <- w_j - eta g_j   for j in row i

Rows are sparse, so two threads seldom step the same weight at once; where they do, one step may be
lost, which costs less than waiting for a lock. One thread takes the steps of serial SGD, bit for
bit; so do several whose parts share no column. Every row of every part is visited once an epoch.

Cores that write the same cache lines wait for each other, lock or no lock. So where w is small and
no column crowded, each thread steps a copy of w and exchanges it with the shared w every few
thousand rows: the changes of all threads add up, none is lost, and what a row reads is that much
older. `copies`: None where it pays, by shape; True or False.

The intercept, which every row would step, is summed by each thread and added for others to see
every few rows. `writes`: "shared" as above; "atomic", which loses no step but costs a locked
instruction a weight; "locked", one lock around each step: the peer to compare with.

Ranks average their weights after each epoch: see `stochastic.epochs`.

Papers: Recht, Re, Wright & Niu 2011 (arXiv:1106.5730); copies of a core: Zhang & Re 2014
(DimmWitted, arXiv:1403.7550).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from manyhands.kernels.atomics import acquire, atomic_add, release
from manyhands.kernels.compile import compiled
from manyhands.kernels.instructions import prefetch
from manyhands.linear.losses import SMOOTHNESS
from manyhands.linear.passes.rows import Array, Rows
from manyhands.linear.problem import Problem
from manyhands.linear.stochastic.epochs import State, Stochastic
from manyhands.linear.stochastic.sgd_steps import (
    ATOMIC,
    LOCKED,
    SHARED,
    Arguments,
    EpochArrays,
    lateness,
    prefetch_ahead,
    shuffle,
    thread_seed,
    visit,
)

SEGMENTS = 64  # of w, with a lock each; threads exchange different ones at a time
LINE = 8  # numbers in a cache line
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
        prefetch_ahead(indptr, indices, values, y, c, order, p, hi, w, a, rare, shrink)
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


@compiled
def _exchange(w, own, base, locks, thread):
    """w += own - base, then own = base = w. What no other thread has changed is taken as it is, so
    that threads whose rows share no column have the bits of serial steps."""
    size = (len(w) + SEGMENTS - 1) // SEGMENTS
    for s in range(SEGMENTS):
        segment = (s + thread * 7) % SEGMENTS
        lock = locks[segment * LINE : segment * LINE + 1]
        acquire(lock)
        for j in range(segment * size, min((segment + 1) * size, len(w))):
            if j % LINE == 0:  # the line is in the cache of the thread that has changed it last
                prefetch(w, j + 16 * LINE, 0)
            now, mine, was = w[j], own[j], base[j]
            if mine != was:
                now = mine if now == was else now + (mine - was)
                w[j] = now
            own[j] = base[j] = now
        release(lock)


@compiled
def _arrange(order, lo, hi, shuffled, seed):
    """The rows of a part, in the order of this epoch."""
    for p in range(lo, hi):
        order[p] = p
    if shuffled:
        shuffle(order, lo, hi, seed)


@compiled
def _arranged_part(shuffled, seed, mode, alone, indptr, indices, values, lo, hi, order, *rest):
    _arrange(order, lo, hi, shuffled, seed)
    return _part(mode, alone, indptr, indices, values, lo, hi, order, *rest)


@compiled
def _part_by_copy(
    shuffled, seed, every, thread, locks, copies, indptr, indices, values, lo, hi, order, y, c, w,
    bias, first, stride, a, rare, shrink, paid, sums, lock,
):  # fmt: skip
    _arrange(order, lo, hi, shuffled, seed)
    total, own, base = 0.0, copies[thread, 0], copies[thread, 1]
    own[:] = w
    base[:] = own
    for at in range(lo, hi, every):
        total += _part(
            SHARED, False, indptr, indices, values, at, min(at + every, hi), order, y, c, own, bias,
            first + stride * np.float64(at - lo), stride, a, rare, shrink, paid, sums, lock,
        )  # fmt: skip
        _exchange(w, own, base, locks, thread)
    return total


@dataclass(frozen=True)
class LinearHogwild(Stochastic):
    writes: str = "shared"
    copies: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.writes not in WRITES:
            raise ValueError(f"writes={self.writes!r}; known: {', '.join(WRITES)}")
        if self.copies and (self.writes != "shared" or self.average):
            raise ValueError(
                f"copies=True with writes={self.writes!r}, average={self.average}: a copy is its "
                "thread's own, and no mean of it is kept; leave one of them out"
            )

    def init(self, problem: Problem, theta: Array) -> State:
        state = super().init(problem, theta)
        if self.copies and problem.l1:
            raise ValueError("copies=True with an l1 penalty, which is paid in w; leave it out")
        state["every"] = np.zeros(1)
        if problem.threads.count > 1 and self.copies is not False and not problem.l1:
            state["every"][0] = self._rows_between_exchanges(problem, state)
        return state

    def _rows_between_exchanges(self, problem: Problem, state: State) -> int:
        """Few enough that threads which do not see each other's steps of a column do not overshoot
        together; 0 where an exchange would then cost more than waiting for cache lines."""
        if self.writes != "shared" or self.average:
            return 0
        rows = max(problem.total_rows, 1.0)
        # an exchange costs as much as the steps of about so many rows
        cost = problem.columns * rows / max(8.0 * problem.total_nonzeros, 1.0)
        d = problem.columns
        curve = SMOOTHNESS.get(problem.loss, 1.0) * float(problem.squares()[:d].max(initial=0.0))
        pull = float(state["eta"][0]) * curve / self.per(problem)  # of a row, on w_j, on average
        most = 0.5 / max(problem.threads.count * pull, 1e-300)
        every = int(min(64.0 * cost, most, problem.source.count / (4 * problem.threads.count)))
        if self.copies:
            return max(every, 1)
        return every if every >= 4.0 * cost else 0

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
        parts, order = rows.parts(threads.count), threads.memory("order", rows.count, np.int32)
        y, c, lock = problem.y[at], problem.c[at], np.zeros(16, dtype=np.int64)
        stride = float(threads.count * problem.group.size)
        visits, every = int(state["round"][0]), int(state["every"][0])
        locks = np.zeros(SEGMENTS * LINE, dtype=np.int64)
        copies = threads.memory("copies", (threads.count, 2, len(w))) if every else None

        def part(thread: int) -> float:
            lo, hi = parts[thread]
            arranged = self.shuffle, thread_seed(problem, visits, rows.start, thread)
            each = *rows.csr, lo, hi, order, y, c, w, bias, first, stride, a, *arrays, lock
            loss: float = (
                _arranged_part(*arranged, mode, threads.count == 1, *each)
                if copies is None
                else _part_by_copy(*arranged, every, thread, locks, copies, *each)
            )
            return loss

        return float(sum(threads.run(part)))
