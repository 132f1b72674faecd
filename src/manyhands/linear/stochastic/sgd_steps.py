"""Stochastic gradient steps on the support of one row: what Hogwild!, Cyclades and SAGA share.

    z = x_i'w + b;   g = m c_i phi'(z);   D_j = n / (rows with column j)
    v = (w_j - eta g x_ij) / (1 + eta D_j l2)                         for j in the support of x_i
    w_j <- v moved towards 0 by u_t + q_j, at most to 0;   q_j <- q_j + (w_j - v)

l2: a column is visited once in D_j steps on average, so with weight D_j the penalty's expected
share of a step is the whole penalty (Recht et al. 2011, arXiv:1106.5730, section 2). The step is
implicit in the penalty: it never changes the sign of a weight, however rare its column is.

l1, the cumulative penalty (Tsuruoka et al. 2009, ACL): u_t = sum_s eta_s l1 is what any weight owes
by step t, and q_j what w_j has paid, so that noise of single steps leaves no weight behind.

Steps are those of the mean objective P / s: m = n / s, and l1, l2 here are those of P over s.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from manyhands.kernels.atomics import atomic_add
from manyhands.kernels.compile import U64, compiled, compiling, inlined
from manyhands.kernels.instructions import prefetch
from manyhands.linear.losses import HINGE, LOGISTIC, SMOOTHNESS, SQUARED_HINGE, slope, value
from manyhands.linear.passes import row_kernels as kernels
from manyhands.linear.passes.rows import Array
from manyhands.linear.problem import Problem

# Rows ahead of the one in work whose entries are prefetched; twice as far their bounds, labels and
# weights. Rows come in random order, so the processor cannot guess them.
AHEAD = 4
FAR = 6 << 20  # bytes of w from which on the next row's weights are prefetched: no cache holds them
LONGEST = 128  # entries of a row that are prefetched
SHARED, LOCKED, ATOMIC = range(3)  # how threads write w
NO_PENALTY, STEADY_L2, ANY_PENALTY = range(3)  # STEADY_L2: l2 alone, and eta is constant

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


# A function with arrays as arguments that kernels call in each step. numba would count references
# to the arrays, wherever the function branches, by atomic additions that all threads share.
uncounted = compiling(error_model="numpy", boundscheck=False, forceinline=True, _nrt=False)


class Arguments(NamedTuple):
    """What a kernel needs to know of an epoch: numbers only, for the reason above."""

    penalty: int
    far: bool  # w is larger than FAR
    schedule: int
    loss: int
    eps: float
    m: float
    l1: float  # of the mean objective, as l2 and l2_b
    l2: float
    l2_b: float  # of the intercept
    floor: float  # the least that a weight may be
    eta: float
    alpha: float
    t0: float
    power: float
    eta_b: float  # of the intercept, over eta; 0: none
    most_b: float  # eta of the intercept, at most
    average: float  # the step from which on w is averaged; 0: never
    done: float  # steps before this epoch
    owed: float  # u before this epoch
    pace: float  # a rank's steps over those of all ranks


# Arrays that belong to an epoch: D_j; 1 / (1 + eta D_j l2), where eta is constant; q; and the sums
# of late changes of w, where w is averaged.
EpochArrays = tuple[Array, Array, Array, Array]


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


@uncounted
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


@uncounted
def descend(mode, indices, values, start, end, w, step, eta, u, late, a, rare, shrink, paid, sums):
    """The step on the support; `late` is the weight of this step's change in `sums`."""
    if a.penalty == NO_PENALTY and late == 0.0 and mode != ATOMIC:
        if step != 0.0:
            for k in range(start, end):
                w[U64(indices[k])] -= step * values[k]
    elif a.penalty == STEADY_L2 and late == 0.0 and mode != ATOMIC:
        for k in range(start, end):
            j = U64(indices[k])
            w[j] = (w[j] - step * values[k]) * shrink[j]
    else:
        t2 = eta * a.l2
        for k in range(start, end):
            j = U64(indices[k])
            old = w[j]
            new = old - step * values[k]
            if a.penalty == STEADY_L2:
                new *= shrink[j]
            elif a.penalty == ANY_PENALTY:
                new /= 1.0 + t2 * rare[j]
                if u > 0.0:
                    v = new
                    new = max(0.0, v - (u + paid[j])) if v > 0.0 else min(0.0, v + (u - paid[j]))
                    paid[j] += new - v
                new = max(new, a.floor)
            if mode == ATOMIC:
                atomic_add(w, j, new - old)
            else:
                w[j] = new
            if late != 0.0:
                sums[j] += late * (new - old)


@inlined
def rate(t, a):
    """eta of step t = 1, 2, ..."""
    if a.schedule == OPTIMAL:
        return 1.0 / (a.alpha * (a.t0 + t - 1.0))
    if a.schedule == INVSCALING:
        return a.eta / t**a.power
    return a.eta


@inlined
def sum_of_rates(t, a):
    """The sum of eta over this epoch's steps up to t, as an integral where eta falls."""
    if a.schedule == OPTIMAL:
        return math.log((a.t0 + t - 0.5) / (a.t0 + a.done - 0.5)) / a.alpha
    if a.schedule == INVSCALING and a.power == 1.0:
        return a.eta * math.log((t + 0.5) / (a.done + 0.5))
    if a.schedule == INVSCALING:
        rest = 1.0 - a.power
        return a.eta * ((t + 0.5) ** rest - (a.done + 0.5) ** rest) / rest
    return a.eta * (t - a.done)


@inlined
def owed(t, a):
    """u_t; a rank takes its share of the steps."""
    return a.owed + a.l1 * a.pace * sum_of_rates(t, a) if a.l1 > 0.0 else 0.0


@compiled
def owed_at(t, a):
    return owed(t, a)


@compiled
def fade(w, counts, t, a):
    """The penalties of an epoch on weights whose columns no row has."""
    total = sum_of_rates(t, a)
    for j in range(len(counts)):
        if counts[j] == 0.0 and w[j] != 0.0:
            w[j] = shrunk(w[j], total * a.l1, total * a.l2, a.floor)


@inlined
def lateness(t, a):
    """How much less the change of step t counts in the mean of w from step a.average on."""
    return max(0.0, t - a.average) if a.average > 0.0 else 0.0


@inlined
def loss_and_slope(loss, z, y, eps):
    """phi and phi'; the logistic loss without a branch that depends on the data."""
    if loss == LOGISTIC:
        m = y * z
        e = math.exp(-abs(m))
        return math.log(1.0 + e) + max(-m, 0.0), -y * (e if m > 0.0 else 1.0) / (1.0 + e)
    return value(loss, z, y, eps), slope(loss, z, y, eps)


@uncounted
def passive_aggressive(phi, z, y, values, start, end, a):
    """eta phi' of pa1 and pa2: so much that the row's loss becomes small."""
    square = 0.0
    for k in range(start, end):
        square += values[k] * values[k]
    if a.schedule == PA1:
        size = min(a.eta, phi / square) if square > 0.0 else 0.0
    else:
        size = phi / (square + 0.5 / a.eta)
    if a.loss in (HINGE, SQUARED_HINGE):
        return -size * y
    return size if y < z else -size


@uncounted
def visit(mode, indptr, indices, values, i, y, c, w, b, t, a, rare, shrink, paid, sums):
    """Step t, on row i: returns its weighted loss before the step, and the intercept's step."""
    start, end = U64(indptr[i]), U64(indptr[i + 1])
    z = b + dot(indices, values, start, end, w)
    phi, first = loss_and_slope(a.loss, z, y, a.eps)
    eta = rate(t, a)
    if a.schedule < PA1:
        step = eta * (a.m * c * first)
    else:
        step = a.m * c * passive_aggressive(phi, z, y, values, start, end, a)
    u, late = owed(t, a), lateness(t, a)
    descend(
        mode, indices, values, start, end, w, step, eta, u, late, a, rare, shrink, paid, sums
    )  # fmt: skip
    if a.schedule < PA1:
        step_b = -min(eta * a.eta_b, a.most_b) * (a.m * c * first + a.l2_b * b)
    else:
        step_b = -step * a.eta_b
    return c * phi, step_b


@uncounted
def prefetch_bounds(indptr, y, c, i):
    prefetch(indptr, np.int64(i), 0)
    prefetch(y, np.int64(i), 0)
    prefetch(c, np.int64(i), 0)


@uncounted
def prefetch_row(indptr, indices, values, i):
    start = indptr[i]
    for line in range(0, min(indptr[i + 1] - start, LONGEST), 16):
        prefetch(indices, start + line, 0)
        prefetch(values, start + line, 0)
        prefetch(values, start + line, 1)


@uncounted
def prefetch_weights(indptr, indices, i, w, beside):
    """w and what is read beside it, in the columns of row i."""
    start = indptr[i]
    for k in range(start, min(indptr[i + 1], start + LONGEST)):
        prefetch(w, np.int64(indices[k]), 0)
        prefetch(beside, np.int64(indices[k]), 0)


@uncounted
def prefetch_ahead(indptr, indices, values, y, c, order, p, hi, w, a, rare, shrink):
    """What the rows order[p + 1], order[p + AHEAD] and order[p + 2 AHEAD] will need."""
    if p + 2 * AHEAD < hi:
        prefetch_bounds(indptr, y, c, order[p + 2 * AHEAD])
    if p + AHEAD < hi:
        prefetch_row(indptr, indices, values, order[p + AHEAD])
    if a.far and p + 1 < hi:
        if a.penalty == STEADY_L2:
            prefetch_weights(indptr, indices, order[p + 1], w, shrink)
        elif a.penalty == ANY_PENALTY:
            prefetch_weights(indptr, indices, order[p + 1], w, rare)
        else:
            prefetch_weights(indptr, indices, order[p + 1], w, w)


@compiled
def count_columns(indices, start, end, counts):
    for k in range(start, end):
        counts[indices[k]] += 1.0


def own_counts(problem: Problem) -> Array:
    """Rows with column j, of this rank."""
    counts = np.zeros(problem.columns)
    for rows, _ in problem.blocks():
        count_columns(rows.indices, rows.indptr[0], rows.indptr[-1], counts)
    return counts


def column_counts(problem: Problem) -> Array:
    """Rows with column j, of all ranks."""
    return problem.sum(own_counts(problem), "counts")


def largest_curvature(problem: Problem, m: float) -> float:
    """max_i m c_i |x_i|^2 times the largest phi'' (1 where phi' jumps)."""
    most = np.zeros(1)
    for rows, at in problem.blocks():
        norms = np.empty(rows.count)
        kernels.squared_norms(rows.indptr, rows.values, 0, rows.count, norms)
        most[0] = max(most[0], float((norms * problem.c[at]).max(initial=0.0)))
    return float(most_of_ranks(problem, most)[0]) * m * SMOOTHNESS.get(problem.loss, 1.0)


def most_of_ranks(problem: Problem, values: Array) -> Array:
    """The largest over ranks, element by element, in place."""
    if problem.group.size > 1:
        problem.group.all_reduce({"most": torch.from_numpy(values)}, op="max").wait()
    return values


def first_time(alpha: float, loss: int, eps: float) -> float:
    """t0 of the schedule 'optimal' (Bottou): the first step is what a typical weight needs."""
    typical = math.sqrt(1.0 / math.sqrt(alpha))
    return 1.0 / (typical / max(1.0, float(_slope(loss, -typical, 1.0, eps))) * alpha)


@compiled
def _slope(loss, z, y, eps):
    return slope(loss, z, y, eps)


def thread_seed(problem: Problem, round_: int, start: int, thread: int) -> Any:
    seed = problem.seed * 1_000_003 + round_ * 7919 + start * 31 + problem.group.rank * 104_729
    return (seed * 64 + thread) * 2_654_435_761 % (1 << 62)


@compiled
def sums_of(w):
    """|w|_1 and |w|^2, without BLAS, whose threads take longer to wake than this loop."""
    absolute, square = 0.0, 0.0
    for j in range(len(w)):
        absolute += abs(w[j])
        square += w[j] * w[j]
    return absolute, square


@compiled
def rareness(counts, lo, hi, seen, out):
    """out_j = D_j."""
    for j in range(lo, hi):
        out[j] = seen / max(counts[j], 1.0)


@compiled
def shrinkage(counts, lo, hi, seen, strength, out):
    """out_j = 1 / (1 + strength D_j)."""
    for j in range(lo, hi):
        out[j] = 1.0 / (1.0 + strength * seen / max(counts[j], 1.0))


def average_ranks(problem: Problem, theta: Array) -> None:
    """theta <- the mean over ranks, weighted by their rows."""
    if problem.group.size > 1:
        theta *= problem.source.count / problem.total_rows
        problem.sum(theta, "theta")


def overflow(when: str) -> ValueError:
    return ValueError(
        f"Floating-point under-/overflow occurred in {when}: the weights are not finite. Scale the "
        "columns, for example with StandardScaler, or give a smaller eta0"
    )
