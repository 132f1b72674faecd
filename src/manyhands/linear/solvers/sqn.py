"""Stochastic quasi-Newton: gradients of small batches, curvature of large ones, every L steps.

    u <- u - eta_t H g;   every L steps:  m = mean of the last L iterates
    s = m - m_before,   y = (Hessian of f at m, on an independent batch) s

Curvature is measured, not taken as a difference of noisy gradients, along the way of the averages.
Until there are two averages, the first 2 L steps, steps are those of gradient descent. A round is
an epoch; one gradient, two where anchored, travels for each batch, and one vector more in L.

Paper: Byrd, Hansen, Nocedal & Singer 2016 (arXiv:1401.7020).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from manyhands.linear.passes.rows import Array
from manyhands.linear.problem import Problem
from manyhands.linear.stochastic.mini_batches import MiniBatch, Scaling, mini_batches
from manyhands.linear.stochastic.quasi_newton_epochs import (
    BatchStep,
    EpochOptions,
    State,
    begin,
    cauchy,
    run_epoch,
)
from manyhands.quasi_newton import History, two_loop


@dataclass(frozen=True)
class SQN:
    """`batch` and `batch_h`: rows of all ranks for gradients and for curvature; None: a twentieth
    of all, or more where columns are many, and four times as many."""

    batch: int | None = None
    batch_h: int | None = None
    every: int = 10  # L
    memory: int = 10
    eta: float = 1.0
    decay: float = math.inf  # T, in epochs; infinite: eta does not fall
    anchored: bool = True
    precondition: bool = True  # by the Hessian's diagonal at the start

    def __post_init__(self) -> None:
        self._options()
        if self.batch_h is not None and self.batch_h < 1:
            raise ValueError(f"batch_h={self.batch_h}: at least 1 row is needed, or None")
        if self.every < 1:
            raise ValueError(f"every={self.every}: at least 1 step is needed")

    def _options(self) -> EpochOptions:
        return EpochOptions(
            self.batch, self.memory, self.eta, self.decay, self.anchored, self.precondition, False
        )

    def init(self, problem: Problem, theta: Array) -> State:
        state = begin(self._options(), problem, theta)
        state |= {"gamma": np.zeros(1), "averages": np.zeros(1)}
        return state | {"sum": np.zeros(problem.size), "average": np.zeros(problem.size)}

    def round(self, problem: Problem, theta: Array, state: State) -> float:
        """One epoch; returns a bound or an estimate of P - P* at its end."""
        options, scaling = self._options(), Scaling(state["scale"], state["mean"])
        size = self.batch_h or 4 * options.size(problem)
        others = mini_batches(problem, scaling, size, int(state["epoch"][0]), 1, again=True)

        def move(step: BatchStep, history: History, u: Array) -> None:
            self._move(state, others, step, history, u)

        return run_epoch(options, problem, theta, state, move)

    def _move(
        self,
        state: State,
        others: Iterator[MiniBatch],
        step: BatchStep,
        history: History,
        u: Array,
    ) -> None:
        if state["gamma"][0] == 0.0:
            state["gamma"][0] = cauchy(step, u)
        gamma = None if len(history) else float(state["gamma"][0])
        u += step.eta * two_loop(torch.from_numpy(step.g), history, gamma).numpy()
        state["sum"] += u
        if int(state["steps"][0]) % self.every == 0:
            self._measure(state, others, history)

    def _measure(self, state: State, others: Iterator[MiniBatch], history: History) -> None:
        """The pair of the last two averages."""
        mean = state["sum"] / self.every
        s = mean - state["average"]
        state["sum"][:], state["average"][:] = 0.0, mean
        state["averages"] += 1.0
        if state["averages"][0] > 1.0:
            y = next(others).curvature(mean, s)
            history.add(torch.from_numpy(s), torch.from_numpy(y))
