"""Reduced objective: P(w) = min_b P(w, b), on points and on lines, for solvers that use gradients.

    g = X'r + l2 w,   r = slopes of the loss at the margins z, where b is at its best
    P(w + t d): margins z + t Xd + b, so one pass over the data and then scalars whatever t is
    P(w) - P* <= |g|^2 / (2 l2)

The last line holds because P is l2-strongly convex; for a point with slopes r it is the duality gap
of a = -r. A point and its gradient cost two passes: X d and X'r.

Each rank owns slices of the vectors over columns. Rows over ranks: the gradient is summed by
reduce-scatter and the direction made whole by all-gather, together what one all-reduce sends.
Columns over ranks: a rank's slice is its columns, and margins are summed instead.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import torch

from manyhands.core import Group
from manyhands.linear.certificate import Certificate
from manyhands.linear.column_problem import ColumnProblem
from manyhands.linear.margin_losses import (
    ClassLoss,
    MarginPoint,
    ScalarLoss,
    slope_scale,
)
from manyhands.linear.passes.rows import Array
from manyhands.linear.problem import Problem
from manyhands.linear.softmax_problem import SoftmaxProblem

Squares = tuple[float, float, float]  # |w|^2, w'd, |d|^2


class Slices:
    """A vector over columns of which every rank owns slices."""

    def __init__(self, group: Group, count: int):
        self.group = group
        self._shared = (
            group.allocate(count, torch.float64)
            if group.size > 1
            else torch.zeros(count, dtype=torch.float64)
        )
        self.whole = self._shared.numpy()
        self._own = group.own(self._shared) if group.size > 1 else [slice(0, count)]

    def cut(self, whole: Array) -> Array:
        """A copy of the own slices."""
        return np.concatenate([whole[s] for s in self._own] or [np.empty(0)])

    def summed(self) -> Array:
        """The own slices of `self.whole`, summed over ranks."""
        if self.group.size > 1:
            self.group.reduce_scatter({"gradient": self._shared}).wait()
        return self.cut(self.whole)

    def gathered(self, own: Array) -> Array:
        """The whole vector from the own slices of all ranks."""
        start = 0
        for s in self._own:
            self.whole[s] = own[start : start + s.stop - s.start]
            start += s.stop - s.start
        if self.group.size > 1:
            self.group.all_gather({"direction": self._shared}).wait()
        return self.whole.copy()


class ReducedObjective(Protocol):
    """One of the three below. `l2` is of w; `loss` has the rest of the objective."""

    loss: ScalarLoss | ClassLoss
    l2: float

    def weights(self, theta: Array) -> Array:
        """w, all that this rank has of it."""
        ...

    def intercepts(self, theta: Array) -> Array: ...
    def store(self, theta: Array, w: Array, b: Array) -> None: ...
    def margins(self, theta: Array) -> Array: ...
    def products(self, w: Array, d: Array) -> tuple[Array, Squares]:
        """X d without intercept, and |w|^2, w'd and |d|^2 over all columns."""
        ...

    def transposed(self, r: Array) -> Array:
        """The own slices of X'r."""
        ...

    def moments(self, at: MarginPoint) -> Array:
        """The own slices of the Hessian's diagonal at a point, without l2."""
        ...

    def cut(self, whole: Array) -> Array: ...
    def gathered(self, own: Array) -> Array: ...
    def sum(self, values: Array) -> Array:
        """Sums over the slices of all ranks."""
        ...


class ReducedRows:
    """Rows over ranks."""

    def __init__(self, problem: Problem):
        p = self.problem = problem
        self.loss: ScalarLoss | ClassLoss
        self.l2, self.sum = p.l2, lambda values: p.sum(values, "dots")
        self.slices = Slices(p.group, p.columns)
        self.cut, self.gathered = self.slices.cut, self.slices.gathered
        weight = float(p.sum(np.array([slope_scale(p.loss, p.y, p.c)]))[0])
        self.loss = ScalarLoss(
            p.y, p.c, p.loss, p.eps, p.intercept, p.l2_intercept, weight, p.threads,
            lambda values: p.sum(values, "loss"),
        )  # fmt: skip

    def weights(self, theta: Array) -> Array:
        return theta[: self.problem.columns].copy()

    def intercepts(self, theta: Array) -> Array:
        return np.array([self.problem.unpack(theta)[1]])

    def store(self, theta: Array, w: Array, b: Array) -> None:
        theta[: self.problem.columns] = w
        if self.problem.intercept:
            theta[-1] = b[0]

    def margins(self, theta: Array) -> Array:
        z = self.problem.z
        return (self.problem.margins(theta) if theta.any() else np.zeros_like(z)).copy()

    def products(self, w: Array, d: Array) -> tuple[Array, Squares]:
        dz = np.empty(self.problem.source.count)
        for rows, at in self.problem.blocks():
            rows.margins(self.problem.threads, d, 0.0, dz[at])
        return dz, (float(w @ w), float(w @ d), float(d @ d))

    def transposed(self, r: Array) -> Array:
        out = self.slices.whole
        out[:] = 0.0
        for rows, at in self.problem.blocks():
            rows.scatter(self.problem.threads, r[at], out)
        return self.slices.summed()

    def moments(self, at: MarginPoint) -> Array:
        out = self.slices.whole
        out[:] = 0.0
        for rows, where in self.problem.blocks():
            rows.squares(self.problem.threads, at.h[where], out)
        squares = self.slices.summed()
        if not self.problem.intercept:
            return squares
        total = float(self.loss.sum(np.array([at.h.sum()]))[0]) + self.problem.l2_intercept
        return centred(squares, self.transposed(at.h), total)


class ReducedColumns:
    """Columns over ranks: only margins travel, and sums of products."""

    def __init__(self, problem: ColumnProblem):
        p = self.problem = problem
        self.loss: ScalarLoss | ClassLoss
        self.l2, self.sum = p.l2, lambda values: p.sum(values, "dots")
        weight = slope_scale(p.loss, p.y, p.c)
        self.loss = ScalarLoss(
            p.y, p.c, p.loss, p.eps, p.intercept, p.l2_intercept, weight, p.threads,
            lambda values: values,
        )  # fmt: skip

    def weights(self, theta: Array) -> Array:
        return theta[: self.problem.columns].copy()

    def intercepts(self, theta: Array) -> Array:
        return np.array([self.problem.unpack(theta)[1]])

    def store(self, theta: Array, w: Array, b: Array) -> None:
        theta[: self.problem.columns] = w
        if self.problem.intercept:
            theta[-1] = b[0]

    def margins(self, theta: Array) -> Array:
        return self.problem.margins(theta).copy()

    def products(self, w: Array, d: Array) -> tuple[Array, Squares]:
        n = len(self.problem.y)
        out = np.zeros(n + 3)
        self.problem.columns_.add(d, np.arange(len(d)), out[:n])
        out[n:] = w @ w, w @ d, d @ d
        self.problem.sum(out, "margins")
        ww, wd, dd = out[n:].tolist()
        return out[:n], (ww, wd, dd)

    def transposed(self, r: Array) -> Array:
        return self.problem.transposed(r)

    def moments(self, at: MarginPoint) -> Array:
        first, squares = self.problem.columns_.moments(np.arange(self.problem.columns), at.h)
        if not self.problem.intercept:
            return squares
        return centred(squares, first, float(at.h.sum()) + self.problem.l2_intercept)

    def cut(self, whole: Array) -> Array:
        return whole.copy()

    def gathered(self, own: Array) -> Array:
        return own


class ReducedClasses:
    """Several classes, rows over ranks. w has K numbers of each column side by side."""

    def __init__(self, problem: SoftmaxProblem):
        p = self.problem = problem
        self.loss: ScalarLoss | ClassLoss
        self.l2, self.sum = p.l2, lambda values: p.sum(values, "dots")
        self.slices = Slices(p.group, p.columns * p.classes)
        self.cut, self.gathered = self.slices.cut, self.slices.gathered
        self.loss = p.loss_on_margins

    def weights(self, theta: Array) -> Array:
        return self.problem.unpack(theta)[0].ravel()

    def intercepts(self, theta: Array) -> Array:
        return self.problem.unpack(theta)[1]

    def store(self, theta: Array, w: Array, b: Array) -> None:
        self.problem.store(theta, w.reshape(self.problem.columns, -1), b)

    def margins(self, theta: Array) -> Array:
        z = self.problem.z
        return (self.problem.margins(theta) if theta.any() else np.zeros_like(z)).copy()

    def products(self, w: Array, d: Array) -> tuple[Array, Squares]:
        p = self.problem
        dz = np.empty((p.source.count, p.classes))
        p.own_margins(d.reshape(p.columns, -1), np.zeros(p.classes), dz)
        return dz, (float(w @ w), float(w @ d), float(d @ d))

    def transposed(self, r: Array) -> Array:
        out = self.slices.whole
        out[:] = 0.0
        self.problem.own_transposed(r, out.reshape(self.problem.columns, -1))
        return self.slices.summed()

    def moments(self, at: MarginPoint) -> Array:
        """The same for all classes, so that their sum stays where it is: mean_k p_k (1 - p_k)."""
        p, d = self.problem, self.problem.columns
        chances = at.r.copy()
        chances[np.arange(len(p.y)), p.y] += p.c  # c p
        c = np.maximum(p.c, 1e-300)
        h = (chances * (1.0 - chances / c[:, None])).mean(axis=1)
        out = np.zeros(2 * d + 1)
        for rows, where in p.blocks():
            rows.squares(p.threads, h[where], out[:d])
            out[-1] += rows.scatter(p.threads, h[where], out[d:-1])
        p.sum(out, "moments")
        diagonal = centred(out[:d], out[d:-1], out[-1]) if p.intercept else out[:d]
        return self.cut(np.repeat(diagonal, p.classes))


def centred(squares: Array, first: Array, total: float) -> Array:
    """sum h x^2 - (sum h x)^2 / sum h, which is what a column has beside the intercept."""
    if not total > 0.0:
        return squares
    return np.maximum(squares - first * first / total, 1e-6 * squares)


def check_smooth(problem: Any) -> None:
    """Refuse what has no gradient."""
    if getattr(problem, "l1", 0.0) or getattr(problem, "positive", False):
        given = f"l1={problem.l1}" if problem.l1 else "positive=True"
        raise ValueError(
            f"{given}: quasi-Newton solvers need an objective that is smooth and free of bounds; "
            "choose solver='scd', or for l1 over ranks 'sdca' or 'admm'"
        )
    if not getattr(problem, "smooth", True):
        raise ValueError(
            "the slope of this loss jumps: quasi-Newton solvers need a smooth one; choose "
            "solver='sdca' or 'hogwild'"
        )


def reduced(problem: Any) -> ReducedObjective:
    """The reduced objective of a problem, made once: it may hold memory that ranks share."""
    found: ReducedObjective | None = vars(problem).get("_reduced")
    if found is None:
        check_smooth(problem)
        if isinstance(problem, SoftmaxProblem):
            found = ReducedClasses(problem)
        elif isinstance(problem, ColumnProblem):
            found = ReducedColumns(problem)
        else:
            found = ReducedRows(problem)
        vars(problem)["_reduced"] = found
    return found


class Line:
    """P on w + t d, as a function of t, for a line search. `into` has slopes and curvatures at the
    last t, and `shift` is the change of the intercept there."""

    def __init__(
        self, objective: ReducedObjective, at: MarginPoint, theta: Array, w: Array, d: Array
    ):
        self.objective, self.at, self.d, self.w = objective, at, d, w
        self.dz, self.squares = objective.products(w, d)
        self.b = objective.intercepts(theta)
        self.into = MarginPoint(at.z, np.empty_like(at.r), np.empty_like(at.h))
        self.shift = np.zeros_like(self.b)
        curvature, self._rate = objective.loss.tangent(at, self.dz)
        self.curvature = curvature + objective.l2 * self.squares[2]

    def newton_step(self, slope: float) -> float:
        """The step to the minimum of the quadratic model; 1 where it has none."""
        step = -slope / self.curvature if self.curvature > 0.0 else 1.0
        return step if math.isfinite(step) and step > 0.0 else 1.0

    def __call__(self, t: float) -> tuple[float, float]:
        loss, l2, (ww, wd, dd) = self.objective.loss, self.objective.l2, self.squares
        f, slope, self.shift = loss.best(self.at, self.dz, t, self.b, t * self._rate, self.into)
        if t > 0.0:
            self._rate = self.shift / t
        return f + 0.5 * l2 * (ww + 2.0 * t * wd + t * t * dd), slope + l2 * (wd + t * dd)

    def take(self, theta: Array, t: float) -> Array:
        """Move theta and its margins to w + t d, where the line was looked at last; returns it."""
        z = self.at.z
        np.multiply(self.dz, t, out=self.dz)
        z += self.dz
        z += self.shift if z.ndim > 1 else self.shift[0]
        self.at.r[:], self.at.h[:] = self.into.r, self.into.h
        w = self.w + t * self.d
        self.objective.store(theta, w, self.b + self.shift)
        return w


def start(objective: ReducedObjective, theta: Array) -> tuple[MarginPoint, float]:
    """The point of theta, whose intercept is set to its best value, and P there."""
    z = objective.margins(theta)
    at, b, w = objective.loss.point(z), objective.intercepts(theta), objective.weights(theta)
    f, _, shift = objective.loss.best(at, z, 0.0, b, np.zeros_like(b), at)
    z += shift if z.ndim > 1 else shift[0]
    objective.store(theta, w, b + shift)
    own = objective.cut(w)
    return at, f + 0.5 * objective.l2 * float(objective.sum(np.array([own @ own]))[0])


def diagonal(objective: ReducedObjective, at: MarginPoint) -> Array:
    """The own slices of the Hessian's diagonal; 1 for a column without a single entry."""
    found = objective.moments(at) + objective.l2
    return np.where(found > 0.0, found, 1.0)


def certificate(objective: ReducedObjective, f: float, square: float) -> Certificate:
    """From P and |g|^2 at a point."""
    l2 = objective.l2
    return Certificate(f, f - square / (2.0 * l2) if l2 > 0.0 else -math.inf)
