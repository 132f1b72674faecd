"""Problem: a regularised linear model over this rank's rows, as solvers see it.

    P(w, b) = sum_i c_i phi(x_i'w + b, y_i) + l1 |w|_1 + l2/2 |w|^2 + l2_intercept/2 b^2

The sum is over the rows of all ranks. `theta` is w with b behind it, where there is an intercept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from manyhands.core import Group
from manyhands.exchange.solo import SoloGroup
from manyhands.linear.losses import SMOOTHNESS
from manyhands.linear.passes import row_kernels as kernels
from manyhands.linear.passes.rows import Array, BlockSource, Rows, Threads


@dataclass
class Problem:
    """What is minimised; `y` and `c` are labels and weights of this rank's rows."""

    source: BlockSource
    y: Array
    c: Array
    loss: int
    l1: float = 0.0
    l2: float = 0.0
    intercept: bool = True
    l2_intercept: float = 0.0  # 0: the intercept is free
    eps: float = 0.0
    threads: Threads = field(default_factory=Threads)
    group: Group = field(default_factory=SoloGroup)
    seed: int = 0
    positive: bool = False  # w >= 0

    def __post_init__(self) -> None:
        self.columns = self.source.columns
        self.size = self.columns + self.intercept
        self.smooth = self.loss in SMOOTHNESS
        self.z = np.zeros(self.source.count)  # the margins of the last pass
        self.r = self.h = np.zeros(0)  # slopes and curvatures of the last sweep
        totals = np.array([self.source.count, float(self.c.sum()), float(self.source.nonzeros)])
        self.total_rows, self.total_weight, self.total_nonzeros = self.sum(totals).tolist()

    # -- all ranks --

    def sum(self, values: Array, name: str = "sum") -> Array:
        """`values` summed over ranks, in place."""
        if self.group.size > 1:
            self.group.all_reduce({name: torch.from_numpy(values)}).wait()
        return values

    def blocks(self) -> Iterator[tuple[Rows, slice]]:
        for rows in self.source.blocks():
            yield rows, slice(rows.start, rows.start + rows.count)

    # -- theta --

    def unpack(self, theta: Array) -> tuple[Array, float]:
        return theta[: self.columns], float(theta[self.columns]) if self.intercept else 0.0

    def penalty(self, theta: Array) -> float:
        w, b = self.unpack(theta)
        return float(
            (self.l1 * np.abs(w).sum() if self.l1 else 0.0)
            + 0.5 * self.l2 * (w @ w)
            + 0.5 * self.l2_intercept * b * b
        )

    def ridge(self) -> Array:
        """The l2 of each element of theta."""
        out = np.full(self.size, self.l2)
        if self.intercept:
            out[-1] = self.l2_intercept
        return out

    # -- passes over the rows of all ranks --

    def value_and_gradient(self, theta: Array) -> tuple[float, Array]:
        """P and its gradient without l1; one vector of d + 2 numbers travels."""
        d = self.columns
        out = self.sum(self._pass(theta), "gradient")
        return out[d + 1] + self.penalty(theta), out[: self.size] + self.ridge() * theta

    def own_loss(self, theta: Array) -> tuple[float, Array]:
        """The loss of this rank's rows alone, without a penalty, and its gradient."""
        out = self._pass(theta)
        return float(out[-1]), out[: self.size]

    def _pass(self, theta: Array) -> Array:
        """Gradient by w and b, and the loss, of this rank's rows."""
        (w, b), d = self.unpack(theta), self.columns
        out = np.zeros(d + 2)
        for rows, at in self.blocks():
            loss, shift = rows.gradient(
                self.threads, self.y[at], self.c[at], self.loss, self.eps, w, b, out[:d], self.z[at]
            )
            out[d] += shift
            out[d + 1] += loss
        return out

    def objective(self, theta: Array) -> float:
        self.margins(theta)
        return self.loss_at(0.0)[0] + self.penalty(theta)

    def margins(self, theta: Array) -> Array:
        """z = Xw + b of this rank's rows, kept in `self.z`."""
        w, b = self.unpack(theta)
        for rows, at in self.blocks():
            rows.margins(self.threads, w, b, self.z[at])
        return self.z

    def zero_margins(self) -> Array:
        """The margins at theta = 0, which cost no pass."""
        self.z[:] = 0.0
        return self.z

    def loss_at(self, shift: float) -> tuple[float, float, float]:
        """sum c phi(z + shift) at the kept margins, with two derivatives by `shift`."""
        done = self.threads.over(
            len(self.z),
            lambda lo, hi: kernels.losses(
                self.z, self.y, self.c, lo, hi, self.loss, self.eps, float(shift)
            ),
        )
        first, second, third = self.sum(np.array(done).sum(0), "loss").tolist()
        return first, second, third

    def sweep(self) -> tuple[float, float, float]:
        """The loss at the kept margins with two derivatives by the intercept; slopes and
        curvatures of the rows are kept in `self.r` and `self.h`."""
        if len(self.r) != len(self.z):
            self.r, self.h = np.empty_like(self.z), np.empty_like(self.z)
        done = self.threads.over(
            len(self.z),
            lambda lo, hi: kernels.sweep(
                self.z, self.y, self.c, lo, hi, self.loss, self.eps, self.r, self.h
            ),
        )
        first, second, third = self.sum(np.array(done).sum(0), "loss").tolist()
        return first, second, third

    def slopes(self) -> Array:
        """c phi'(z) at the kept margins."""
        r = np.empty_like(self.z)
        self.threads.over(
            len(r),
            lambda lo, hi: kernels.slopes(self.z, self.y, self.c, lo, hi, self.loss, self.eps, r),
        )
        return r

    def transposed(self, r: Array) -> tuple[Array, float]:
        """X'r and the sum of r, over the rows of all ranks."""
        out = np.zeros(self.columns + 1)
        for rows, at in self.blocks():
            out[-1] += rows.scatter(self.threads, r[at], out[:-1])
        self.sum(out, "transposed")
        return out[:-1], float(out[-1])

    def curvatures(self) -> Array:
        """h = c phi''(z) at the kept margins."""
        h = np.empty_like(self.z)
        self.threads.over(
            len(h),
            lambda lo, hi: kernels.curvatures(
                self.z, self.y, self.c, lo, hi, self.loss, self.eps, h
            ),
        )
        return h

    def squares(self) -> Array:
        """The diagonal of X' diag(c) X."""
        out = np.zeros(self.columns + 1)
        for rows, at in self.blocks():
            out[-1] += rows.squares(self.threads, self.c[at], out[:-1])
        return self.sum(out, "squares")[: self.size]

    def hessian_product(self, h: Array, v: Array, xv: Array) -> Array:
        """H v, for curvatures h; xv is set to Xv + v_b of this rank's rows."""
        (vw, vb), d = self.unpack(v), self.columns
        out = np.zeros(d + 1)
        for rows, at in self.blocks():
            out[d] += rows.hessian_product(self.threads, h[at], vw, vb, out[:d], xv[at])
        self.sum(out, "hessian")
        return out[: self.size] + self.ridge() * v

    def hessian(self, h: Array) -> Array:
        """The whole Hessian of the smooth part, for few columns."""
        d = self.columns
        out = np.zeros((self.size, self.size))
        inner = np.zeros((d, d))
        edge = np.zeros(d + 1)
        for rows, at in self.blocks():
            rows.gram(self.threads, h[at], inner)
            if self.intercept:
                edge[d] += rows.scatter(self.threads, h[at], edge[:d])
        out[:d, :d] = inner
        if self.intercept:
            out[d, :d] = out[:d, d] = edge[:d]
            out[d, d] = edge[d]
        self.sum(out, "hessian")
        out[np.diag_indices(self.size)] += self.ridge()
        return out

    def best_intercept(self, b: float, tol: float = 1e-12) -> float:
        """argmin_b of P for this w: Newton's method on kept margins, scalars travel.

        `self.z` are the margins at `b`; afterwards they are those at the intercept returned.
        """
        if not self.free_intercept:
            return b
        shift = best_shift(self.loss_at, self.total_weight, tol)
        self.z += shift
        return b + shift

    @property
    def free_intercept(self) -> bool:
        """Whether there is an intercept without a penalty, and the loss tells its best value."""
        return self.intercept and not self.l2_intercept and self.smooth


def step_length(
    problem: Problem, theta: Array, d: Array, dz: Array, before: float, slope: float, c1: float
) -> tuple[float, float]:
    """The first of t = 1, 1/2, ... at which P(theta + t d) has decreased by c1 t |slope|, and P
    there; 0, `before`: none.

    `dz` = X d, and the kept margins are those at theta, where P is `before`. Nothing is read but
    margins; afterwards margins, slopes and curvatures are those at theta + t d.
    """
    z, t = problem.z.copy(), 1.0
    while t > 1e-10:
        np.multiply(dz, t, out=problem.z)
        problem.z += z
        after = problem.sweep()[0] + problem.penalty(theta + t * d)
        if after <= before + c1 * t * slope + 1e-14 * abs(before):
            return t, after
        t *= 0.5
    problem.z[:] = z
    problem.sweep()
    return 0.0, before


def best_shift(
    loss_at: Callable[[float], tuple[float, float, float]], weight: float, tol: float = 1e-12
) -> float:
    """The shift of all margins at which the loss is lowest: Newton's method inside a bracket."""
    shift, low, high = 0.0, -np.inf, np.inf
    for _ in range(60):
        _, first, second = loss_at(shift)
        if abs(first) <= tol * max(weight, 1e-300):
            break
        low, high = (low, shift) if first > 0 else (shift, high)
        step = shift - first / second if second > 0 else np.nan
        if not low < step < high:  # Newton leaves the bracket: halve it, or widen it
            if np.isfinite(low) and np.isfinite(high):
                step = 0.5 * (low + high)
            else:
                step = shift - np.sign(first) * max(1.0, 2.0 * abs(shift))
        if step == shift:
            break
        shift = step
    return float(shift)


def as_theta(problem: Problem, coef: Any, intercept: float) -> Array:
    theta = np.zeros(problem.size)
    theta[: problem.columns] = coef
    if problem.intercept:
        theta[-1] = intercept
    return theta
