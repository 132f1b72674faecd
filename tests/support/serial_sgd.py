"""Serial SGD in plain Python, number by number, and sparse problems for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from manyhands.linear.losses import LOGISTIC
from manyhands.linear.passes.rows import InMemory, Rows, threads_of
from manyhands.linear.problem import Problem
from manyhands.linear.stochastic import sgd_steps as steps

Array = Any


def sparse_rows(rows: int = 300, columns: int = 400, each: int = 4, seed: int = 0) -> Rows:
    """Rows of at most `each` non-zeros in random columns."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, each + 1, rows)
    indptr = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    indices = np.concatenate([np.sort(rng.choice(columns, k, replace=False)) for k in counts])
    return Rows(indptr, indices.astype(np.int32), rng.standard_normal(indptr[-1]), columns)


@contextmanager
def problem_of(
    rows: Rows, threads: int = 1, loss: int = LOGISTIC, seed: int = 3, **options: Any
) -> Iterator[Problem]:
    rng = np.random.default_rng(seed)
    y = np.where(rng.random(rows.count) < 0.5, -1.0, 1.0)
    c = rng.uniform(0.5, 1.5, rows.count)
    with threads_of(threads) as pool:
        yield Problem(InMemory(rows), y, c, loss, threads=pool, seed=7, **options)


def dot(values: list[float], w: list[float]) -> float:
    """Four sums side by side, as the kernel has them."""
    sums, whole = [0.0, 0.0, 0.0, 0.0], len(values) // 4 * 4
    for k in range(whole):
        sums[k % 4] += values[k] * w[k]
    for k in range(whole, len(values)):
        sums[0] += values[k] * w[k]
    return (sums[0] + sums[1]) + (sums[2] + sums[3])


def serial_sgd(
    problem: Problem, batches: list[Array], w: Array, b: float, a: Any, arrays: Any, paid: Array
) -> tuple[float, float]:
    """Steps on the rows of `batches`, in that order; b is constant within a batch.

    w and paid are changed in place; returns b and the sum of the losses before the steps.
    """
    rows: Rows = problem.source.rows  # type: ignore[attr-defined]
    rare, shrink, *_ = arrays
    t, loss = a.done, 0.0
    for batch in batches:
        moves = []
        for i in batch:
            t += 1.0
            own = slice(rows.indptr[i], rows.indptr[i + 1])
            columns, values = rows.indices[own], rows.values[own].tolist()
            z = b + dot(values, w[columns].tolist())
            y, c = float(problem.y[i]), float(problem.c[i])
            slope = float(steps._slope(problem.loss, z, y, problem.eps))
            loss += c * float(steps.loss_and_slope(problem.loss, z, y, problem.eps)[0])
            eta = a.eta if a.schedule != steps.INVSCALING else a.eta / t**a.power
            if a.schedule == steps.OPTIMAL:
                eta = 1.0 / (a.alpha * (a.t0 + t - 1.0))
            step, u = eta * (a.m * c * slope), float(steps.owed_at(t, a))
            for j, x in zip(columns.tolist(), values, strict=True):
                v = float(w[j]) - step * x
                if a.penalty == steps.STEADY_L2:
                    v *= float(shrink[j])
                elif a.penalty == steps.ANY_PENALTY:
                    v /= 1.0 + eta * a.l2 * float(rare[j])
                w[j] = v
                if u > 0.0:
                    w[j] = max(0.0, v - (u + paid[j])) if v > 0.0 else min(0.0, v + (u - paid[j]))
                    paid[j] += w[j] - v
                w[j] = max(float(w[j]), a.floor)
            own_eta = min(eta * a.eta_b, a.most_b)
            moves.append(-own_eta * (a.m * c * slope + a.l2_b * b))
        for move in moves:
            b += move
    return b, loss
