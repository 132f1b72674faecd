"""Column problem: the same objective as `Problem`, over the columns that this rank owns.

    split=by_feature: rank k has the columns X_k of all rows, and all labels; z = sum_k X_k w_k + b

Only margins travel: n numbers a round. theta is the own w with the intercept, which all ranks have.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from manyhands.core import Group
from manyhands.exchange.solo import SoloGroup
from manyhands.linear.certificate import WITH_GAP, Certificate, conjugates
from manyhands.linear.losses import SMOOTHNESS, SQUARED
from manyhands.linear.passes import row_kernels as kernels
from manyhands.linear.passes.columns import Columns
from manyhands.linear.passes.rows import Array, Threads


@dataclass
class ColumnProblem:
    columns_: Columns
    y: Array
    c: Array
    loss: int
    l1: float = 0.0
    l2: float = 0.0
    intercept: bool = True
    l2_intercept: float = 0.0
    eps: float = 0.0
    threads: Threads = field(default_factory=Threads)
    group: Group = field(default_factory=SoloGroup)
    seed: int = 0
    positive: bool = False

    def __post_init__(self) -> None:
        self.columns = self.columns_.count
        self.size = self.columns + self.intercept
        self.smooth = self.loss in SMOOTHNESS
        self.total_rows = len(self.y)
        self.total_weight = float(self.c.sum())
        self.z = np.zeros(len(self.y))

    def sum(self, values: Array, name: str = "sum") -> Array:
        if self.group.size > 1:
            self.group.all_reduce({name: torch.from_numpy(values)}).wait()
        return values

    def most(self, value: float) -> float:
        if self.group.size == 1:
            return value
        found = np.array([value])
        self.group.all_reduce({"most": torch.from_numpy(found)}, op="max").wait()
        return float(found[0])

    def unpack(self, theta: Array) -> tuple[Array, float]:
        return theta[: self.columns], float(theta[self.columns]) if self.intercept else 0.0

    def penalty(self, theta: Array) -> float:
        w, b = self.unpack(theta)
        own = np.array([self.l1 * np.abs(w).sum() + 0.5 * self.l2 * (w @ w)])
        return float(self.sum(own, "penalty")[0]) + 0.5 * self.l2_intercept * b * b

    def margins(self, theta: Array) -> Array:
        w, b = self.unpack(theta)
        self.z[:] = 0.0
        used = np.flatnonzero(w)
        self.columns_.add(w[used], used, self.z)
        self.sum(self.z, "margins")
        self.z += b
        return self.z

    def loss_at(self, shift: float, z: Array | None = None) -> tuple[float, float, float]:
        """All ranks have all margins, so each finds the same sums."""
        z = self.z if z is None else z
        found = kernels.losses(z, self.y, self.c, 0, len(z), self.loss, self.eps, float(shift))
        return float(found[0]), float(found[1]), float(found[2])

    def slopes(self) -> Array:
        r = np.empty_like(self.z)
        kernels.slopes(self.z, self.y, self.c, 0, len(r), self.loss, self.eps, r)
        return r

    def curvatures(self) -> Array:
        h = np.empty_like(self.z)
        kernels.curvatures(self.z, self.y, self.c, 0, len(h), self.loss, self.eps, h)
        return h

    def transposed(self, r: Array) -> Array:
        out = np.empty(self.columns)
        self.columns_.transposed(self.threads, r, out)
        return out

    def certificate(self, theta: Array, r: Array, xr: Array) -> Certificate:
        """The duality gap from the slopes `r` and X'r at theta, which cost no further pass.

        A free intercept must be at its best value, so that `r` sums to zero.
        """
        loss = self.loss_at(0.0)[0]
        objective = loss + self.penalty(theta)
        if self.loss not in WITH_GAP or not self.smooth or not (self.l1 or self.l2):
            return Certificate(objective, -np.inf)
        a, v, scale = -r, -xr, 1.0
        reach = np.maximum(v, 0.0) if self.positive else np.abs(v)
        if self.l2 == 0.0:
            most = self.most(float(reach.max(initial=0.0)))
            scale = min(1.0, self.l1 / most) if most > 0 else 1.0
            if self.loss == SQUARED and self.l1 > 0.0 and most > 0.0:
                best = float(a @ self.y) / max(2.0 * loss, 1e-300)
                scale = float(np.clip(best, -self.l1 / most, self.l1 / most))
        if self.loss == SQUARED:  # sum a^2 / c is twice the loss
            dual = scale * float(a @ self.y) - scale * scale * loss
        else:
            dual = -float(conjugates(a, self.y, self.c, self.loss, scale))
        if self.l2 > 0.0:
            over = np.maximum(0.0, reach - self.l1)
            dual -= float(self.sum(np.array([over @ over]), "dual")[0]) / (2.0 * self.l2)
        if self.intercept and self.l2_intercept > 0.0:
            dual -= (scale * float(a.sum())) ** 2 / (2.0 * self.l2_intercept)
        return Certificate(objective, dual)
