"""Mini-batches: random rows of every rank, with gradient and curvature of the mean objective there.

    f = P / s,  s = sum_i c_i;     f_B(theta) = n / (|B| s) sum_{i in B} c_i phi(z_i) + R(theta) / s
    theta = T u:   w_j = u_j / sqrt(D_j),   b = u_b / sqrt(D_b) - mean'w

R is the penalty. An epoch visits each row once, in random order. Every rank gives its share of a
batch, and a vector of d + 2 numbers travels for a gradient. Steps are taken in u, where the Hessian
at the start has a unit diagonal, and no product of a column with the intercept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from manyhands.linear.passes import row_kernels as kernels
from manyhands.linear.passes.rows import Array, Rows
from manyhands.linear.problem import Problem


@dataclass(frozen=True)
class Scaling:
    """T: `scale` is of w and, where there is an intercept, of b behind it; `mean` is of columns."""

    scale: Array
    mean: Array

    @classmethod
    def at(cls, problem: Problem) -> Scaling:
        """From the Hessian of f at the kept margins."""
        d, s = problem.columns, problem.total_weight
        h, out = problem.curvatures(), np.zeros(2 * d + 1)
        for rows, at in problem.blocks():
            rows.squares(problem.threads, h[at], out[:d])
            out[-1] += rows.scatter(problem.threads, h[at], out[d:-1])
        squares, first, total = np.split(problem.sum(out, "moments"), (d, 2 * d))
        diagonal, mean = squares, np.zeros(d)
        if problem.intercept and total[0] > 0.0:
            mean = first / total[0]
            diagonal = np.maximum(squares - first * mean, 1e-6 * squares)
        diagonal = np.append(diagonal, total)[: problem.size] + problem.ridge()
        return cls(np.where(diagonal > 0.0, diagonal / s, 1.0) ** -0.5, mean)

    @classmethod
    def none(cls, problem: Problem) -> Scaling:
        return cls(np.ones(problem.size), np.zeros(problem.columns))

    def theta(self, u: Array) -> Array:
        out, d = self.scale * u, len(self.mean)
        out[d:] -= self.mean @ out[:d]
        return out

    def u(self, theta: Array) -> Array:
        out, d = theta.copy(), len(self.mean)
        out[d:] += self.mean @ out[:d]
        return np.asarray(out / self.scale)

    def gradient(self, g: Array) -> Array:
        """T'g."""
        out, d = g.copy(), len(self.mean)
        if len(g) > d:
            out[:d] -= g[d] * self.mean
        return self.scale * out


@dataclass(frozen=True)
class MiniBatch:
    """Rows of this rank; none where it has no more in this epoch."""

    problem: Problem
    scaling: Scaling
    rows: Rows | None
    y: Array
    c: Array

    def gradient(self, u: Array) -> tuple[Array, float]:
        """The gradient of f_B by u, and of how many rows it is; 0: the epoch is over."""
        p, d, theta = self.problem, self.problem.columns, self.scaling.theta(u)
        (w, b), out = p.unpack(theta), np.zeros(d + 2)
        if self.rows is not None:
            z = np.empty(self.rows.count)
            _, out[d] = self.rows.gradient(
                p.threads, self.y, self.c, p.loss, p.eps, w, b, out[:d], z
            )
            out[-1] = self.rows.count
        return self._mean(out, theta, "gradient")

    def curvature(self, u: Array, v: Array) -> Array:
        """The Hessian of f_B at u, times v."""
        p, d, theta, along = self.problem, self.problem.columns, *map(self.scaling.theta, (u, v))
        (w, b), (vw, vb), out = p.unpack(theta), p.unpack(along), np.zeros(d + 2)
        if self.rows is not None:
            z, h = np.empty(self.rows.count), np.empty(self.rows.count)
            self.rows.margins(p.threads, w, b, z)
            kernels.curvatures(z, self.y, self.c, 0, len(z), p.loss, p.eps, h)
            out[d] = self.rows.hessian_product(p.threads, h, vw, vb, out[:d], z)
            out[-1] = self.rows.count
        return self._mean(out, along, "curvature")[0]

    def _mean(self, out: Array, theta: Array, name: str) -> tuple[Array, float]:
        p = self.problem
        count = float(p.sum(out, name)[-1])
        g = p.total_rows / max(count, 1.0) * out[: p.size] + p.ridge() * theta
        return self.scaling.gradient(g / p.total_weight), count


def mini_batches(
    problem: Problem, scaling: Scaling, size: int, *seed: int, again: bool = False
) -> Iterator[MiniBatch]:
    """Batches of about `size` rows over all ranks, without end: after the last one they are empty,
    because another rank may have more of them, or rows come `again`. Where rows are read block by
    block, a batch is of one block.
    """
    rng = np.random.default_rng((*seed, problem.seed, problem.group.rank))
    own = max(1.0, size * problem.source.count / max(problem.total_rows, 1.0))
    while True:
        for rows, at in problem.blocks():
            order, y, c = rng.permutation(rows.count), problem.y[at], problem.c[at]
            for which in np.array_split(order, max(1, round(rows.count / own))):
                yield MiniBatch(problem, scaling, rows.take(which), y[which], c[which])
        if not again or problem.source.count == 0:
            break
    while True:
        yield MiniBatch(problem, scaling, None, np.empty(0), np.empty(0))


def default_size(problem: Problem, memory: int) -> int:
    """A twentieth of all rows, and rows enough that reading them costs as much as the vectors of a
    step, 4 m d."""
    per_row = max(problem.total_nonzeros / max(problem.total_rows, 1.0), 1.0)
    least = max(256.0, 2.0 * memory * problem.columns / per_row)
    return int(max(1.0, min(max(least, problem.total_rows / 20.0), problem.total_rows)))
