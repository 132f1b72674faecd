"""Epochs of stochastic quasi-Newton solvers, which end lower than they began.

    g = g_B(u) - g_B(a) + g(a),   a: the iterate at the start of the epoch     (anchored)
    eta_t = eta T / (T + t)

The noise of an anchored g vanishes as u comes close to a, and with it the need for eta to fall
(Johnson & Zhang 2013; with L-BFGS: Moritz, Nishihara & Jordan 2016, arXiv:1508.02087). An epoch at
whose end P is higher than before is taken back, and the next one has half of eta.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from manyhands.linear.passes.rows import Array
from manyhands.linear.problem import Problem
from manyhands.linear.reduced_objective import check_smooth
from manyhands.linear.stochastic.mini_batches import (
    MiniBatch,
    Scaling,
    default_size,
    mini_batches,
)
from manyhands.quasi_newton import History, two_loop

State = dict[str, Array]
GROWTH = 1.3  # of eta after an epoch that went down, up to what was asked for


@dataclass(frozen=True)
class BatchStep:
    """What a step is made of: `own` is the gradient of the batch, `g` the same anchored."""

    batch: MiniBatch
    own: Array
    g: Array
    eta: float


Move = Callable[[BatchStep, History, Array], None]  # changes the last, u


@dataclass(frozen=True)
class EpochOptions:
    """Fields of the solvers; `forget`: an epoch that is taken back takes the history with it."""

    batch: int | None
    memory: int
    eta: float
    decay: float
    anchored: bool
    precondition: bool
    forget: bool

    def __post_init__(self) -> None:
        if self.batch is not None and self.batch < 1:
            raise ValueError(f"batch={self.batch}: at least 1 row is needed, or None")
        if self.memory < 1:
            raise ValueError(f"memory={self.memory}: at least 1 pair is needed")
        if not 0.0 < self.eta < math.inf:
            raise ValueError(f"eta={self.eta}: a number above 0 is needed")
        if not self.decay > 0.0:
            raise ValueError(f"decay={self.decay}: more than 0 epochs are needed, inf for none")

    def size(self, problem: Problem) -> int:
        return self.batch or default_size(problem, self.memory)


def begin(options: EpochOptions, problem: Problem, theta: Array) -> State:
    check_smooth(problem)
    problem.margins(theta)
    if problem.intercept:
        theta[-1] = problem.best_intercept(float(theta[-1]))
    scaling = Scaling.at(problem) if options.precondition else Scaling.none(problem)
    f, g = problem.value_and_gradient(theta)
    return {
        "u": scaling.u(theta), "g": scaling.gradient(g) / problem.total_weight, "f": np.array([f]),
        "scale": scaling.scale, "mean": scaling.mean, "eta": np.array([options.eta]),
        "epoch": np.zeros(1), "steps": np.zeros(1), "pairs": np.zeros(1),
        "s": np.zeros((options.memory, problem.size)),
        "y": np.zeros((options.memory, problem.size)),
    }  # fmt: skip


def run_epoch(
    options: EpochOptions, problem: Problem, theta: Array, state: State, move: Move
) -> float:
    """`move` takes a step for each batch; returns a bound or an estimate of P - P*."""
    scaling, history = Scaling(state["scale"], state["mean"]), _loaded(options, state)
    before = {name: value.copy() for name, value in state.items() if name not in ("s", "y")}
    size, u, epoch = options.size(problem), state["u"].copy(), int(state["epoch"][0])
    for batch in mini_batches(problem, scaling, size, epoch):
        g, count = batch.gradient(u)
        if count == 0.0:
            break
        own = g
        if options.anchored:
            g = own - batch.gradient(state["u"])[0] + state["g"]
        epochs = float(state["steps"][0]) * size / max(problem.total_rows, 1.0)
        falling = 1.0 if math.isinf(options.decay) else options.decay / (options.decay + epochs)
        state["steps"] += 1.0
        move(BatchStep(batch, own, g, falling * float(state["eta"][0])), history, u)
    theta[:] = scaling.theta(u)
    f, g = problem.value_and_gradient(theta)
    if not f <= before["f"][0]:
        state |= before
        state["eta"] *= 0.5
        state["epoch"] += 1.0
        if options.forget:
            state["pairs"][0] = 0.0
        theta[:] = scaling.theta(state["u"])
        return math.inf
    _store(state, history)
    state["eta"] = np.minimum(GROWTH * state["eta"], options.eta)
    state["epoch"] += 1.0
    state["u"], state["g"] = u, scaling.gradient(g) / problem.total_weight
    state["f"][0] = f
    if problem.l2 > 0.0:
        w = g[: problem.columns]
        return float(w @ w) / (2.0 * problem.l2)
    d = two_loop(torch.from_numpy(state["g"]), history).numpy()
    return max(-0.5 * problem.total_weight * float(state["g"] @ d), float(before["f"][0]) - f)


def cauchy(step: BatchStep, u: Array) -> float:
    """The step along -g to the minimum of the batch's quadratic model."""
    g = step.g
    curvature = float(g @ step.batch.curvature(u, g))
    return float(g @ g) / curvature if curvature > 0.0 else 1.0


def _loaded(options: EpochOptions, state: State) -> History:
    history = History(options.memory)
    for k in range(int(state["pairs"][0])):
        history.add(*(torch.from_numpy(state[name][k].copy()) for name in "sy"))
    return history


def _store(state: State, history: History) -> None:
    state["pairs"][0] = len(history)
    for k, pair in enumerate(history):
        state["s"][k], state["y"][k] = pair.s.numpy(), pair.y.numpy()
