"""Duality gap: a bound on how far the objective is above its minimum, whatever the solver.

    D(a) = - sum_i c_i phi*(-a_i / c_i) - g*(X'a)     P(theta) - P* <= P(theta) - D(a)
    g*(v) = sum_j max(0, |v_j| - l1)^2 / (2 l2);  with l2 = 0: 0 if |v|_inf <= l1, else infinite

From a primal point: a_i = -c_i phi'(z_i), which is optimal at the optimum. A free intercept needs
sum_i a_i = 0; that is its own optimality condition, so b is first set to its best value for this w.
Without l2 the dual point is scaled until |X'a|_inf <= l1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from manyhands.kernels.compile import compiled, inlined
from manyhands.linear.losses import HINGE, LOGISTIC, SQUARED, SQUARED_HINGE, conjugate
from manyhands.linear.passes.rows import Array
from manyhands.linear.problem import Problem, best_shift

WITH_GAP = (LOGISTIC, SQUARED, HINGE, SQUARED_HINGE)


@dataclass(frozen=True)
class Certificate:
    objective: float
    dual: float

    @property
    def gap(self) -> float:
        return self.objective - self.dual


@compiled
def conjugates(a, y, c, loss, scale):
    total = 0.0
    for i in range(len(a)):
        if c[i] > 0.0:
            total += c[i] * conjugate(loss, scale * a[i] / c[i], y[i])
        elif a[i] != 0.0:
            total = np.inf
    return total


def certify(problem: Problem, theta: Array, own_dual: Array | None = None) -> Certificate:
    """Objective and dual value at `theta`, whose intercept is set to its best value.

    `own_dual`: the solver's own dual variables, if it has any; the better of both points counts.
    """
    problem.margins(theta)
    if problem.intercept:
        theta[-1] = problem.best_intercept(float(theta[-1]))
    objective = problem.loss_at(0.0)[0] + problem.penalty(theta)
    if problem.loss not in WITH_GAP or not (problem.l1 or problem.l2):
        return Certificate(objective, -math.inf)
    if own_dual is not None:
        return Certificate(objective, _dual(problem, _feasible(problem, own_dual)))
    if problem.loss == HINGE:  # its slope jumps: a point near the optimum tells little of a
        return Certificate(objective, -math.inf)
    return Certificate(objective, _dual(problem, -problem.slopes()))


@inlined
def _shifted(loss, a, y, c, t):
    """The dual variable whose margin is larger by t, and its slope by -t."""
    if loss == LOGISTIC:
        p = min(max(y * a / c, 0.0), 1.0)
        e = math.exp(min(max(y * t, -500.0), 500.0))
        p /= p + (1.0 - p) * e
        return y * c * p, c * p * (1.0 - p)
    if loss == SQUARED:
        return a - c * t, c
    if loss == SQUARED_HINGE:
        p = y * a - 2.0 * c * y * t
        return (y * p, 2.0 * c) if a != 0.0 and p > 0.0 else (0.0, 0.0)
    return a, 0.0


@compiled
def _shift_sums(a, y, c, lo, hi, loss, t):
    total, slope = 0.0, 0.0
    for i in range(lo, hi):
        if c[i] > 0.0:
            own, less = _shifted(loss, a[i], y[i], c[i], t)
            total += own
            slope += less
    return 0.0, -total, slope


@compiled
def _shift(a, y, c, loss, t, out):
    for i in range(len(a)):
        out[i] = _shifted(loss, a[i], y[i], c[i], t)[0] if c[i] > 0.0 else 0.0


def _feasible(problem: Problem, a: Array) -> Array:
    """The solver's a where there is no free intercept; else one near it with sum a = 0.

    All rows' margins move by the same t, which changes most where the loss is curved most and the
    dual loses least. A remaining sum (hinge loss): the heavier side is scaled down, which keeps
    every y a in its interval.
    """
    if not problem.intercept or problem.l2_intercept:
        return a

    def sums(t: float) -> tuple[float, float, float]:
        done = problem.threads.over(
            len(a),
            lambda lo, hi: _shift_sums(a, problem.y, problem.c, lo, hi, problem.loss, t),
        )
        first, second, third = problem.sum(np.array(done).sum(0), "dual").tolist()
        return first, second, third

    if problem.loss != HINGE:
        out = np.empty_like(a)
        _shift(a, problem.y, problem.c, problem.loss, best_shift(sums, problem.total_weight), out)
        a = out
    if problem.loss == SQUARED:
        return a
    up = problem.y > 0
    sides = problem.sum(np.array([a[up].sum(), -a[~up].sum()]), "dual")
    least = float(sides.min())
    scales = [least / side if side > 0 else 0.0 for side in sides.tolist()]
    return a * np.where(up, scales[0], scales[1])


def _dual(problem: Problem, a: Array) -> float:
    v, total = problem.transposed(a)
    scale = 1.0
    if problem.l2 == 0.0:
        most = float((np.maximum(v, 0.0) if problem.positive else np.abs(v)).max(initial=0.0))
        if most > problem.l1:
            scale = problem.l1 / most
        if problem.loss == SQUARED and problem.l1 > 0.0 and most > 0.0:
            scale = _best_scale(problem, a, problem.l1 / most)
    own = np.array([conjugates(a, problem.y, problem.c, problem.loss, scale)])
    value = -float(problem.sum(own, "dual")[0])
    if problem.l2 > 0.0:
        reach = v if problem.positive else np.abs(v)
        over = np.maximum(0.0, reach - problem.l1)
        value -= float(over @ over) / (2.0 * problem.l2)
    if problem.intercept and problem.l2_intercept > 0.0:
        value -= (scale * total) ** 2 / (2.0 * problem.l2_intercept)
    elif problem.intercept and abs(total) > 1e-7 * max(problem.total_weight, 1e-300):
        return -math.inf  # not feasible: sum a must be 0
    return value


def _best_scale(problem: Problem, a: Array, most: float) -> float:
    """The scale in [-most, most] at which the dual of squared loss is largest."""
    used = problem.c > 0.0
    square = float((a[used] ** 2 / problem.c[used]).sum())
    sums = problem.sum(np.array([float(a @ problem.y), square]), "dual")
    return float(np.clip(sums[0] / max(sums[1], 1e-300), -most, most))
