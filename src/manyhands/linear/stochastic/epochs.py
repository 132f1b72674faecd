"""Stochastic solvers: what Hogwild! and Cyclades share around their epochs.

    schedule     eta of epoch e and step t
    epoch        eta0 decay^e                                 (Recht et al. 2011)
    constant     eta0
    optimal      1 / (alpha (t0 + t - 1))                     (Bottou; Shalev-Shwartz et al. 2007)
    invscaling   eta0 / t^power
    adaptive     eta0, a fifth of it where the objective stalls
    pa1, pa2     passive-aggressive                           (Crammer et al. 2006)

Over ranks: local SGD. Each rank makes an epoch of steps on its own rows; then weights are averaged
by numbers of rows: one vector of d + 1 numbers a round, two where w is averaged over steps. Rows of
all ranks should be alike: the mean of weights that fit one class each fits none.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from manyhands.linear.certificate import WITH_GAP, Certificate, certify
from manyhands.linear.losses import HINGE, SMOOTHNESS
from manyhands.linear.passes.rows import Array
from manyhands.linear.problem import Problem
from manyhands.linear.stochastic import sgd_steps as steps
from manyhands.linear.stochastic.sgd_steps import Arguments, EpochArrays

State = dict[str, Array]
FALLING = ("optimal", "invscaling")  # schedules that change eta with every step
SPARSE_STEP_B = 0.01  # of an intercept beside sparse columns: it is stepped in every row, they not


@dataclass(frozen=True)
class Stochastic(ABC):
    """`eta0`: None for 1 / the largest curvature of a row. `average`: the step from which on w is
    averaged, 0 for never. `tol`: stop where the mean objective of an epoch did not fall by so much
    for `patience` epochs; None: stop by the duality gap. `by_rows`: the objective per row, not per
    weight."""

    eta0: float | None = None
    schedule: str = "epoch"
    decay: float = 0.9
    power: float = 0.5
    alpha: float | None = None  # of the schedule `optimal`; None: the mean penalty
    shuffle: bool = True
    average: int = 0
    tol: float | None = None
    patience: int = 5
    by_rows: bool = False

    def __post_init__(self) -> None:
        if self.schedule not in steps.SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r}; known: {', '.join(steps.SCHEDULES)}")
        if self.eta0 is not None and not 0.0 < self.eta0 < math.inf:
            raise ValueError(f"eta0={self.eta0}: more than 0 is needed")
        if not 0.0 < self.decay <= 1.0:
            raise ValueError(f"decay={self.decay}: more than 0 and at most 1 is needed")
        if self.average < 0 or self.patience < 1:
            raise ValueError(
                f"average={self.average}, patience={self.patience}: a step or 0, and 1 round or "
                "more are needed"
            )
        if self.schedule == "adaptive" and self.tol is None:
            raise ValueError("schedule='adaptive' lowers eta where the objective stalls: give tol")

    @abstractmethod
    def epoch(
        self, problem: Problem, w: Array, bias: Array, state: State, a: Arguments,
        arrays: EpochArrays,
    ) -> float:  # fmt: skip
        """One step for each row of this rank; returns the rows' losses before their steps."""

    @abstractmethod
    def lag(self, problem: Problem, state: State) -> int:
        """Rows that may read the intercept before a row's step of it is in."""

    def per(self, problem: Problem) -> float:
        """s: the mean objective is P / s."""
        return float(problem.total_rows if self.by_rows else problem.total_weight)

    def init(self, problem: Problem, theta: Array) -> State:
        one = np.zeros(1)
        state: State = {
            "round": one.copy(),
            "t": one.copy(),
            "since": np.array([float(self.average)]),
            "objective": np.array([np.inf]),
            "best": np.array([np.inf]),
            "stalled": one.copy(),
            "recent": np.full(self.patience + 1, np.inf),
            "counts": np.zeros(problem.columns),
            "seen": one.copy(),
            "owed": one.copy(),
            "paid": np.zeros(problem.columns if problem.l1 else 1),
        }
        self.see(problem, state)
        absent = state["counts"] == 0.0
        state["fading"] = np.array([float(theta[: problem.columns][absent].any())])
        m = problem.total_rows / self.per(problem)
        eta0 = self.eta0
        if eta0 is None and self.schedule in ("pa1", "pa2"):
            eta0 = 1.0
        if eta0 is None:
            eta0 = 1.0 / max(steps.largest_curvature(problem, m), 1e-300)
        state["eta"] = np.array([eta0])
        if self.average:
            state["w"], state["sums"] = theta.copy(), np.zeros(problem.size)
        return state

    def see(self, problem: Problem, state: State) -> None:
        """Count columns of rows that have not been counted: D_j is of all rows seen so far."""
        if problem.l1 or problem.l2:
            state["counts"] += steps.column_counts(problem)
        state["seen"] += problem.total_rows

    def round(self, problem: Problem, theta: Array, state: State) -> float:
        """An epoch on every rank, then an average; returns an estimate of the gap."""
        objective = self.pass_over(problem, theta, state)
        return self.progress(problem, state, objective)

    def pass_over(self, problem: Problem, theta: Array, state: State) -> float:
        """An epoch; returns the mean objective: as seen meanwhile, or with ranks at its end."""
        w = state["w"] if self.average else theta
        d, s = problem.columns, self.per(problem)
        bias = np.zeros(16)  # b and the sum of its late changes, a cache line apart
        if problem.intercept:
            bias[0] = w[d]
        state["round"] += 1
        a, arrays = self.arguments(problem, state)
        loss = np.array([self.epoch(problem, w[:d], bias, state, a, arrays)])
        state["t"] += problem.total_rows
        if state["fading"][0] and (problem.l1 or problem.l2):
            steps.fade(w, state["counts"], float(state["t"][0]), a)
        state["owed"] = np.array([steps.owed_at(float(state["t"][0]), a)])
        if problem.intercept:
            w[d] = bias[0]
        steps.average_ranks(problem, w)
        absolute, square = steps.sums_of(w[:d])
        if not math.isfinite(absolute + abs(bias[0])):
            raise steps.overflow(f"epoch {int(state['round'][0])}")
        if self.average:
            if problem.intercept:
                state["sums"][d] += bias[8]
            self._report(problem, theta, state)
        if problem.group.size > 1:  # losses of own rows under own weights tell nothing of the mean
            objective = problem.objective(theta) / s
        else:
            penalty = problem.l1 * absolute + 0.5 * problem.l2 * square
            objective = (float(loss[0]) + penalty + 0.5 * problem.l2_intercept * bias[0] ** 2) / s
        state["objective"] = np.array([objective])
        return objective

    def arguments(self, problem: Problem, state: State) -> tuple[Arguments, EpochArrays]:
        """What the kernels need to know of this epoch."""
        s = self.per(problem)
        m, l1, l2 = problem.total_rows / s, problem.l1 / s, problem.l2 / s
        eta = float(state["eta"][0])
        if self.schedule == "epoch":
            eta *= self.decay ** (float(state["round"][0]) - 1.0)
        alpha = self.alpha or l1 + l2
        if self.schedule == "optimal" and not alpha > 0.0:
            raise ValueError(
                "schedule='optimal' needs a penalty, or alpha: the rate is 1 / alpha t"
            )
        t0 = 0.0
        if self.schedule == "optimal":
            t0 = steps.first_time(alpha, problem.loss, problem.eps)
        eta_b, most_b = self._steps_of_intercept(problem, state, m)
        penalty, rare, shrink = steps.NO_PENALTY, np.zeros(1), np.zeros(1)
        counts, seen = state["counts"], float(state["seen"][0])
        if l2 and not l1 and not problem.positive and self.schedule not in FALLING:
            penalty, shrink = steps.STEADY_L2, np.empty_like(counts)
            problem.threads.over(
                len(counts),
                lambda lo, hi: steps.shrinkage(counts, lo, hi, seen, eta * l2, shrink),
            )
        elif l1 or l2 or problem.positive:
            penalty, rare = steps.ANY_PENALTY, np.empty_like(counts)
            problem.threads.over(
                len(counts), lambda lo, hi: steps.rareness(counts, lo, hi, seen, rare)
            )
        a = Arguments(
            penalty, problem.columns * 8 > steps.FAR, steps.SCHEDULES[self.schedule],
            problem.loss, float(problem.eps), m, l1, l2, problem.l2_intercept / s,
            0.0 if problem.positive else -math.inf, eta, alpha, t0, self.power, eta_b, most_b,
            float(state["since"][0]), float(state["t"][0]), float(state["owed"][0]),
            1.0 / problem.group.size,
        )  # fmt: skip
        sums = state["sums"][: problem.columns] if self.average else np.zeros(1)
        return a, (rare, shrink, state["paid"], sums)

    def _steps_of_intercept(self, problem: Problem, state: State, m: float) -> tuple[float, float]:
        """eta of the intercept over that of w, and the most that it may be."""
        if not problem.intercept:
            return 0.0, 0.0
        rows = max(float(problem.total_rows), 1.0)
        density = problem.total_nonzeros / max(rows * problem.columns, 1.0)
        curve = SMOOTHNESS.get(problem.loss, 1.0) * m * problem.total_weight / rows
        lag = self.lag(problem, state)
        # steps from one and the same intercept add up; eta0 by curvature is that of x, not of b
        most = 1.0 / max(curve * lag, 1e-300) if lag > 1 or self.eta0 is None else math.inf
        return max(density, SPARSE_STEP_B), most

    def _report(self, problem: Problem, theta: Array, state: State) -> None:
        """theta <- the mean of w since step `average`; before it, w."""
        taken = float(state["t"][0] - state["since"][0]) + 1.0
        theta[:] = state["w"]
        if taken > 0.0:
            sums = state["sums"].copy()
            steps.average_ranks(problem, sums)
            theta -= sums / taken

    # -- when to stop --

    def progress(self, problem: Problem, state: State, objective: float) -> float:
        """An estimate of the gap: what epochs still gain. With `tol`: infinite, or 0 to stop.

        Any figure that falls may stand for the objective, where `tol` is given.
        """
        if self.tol is None:
            recent = state["recent"] = np.append(state["recent"][1:], objective * self.per(problem))
            bounded = problem.loss in WITH_GAP and problem.loss != HINGE
            if bounded and (problem.l1 or problem.l2):  # the gap is computed before it ends
                gain = float(recent[-2] - recent[-1])
            else:  # nothing else tells that it ends too early: what epochs of full steps would move
                gain = float(recent.max() - recent.min())
                if self.schedule == "epoch":
                    gain /= max(self.decay ** (float(state["round"][0]) - 1.0), 1e-300)
            return max(gain, 0.0) if not math.isnan(gain) else math.inf
        best = float(state["best"][0])
        state["stalled"] = state["stalled"] + 1.0 if objective > best - self.tol else np.zeros(1)
        state["best"] = np.array([min(best, objective)])
        if state["stalled"][0] < self.patience:
            return math.inf
        if self.schedule == "adaptive" and state["eta"][0] > 1e-6:
            state["eta"] /= 5.0
            state["stalled"] = np.zeros(1)
            return math.inf
        return 0.0

    def certify(self, problem: Problem, theta: Array, state: State) -> Certificate:
        if self.tol is None:
            return certify(problem, theta)
        return Certificate(float(state["objective"][0]) * self.per(problem), -math.inf)
