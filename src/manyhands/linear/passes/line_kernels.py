"""Loops over margins: the loss on a line z + t dz + b, with all that a line search wants of it.

Arguments: margins `z`, their change `dz` for a step of one, `step` t, `shift` b, `lo, hi` the rows
to visit, and labels `y`, weights `c` and the loss as in `row_kernels`. No loop reads the data set.
"""

from __future__ import annotations

import math

from manyhands.kernels.compile import compiled, inlined
from manyhands.linear.losses import LOGISTIC, curvature, slope, value


@inlined
def _all_three(loss, z, y, eps):
    """Loss, slope and curvature; the logistic loss needs one exponential for all of them."""
    if loss == LOGISTIC:
        m = y * z
        e = math.exp(-abs(m))
        over = 1.0 / (1.0 + e)
        return math.log1p(e) + max(-m, 0.0), -y * over * (e if m > 0.0 else 1.0), e * over * over
    return value(loss, z, y, eps), slope(loss, z, y, eps), curvature(loss, z, y, eps)


@compiled
def along(z, dz, step, shift, y, c, lo, hi, loss, eps, r, h):
    """r_i = c_i phi'(z_i + t dz_i + b) and h_i = c_i phi''(...); returns the loss, its slope by t,
    and its first and second derivative by b."""
    total, by_step, first, second = 0.0, 0.0, 0.0, 0.0
    for i in range(lo, hi):
        f, df, ddf = _all_three(loss, z[i] + (step * dz[i] + shift), y[i], eps)
        r[i] = c[i] * df
        h[i] = c[i] * ddf
        total += c[i] * f
        by_step += r[i] * dz[i]
        first += r[i]
        second += h[i]
    return total, by_step, first, second


@compiled
def curved(h, dz, lo, hi):
    """sum h, sum h dz and sum h dz^2."""
    total, mixed, second = 0.0, 0.0, 0.0
    for i in range(lo, hi):
        t = h[i] * dz[i]
        total += h[i]
        mixed += t
        second += t * dz[i]
    return total, mixed, second
