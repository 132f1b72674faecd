"""Cyclades: stochastic gradient steps of threads that never touch the same weight.

    sample a batch -> components of its conflict graph -> cores; steps without locks; barrier

Rows of one component keep the order of the sample and rows of two components share no column, so
the result is that of serial SGD in the sampled order, bit for bit, with any number of threads.

The intercept would join all rows. It is constant within a batch; the batch's steps of it are summed
in the order of the sample. That, too, does not depend on threads.

Which rows form a batch is drawn anew every `keep` epochs; in between, the batches come in another
random order in each epoch, and their plan is used again. keep=1 draws all rows anew in each epoch.
Where columns are so popular that a batch would have few rows, one thread takes all steps.

Ranks average their weights after each epoch: see `stochastic`.

Paper: Pan et al. 2016 (arXiv:1605.09721).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from manyhands.kernels.atomics import atomic_add, wait_for
from manyhands.kernels.compile import compiled
from manyhands.linear.passes.rows import Array, Rows
from manyhands.linear.problem import Problem
from manyhands.linear.solvers.conflict_batches import ConflictFree, batch_size, conflict_free
from manyhands.linear.solvers.sgd_steps import (
    AHEAD,
    SHARED,
    Arguments,
    column_counts,
    lateness,
    prefetch_bounds,
    prefetch_row,
    shuffle,
    thread_seed,
    visit,
)
from manyhands.linear.solvers.stochastic import State, Stochastic


@compiled
def _own_rows(core, order, positions, cuts, batch, sequence, rows, slots, ends):
    """This core's rows, and their places in their batches, in the order in which it visits them."""
    count = 0
    for e in range(len(sequence)):
        b = sequence[e]
        for q in range(cuts[b, core], cuts[b, core + 1]):
            rows[count] = order[positions[q]]
            slots[count] = positions[q] - b * batch
            count += 1
        ends[e] = count


@compiled
def _core(
    arrived, cores, sizes, mine, slots, ends, steps_b, phis, indptr, indices, values, y, c, w, bias,
    first, stride, a,
):  # fmt: skip
    """One core's steps of all batches. steps_b[e % 2] are the intercept's steps of batch e: a core
    may be one batch ahead of one that still sums them."""
    b, late, q, done, count = bias[0], 0.0, 0, 0, len(mine)
    for e in range(len(ends)):
        while q < ends[e]:
            if q + 2 * AHEAD < count:
                prefetch_bounds(indptr, y, c, mine[q + 2 * AHEAD])
            if q + AHEAD < count:
                prefetch_row(indptr, indices, values, mine[q + AHEAD])
            i, slot = mine[q], slots[q]
            t = first + stride * np.float64(done + slot + 1)
            phi, step = visit(SHARED, indptr, indices, values, i, y[i], c[i], w, b, t, a)
            phis[done + slot] = phi
            steps_b[e % 2, slot] = step
            q += 1
        if cores > 1:
            atomic_add(arrived, 0, 1)
            wait_for(arrived, 0, cores * (e + 1))
        if bias[1] != 0.0:
            for slot in range(sizes[e]):
                step = steps_b[e % 2, slot]
                b += step
                late += lateness(first + stride * np.float64(done + slot + 1), a.numbers) * step
        done += sizes[e]
    return b, late


@dataclass(frozen=True)
class Cyclades(Stochastic):
    """`batch`: rows of a batch; None: as many as split into components, see `conflict_batches`."""

    batch: int | None = None
    keep: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep < 1 or (self.batch is not None and self.batch < 1):
            raise ValueError(f"batch={self.batch}, keep={self.keep}: 1 or more is needed")

    def init(self, problem: Problem, theta: Array) -> State:
        state = super().init(problem, theta)
        batch = self.batch
        if batch is None:
            batch = batch_size(column_counts(problem), problem.total_rows)
        state["batch"] = np.array([batch])
        return state

    def lag(self, problem: Problem, state: State) -> int:
        return int(state["batch"][0])

    def epoch(
        self, problem: Problem, w: Array, bias: Array, state: State, arguments: Arguments
    ) -> float:
        total, first = 0.0, float(state["t"][0])
        for rows, at in problem.blocks():
            total += self._block(problem, rows, at, w, bias, state, arguments, first)
            first += rows.count * problem.group.size
        return total

    def plan(self, problem: Problem, rows: Rows, state: State) -> ConflictFree:
        """The plan of a block of rows: that of the last epoch, or a new one every `keep` epochs."""
        draw = (int(state["round"][0]) - 1) // self.keep
        batch = int(state["batch"][0])
        names = [f"{k}/{rows.start}" for k in ("order", "positions", "cuts")]
        kept = [state.get(name) for name in (f"draw/{rows.start}", *names)]
        # after a resume the state has floats, and maybe another number of threads: plan again
        if kept[0] is not None and kept[0][0] == draw and kept[1].dtype == np.int32:
            return ConflictFree(*kept[1:], batch)
        order = np.arange(rows.count, dtype=np.int32)
        if self.shuffle:
            shuffle(order, 0, rows.count, thread_seed(problem, draw, rows.start, 0))
        found = conflict_free(
            problem.threads, rows.indptr, rows.indices, rows.columns, order, batch
        )
        state[f"draw/{rows.start}"] = np.array([draw])
        state.update(zip(names, (found.order, found.positions, found.cuts), strict=True))
        return found

    def sequence(self, problem: Problem, rows: Rows, plan: ConflictFree, state: State) -> Array:
        """The order of the batches in this epoch."""
        out = np.arange(plan.batches, dtype=np.int32)
        if self.shuffle:
            shuffle(out, 0, len(out), thread_seed(problem, int(state["round"][0]), rows.start, 1))
        return out

    def _block(
        self, problem: Problem, rows: Rows, at: slice, w: Array, bias: Array, state: State,
        arguments: Arguments, first: float,
    ) -> float:  # fmt: skip
        plan = self.plan(problem, rows, state)
        sequence = self.sequence(problem, rows, plan, state)
        sizes = np.minimum(plan.batch, rows.count - sequence.astype(np.int64) * plan.batch)
        arrived, phis = np.zeros(16, np.int64), np.empty(rows.count)
        steps_b, y, c = np.zeros((2, plan.batch)), problem.y[at], problem.c[at]
        bias[1] = float(problem.intercept)

        def core(k: int) -> tuple[float, float]:
            if k >= plan.cores:
                return 0.0, 0.0
            count = int((plan.cuts[:, k + 1] - plan.cuts[:, k]).sum())
            mine, slots = np.empty((2, count), np.int32)
            ends = np.empty(plan.batches, np.int64)
            _own_rows(
                k, plan.order, plan.positions, plan.cuts, plan.batch, sequence, mine, slots, ends
            )
            found: tuple[float, float] = _core(
                arrived, plan.cores, sizes, mine, slots, ends, steps_b, phis, *rows.csr, y, c, w,
                bias, first, float(problem.group.size), arguments,
            )  # fmt: skip
            return found

        b, late = problem.threads.run(core)[0]
        bias[0] = b
        bias[8] += late
        return float(phis.sum())
