"""BFGS: a dense estimate H of the inverse Hessian, for few columns.

    H <- (I - rho s y') H (I - rho y s') + rho s s',   rho = 1 / s'y
       = H - rho (Hy s' + s (Hy)') + rho (1 + rho y'Hy) s s'

Afterwards H y = s, and H stays positive definite as s'y > 0, which the second Wolfe condition sees
to. It corrects itself after inexact line searches (Nocedal & Wright 2006, chapter 6).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from manyhands.linear.certificate import Certificate
from manyhands.linear.passes.rows import Array
from manyhands.linear.solvers import dense_quasi_newton as dense

State = dict[str, Array]


def bfgs_update(h: Array, s: Array, y: Array) -> None:
    """H <- the BFGS formula, in place."""
    rho, hy = 1.0 / float(s @ y), h @ y
    h -= rho * (np.outer(hy, s) + np.outer(s, hy))
    h += rho * (1.0 + rho * float(y @ hy)) * np.outer(s, s)


@dataclass(frozen=True)
class BFGS:
    precondition: bool = True  # H_0 is the inverse of the Hessian's diagonal at the start
    gamma: float | None = None  # H_0 is multiplied by it; None: s'y / y'H_0 y of the first pair
    c1: float = 1e-4
    c2: float = 0.9
    most_columns: int = 5000

    def __post_init__(self) -> None:
        self._options()

    def _options(self) -> dense.DenseOptions:
        return dense.DenseOptions("bfgs", **vars(self))

    def init(self, problem: Any, theta: Array) -> State:
        return dense.begin(self._options(), problem, theta)

    def round(self, problem: Any, theta: Array, state: State) -> float:
        return dense.step(self._options(), bfgs_update, problem, theta, state)

    def certify(self, problem: Any, theta: Array, state: State) -> Certificate:
        """Costs no pass: the gradient at theta is known."""
        return dense.certified(problem, state)
