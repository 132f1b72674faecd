"""Stochastic gradient steps on the support of one row: what Hogwild!, Cyclades and SAGA share.

    z = x_i'w + b;   g = m c_i phi'(z);   D_j = n / (rows with column j)
    w_j <- S(w_j - eta g x_ij, eta D_j l1) / (1 + eta D_j l2)         for j in the support of x_i

A column is visited once in D_j steps on average, so with weight D_j the penalty's expected share
of a step is the whole penalty (Recht et al. 2011, arXiv:1106.5730, section 2; as a proximal step:
Pedregosa et al. 2017, arXiv:1707.06468). The step is implicit in the penalty: it never changes the
sign of a weight, however rare its column is.

Steps are those of the mean objective P / s, where s is the sum of all c_i unless given: m = n / s.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from manyhands.kernels.atomics import atomic_add
from manyhands.kernels.compile import U64, compiled, inlined
from manyhands.kernels.instructions import prefetch
from manyhands.linear.losses import HINGE, SMOOTHNESS, SQUARED_HINGE, slope, value
from manyhands.linear.passes import row_kernels as kernels
from manyhands.linear.passes.rows import Array
from manyhands.linear.problem import Problem

AHEAD, AHEAD_W = 6, 2  # rows whose entries, and whose weights, are prefetched
FAR = 1 << 20  # bytes of w beyond which its lines are prefetched: they are in no near cache
SHARED, LOCKED, ATOMIC, PRIVATE = range(4)  # how threads write w

SCHEDULES = {
    "epoch": 0,
    "constant": 1,
    "optimal": 2,
    "invscaling": 3,
    "adaptive": 4,
    "pa1": 5,
    "pa2": 6,
}
OPTIMAL, INVSCALING, PA1, PA2 = 2, 3, 5, 6
ETA, ALPHA, T0, POWER, L1, L2, FLOOR, M, ETA_B, MOST_B, L2_B = range(11)  # of `numbers`


@inlined
def random(state):
    """xorshift64."""
    state ^= state << U64(13)
    state ^= state >> U64(7)
    state ^= state << U64(17)
    return state


@compiled
def shuffle(order, lo, hi, seed):
    """A random permutation of order[lo:hi]."""
    state = U64(seed) | U64(1)
    for i in range(hi - 1, lo, -1):
        state = random(state)
        j = lo + np.int64((state >> U64(11)) % U64(i - lo + 1))
        order[i], order[j] = order[j], order[i]


@inlined
def dot(indices, values, start, end, w):
    """x_i'w with four sums side by side: an addition waits for the one before it."""
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    whole = start + ((end - start) & U64(0xFFFFFFFFFFFFFFFC))
    for k in range(start, whole, U64(4)):
        a += values[k] * w[U64(indices[k])]
        b += values[k + U64(1)] * w[U64(indices[k + U64(1)])]
        c += values[k + U64(2)] * w[U64(indices[k + U64(2)])]
        d += values[k + U64(3)] * w[U64(indices[k + U64(3)])]
    for k in range(whole, end):
        a += values[k] * w[U64(indices[k])]
    return (a + b) + (c + d)


@inlined
def shrunk(v, t1, t2, floor):
    """The proximal step of t1 |v| + t2/2 v^2, not below `floor`."""
    return max((max(0.0, v - t1) + min(0.0, v + t1)) / (1.0 + t2), floor)


@inlined
def descend(mode, indices, values, start, end, w, step, t1, t2, floor, rare, late, sums):
    """The step on the support; `late` is the weight of this step's change in `sums`."""
    if t1 == 0.0 and t2 == 0.0 and floor < 0.0 and late == 0.0:
        if step == 0.0:
            return
        for k in range(start, end):
            if mode == ATOMIC:
                atomic_add(w, U64(indices[k]), -step * values[k])
            else:
                w[U64(indices[k])] -= step * values[k]
        return
    for k in range(start, end):
        j = U64(indices[k])
        old = w[j]
        new = shrunk(old - step * values[k], t1 * rare[j], t2 * rare[j], floor)
        if mode == ATOMIC:
            atomic_add(w, j, new - old)
        else:
            w[j] = new
        if late != 0.0:
            sums[j] += late * (new - old)


@inlined
def rate(schedule, t, numbers):
    """eta of step t = 1, 2, ..."""
    if schedule == OPTIMAL:
        return 1.0 / (numbers[ALPHA] * (numbers[T0] + t - 1.0))
    if schedule == INVSCALING:
        return numbers[ETA] / t ** numbers[POWER]
    return numbers[ETA]


@inlined
def length_of(schedule, loss, eps, z, y, c, eta, values, start, end, numbers):
    """eta g: the step along -x_i. pa1 and pa2 choose it so that the row's loss becomes small."""
    if schedule < PA1:
        return eta * numbers[M] * c * slope(loss, z, y, eps)
    square = 0.0
    for k in range(start, end):
        square += values[k] * values[k]
    if schedule == PA1:
        size = min(numbers[ETA], value(loss, z, y, eps) / square) if square > 0.0 else 0.0
    else:
        size = value(loss, z, y, eps) / (square + 0.5 / numbers[ETA])
    classifies = loss == HINGE or loss == SQUARED_HINGE
    toward = y if classifies else -1.0 if y < z else 1.0
    return -size * toward * c * numbers[M]


@inlined
def intercept_step(schedule, eta, length, b, numbers):
    """What the row adds to the intercept, with a step of its own size."""
    if numbers[ETA_B] == 0.0:
        return 0.0
    if schedule >= PA1:
        return -length * numbers[ETA_B]
    own = min(eta * numbers[ETA_B], numbers[MOST_B])
    return -own * (length / eta + numbers[L2_B] * b) if eta > 0.0 else 0.0


@inlined
def prefetch_row(indptr, indices, values, i):
    start = indptr[i]
    for line in range(0, min(indptr[i + 1] - start, 128), 16):
        prefetch(indices, start + line, 0)
        prefetch(values, start + line, 0)
        prefetch(values, start + line, 1)


@inlined
def prefetch_weights(indptr, indices, w, i):
    for k in range(indptr[i], min(indptr[i + 1], indptr[i] + 32)):
        prefetch(w, np.int64(indices[k]), 0)


@compiled
def count_columns(indices, start, end, counts):
    for k in range(start, end):
        counts[indices[k]] += 1


def rareness(problem: Problem) -> Array:
    """D_j = n / (rows of this rank with column j); n where there is none."""
    counts = np.zeros(problem.columns, dtype=np.int64)
    for rows, _ in problem.blocks():
        count_columns(rows.indices, rows.indptr[0], rows.indptr[-1], counts)
    return max(problem.source.count, 1) / np.maximum(counts, 1)


def largest_curvature(problem: Problem, m: float, intercept: float) -> float:
    """max_i m c_i (|x_i|^2 + intercept) times the largest phi'' (1 where phi' jumps)."""
    most = 0.0
    for rows, at in problem.blocks():
        norms = np.empty(rows.count)
        kernels.squared_norms(rows.indptr, rows.values, 0, rows.count, norms)
        most = max(most, float(((norms + intercept) * problem.c[at]).max(initial=0.0)))
    return most * m * SMOOTHNESS.get(problem.loss, 1.0)


def first_time(alpha: float, loss: int, eps: float) -> float:
    """t0 of the schedule 'optimal' (Bottou): the first step is what a typical weight needs."""
    typical = math.sqrt(1.0 / math.sqrt(alpha))
    return 1.0 / (typical / max(1.0, float(_slope(loss, -typical, 1.0, eps))) * alpha)


@compiled
def _slope(loss, z, y, eps):
    return slope(loss, z, y, eps)


def thread_seed(problem: Problem, visit: int, start: int, thread: int) -> Any:
    seed = problem.seed * 1_000_003 + visit * 7919 + start * 31 + problem.group.rank * 104_729
    return (seed * 64 + thread) * 2_654_435_761 % (1 << 62)


def average_ranks(problem: Problem, theta: Array) -> None:
    """theta <- the mean over ranks, weighted by their rows."""
    if problem.group.size > 1:
        theta *= problem.source.count / problem.total_rows
        problem.sum(theta, "theta")


def check_finite(theta: Array, name: str) -> None:
    if not np.isfinite(theta).all():
        raise ValueError(
            f"Floating-point under-/overflow occurred in {name}: the weights are not finite. "
            "Scale the columns, for example with StandardScaler, or give a smaller eta0"
        )
