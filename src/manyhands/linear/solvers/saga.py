"""SAGA: stochastic gradient steps whose noise vanishes, so that eta needs no decay.

    z = x_i'w + b;   g = m c_i phi'(z);   H_j = mean of a_k x_kj over the n_j rows k with column j
    w_j <- S(w_j - eta ((g - a_i) x_ij + H_j), eta D_j l1) / (1 + eta D_j l2),   D_j = n / n_j
    H_j <- H_j + (g - a_i) x_ij / n_j;   a_i <- g                       for j in the support of x_i

a_i is the slope of row i when it was last visited. The mean gradient, H_j / D_j, and the penalty
are applied on the support of the row only, D_j times as strongly: column j comes once in D_j steps.
The intercept is a column of ones. eta = step / L, with L the largest curvature of a row.

Threads take conflict-free batches, as in `cyclades`: rows of two threads share no column, so the
result does not depend on the number of threads, bit for bit. Rows are of one rank: local epochs of
several ranks, averaged, do not reach the optimum where few rows have a column.

Papers: Defazio, Bach & Lacoste-Julien 2014 (arXiv:1407.0202); Pedregosa, Leblond & Lacoste-Julien
2017 (arXiv:1707.06468).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from manyhands.kernels.compile import U64, compiled
from manyhands.kernels.instructions import prefetch
from manyhands.linear.certificate import WITH_GAP, Certificate, certify
from manyhands.linear.losses import SMOOTHNESS, slope
from manyhands.linear.passes import row_kernels as kernels
from manyhands.linear.passes.rows import Array, Rows, Threads
from manyhands.linear.problem import Problem
from manyhands.linear.stochastic.conflict_batches import barrier, batch_size, planned
from manyhands.linear.stochastic.sgd_steps import (
    AHEAD,
    FAR,
    dot,
    largest_curvature,
    overflow,
    own_counts,
    prefetch_bounds,
    prefetch_row,
    prefetch_weights,
    shrunk,
)

State = dict[str, Array]
STEP_B = 0.25  # of the intercept, over the curvature of a batch


class _Arguments(NamedTuple):
    """Arguments of the kernel: the objective, and eta of w and of b."""

    loss: int
    eps: float
    m: float
    rows: float
    l1: float
    l2: float
    l2_b: float
    floor: float
    eta: float
    eta_b: float


@compiled
def _core(
    arrived, cores, sizes, mine, slots, ends, changes, indptr, indices, values, y, c, slopes, w, H,
    share, bias, a,
):  # fmt: skip
    """One core's steps of all batches. changes[e % 2] are the changes of slopes in batch e: a core
    may be one batch ahead of one that still sums them. bias: b and its mean slope."""
    b, mean_b, q, count = bias[0], bias[1], 0, len(mine)
    t1, t2, far = a.eta * a.l1 * a.rows, a.eta * a.l2 * a.rows, w.size * 8 > FAR
    for e in range(len(ends)):
        while q < ends[e]:
            if q + 2 * AHEAD < count:
                prefetch_bounds(indptr, y, c, mine[q + 2 * AHEAD])
                prefetch(slopes, np.int64(mine[q + 2 * AHEAD]), 0)
            if q + AHEAD < count:
                prefetch_row(indptr, indices, values, mine[q + AHEAD])
            if far and q + 1 < count:
                prefetch_weights(indptr, indices, mine[q + 1], w, H)
                prefetch_weights(indptr, indices, mine[q + 1], share, share)
            i = mine[q]
            start, end = U64(indptr[i]), U64(indptr[i + 1])
            z = b + dot(indices, values, start, end, w)
            g = a.m * c[i] * slope(a.loss, z, y[i], a.eps)
            change = g - slopes[i]
            slopes[i] = g
            changes[e % 2, slots[q]] = change
            for k in range(start, end):
                j = U64(indices[k])
                move = change * values[k]
                v = w[j] - a.eta * (move + H[j])
                w[j] = shrunk(v, t1 * share[j], t2 * share[j], a.floor)
                H[j] += move * share[j]
            q += 1
        barrier(arrived, cores, e + 1)
        if a.eta_b > 0.0:
            for slot in range(sizes[e]):
                change = changes[e % 2, slot]
                b = (b - a.eta_b * (change + mean_b)) / (1.0 + a.eta_b * a.l2_b)
                mean_b += change / a.rows
    return b, mean_b


@dataclass(frozen=True)
class SAGA:
    """`step`: eta times the largest curvature of a row. `batch` and `keep` as for Cyclades."""

    step: float = 1.0 / 3.0
    batch: int | None = None
    keep: int = 8

    def __post_init__(self) -> None:
        if not 0.0 < self.step < 2.0:
            raise ValueError(f"step={self.step}: more than 0 and less than 2 is needed")
        if self.keep < 1 or (self.batch is not None and self.batch < 1):
            raise ValueError(f"batch={self.batch}, keep={self.keep}: 1 or more is needed")

    def init(self, problem: Problem, theta: Array) -> State:
        """Slopes of all rows at theta, and their means."""
        if problem.group.size > 1:
            raise ValueError(f"SAGA takes rows of one rank, got {problem.group.size} ranks")
        if problem.loss not in SMOOTHNESS:
            raise ValueError("SAGA needs a loss whose slope has no jump; hogwild takes any")
        m = problem.total_rows / problem.total_weight
        curve = largest_curvature(problem, m)
        counts = own_counts(problem)
        batch = self.batch or batch_size(counts, problem.source.count)
        problem.margins(theta)
        a = np.empty_like(problem.z)
        kernels.slopes(problem.z, problem.y, problem.c, 0, len(a), problem.loss, problem.eps, a)
        state = {
            "round": np.zeros(1),
            "eta": np.array([self.step / max(curve, 1e-300), 0.0]),
            "share": 1.0 / np.maximum(counts, 1.0),
            "a": m * a,
            "batch": np.array([batch]),
            "calibration": np.zeros(2),  # the gap over its estimate, and the last estimate
        }
        if problem.intercept:  # constant within a batch, so a batch may not step it too far
            heaviest = m * float(problem.c.max(initial=0.0))
            state["eta"][1] = STEP_B / (SMOOTHNESS[problem.loss] * max(batch, heaviest))
        self._means(problem, state)
        if problem.loss not in WITH_GAP or not (problem.l1 or problem.l2):
            state["calibration"][0] = 1.0  # there is no gap to learn it from
        return state

    def _means(self, problem: Problem, state: State) -> None:
        """H, and the intercept's mean slope behind it, from the slopes of all rows."""
        one, sums = Threads(1), np.zeros(problem.columns + 1)  # one: in the order of the rows
        for rows, at in problem.blocks():
            sums[-1] += rows.scatter(one, state["a"][at], sums[:-1])
        state["H"] = sums * np.append(state["share"], 1.0 / max(problem.source.count, 1))

    def round(self, problem: Problem, theta: Array, state: State) -> float:
        """One visit of each row; returns an estimate of the gap."""
        d, H = problem.columns, state["H"]
        s = problem.total_weight
        m, (eta, eta_b) = problem.total_rows / s, state["eta"].tolist()
        a = _Arguments(
            problem.loss, float(problem.eps), m, float(problem.source.count), problem.l1 / s,
            problem.l2 / s, problem.l2_intercept / s, 0.0 if problem.positive else -math.inf, eta,
            eta_b,
        )  # fmt: skip
        state["round"] += 1
        for rows, at in problem.blocks():
            bias = np.array([theta[d] if problem.intercept else 0.0, H[d]])
            b, H[d] = self._block(problem, rows, at, theta[:d], bias, state, a)
            if problem.intercept:
                theta[d] = b
        if not np.isfinite(theta).all():
            raise overflow(f"epoch {int(state['round'][0])} of SAGA")
        return self._estimate(problem, theta, state)

    def _block(
        self, problem: Problem, rows: Rows, at: slice, w: Array, bias: Array, state: State,
        a: _Arguments,
    ) -> tuple[float, float]:  # fmt: skip
        plan, sequence = planned(problem, rows, state, self.keep, True)
        sizes, y, c, slopes = plan.sizes(sequence), problem.y[at], problem.c[at], state["a"][at]
        arrived, changes = np.zeros(16, np.int64), np.zeros((2, plan.batch))

        def core(k: int) -> tuple[float, float]:
            if k >= plan.cores:
                return 0.0, 0.0
            mine, slots, ends = plan.rows_of(k, sequence)
            found: tuple[float, float] = _core(
                arrived, plan.cores, sizes, mine, slots, ends, changes, *rows.csr, y, c, slopes, w,
                state["H"], state["share"], bias, a,
            )  # fmt: skip
            return found

        found: tuple[float, float] = problem.threads.run(core)[0]
        return found

    def _estimate(self, problem: Problem, theta: Array, state: State) -> float:
        """About the gap: |g|^2 / 2 l2, or |g| |w| without l2, with g the smallest subgradient.

        Its ratio to the gap is learnt whenever the gap is computed; the first time is at once.
        """
        d, n, s = problem.columns, problem.source.count, problem.total_weight
        w, l1, l2 = theta[:d], problem.l1 / s, problem.l2 / s
        g = state["H"][:d] / (state["share"] * max(n, 1)) + l2 * w
        at_zero = np.maximum(-g - l1, 0.0) if problem.positive else np.maximum(np.abs(g) - l1, 0.0)
        g = np.where(w == 0.0, at_zero, g + l1 * np.sign(w))
        size = float(g @ g)
        found = 0.5 * size / l2 if l2 else math.sqrt(size * float(w @ w))
        state["calibration"][1] = found * s
        return found * s * float(state["calibration"][0])

    def certify(self, problem: Problem, theta: Array, state: State) -> Certificate:
        found = certify(problem, theta)
        guess = float(state["calibration"][1])
        gap = found.gap if math.isfinite(found.gap) else guess
        state["calibration"][0] = gap / guess if guess > 0.0 else 1.0
        return found
