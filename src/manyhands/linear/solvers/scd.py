"""Coordinate descent on columns: proximal Newton steps over a working set, split by feature.

    Q(w) = sum_i g_i dz_i + h_i/2 dz_i^2 + l1 |w|_1 + l2/2 |w|^2,   g = c phi'(z), h = c phi''(z)
    w_j <- S(L_j w_j - X_j'r, l1) / (L_j + l2),   L_j = sum_i h_i x_ij^2,   r_i = g_i + h_i dz_i

For squared loss Q is the objective itself. Columns are centred by their h-weighted means without
being touched, which eliminates a free intercept. Cycles over the working set are extrapolated
(Anderson acceleration). The working set has the columns that violate their optimality condition
most; it doubles until the duality gap, which every round knows, is small enough.

K ranks own the columns X_k of all rows. Each replaces L_j by sigma' L_j and counts its own changes
sigma' times (sigma' = K), so that the sum of all ranks' steps never increases the objective; then
the true X_k dw_k is summed: n numbers travel a round.

Papers: Friedman, Hastie & Tibshirani 2010; Bertrand & Massias 2021 (arXiv:2011.10065); Massias,
Gramfort & Salmon 2018 (arXiv:1802.07481); Richtarik & Takac 2016 (arXiv:1310.2059).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from manyhands.kernels.compile import U64, compiled
from manyhands.linear.certificate import Certificate
from manyhands.linear.column_problem import ColumnProblem
from manyhands.linear.losses import SQUARED
from manyhands.linear.passes.row_kernels import add, dot
from manyhands.linear.passes.rows import Array
from manyhands.linear.problem import best_shift

State = dict[str, Array]
MEMORY = 5  # iterates that an extrapolation combines


@compiled
def _cycle(
    indptr, indices, values, which, w, h, uniform, r, lipschitz, sums, l1, l2, sigma, shift,
    per_weight, positive,
):  # fmt: skip
    """One visit of each column of `which`; returns the largest change, in units of the loss.

    `w` belongs to `which`. r lacks h * shift[0], the intercept's part of it.
    """
    largest = 0.0
    for t in range(len(which)):
        j = which[t]
        if lipschitz[j] <= 0.0:
            continue
        start, end = U64(indptr[j]), U64(indptr[j + 1])
        g = shift[0] * sums[j] + dot(indices, values, start, end, r)
        curve = sigma * lipschitz[j]
        v = curve * w[t] - g
        new = (max(0.0, v - l1) + (0.0 if positive else min(0.0, v + l1))) / (curve + l2)
        change = new - w[t]
        if change == 0.0:
            continue
        w[t] = new
        step = sigma * change
        if uniform > 0.0:
            add(indices, values, start, end, step * uniform, r)
        else:
            for k in range(start, end):
                i = U64(indices[k])
                r[i] += step * h[i] * values[k]
        shift[0] -= step * sums[j] * per_weight
        largest = max(largest, abs(change) * (curve + l2))
    return largest


@dataclass(frozen=True)
class SCD:
    """Coordinate descent. `start`: columns of the first working set; None: about a thirtieth."""

    start: int | None = None
    cycles: int = 50  # over a working set, at most, between two looks at all columns
    accelerate: bool = True

    def init(self, problem: ColumnProblem, theta: Array) -> State:
        problem.margins(theta)
        start = max(32, problem.columns // 32) if self.start is None else self.start
        state = {"z": problem.z.copy(), "size": np.array([float(start)])}
        self._look(problem, theta, state)
        return state

    def round(self, problem: ColumnProblem, theta: Array, state: State) -> float:
        """Cycles over the working set, one exchange, and a look at all columns."""
        w, sigma = theta[: problem.columns], float(problem.group.size)
        problem.z[:] = state["z"]  # of a run that goes on, they are not known yet
        which = self._working_set(problem, w, state)
        h = problem.c if problem.loss == SQUARED else problem.curvatures()
        if problem.loss != SQUARED:
            h = np.maximum(h, 1e-10 * max(float(h.max(initial=0.0)), 1e-300))
        dw = self._descend(problem, w, state, which, h, sigma)
        dz = np.zeros_like(problem.z)
        problem.columns_.add(dw, which, dz)
        problem.sum(dz, "margins")
        db = self._intercept_step(problem, theta, h, state["r"], dz) if problem.intercept else 0.0
        self._step(problem, theta, state, which, dw, dz + db, db)
        self._look(problem, theta, state)
        gap = float(state["certificate"][0] - state["certificate"][1])
        return gap if problem.l1 or problem.l2 else self._estimate(problem, w, state)

    def certify(self, problem: ColumnProblem, theta: Array, state: State) -> Certificate:
        objective, dual = state["certificate"].tolist()
        return Certificate(objective, dual)

    # -- the parts of a round --

    def _estimate(self, problem: ColumnProblem, w: Array, state: State) -> float:
        """About the gap where no penalty bounds it: |g| |w|, g the gradient that is left."""
        g = state["violation"]
        squares = problem.sum(np.array([g @ g, w @ w]), "estimate")
        if squares[0] == 0.0:
            return 0.0
        return float(np.sqrt(squares[0] * squares[1])) if squares[1] else np.inf

    def _intercept_step(
        self, problem: ColumnProblem, theta: Array, h: Array, r: Array, dz: Array
    ) -> float:
        """The change of the intercept that minimises Q for these margins."""
        slope = float(r.sum() + h @ dz) + problem.l2_intercept * float(theta[-1])
        return -slope / max(float(h.sum()) + problem.l2_intercept, 1e-300)

    def _working_set(self, problem: ColumnProblem, w: Array, state: State) -> Array:
        """Columns in use, and those that violate their optimality condition most."""
        violation = state["violation"]
        used = w != 0.0
        size = int(max(state["size"][0], 2 * np.count_nonzero(used)))
        if size >= problem.columns:
            return np.arange(problem.columns)
        priority = np.where(used, np.inf, violation)
        which = np.argpartition(-priority, size - 1)[:size]
        which = which[(priority[which] > 0.0)]
        return np.sort(which)

    def _descend(
        self, problem: ColumnProblem, w: Array, state: State, which: Array, h: Array, sigma: float
    ) -> Array:
        """Cycles of coordinate descent on Q over `which`; returns the change of w there."""
        columns = problem.columns_
        sums, squares = columns.moments(which, h)
        weight = float(h.sum())
        centred = problem.intercept and problem.l2_intercept == 0.0 and weight > 0
        per_weight = 1.0 / weight if centred else 0.0
        lipschitz = squares - per_weight * sums**2
        lipschitz[lipschitz < 1e-12 * squares] = 0.0
        uniform = float(h[0]) if problem.loss == SQUARED and (h == h[0]).all() else 0.0
        r, shift, own = state["r"].copy(), np.zeros(1), w[which].copy()
        held = sums if centred else np.zeros_like(sums)
        arguments = (lipschitz, held, problem.l1, problem.l2, sigma, shift, per_weight)
        target = 0.3 * float(state["violation"].max(initial=0.0))
        target = max(0.1 * target, 1e-15) if problem.group.size == 1 else 0.0
        kept: list[Array] = []
        for _ in range(self.cycles if problem.group.size == 1 else 3):
            largest = _cycle(*columns.csc, which, own, h, uniform, r, *arguments, problem.positive)
            if largest <= target:
                break
            kept.append(own.copy())
            if self.accelerate and len(kept) > MEMORY and problem.group.size == 1:
                better = _extrapolated(kept)
                kept.clear()
                if better is not None and not (problem.positive and (better < 0).any()):
                    self._take_better(problem, which, own, better, h, r, shift, per_weight, held)
        return own - w[which]

    def _take_better(
        self,
        problem: ColumnProblem,
        which: Array,
        own: Array,
        better: Array,
        h: Array,
        r: Array,
        shift: Array,
        per_weight: float,
        sums: Array,
    ) -> None:
        """Replace `own` by the extrapolated point where Q is lower there."""
        dz = np.zeros_like(r)
        problem.columns_.add(better - own, which, dz)
        dz -= per_weight * float(sums[which] @ (better - own))
        now = r + h * shift[0]
        change = float(now @ dz + 0.5 * (h * dz) @ dz)
        change += problem.l1 * float(np.abs(better).sum() - np.abs(own).sum())
        change += 0.5 * problem.l2 * float(better @ better - own @ own)
        if change < 0.0:
            own[:] = better
            r[:] = now + h * dz
            shift[0] = 0.0

    def _step(
        self,
        problem: ColumnProblem,
        theta: Array,
        state: State,
        which: Array,
        dw: Array,
        dz: Array,
        db: float,
    ) -> None:
        """Take the step, halved until the objective does not increase."""
        before, at, step = float(state["certificate"][0]), theta.copy(), 1.0
        w = theta[: problem.columns]
        for _ in range(40):
            w[which] = at[which] + step * dw
            if problem.intercept:
                theta[-1] = at[-1] + step * db
            problem.z[:] = state["z"] + step * dz
            if problem.loss_at(0.0)[0] + problem.penalty(theta) <= before + 1e-12 * abs(before):
                break
            step *= 0.5
        state["z"] = problem.z.copy()

    def _look(self, problem: ColumnProblem, theta: Array, state: State) -> None:
        """Slopes, all columns' gradients, the gap and the violations at theta."""
        problem.z[:] = state["z"]
        if problem.intercept and problem.l2_intercept == 0.0:
            shift = best_shift(problem.loss_at, problem.total_weight) if problem.smooth else 0.0
            theta[-1] += shift
            problem.z += shift
            state["z"] = problem.z.copy()
        w = theta[: problem.columns]
        r = problem.slopes()
        xr = problem.transposed(r)
        found = problem.certificate(theta, r, xr)
        g = xr + problem.l2 * w
        l1 = problem.l1
        at_zero = np.maximum(-g - l1, 0.0) if problem.positive else np.maximum(np.abs(g) - l1, 0.0)
        state["violation"] = np.where(w == 0.0, at_zero, np.abs(g + l1 * np.sign(w)))
        best = state["certificate"][1] if "certificate" in state else -np.inf
        state["certificate"] = np.array([found.objective, max(found.dual, best)])
        state["r"] = r
        if "xr" in state:
            state["size"] = np.minimum(2.0 * state["size"], max(problem.columns, 1))
        state["xr"] = xr


def _extrapolated(kept: list[Array]) -> Array | None:
    """The combination of iterates, with weights that sum to one, whose residual is smallest."""
    points = np.stack(kept)
    moves = np.diff(points, axis=0)
    gram = moves @ moves.T
    try:
        c = np.linalg.solve(gram + 1e-12 * np.trace(gram) * np.eye(len(gram)), np.ones(len(gram)))
    except np.linalg.LinAlgError:
        return None
    total = float(c.sum())
    if not np.isfinite(total) or total == 0.0:
        return None
    return np.asarray((c / total) @ points[1:])
