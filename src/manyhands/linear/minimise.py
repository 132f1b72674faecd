"""The loop of a linear model: rounds of a solver until the duality gap is small enough.

    while gap > tol * P(0):  solver.round(problem, theta, state);  certify;  record

P(0) is the objective without any feature, at the best intercept. A solver estimates its gap for
free; the gap itself costs a pass, so it is computed when the estimate is small enough, or in every
round where rounds are recorded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from manyhands.linear.certificate import Certificate, certify
from manyhands.linear.passes.rows import Array
from manyhands.linear.problem import best_shift

State = dict[str, Array]


class LinearSolver(Protocol):
    """A solver: a frozen dataclass whose fields are its options. Some also have `settle` (make
    theta exact before it is certified), `dual` (their dual variables) and `certify`."""

    def init(self, problem: Any, theta: Array) -> State: ...
    def round(self, problem: Any, theta: Array, state: State) -> float: ...


@dataclass(frozen=True)
class RoundRecord:
    """One certified round: when it ended, and how far from the minimum it can be at most."""

    round: int
    seconds: float
    objective: float
    gap: float
    nbytes: int = 0  # that this rank has sent since the start


@dataclass
class Solution:
    theta: Array
    rounds: int
    converged: bool
    certificate: Certificate
    history: list[RoundRecord] = field(default_factory=list)
    state: State = field(default_factory=dict)
    directory: str = ""  # of the run, where it has one


@dataclass(frozen=True)
class Stopping:
    """When to stop: the gap below tol * P(0), or after so many rounds."""

    tol: float = 1e-4
    max_iter: int = 100
    every_round: bool = False  # certify and record each round


def null_objective(problem: Any) -> float:
    """P at w = 0 and the best intercept; needs no pass over the data."""
    problem.z[:] = 0.0
    free = problem.intercept and problem.l2_intercept == 0.0 and problem.smooth
    shift = best_shift(problem.loss_at, problem.total_weight) if free else 0.0
    return float(problem.loss_at(shift)[0])


def minimise(
    problem: Any,
    solver: LinearSolver,
    theta: Array,
    stopping: Stopping,
    watch: Callable[[RoundRecord, Array, State], bool] | None = None,
    state: State | None = None,
    first_round: int = 0,
) -> Solution:
    """Run rounds from `theta`, which is updated in place; `watch` may end the run (True)."""
    began = time.perf_counter()
    enough = stopping.tol * max(_null(problem), 1e-300)
    state = solver.init(problem, theta) if state is None else state
    history: list[RoundRecord] = []
    found, best_dual = Certificate(math.inf, -math.inf), -math.inf
    rounds = first_round
    while rounds < stopping.max_iter:
        estimate = solver.round(problem, theta, state)
        rounds += 1
        last = rounds == stopping.max_iter
        if not (estimate <= enough or last or stopping.every_round):
            continue
        found = _certified(problem, solver, theta, state)
        best_dual = max(best_dual, found.dual)
        found = Certificate(found.objective, best_dual)
        seconds = time.perf_counter() - began
        history.append(RoundRecord(rounds, seconds, found.objective, found.gap, _sent(problem)))
        ended = watch is not None and watch(history[-1], theta, state)
        if not math.isfinite(found.objective):
            break
        if found.gap <= enough or (found.dual == -math.inf and estimate <= enough):
            return Solution(theta, rounds, True, found, history, state)
        if ended:
            break
    return Solution(theta, rounds, False, found, history, state)


def _null(problem: Any) -> float:
    own = getattr(problem, "null_objective", None)
    return float(own()) if own is not None else null_objective(problem)


def _certified(problem: Any, solver: Any, theta: Array, state: State) -> Certificate:
    if hasattr(solver, "certify"):
        found: Certificate = solver.certify(problem, theta, state)
        return found
    if hasattr(solver, "settle"):
        solver.settle(problem, theta, state)
    own = getattr(problem, "certify", None)
    if own is not None:
        result: Certificate = own(theta)
        return result
    return certify(problem, theta, solver.dual(state) if hasattr(solver, "dual") else None)


def _sent(problem: Any) -> int:
    return int(getattr(problem.group, "nbytes", 0))


def start_at(problem: Any, theta: Array | None) -> Array:
    return np.zeros(problem.size) if theta is None else theta.astype(np.float64, copy=True)
