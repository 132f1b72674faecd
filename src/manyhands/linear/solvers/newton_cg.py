"""Truncated Newton's method: conjugate gradients solve for the step, to a tolerance that tightens.

    H d = -g,   H = X' diag(h) X + l2 I,   h = c phi''(z);   theta <- theta + t d
    stop the inner solve at |H d + g| <= eta |g|,   eta = min(1/2, (|g| / |g_0|)^(1/2))

The inner solve is preconditioned by the diagonal of H. A product H p reads the data once and keeps
X p, so the margins of the step are a sum of products that are known already, and neither the line
search nor the next margins read the data again. A round is one X'r and as many products as the
inner solve takes. What travels is a vector of d + 1 numbers each time.

Papers: Dembo & Steihaug 1983 (doi:10.1007/BF02592055); for linear models Lin, Weng & Keerthi 2008.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from manyhands.linear.certificate import WITH_GAP, Certificate
from manyhands.linear.passes.rows import Array
from manyhands.linear.problem import Problem, step_length

State = dict[str, Array]


@dataclass(frozen=True)
class NewtonCG:
    """`products`: at most so many Hessian products in a round."""

    products: int = 50
    c1: float = 1e-4  # of the decrease that the slope promises, a step must reach this share

    def init(self, problem: Problem, theta: Array) -> State:
        z = problem.margins(theta) if theta.any() else problem.zero_margins()
        state = {"z": z.copy(), "first": np.zeros(1), "squares": problem.squares()}
        objective = problem.sweep()[0] + problem.penalty(theta)
        self._look(problem, theta, state, objective)
        state["first"][0] = np.linalg.norm(state["g"])
        return state

    def round(self, problem: Problem, theta: Array, state: State) -> float:
        """One step; returns an estimate of P - P* at its end."""
        problem.z[:] = state["z"]
        d, dz = self._direction(problem, state)
        before, slope = float(state["objective"][0]), float(state["g"] @ d)
        step, after = step_length(problem, theta, d, dz, before, slope, self.c1)
        if step == 0.0:
            return 0.0  # no step decreases P beyond rounding: this is the minimum
        theta += step * d
        self._look(problem, theta, state, after)
        return 0.5 * float(state["g"] @ (state["g"] / state["diagonal"]))

    def certify(self, problem: Problem, theta: Array, state: State) -> Certificate:
        """At the dual point of the slopes the gap is |g|^2 / 2 l2: no pass, g is known."""
        objective, ridge = float(state["objective"][0]), problem.ridge()
        if problem.loss not in WITH_GAP or not problem.l2:
            return Certificate(objective, -math.inf)
        g = state["g"].copy()
        if problem.free_intercept:
            g[-1], ridge[-1] = 0.0, 1.0  # the intercept is at its best value, to rounding
        return Certificate(objective, objective - 0.5 * float(g @ (g / ridge)))

    def _look(self, problem: Problem, theta: Array, state: State, objective: float) -> None:
        """The best intercept, and objective, gradient and curvatures at the kept margins."""
        if problem.free_intercept:
            theta[-1] = problem.best_intercept(float(theta[-1]))
            objective = problem.sweep()[0] + problem.penalty(theta)
        xr, sum_r = problem.transposed(problem.r)
        state["g"] = (np.append(xr, sum_r) if problem.intercept else xr) + problem.ridge() * theta
        state["h"], state["z"] = problem.h.copy(), problem.z.copy()
        state["objective"] = np.array([objective])
        # the diagonal at the mean curvature of a row: exact where all rows are alike
        total = float(problem.sum(np.array([state["h"].sum()]), "curvature")[0])
        mean = total / max(problem.total_weight, 1e-300)
        state["diagonal"] = np.maximum(mean * state["squares"] + problem.ridge(), 1e-12)

    def _direction(self, problem: Problem, state: State) -> tuple[Array, Array]:
        """d and X d (with the intercept's part), by preconditioned conjugate gradients."""
        g, h, scale = state["g"], state["h"], 1.0 / state["diagonal"]
        d, dz = np.zeros_like(g), np.zeros_like(problem.z)
        residual, xp = -g, np.empty_like(problem.z)
        p = scale * residual
        rho = float(residual @ p)
        size = float(np.linalg.norm(g))
        enough = min(0.5, math.sqrt(size / max(float(state["first"][0]), 1e-300))) * size
        for _ in range(self.products):
            hp = problem.hessian_product(h, p, xp)
            curve = float(p @ hp)
            if curve <= 1e-14 * float(p @ p):  # flat: no l2, and columns that depend on each other
                break
            alpha = rho / curve
            d += alpha * p
            dz += alpha * xp
            residual -= alpha * hp
            if float(np.linalg.norm(residual)) <= enough:
                break
            before, rho = rho, float((again := scale * residual) @ residual)
            p = again + (rho / before) * p
        if not d.any():
            d, dz = p, xp
        return d, dz
