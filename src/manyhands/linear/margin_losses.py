"""Margin losses: the loss on a line of margins, with the intercept at its best for every step.

    f(t) = min_b sum_i c_i phi(z_i + t dz_i + b, y_i) + l2_b/2 (b_0 + b)^2
    f'(t) = sum_i r_i' dz_i,   r_i = c_i phi'(...);   sum_i r_i + l2_b (b_0 + b) = 0 at the best b

So f is a function of one variable whatever the intercept is, and what travels between ranks is a
few numbers a step. Scalar losses have one margin a row, the softmax has one for each class.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.linalg import LinAlgError, cho_factor, cho_solve  # type: ignore[import-untyped]

from manyhands.linear.losses import SQUARED
from manyhands.linear.passes import line_kernels, softmax
from manyhands.linear.passes.rows import Array, Threads
from manyhands.linear.problem import best_shift

Sum = Callable[[Array], Array]  # over the rows of all ranks
EXACT = 1e-12  # of the slope by b, relative to the largest it could be


@dataclass
class MarginPoint:
    """Margins of this rank's rows, with slopes r and curvatures h there; h may be of no use."""

    z: Array
    r: Array
    h: Array


@dataclass(frozen=True)
class ScalarLoss:
    """c phi(z, y), one margin a row."""

    y: Array
    c: Array
    loss: int
    eps: float
    intercept: bool
    l2_intercept: float
    weight: float  # of all rows
    threads: Threads
    sum: Sum

    def point(self, z: Array) -> MarginPoint:
        return MarginPoint(z, np.empty_like(z), np.empty_like(z))

    def tangent(self, at: MarginPoint, dz: Array) -> tuple[float, Array]:
        """The curvature of f at t = 0, and how fast the best b changes there."""
        done = self.threads.over(len(dz), lambda lo, hi: line_kernels.curved(at.h, dz, lo, hi))
        total, mixed, second = self.sum(np.array(done).sum(0)).tolist()
        if not self.intercept or total + self.l2_intercept <= 0.0:
            return second, np.zeros(1)
        by_step = -mixed / (total + self.l2_intercept)
        return second + by_step * mixed, np.array([by_step])

    def best(
        self, at: MarginPoint, dz: Array, step: float, b: Array, guess: Array, into: MarginPoint
    ) -> tuple[float, float, Array]:
        """f(t), f'(t) and the best b from a guess; `into` has r and h there afterwards."""
        last = (0.0, 0.0, np.zeros(1))

        def look(more: float) -> tuple[float, float, float]:
            nonlocal last
            shift = guess + more
            f, by_step, first, second = self._sums(at.z, dz, step, float(shift[0]), into)
            if self.l2_intercept:
                whole = float((b + shift)[0])
                f += 0.5 * self.l2_intercept * whole * whole
                first += self.l2_intercept * whole
                second += self.l2_intercept
            last = f, by_step, shift
            return f, first, second

        if self.intercept:
            best_shift(look, self.weight, EXACT)
        else:
            look(0.0)
        return last

    def _sums(
        self, z: Array, dz: Array, step: float, shift: float, into: MarginPoint
    ) -> list[float]:
        y, c, r, h = self.y, self.c, into.r, into.h
        done = self.threads.over(
            len(z),
            lambda lo, hi: line_kernels.along(
                z, dz, step, shift, y, c, lo, hi, self.loss, self.eps, r, h
            ),
        )
        found: list[float] = self.sum(np.array(done).sum(0)).tolist()
        return found


def slope_scale(loss: int, y: Array, c: Array) -> float:
    """What the slope by b is measured by: the sum of weights, of weighted labels where slopes are
    in their unit."""
    return float(c @ np.abs(y)) if loss == SQUARED else float(c.sum())


@dataclass(frozen=True)
class ClassLoss:
    """c (log sum_k exp z_k - z_y): K margins a row, y is the number of its class."""

    y: Array
    c: Array
    classes: int
    intercept: bool
    weight: float
    threads: Threads
    sum: Sum

    def point(self, z: Array) -> MarginPoint:
        return MarginPoint(z, np.empty_like(z), np.zeros(0))

    def tangent(self, at: MarginPoint, dz: Array) -> tuple[float, Array]:
        def work(lo: int, hi: int) -> Array:
            sums = np.zeros(self.classes + 1)
            sums[-1] = softmax.curved(at.r, self.y, self.c, dz, lo, hi, sums[:-1])
            return sums

        found = self.sum(np.sum(self.threads.over(len(dz), work), axis=0))
        mixed, second = found[:-1], float(found[-1])
        if not self.intercept:
            return second, np.zeros(self.classes)
        by_step = -self._solve(at, mixed)
        return second + float(by_step @ mixed), by_step

    def best(
        self, at: MarginPoint, dz: Array, step: float, b: Array, guess: Array, into: MarginPoint
    ) -> tuple[float, float, Array]:
        """As of a scalar loss, by Newton's method with halved steps; the sum of b stays zero."""
        shift = guess if self.intercept else np.zeros(self.classes)
        f, by_step, first = self.look(at.z, dz, step, shift, into)
        if not self.intercept:
            return f, by_step, shift
        for _ in range(100):
            size = float(np.abs(first).max(initial=0.0))
            if size <= EXACT * self.weight:
                break
            d, t = -self._solve(into, first), 1.0
            while True:
                new = shift + t * d
                found = self.look(at.z, dz, step, new, into)
                smaller = float(np.abs(found[2]).max(initial=0.0)) < size
                if found[0] <= f - 1e-4 * t * float(-first @ d) or smaller or t < 1e-10:
                    break
                t *= 0.5
            stuck = t < 1e-10 or (size <= 1e-9 * self.weight and not smaller)
            shift, (f, by_step, first) = new, found
            if stuck:  # at rounding
                break
        return f, by_step, shift

    def look(
        self, z: Array, dz: Array, step: float, shift: Array, into: MarginPoint
    ) -> tuple[float, float, Array]:
        """The loss at z + t dz + b, its slope by t and by b."""

        def work(lo: int, hi: int) -> Array:
            sums, y, c = np.zeros(self.classes + 2), self.y, self.c
            sums[-2:] = softmax.along(z, dz, step, shift, y, c, lo, hi, into.r, sums[:-2])
            return sums

        found = self.sum(np.sum(self.threads.over(len(z), work), axis=0))
        return float(found[-2]), float(found[-1]), found[:-2]

    def _solve(self, at: MarginPoint, v: Array) -> Array:
        """H_b^-1 v, H_b = sum_i c_i (diag p_i - p_i p_i'), on vectors whose sum is zero."""
        p = at.r.copy()
        p[np.arange(len(p)), self.y] += self.c  # c p
        root = np.sqrt(np.maximum(self.c, 1e-300))
        inner = p / root[:, None]
        h = self.sum(np.diag(p.sum(0)) - inner.T @ inner)
        mean = float(np.trace(h)) / self.classes
        if not mean > 0.0 or not math.isfinite(mean):
            return v / max(self.weight, 1e-300)
        h += mean / self.classes  # along ones, where H_b is zero
        h[np.diag_indices(self.classes)] += 1e-14 * mean
        v = v - v.mean()
        try:
            found = cho_solve(cho_factor(h), v)
        except LinAlgError:
            found = np.linalg.lstsq(h, v, rcond=None)[0]
        return np.asarray(found - found.mean())
