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
class FitRound:
    """One round: when it ended, and how far from the minimum it can be at most. Where the round
    was not certified, objective and gap are NaN."""

    round: int
    seconds: float
    objective: float
    gap: float
    nbytes: int = 0  # that this rank has sent since the start
    certify_s: float = 0.0  # of `seconds`: what the certificate of this round took
    estimate: float = math.nan  # of the gap, by the solver


@dataclass
class Standing:
    """How far a run is, and all that it needs to go on from here."""

    theta: Array
    state: State | None = None
    rounds: int = 0
    seconds: float = 0.0
    nbytes: int = 0
    certificate: Certificate = field(default_factory=lambda: Certificate(math.inf, -math.inf))
    estimate: float = math.inf
    null: float = math.nan  # P(0)
    history: list[FitRound] = field(default_factory=list)  # certified rounds

    def is_enough(self, enough: float) -> bool:
        unknown = self.certificate.dual == -math.inf and math.isfinite(self.certificate.objective)
        return self.certificate.gap <= enough or (unknown and self.estimate <= enough)


@dataclass
class Solution:
    theta: Array
    rounds: int
    converged: bool
    certificate: Certificate
    history: list[FitRound] = field(default_factory=list)
    state: State = field(default_factory=dict)
    directory: str = ""  # of the run, where it has one


@dataclass(frozen=True)
class Stopping:
    """When to stop: the gap below tol * P(0), or after so many rounds."""

    tol: float = 1e-4
    max_iter: int = 100
    every_round: bool = False  # certify and record each round
    spaced: bool = False  # certify and record rounds 1, 2, 3, 4, 6, 8, 12, 16, 24, ...

    def certifies(self, round: int) -> bool:
        half = round // 3 if round % 3 == 0 else round
        return self.every_round or (self.spaced and half & (half - 1) == 0)


def null_objective(problem: Any) -> float:
    """P at w = 0 and the best intercept; needs no pass over the data."""
    problem.z[:] = 0.0
    free = problem.intercept and problem.l2_intercept == 0.0 and problem.smooth
    shift = best_shift(problem.loss_at, problem.total_weight) if free else 0.0
    return float(problem.loss_at(shift)[0])


Watch = Callable[[FitRound, Standing], bool]


def minimise(
    problem: Any,
    solver: LinearSolver,
    theta: Array,
    stopping: Stopping,
    watch: Watch | None = None,
    standing: Standing | None = None,
) -> Solution:
    """Run rounds from `theta`, which is updated in place, or go on from `standing`. `watch` sees
    every round, and may end the run (True)."""
    at = Standing(theta) if standing is None else standing
    began, sent = time.perf_counter() - at.seconds, _sent(problem) - at.nbytes
    at.null = max(_null(problem), 1e-300)
    if not math.isfinite(at.null):  # else any gap would be small enough
        raise ValueError(
            f"Floating-point overflow occurred: the objective without features is {at.null}. Scale "
            "the targets, or give smaller weights (C, sample_weight)"
        )
    enough = stopping.tol * at.null
    if at.state is None:
        at.state = solver.init(problem, at.theta)
    ended = False
    while not ended and at.rounds < stopping.max_iter and not at.is_enough(enough):
        at.estimate = solver.round(problem, at.theta, at.state)
        at.rounds += 1
        last, spent = at.rounds == stopping.max_iter, math.nan
        if at.estimate <= enough or last or stopping.certifies(at.rounds):
            spent = _certify_round(problem, solver, at)
        at.seconds, at.nbytes = time.perf_counter() - began, _sent(problem) - sent
        record = _record(at, spent)
        if not math.isnan(spent):
            at.history.append(record)
        ended = watch is not None and watch(record, at)
        ended = ended or not (math.isnan(spent) or math.isfinite(at.certificate.objective))
    converged = at.is_enough(enough)
    return Solution(at.theta, at.rounds, converged, at.certificate, at.history, at.state)


def _certify_round(problem: Any, solver: Any, at: Standing) -> float:
    """The certificate at theta, with the best dual value so far; returns the seconds it took."""
    start = time.perf_counter()
    assert at.state is not None
    found = _certified(problem, solver, at.theta, at.state)
    at.certificate = Certificate(found.objective, max(at.certificate.dual, found.dual))
    return time.perf_counter() - start


def _record(at: Standing, spent: float) -> FitRound:
    found = at.certificate if not math.isnan(spent) else Certificate(math.nan, math.nan)
    certify_s = 0.0 if math.isnan(spent) else spent
    figures = (found.objective, found.gap, at.nbytes, certify_s, at.estimate)
    return FitRound(at.rounds, at.seconds, *figures)


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
