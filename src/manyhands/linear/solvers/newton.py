"""Newton's method with the whole Hessian, for few columns.

    H = X' diag(c phi''(z)) X + l2 I;   d = -H^-1 g;   theta <- theta + t d

The margins of the direction, X d, are computed once, so a line search costs no pass over the data.
A round is one gradient, one Hessian and one product X d. What travels is the gradient and the
Hessian, d (d + 3) numbers: for at most a few thousand columns (Nocedal & Wright 2006, chapter 3).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import LinAlgError, cho_factor, cho_solve, eigh  # type: ignore[import-untyped]

from manyhands.linear.passes.rows import Array
from manyhands.linear.problem import Problem, step_length

State = dict[str, Array]


@dataclass(frozen=True)
class Newton:
    c1: float = 1e-4  # of the decrease that the slope promises, a step must reach this share

    def init(self, problem: Problem, theta: Array) -> State:
        z = problem.margins(theta) if theta.any() else problem.zero_margins()
        return {"z": z.copy()}

    def round(self, problem: Problem, theta: Array, state: State) -> float:
        """One step; returns half the squared Newton decrement, about P - P*."""
        problem.z[:] = state["z"]
        before = problem.sweep()[0] + problem.penalty(theta)
        xr, sum_r = problem.transposed(problem.r)
        g = (np.append(xr, sum_r) if problem.intercept else xr) + problem.ridge() * theta
        d = -_solve(problem, problem.hessian(problem.h), g)
        slope = float(g @ d)
        w, b = problem.unpack(d)
        dz = np.empty_like(problem.z)
        for rows, at in problem.blocks():
            rows.margins(problem.threads, w, b, dz[at])
        step, _ = step_length(problem, theta, d, dz, before, slope, self.c1)
        if step == 0.0:
            return 0.0  # no step decreases P beyond rounding: this is the minimum
        theta += step * d
        state["z"] = problem.z.copy()
        return -0.5 * slope


def _solve(problem: Problem, h: Array, g: Array) -> Array:
    """H^-1 g. A free intercept is eliminated first: where columns depend on each other and l2 is
    zero, the solution has the shortest w, whatever the intercept."""
    if not problem.intercept or h[-1, -1] <= 0.0:
        return _positive_solve(h, g)
    hb, edge, gb = h[-1, -1], h[:-1, -1], g[-1]
    w = _positive_solve(h[:-1, :-1] - np.outer(edge, edge / hb), g[:-1] - edge * (gb / hb))
    return np.append(w, (gb - edge @ w) / hb)


def _positive_solve(h: Array, g: Array) -> Array:
    scale = np.diag(h).copy()  # of columns, which must not decide whether H is singular
    scale = 1.0 / np.sqrt(np.where(scale > 0.0, scale, 1.0))
    scaled = scale[:, None] * h * scale
    if not (np.isfinite(scaled).all() and np.isfinite(g).all()):
        raise ValueError(
            "Floating-point overflow occurred in the derivatives of the objective. Scale the "
            "columns, for example with StandardScaler, or give smaller weights (C, sample_weight)"
        )
    try:
        factor = cho_factor(scaled, lower=True)
        diagonal = np.abs(np.diag(factor[0]))
        if diagonal.size == 0 or diagonal.min() > 1e-7 * diagonal.max():
            return np.asarray(scale * cho_solve(factor, scale * g))
    except LinAlgError:
        pass
    values, vectors = eigh(h)
    kept = values > max(h.shape[0], 1) * np.finfo(h.dtype).eps * max(values.max(), 1e-300)
    return np.asarray(vectors[:, kept] @ ((vectors[:, kept].T @ g) / values[kept]))
