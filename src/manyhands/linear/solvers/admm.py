"""Consensus ADMM: every rank fits its own rows, an average with the penalty's prox joins them.

    x_k = argmin f_k(x) + rho/2 |x - z + u_k|^2
    z   = prox_{g / (K rho)}(mean_k(x_k + u_k));   u_k <- u_k + x_k - z

f_k is the loss of rank k's rows, g the penalty; u are scaled duals, so rescaling rho rescales them.
rho doubles or halves where the primal residual |x - z| and the dual one, rho |z - z_old|, differ by
more than ten times. Two vectors of d numbers travel a round: a mean, and the norms of residuals.
Local fits are L-BFGS to a tolerance that falls with the residuals (Boyd et al. 2011,
doi:10.1561/2200000016).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from manyhands.linear.passes.rows import Array
from manyhands.linear.problem import Problem
from manyhands.quasi_newton import History, strong_wolfe, two_loop

State = dict[str, Array]


@dataclass(frozen=True)
class LinearADMM:
    rho: float | None = None  # None: a tenth of the mean curvature of a rank's loss
    adapt: bool = True
    iterations: int = 50  # of a local fit, at most

    def init(self, problem: Problem, theta: Array) -> State:
        rho = self.rho
        if rho is None:
            w, b = problem.unpack(theta)
            del w, b
            problem.margins(theta)
            h = problem.curvatures()
            totals = problem.sum(np.array([float(h.sum()), problem.total_nonzeros * 0.0]))
            density = problem.total_nonzeros / max(problem.total_rows * problem.columns, 1.0)
            rho = max(0.1 * float(totals[0]) * density / problem.group.size, 1e-6)
        zeros = np.zeros(problem.size)
        return {
            "x": theta.copy(),
            "u": zeros,
            "rho": np.array([rho]),
            "tol": np.array([0.1]),
        }

    def round(self, problem: Problem, theta: Array, state: State) -> float:
        x, u, rho, ranks = state["x"], state["u"], float(state["rho"][0]), problem.group.size
        self._fit(problem, x, theta - u, rho, float(state["tol"][0]))
        mean = problem.sum((x + u) / ranks, "mean")
        old = theta.copy()
        theta[:] = self._prox(problem, mean, ranks * rho)
        u += x - theta
        norms = np.array([float((x - theta) @ (x - theta)), float(theta @ theta)])
        norms[1] /= ranks
        primal, size = np.sqrt(problem.sum(norms, "residual"))
        dual = rho * float(np.linalg.norm(theta - old)) * np.sqrt(ranks)
        if self.adapt:
            factor = 2.0 if primal > 10 * dual / rho else 0.5 if dual / rho > 10 * primal else 1.0
            state["rho"] *= factor
            u /= factor
        state["tol"][0] = min(state["tol"][0], 0.1 * max(primal, dual / rho) / max(size, 1e-12))
        state["tol"][0] = max(state["tol"][0], 1e-12)
        # the objective moves by about the slope along the residuals
        return float((primal + dual / rho) * rho * max(size, 1e-12))

    def _prox(self, problem: Problem, v: Array, weight: float) -> Array:
        out = v * weight / (weight + problem.ridge())
        if problem.l1:
            w, ridge = v[: problem.columns], problem.l2
            shrunk = np.sign(w) * np.maximum(np.abs(w) - problem.l1 / weight, 0.0)
            out[: problem.columns] = shrunk * weight / (weight + ridge)
        return np.asarray(out)

    def _fit(self, problem: Problem, x: Array, v: Array, rho: float, tol: float) -> None:
        """x <- argmin of the own rows' loss + rho/2 |x - v|^2."""

        def evaluate(at: Array) -> tuple[float, Array]:
            f, g = problem.own_loss(at)
            away = at - v
            return f + 0.5 * rho * float(away @ away), g + rho * away

        f, g = evaluate(x)
        first = float(np.abs(g).max(initial=0.0))
        history = History(10)
        for _ in range(self.iterations):
            if float(np.abs(g).max(initial=0.0)) <= tol * max(first, 1e-300) or f == 0.0:
                break
            d = two_loop(torch.from_numpy(g), history).numpy()
            slope = float(g @ d)
            if slope >= 0:
                break
            at: dict[str, tuple[Array, float, Array]] = {}

            def along(
                step: float, d: Array = d, at: dict[str, tuple[Array, float, Array]] = at
            ) -> tuple[float, float]:
                point = x + step * d
                value, gradient = evaluate(point)
                at["last"] = point, value, gradient
                return value, float(gradient @ d)

            step = 1.0 if len(history) else min(1.0, 1.0 / max(float(np.abs(g).sum()), 1e-300))
            found = strong_wolfe(along, f, slope, step, noise=1e-14)
            if found.step == 0.0:
                break
            point, f, new = at["last"]
            history.add(torch.from_numpy(point - x), torch.from_numpy(new - g))
            x[:], g = point, new
