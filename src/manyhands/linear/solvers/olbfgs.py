"""Online L-BFGS: stochastic steps by curvature pairs that each come from one mini-batch.

    s = -eta_t H g;   y = g_B(u + s) - g_B(u) + lam s;   u <- u + s
    H_0 = mean of s'y / y'y over the pairs kept

Both gradients of y are of the same batch B, so y is a difference along s and no sampling noise; lam
keeps s'y positive where a batch is flat. With all rows in a batch, lam = 0 and H_0 of the newest
pair this is L-BFGS with a fixed step. A round is an epoch; two gradients travel for each batch, or
three where they are anchored.

Paper: Schraudolph, Yu & Guenter 2007 (AISTATS).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from manyhands.linear.passes.rows import Array
from manyhands.linear.problem import Problem
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
class OLBFGS:
    """`batch`: rows of all ranks; None: a twentieth of all, or more where columns are many."""

    batch: int | None = None
    memory: int = 10
    eta: float = 1.0
    decay: float = math.inf  # T, in epochs; infinite: eta does not fall
    lam: float = 0.01
    mean_gamma: bool = True  # False: H_0 of the newest pair, as in L-BFGS
    anchored: bool = True
    precondition: bool = True  # by the Hessian's diagonal at the start

    def __post_init__(self) -> None:
        self._options()
        if not self.lam >= 0.0:
            raise ValueError(f"lam={self.lam}: 0 or more is needed")

    def _options(self) -> EpochOptions:
        return EpochOptions(
            self.batch, self.memory, self.eta, self.decay, self.anchored, self.precondition, True
        )

    def init(self, problem: Problem, theta: Array) -> State:
        return begin(self._options(), problem, theta)

    def round(self, problem: Problem, theta: Array, state: State) -> float:
        """One epoch; returns a bound or an estimate of P - P* at its end."""
        return run_epoch(self._options(), problem, theta, state, self._move)

    def _move(self, step: BatchStep, history: History, u: Array) -> None:
        gamma = None
        if not len(history):
            gamma = cauchy(step, u)
        elif self.mean_gamma:
            gamma = sum(pair.sy / pair.yy for pair in history) / len(history)
        s = step.eta * two_loop(torch.from_numpy(step.g), history, gamma)
        u += s.numpy()
        y = step.batch.gradient(u)[0] - step.own + self.lam * s.numpy()
        history.add(s, torch.from_numpy(y))
