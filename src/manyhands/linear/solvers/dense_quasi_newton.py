"""Dense quasi-Newton: the rounds that BFGS and DFP share, around a whole matrix H.

    d = -H g;   w <- w + t d (strong Wolfe);   s = t d,  y = g_new - g;   H <- update(H, s, y)

H is an estimate of the inverse Hessian, d^2 numbers: for few columns. Every rank has all of it and
computes the same; a gradient travels in a round and, where rows are split, nothing else but the
numbers of the line search. The intercept is at its best value for every w.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from manyhands.linear.certificate import Certificate
from manyhands.linear.column_problem import ColumnProblem
from manyhands.linear.margin_losses import MarginPoint
from manyhands.linear.passes.rows import Array
from manyhands.linear.reduced_objective import (
    Line,
    ReducedObjective,
    certificate,
    diagonal,
    reduced,
    start,
)
from manyhands.quasi_newton import CURVATURE, strong_wolfe

State = dict[str, Array]
Update = Callable[[Array, Array, Array], None]  # of H in place, by s and y with s'y > 0
NOISE = 1e-14  # relative rounding error of a loss


@dataclass(frozen=True)
class DenseOptions:
    """`name` is the solver's, for errors; the others are its fields."""

    name: str
    precondition: bool
    gamma: float | None
    c1: float
    c2: float
    most_columns: int

    def __post_init__(self) -> None:
        if not 0.0 < self.c1 < 1.0 or not 0.0 < self.c2 < 1.0:
            raise ValueError(f"c1={self.c1}, c2={self.c2}: numbers between 0 and 1 are needed")
        if self.gamma is not None and not self.gamma > 0.0:
            raise ValueError(f"gamma={self.gamma}: more than 0 is needed, or None")

    def check(self, problem: Any, count: int) -> None:
        if isinstance(problem, ColumnProblem) and problem.group.size > 1:
            raise ValueError(
                f"Solver {self.name} needs all columns on every rank, got columns split over "
                f"{problem.group.size}; choose solver='lbfgs'"
            )
        if count > self.most_columns:
            raise ValueError(
                f"Solver {self.name} keeps a matrix of {count} x {count} numbers, "
                f"{8 * count * count / 2**30:.1f} GiB on every rank; at most "
                f"{self.most_columns} are allowed (most_columns); choose solver='lbfgs'"
            )


def begin(options: DenseOptions, problem: Any, theta: Array) -> State:
    objective = reduced(problem)
    w = objective.weights(theta)
    options.check(problem, len(w))
    at, f = start(objective, theta)
    whole = np.ones_like(w)
    if options.precondition:
        whole = 1.0 / objective.gathered(diagonal(objective, at))
    state = {"z": at.z, "r": at.r, "h": at.h, "first": whole * (options.gamma or 1.0)}
    state |= {
        "g": _gradient(objective, state, w),
        "H": np.diag(state["first"]),
        "known": np.array([f, math.inf, 0.0]),  # P, its last decrease, pairs since H_0
    }
    return state


def step(options: DenseOptions, update: Update, problem: Any, theta: Array, state: State) -> float:
    """One round; returns a bound or an estimate of P - P* at its end."""
    objective, known, h = reduced(problem), state["known"], state["H"]
    d = -(h @ state["g"])
    slope = float(state["g"] @ d)
    if not slope < 0.0:
        return _restart(state) if state["g"].any() else 0.0
    at = MarginPoint(state["z"], state["r"], state["h"])
    line = Line(objective, at, theta, objective.weights(theta), d)
    first = line.newton_step(slope)
    f = float(known[0])
    found = strong_wolfe(line, f, slope, first, options.c1, options.c2, noise=NOISE)
    if found.step == 0.0:
        return _restart(state)
    w = line.take(theta, found.step)
    known[:2] = found.loss, f - found.loss
    g = _gradient(objective, state, w)
    s, y = found.step * d, g - state["g"]
    state["g"] = g
    sy, yy = float(s @ y), float(y @ y)
    if sy > CURVATURE * math.sqrt(float(s @ s) * yy):
        if known[2] == 0.0 and options.gamma is None:  # H_0 in the unit of the first pair
            h *= sy / float(y @ (h @ y))
        update(h, s, y)
        known[2] += 1.0
    if objective.l2 > 0.0:
        return float(g @ g) / (2.0 * objective.l2)
    return max(0.5 * float(g @ (h @ g)), float(known[1]))


def certified(problem: Any, state: State) -> Certificate:
    g = state["g"]
    return certificate(reduced(problem), float(state["known"][0]), float(g @ g))


def _restart(state: State) -> float:
    """H_0 again; where it was H_0, no step goes down but for rounding: this is the minimum."""
    without = state["known"][2] == 0.0
    state["H"][:], state["known"][2] = np.diag(state["first"]), 0.0
    return 0.0 if without else math.inf


def _gradient(objective: ReducedObjective, state: State, w: Array) -> Array:
    return objective.gathered(objective.transposed(state["r"])) + objective.l2 * w
