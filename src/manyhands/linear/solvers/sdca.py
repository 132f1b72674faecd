"""Stochastic dual coordinate ascent; over ranks, CoCoA+: local epochs, updates added.

    max_a D(a),   w(a) = S(X'a, l1) / l2,   q_i = |x_i|^2 / l2
    logistic : m <- m + q (c s(-m) - a) solved for the margin m by Newton;  a = c s(-m)
    squared  : a += (c (y - z) - a) / (1 + c q)
    hinge    : y a = clip(y a + (1 - y z) / q, 0, c)
    squared hinge: y a = max(0, y a + (1 - y z - y a / 2c) / (q + 1 / 2c))

K ranks: each works on its own rows with q -> sigma' q and its own view of w; then the updates
are added with weight gamma: one vector of d + 2 numbers a rank travels. Adding (gamma=1, sigma'=K)
or averaging (gamma=1/K, sigma'=1). Threads of a rank share w without locks (PASSCoDe); w is
computed anew from a before it is certified.

A free intercept is a column of ones whose penalty is centred at the last intercept: the proximal
point method, which moves the centre until the penalty is zero.

Papers: Shalev-Shwartz & Zhang 2013 (arXiv:1209.1873); Yu, Huang & Lin 2011 (logistic dual);
Ma et al. 2015 (arXiv:1502.03508); Hsieh, Yu & Dhillon 2015 (arXiv:1504.01365).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from manyhands.kernels.compile import U64, compiled, inlined
from manyhands.kernels.instructions import prefetch
from manyhands.linear.losses import HINGE, LOGISTIC, SQUARED
from manyhands.linear.passes import row_kernels as kernels
from manyhands.linear.passes.row_kernels import add, dot
from manyhands.linear.passes.rows import Array, Rows
from manyhands.linear.problem import Problem

State = dict[str, Array]
AHEAD = 6  # rows that are prefetched: their order is random, so the processor cannot guess it
FIRM = 0.01  # largest penalty of a free intercept, as a share of the rows' weight
FLUSH = 32  # rows between two looks of a thread at the others' intercept


@inlined
def _random(state):
    """xorshift64."""
    state ^= state << U64(13)
    state ^= state >> U64(7)
    state ^= state << U64(17)
    return state


@inlined
def _dual_step(loss, a, z, y, c, q):
    """The best dual variable of one row, and how far its gap is from zero."""
    if loss == LOGISTIC:
        a0 = y * a
        m0 = y * z
        p = 1.0 / (1.0 + math.exp(m0))
        first = c * p
        f = q * (a0 - first)
        low, high = min(m0, m0 - f), max(m0, m0 - f)  # p falls with m: the root is between
        m = m0
        for _ in range(20):
            step = f / (1.0 + q * c * p * (1.0 - p))
            m = m - step if low < m - step < high else 0.5 * (low + high)
            p = 1.0 / (1.0 + math.exp(m))
            f = m - m0 - q * (c * p - a0)
            low, high = (low, m) if f > 0.0 else (m, high)
            if abs(f) < 1e-9 * (1.0 + abs(m)):
                break
        p0 = first / c
        gap = (a0 - first) * (a0 - first) / (2.0 * c * max(p0 * (1.0 - p0), 1e-6))
        return y * c * p, gap
    if loss == SQUARED:
        r = c * (y - z) - a
        return a + r / (1.0 + c * q), 0.5 * r * r / c
    a0 = y * a
    slack = 1.0 - y * z
    if loss == HINGE:
        gap = c * max(0.0, slack) - a0 * slack
        if q > 0.0:
            return y * min(max(a0 + slack / q, 0.0), c), gap
        return (y * c if slack > 0.0 else 0.0), gap
    wanted = 2.0 * c * max(0.0, slack)
    new = max(0.0, a0 + (slack - a0 / (2.0 * c)) / (q + 0.5 / c))
    return y * new, (wanted - a0) * (wanted - a0) / (4.0 * c)


@compiled
def _epoch(
    indptr, indices, values, lo, hi, order, seed, y, c, norms, loss, a, u, threshold,
    inverse, bias, inverse_bias, sigma, shared,
):  # fmt: skip
    """One visit of each row lo..hi in random order; returns the sum of the rows' gaps.

    u = X'a / l2, `threshold` = l1 / l2, `inverse` = 1 / l2. bias[0] is the intercept.
    """
    state = U64(seed) | U64(1)
    for i in range(hi - 1, lo, -1):
        state = _random(state)
        j = lo + np.int64((state >> U64(11)) % U64(i - lo + 1))
        order[i], order[j] = order[j], order[i]
    gap = 0.0
    b, moved = bias[0], 0.0
    for t in range(lo, hi):
        i = order[t]
        if t + AHEAD < hi:
            ahead = indptr[order[t + AHEAD]]
            for line in range(0, min(indptr[order[t + AHEAD] + 1] - ahead, 128), 16):
                prefetch(indices, ahead + line, 0)
                prefetch(values, ahead + line, 0)
                prefetch(values, ahead + line, 1)
        if c[i] == 0.0:
            continue
        start, end = U64(indptr[i]), U64(indptr[i + 1])
        z = b
        if threshold == 0.0:
            z += dot(indices, values, start, end, u)
        else:
            for k in range(start, end):
                uj = u[U64(indices[k])]
                z += values[k] * (max(0.0, uj - threshold) + min(0.0, uj + threshold))
        q = sigma * (norms[i] * inverse + inverse_bias)
        new, own = _dual_step(loss, a[i], z, y[i], c[i], q)
        gap += own
        change = new - a[i]
        if change == 0.0:
            continue
        a[i] = new
        add(indices, values, start, end, sigma * change * inverse, u)
        step = sigma * change * inverse_bias
        b += step
        moved += step
        if shared and (t - lo) % FLUSH == 0:
            bias[0] += moved
            b, moved = bias[0], 0.0
    bias[0] += moved
    return gap


@dataclass(frozen=True)
class SDCA:
    """`gamma` and `sigma`: how updates of ranks are added; None: 1 and the number of ranks."""

    gamma: float | None = None
    sigma: float | None = None
    epochs: int = 1  # local epochs between two exchanges

    def weights(self, ranks: int) -> tuple[float, float]:
        gamma = 1.0 if self.gamma is None else self.gamma
        sigma = gamma * ranks if self.sigma is None else self.sigma
        averages = math.isclose(gamma * ranks, 1.0) and sigma >= 1.0
        if sigma < gamma * ranks and not averages:
            raise ValueError(
                f"sigma={sigma} with gamma={gamma} on {ranks} ranks can diverge; give sigma >= "
                f"gamma * ranks = {gamma * ranks:g}, or average with gamma=1/{ranks}, sigma=1"
            )
        return gamma, sigma

    def init(self, problem: Problem, theta: Array) -> State:
        """Dual variables: zero, or from the margins where theta is not zero."""
        self.weights(problem.group.size)
        n = problem.source.count
        state = {"a": np.zeros(n), "norms": np.zeros(n), "round": np.zeros(1)}
        for rows, at in problem.blocks():
            indptr = rows.indptr
            kernels.squared_norms(indptr, rows.values, 0, rows.count, state["norms"][at])
        total = problem.sum(np.array([state["norms"].sum()]), "norms")[0]
        mean = total / max(problem.total_rows, 1)
        least = problem.l2 / mean if mean > 0 else problem.l2
        penalty = problem.l2_intercept or max(least, FIRM * problem.total_weight)
        # the intercept, its centre, its penalty, and of a free one the last sum of a
        state["bias"] = np.array([0.0, 0.0, penalty, 0.0, least])
        if theta.any() and problem.loss != HINGE:
            problem.margins(theta)
            kernels.slopes(
                problem.z, problem.y, problem.c, 0, n, problem.loss, problem.eps, state["a"]
            )
            np.negative(state["a"], out=state["a"])
            if problem.intercept and not problem.l2_intercept:
                state["bias"][1] = theta[-1]
        state["u"] = np.zeros(problem.columns)
        if state["a"].any():
            self.settle(problem, theta, state)
        elif problem.intercept and not problem.l2_intercept:
            problem.z[:] = 0.0
            state["bias"][0] = state["bias"][1] = problem.best_intercept(0.0)
        return state

    def round(self, problem: Problem, theta: Array, state: State) -> float:
        """Local epochs on every rank, then one exchange; returns an estimate of the gap."""
        gamma, sigma = self.weights(problem.group.size)
        a, bias, ranks = state["a"], state["bias"], problem.group.size
        alone = ranks == 1 and gamma == 1.0
        u = state["u"] if alone else state["u"].copy()
        before = None if alone else a.copy()
        b = np.array([bias[0]])
        gap = 0.0
        for _ in range(self.epochs):
            state["round"] += 1
            gap = 0.0
            for rows, at in problem.blocks():
                gap += self._visit(problem, rows, at, state, u, b, sigma)
        if alone:
            bias[0] = b[0]
        else:
            change = np.concatenate(((u - state["u"]) / sigma, (b - bias[:1]) / sigma, [gap]))
            problem.sum(change, "update")
            state["u"] += gamma * change[:-2]
            bias[0] += gamma * change[-2]
            gap = float(change[-1])
            if before is not None and gamma != 1.0:
                a[:] = before + gamma * (a - before)
        if problem.intercept and not problem.l2_intercept:
            _move_centre(bias, FIRM * problem.total_weight)
        self._primal(problem, theta, state)
        return gap

    def _visit(
        self,
        problem: Problem,
        rows: Rows,
        at: slice,
        state: State,
        u: Array,
        b: Array,
        sigma: float,
    ) -> float:
        threads, parts = problem.threads, rows.parts(problem.threads.count)
        order = np.arange(rows.count, dtype=np.int32)
        seed = problem.seed * 1_000_003 + int(state["round"][0]) * 7919 + rows.start * 31
        seed += problem.group.rank * 104_729
        inverse_bias = 1.0 / state["bias"][2] if problem.intercept else 0.0
        own = (problem.y[at], problem.c[at], state["norms"][at], problem.loss, state["a"][at])
        scales = (problem.l1 / problem.l2, 1.0 / problem.l2, b, inverse_bias, sigma)
        several = threads.count > 1

        def visit(t: int) -> float:
            start = (seed * 64 + t) * 2_654_435_761 % (1 << 62)
            return float(_epoch(*rows.csr, *parts[t], order, start, *own, u, *scales, several))

        return sum(threads.run(visit))

    def settle(self, problem: Problem, theta: Array, state: State) -> None:
        """w from a again: threads may have lost updates, and sums have rounding errors."""
        v, total = problem.transposed(state["a"])
        state["u"][:] = v / problem.l2
        state["bias"][0] = state["bias"][1] * (problem.l2_intercept == 0) + (
            total / state["bias"][2] if problem.intercept else 0.0
        )
        self._primal(problem, theta, state)

    def dual(self, state: State) -> Array:
        return state["a"]

    def _primal(self, problem: Problem, theta: Array, state: State) -> None:
        u, t = state["u"], problem.l1 / problem.l2
        theta[: problem.columns] = u if t == 0 else np.sign(u) * np.maximum(np.abs(u) - t, 0.0)
        if problem.intercept:
            theta[-1] = state["bias"][0]


def _move_centre(bias: Array, most: float) -> None:
    """The centre moves to the intercept, which keeps the pull of sum(a).

    A firm penalty makes local problems easy, a loose one makes the centre arrive soon: the penalty
    halves while the sum keeps its sign and its size, and doubles where the sum changes its sign.
    """
    b, centre, penalty, before, least = bias.tolist()
    total = penalty * (b - centre)
    if total * before > 0.0 and abs(total) > 0.5 * abs(before):
        penalty = max(0.5 * penalty, least)
    elif total * before < 0.0:
        penalty = min(2.0 * penalty, max(most, least))
    bias[:4] = b + total / penalty, b, penalty, total
