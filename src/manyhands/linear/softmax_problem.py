"""Softmax problem: multinomial logistic regression over this rank's rows.

    P(W, b) = sum_i c_i (log sum_k exp z_ik - z_i,y_i) + l2/2 |W|^2,   z_i = W x_i + b
    D(a) = sum_i c_i H(q_i) - |X'a|^2 / (2 l2),   a_i = c_i (e_y_i - q_i)

q_i is any distribution over the K classes and H its entropy; a free intercept needs sum_i a_i = 0.
From a primal point q_i = p_i = softmax(z_i), which is mixed with one distribution u for all rows
until the sums are right: q_i = (1 - m) p_i + m u, with the least m. Close to the optimum m is zero.

`theta` has a row for each class: its w with its b behind it. b is free.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from manyhands.core import Group
from manyhands.exchange.solo import SoloGroup
from manyhands.linear.certificate import Certificate
from manyhands.linear.margin_losses import ClassLoss
from manyhands.linear.passes import softmax
from manyhands.linear.passes.rows import Array, BlockSource, Rows, Threads


@dataclass
class SoftmaxProblem:
    source: BlockSource
    y: Array  # int32: the number of each row's class
    c: Array
    classes: int
    l2: float = 0.0
    intercept: bool = True
    threads: Threads = field(default_factory=Threads)
    group: Group = field(default_factory=SoloGroup)
    seed: int = 0

    def __post_init__(self) -> None:
        low, high = self.y.min(initial=0), self.y.max(initial=0)
        if low < 0 or high >= self.classes:
            raise ValueError(
                f"labels from {low} to {high} for {self.classes} classes; "
                f"number them from 0 to {self.classes - 1}"
            )
        self.columns = self.source.columns
        self.size = self.classes * (self.columns + self.intercept)
        self.z = np.zeros((self.source.count, self.classes))  # the margins of the last pass
        totals = np.bincount(self.y, self.c, minlength=self.classes).astype(np.float64)
        self.class_weights = self.sum(totals, "weights")
        self.total_weight = float(self.class_weights.sum())
        self.loss_on_margins = ClassLoss(
            self.y, self.c, self.classes, self.intercept, self.total_weight, self.threads,
            lambda values: self.sum(values, "loss"),
        )  # fmt: skip

    def sum(self, values: Array, name: str = "sum") -> Array:
        """`values` summed over ranks, in place."""
        if self.group.size > 1:
            self.group.all_reduce({name: torch.from_numpy(values)}).wait()
        return values

    def blocks(self) -> Iterator[tuple[Rows, slice]]:
        for rows in self.source.blocks():
            yield rows, slice(rows.start, rows.start + rows.count)

    # -- theta --

    def unpack(self, theta: Array) -> tuple[Array, Array]:
        """w with a row of K numbers for each column, and b."""
        rows = theta.reshape(self.classes, -1)
        w = np.ascontiguousarray(rows[:, : self.columns].T)
        return w, rows[:, -1].copy() if self.intercept else np.zeros(self.classes)

    def store(self, theta: Array, w: Array, b: Array) -> None:
        rows = theta.reshape(self.classes, -1)
        rows[:, : self.columns] = w.T
        if self.intercept:
            rows[:, -1] = b

    def penalty(self, theta: Array) -> float:
        w = theta.reshape(self.classes, -1)[:, : self.columns]
        return 0.5 * self.l2 * float((w * w).sum())

    def ridge(self) -> Array:
        """The l2 of each element of theta."""
        out = np.full((self.classes, self.columns + self.intercept), self.l2)
        if self.intercept:
            out[:, -1] = 0.0
        return out.ravel()

    # -- passes over this rank's rows --

    def own_margins(self, w: Array, b: Array, out: Array) -> None:
        """out = Xw + b."""
        for rows, at in self.blocks():
            self._block_margins(rows, w, b, out[at])

    def own_transposed(self, r: Array, out: Array) -> None:
        """out += X'r."""
        for rows, at in self.blocks():
            self._block_scatter(rows, r[at], out)

    def _block_margins(self, rows: Rows, w: Array, b: Array, out: Array) -> None:
        if rows.dense is not None:
            np.matmul(rows.dense, w, out=out)
            out += b
            return
        parts = rows.parts(self.threads.count)
        self.threads.run(lambda t: softmax.margins(*rows.csr, *parts[t], w, b, out))

    def _block_scatter(self, rows: Rows, r: Array, out: Array) -> None:
        if rows.dense is not None:
            out += rows.dense.T @ r
            return
        parts = rows.parts(self.threads.count)
        sums = [out, *(np.zeros_like(out) for _ in range(self.threads.count - 1))]
        self.threads.run(lambda t: softmax.scatter(*rows.csr, *parts[t], r, sums[t]))
        for more in sums[1:]:
            out += more

    # -- over the rows of all ranks --

    def margins(self, theta: Array) -> Array:
        self.own_margins(*self.unpack(theta), self.z)
        return self.z

    def value_and_gradient(self, theta: Array) -> tuple[float, Array]:
        """P and its gradient: one pass, one vector travels."""
        (w, b), d = self.unpack(theta), self.columns
        out = np.zeros((d + 2) * self.classes)
        into = out[: d * self.classes].reshape(d, -1)
        none = np.zeros(self.classes)
        for rows, at in self.blocks():
            z, y, c = self.z[at], self.y[at], self.c[at]
            self._block_margins(rows, w, b, z)
            r, first = np.empty_like(z), out[d * self.classes : -self.classes]
            out[-1] += softmax.along(z, z, 0.0, none, y, c, 0, len(z), r, first)[0]
            self._block_scatter(rows, r, into)
        self.sum(out, "gradient")
        gradient = np.empty(self.size)
        self.store(gradient, into, out[d * self.classes : -self.classes])
        return float(out[-1]) + self.penalty(theta), gradient + self.ridge() * theta

    def objective(self, theta: Array) -> float:
        self.margins(theta)
        none = np.zeros(self.classes)
        return self._look(none, np.empty_like(self.z)) + self.penalty(theta)

    def chances(self) -> Array:
        """p_i of this rank's rows at the kept margins."""
        p = np.exp(self.z - self.z.max(axis=1, initial=-math.inf, keepdims=True))
        return np.asarray(p / p.sum(axis=1, keepdims=True))

    def hessian_product(self, p: Array, v: Array) -> Array:
        """H v for the chances p."""
        (w, b), d = self.unpack(v), self.columns
        out = np.zeros((d + 1, self.classes))
        for rows, at in self.blocks():
            t = np.empty((rows.count, self.classes))
            self._block_margins(rows, w, b, t)
            t -= (p[at] * t).sum(axis=1, keepdims=True)
            t *= self.c[at][:, None] * p[at]
            self._block_scatter(rows, t, out[:d])
            out[d] += t.sum(axis=0)
        self.sum(out, "hessian")
        found = np.empty(self.size)
        self.store(found, out[:d], out[d])
        return found + self.ridge() * v

    # -- certificate --

    def null_objective(self) -> float:
        """P at w = 0 and the best intercepts."""
        if not self.intercept:
            return self.total_weight * math.log(self.classes)
        used = self.class_weights[self.class_weights > 0.0]
        return float(used @ np.log(self.total_weight / used))

    def certify(self, theta: Array) -> Certificate:
        """Objective and dual value at `theta`, whose intercepts are set to their best values."""
        self.margins(theta)
        w, b = self.unpack(theta)
        shift, r = np.zeros(self.classes), np.empty_like(self.z)
        if self.intercept:
            at = self.loss_on_margins.point(self.z)
            _, _, shift = self.loss_on_margins.best(at, self.z, 0.0, b, shift, at)
            self.z += shift
            self.store(theta, w, b + shift)
        objective = self._look(np.zeros(self.classes), r) + self.penalty(theta)
        if self.l2 <= 0.0:
            return Certificate(objective, -math.inf)
        q = self._feasible(self.chances())
        a = -self.c[:, None] * q
        a[np.arange(len(a)), self.y] += self.c
        v = np.zeros((self.columns, self.classes))
        self.own_transposed(a, v)
        self.sum(v, "transposed")
        entropy = self.sum(np.array([softmax.entropies(q, self.c, 0, len(q))]), "dual")
        return Certificate(objective, float(entropy[0] - (v * v).sum() / (2.0 * self.l2)))

    def _feasible(self, p: Array) -> Array:
        """q_i = (1 - m) p_i + m u with sum_i c_i q_i = sum_i c_i e_y_i, for the least m."""
        if not self.intercept:
            return p
        sums, wanted = self.sum(self.c @ p, "dual"), self.class_weights
        missing = 1.0 - wanted / np.maximum(sums, 1e-300)
        m = float(missing[sums > 0.0].max(initial=0.0))
        u = np.maximum(wanted - (1.0 - m) * sums, 0.0) / self.total_weight  # m u
        return np.asarray((1.0 - m) * p + u)

    def _look(self, shift: Array, r: Array) -> float:
        """The loss at the kept margins; r is set to the slopes."""
        at = self.loss_on_margins.point(self.z)
        at.r = r
        return self.loss_on_margins.look(self.z, self.z, 0.0, shift, at)[0]
