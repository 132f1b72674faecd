"""Limited-memory BFGS, with history, gradient and direction in slices over ranks (Sandblaster).

    s_k = u_{k+1} - u_k,   y_k = g_{k+1} - g_k;   d = -H g from the last m pairs;   u <- u + t d
    G = B'B,   B = [s_1 ... s_m, y_1 ... y_m, g];   d = B q with q from G alone

u = D^{1/2} w, with D the diagonal of the Hessian at the start. The intercept is at its best value
for every w, so it is in no vector. The recursion runs on the Gram matrix G: a rank computes dot
products of its slices, 3 (2m + 1) of them are summed over ranks, and each knows q. So what travels
in a round beside a gradient and a direction is a few hundred bytes; where columns are split, only
margins and those. The margins of d cost one pass over the data, the gradient another, and the line
search (strong Wolfe) none.

Papers: Dean et al. 2012 (Sandblaster); Chen, Wang & Zhou 2014 (dot products alone); Liu & Nocedal
1989 (doi:10.1007/BF01589116).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from manyhands.linear.certificate import Certificate
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
NOISE = 1e-14  # relative rounding error of a loss


@dataclass(frozen=True)
class LinearLBFGS:
    memory: int = 10  # pairs
    precondition: bool = True  # by the Hessian's diagonal at the start
    gamma: float | None = None  # H_0 = gamma I; None: s'y / y'y of the newest pair
    c1: float = 1e-4
    c2: float = 0.9

    def __post_init__(self) -> None:
        if self.memory < 1:
            raise ValueError(f"memory={self.memory}: at least 1 pair is needed")
        if not 0.0 < self.c1 < self.c2 < 1.0:
            raise ValueError(f"c1={self.c1}, c2={self.c2}: 0 < c1 < c2 < 1 is needed")
        if self.gamma is not None and not self.gamma > 0.0:
            raise ValueError(f"gamma={self.gamma}: more than 0 is needed, or None")

    def init(self, problem: Any, theta: Array) -> State:
        objective, most = reduced(problem), 2 * self.memory + 1
        at, f = start(objective, theta)
        w = objective.weights(theta)
        if self.precondition:
            scale = diagonal(objective, at) ** -0.5
        else:
            scale = np.ones_like(objective.cut(w))
        state = {
            "z": at.z, "r": at.r, "h": at.h, "scale": scale,
            "basis": np.zeros((most, len(scale))),  # s in its places, then y, then g
            "gram": np.zeros((most, most)),
            "pairs": np.zeros(2),  # how many were found, and how many of them are in use
            "known": np.array([f, math.inf, 0.0]),  # P, its last decrease, |g|^2
        }  # fmt: skip
        g = self._gradient(objective, state, w)
        state["basis"][-1] = g
        squares = objective.sum(np.array([g @ g, (g / scale) @ (g / scale)]))
        state["gram"][-1, -1], state["known"][2] = squares
        return state

    def round(self, problem: Any, theta: Array, state: State) -> float:
        """One step; returns a bound or an estimate of P - P* at its end."""
        objective, known = reduced(problem), state["known"]
        q, slope = self._direction(state)
        if not slope < 0.0:
            return 0.0  # the gradient is zero
        s = q @ state["basis"]
        d = objective.gathered(s * state["scale"])
        at = MarginPoint(state["z"], state["r"], state["h"])
        line = Line(objective, at, theta, objective.weights(theta), d)
        step = line.newton_step(slope)
        found = strong_wolfe(line, float(known[0]), slope, step, self.c1, self.c2, noise=NOISE)
        if found.step == 0.0:  # the history misleads; without one, no step goes down but rounding
            without = state["pairs"][1] == 0.0
            state["pairs"][1] = 0.0
            return 0.0 if without else math.inf
        w = line.take(theta, found.step)
        known[:2] = found.loss, known[0] - found.loss
        self._add(objective, state, found.step * s, self._gradient(objective, state, w))
        if objective.l2 > 0.0:
            return float(known[2]) / (2.0 * objective.l2)
        return max(-0.5 * self._direction(state)[1], float(known[1]))

    def certify(self, problem: Any, theta: Array, state: State) -> Certificate:
        """Costs no pass: the gradient at theta is known."""
        f, _, square = state["known"].tolist()
        return certificate(reduced(problem), f, square)

    # -- the parts of a round --

    def _gradient(self, objective: ReducedObjective, state: State, w: Array) -> Array:
        """The own slices of the gradient by u."""
        g = objective.transposed(state["r"]) + objective.l2 * objective.cut(w)
        return np.asarray(state["scale"] * g)

    def _places(self, state: State) -> list[int]:
        """Of the pairs in use, oldest first."""
        found, used = (int(n) for n in state["pairs"])
        return [n % self.memory for n in range(found - used, found)]

    def _direction(self, state: State) -> tuple[Array, float]:
        """q, with d = B q, by the two-loop recursion on G; and d'g."""
        gram, places, m = state["gram"], self._places(state), self.memory
        q, alphas, gamma = np.zeros(len(gram)), [], self.gamma or 1.0
        q[-1] = -1.0
        for k in reversed(places):
            alphas.append(float(gram[k] @ q) / gram[k, m + k])
            q[m + k] -= alphas[-1]
        if places and self.gamma is None:
            newest = places[-1]
            gamma = gram[newest, m + newest] / gram[m + newest, m + newest]
        q *= gamma
        for k, alpha in zip(places, reversed(alphas), strict=True):
            q[k] += alpha - float(gram[m + k] @ q) / gram[k, m + k]
        return q, float(gram[-1] @ q)

    def _add(self, objective: ReducedObjective, state: State, s: Array, g: Array) -> None:
        """The new gradient and, if it has curvature, the new pair; one small message."""
        basis, gram, m, scale = state["basis"], state["gram"], self.memory, state["scale"]
        new = np.stack((s, g - basis[-1], g))
        plain = g / scale
        dots = np.concatenate(
            ((new @ basis[:-1].T).ravel(), (new @ new.T).ravel(), [plain @ plain])
        )
        dots = objective.sum(dots)
        old, inner, state["known"][2] = dots[: 6 * m].reshape(3, -1), dots[6 * m : -1], dots[-1]
        inner = inner.reshape(3, 3)
        at = [2 * m]
        if inner[0, 1] > CURVATURE * math.sqrt(inner[0, 0] * inner[1, 1]):
            place = int(state["pairs"][0]) % m
            at = [place, m + place, 2 * m]
            state["pairs"] += 1, 1
            state["pairs"][1] = min(state["pairs"][1], m)
        kept = slice(3 - len(at), 3)
        basis[at] = new[kept]
        gram[at, : 2 * m] = old[kept]
        gram[: 2 * m, at] = old[kept].T
        gram[np.ix_(at, at)] = inner[kept, kept]
