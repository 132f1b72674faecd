"""DFP, the method of Davidon, Fletcher and Powell: the dual of BFGS.

    H <- H - Hy (Hy)' / y'Hy + s s' / s'y

The same as BFGS with s and y exchanged, for the Hessian in place of its inverse. With exact line
searches on a quadratic both take the same steps; unlike BFGS it recovers slowly from an H that is
too large, so its search is accurate: here that costs no pass over the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from manyhands.linear.certificate import Certificate
from manyhands.linear.passes.rows import Array
from manyhands.linear.solvers import dense_quasi_newton as dense

State = dict[str, Array]


def dfp_update(h: Array, s: Array, y: Array) -> None:
    """H <- the DFP formula, in place."""
    hy = h @ y
    h += np.outer(s, s) / float(s @ y) - np.outer(hy, hy) / float(y @ hy)


@dataclass(frozen=True)
class DFP:
    precondition: bool = True  # H_0 is the inverse of the Hessian's diagonal at the start
    gamma: float | None = None  # H_0 is multiplied by it; None: s'y / y'H_0 y of the first pair
    c1: float = 1e-4
    c2: float = 1e-3
    most_columns: int = 5000

    def __post_init__(self) -> None:
        self._options()

    def _options(self) -> dense.DenseOptions:
        return dense.DenseOptions("dfp", **vars(self))

    def init(self, problem: Any, theta: Array) -> State:
        return dense.begin(self._options(), problem, theta)

    def round(self, problem: Any, theta: Array, state: State) -> float:
        return dense.step(self._options(), dfp_update, problem, theta, state)

    def certify(self, problem: Any, theta: Array, state: State) -> Certificate:
        """Costs no pass: the gradient at theta is known."""
        return dense.certified(problem, state)
