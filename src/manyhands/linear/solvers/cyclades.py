"""Cyclades: stochastic gradient steps of threads that never touch the same weight.

    sample a batch -> components of its conflict graph -> cores; steps without locks; barrier

Rows of one component keep the order of the sample and rows of two components share no column, so
the result is that of serial SGD in the sampled order, bit for bit, with any number of threads.

The intercept would join all rows. It is constant within a batch; the batch's steps of it are summed
in the order of the sample. That, too, does not depend on threads.

Which rows form a batch is drawn anew every `keep` epochs; in between, the batches come in another
random order in each epoch, and their plan is used again. keep=1 draws all rows anew in each epoch.
Where columns are so popular that a batch would have few rows, one thread takes all steps.

Ranks average their weights after each epoch: see `stochastic.epochs`.

Paper: Pan et al. 2016 (arXiv:1605.09721).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from manyhands.kernels.compile import compiled
from manyhands.linear.passes.rows import Array, Rows
from manyhands.linear.problem import Problem
from manyhands.linear.stochastic.conflict_batches import barrier, batch_size, planned
from manyhands.linear.stochastic.epochs import State, Stochastic
from manyhands.linear.stochastic.sgd_steps import (
    SHARED,
    Arguments,
    EpochArrays,
    column_counts,
    lateness,
    prefetch_ahead,
    visit,
)


@compiled
def _core(
    arrived, cores, sizes, mine, slots, ends, steps_b, phis, indptr, indices, values, y, c, w, bias,
    first, stride, a, rare, shrink, paid, sums,
):  # fmt: skip
    """One core's steps of all batches. steps_b[e % 2] are the intercept's steps of batch e: a core
    may be one batch ahead of one that still sums them."""
    b, late, q, done, count = bias[0], 0.0, 0, 0, len(mine)
    for e in range(len(ends)):
        while q < ends[e]:
            prefetch_ahead(indptr, indices, values, y, c, mine, q, count, w, a, rare, shrink)
            i, slot = mine[q], slots[q]
            t = first + stride * np.float64(done + slot + 1)
            phi, step = visit(
                SHARED, indptr, indices, values, i, y[i], c[i], w, b, t, a, rare, shrink, paid, sums
            )
            phis[done + slot] = phi
            steps_b[e % 2, slot] = step
            q += 1
        barrier(arrived, cores, e + 1)
        if bias[1] != 0.0:
            for slot in range(sizes[e]):
                step = steps_b[e % 2, slot]
                b += step
                late += lateness(first + stride * np.float64(done + slot + 1), a) * step
        done += sizes[e]
    return b, late


@dataclass(frozen=True)
class Cyclades(Stochastic):
    """`batch`: rows of a batch; None: as many as split into components, see
    `stochastic.conflict_batches`."""

    batch: int | None = None
    keep: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep < 1 or (self.batch is not None and self.batch < 1):
            raise ValueError(f"batch={self.batch}, keep={self.keep}: 1 or more is needed")

    def see(self, problem: Problem, state: State) -> None:
        super().see(problem, state)
        batch = self.batch
        if batch is None:
            batch = batch_size(column_counts(problem), problem.total_rows)
        state["batch"] = np.array([batch])

    def lag(self, problem: Problem, state: State) -> int:
        return int(state["batch"][0])

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
        plan, sequence = planned(problem, rows, state, self.keep, self.shuffle)
        sizes, stride = plan.sizes(sequence), float(problem.group.size)
        arrived, phis = np.zeros(16, np.int64), np.empty(rows.count)
        steps_b, y, c = np.zeros((2, plan.batch)), problem.y[at], problem.c[at]
        bias[1] = float(problem.intercept)

        def core(k: int) -> tuple[float, float]:
            if k >= plan.cores:
                return 0.0, 0.0
            mine, slots, ends = plan.rows_of(k, sequence)
            found: tuple[float, float] = _core(
                arrived, plan.cores, sizes, mine, slots, ends, steps_b, phis, *rows.csr, y, c, w,
                bias, first, stride, a, *arrays,
            )  # fmt: skip
            return found

        b, late = problem.threads.run(core)[0]
        bias[0] = b
        bias[8] += late
        return float(phis.sum())
