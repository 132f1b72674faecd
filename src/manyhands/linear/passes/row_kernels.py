"""Loops over CSR rows: each reads a row once and does with it all that a pass needs.

Arguments: `indptr, indices, values` of the rows, `lo, hi` the rows to visit, `y` labels, `c`
weights, `w` coefficients and `b` the intercept. A row is in the first-level cache when its margin
is known, so gradient and Hessian products scatter it at once: one stream over the data, not two.
"""

from __future__ import annotations

from manyhands.kernels.compile import compiled
from manyhands.linear.losses import curvature, slope, value


@compiled
def margins(indptr, indices, values, lo, hi, w, b, out):
    """out_i = x_i'w + b."""
    for i in range(lo, hi):
        z = b
        for k in range(indptr[i], indptr[i + 1]):
            z += values[k] * w[indices[k]]
        out[i] = z


@compiled
def scatter(indptr, indices, values, lo, hi, r, out):
    """out += sum_i r_i x_i; returns sum_i r_i."""
    total = 0.0
    for i in range(lo, hi):
        ri = r[i]
        total += ri
        if ri != 0.0:
            for k in range(indptr[i], indptr[i + 1]):
                out[indices[k]] += ri * values[k]
    return total


@compiled
def gradient(indptr, indices, values, lo, hi, y, c, loss, eps, w, b, out, z):
    """out += sum_i c_i phi'(z_i) x_i, with z_i kept; returns the loss and sum_i c_i phi'(z_i)."""
    total, shift = 0.0, 0.0
    for i in range(lo, hi):
        zi = b
        for k in range(indptr[i], indptr[i + 1]):
            zi += values[k] * w[indices[k]]
        z[i] = zi
        total += c[i] * value(loss, zi, y[i], eps)
        r = c[i] * slope(loss, zi, y[i], eps)
        shift += r
        if r != 0.0:
            for k in range(indptr[i], indptr[i + 1]):
                out[indices[k]] += r * values[k]
    return total, shift


@compiled
def hessian_product(indptr, indices, values, lo, hi, h, v, vb, out):
    """out += sum_i h_i (x_i'v + vb) x_i; returns sum_i h_i (x_i'v + vb)."""
    shift = 0.0
    for i in range(lo, hi):
        if h[i] == 0.0:
            continue
        t = vb
        for k in range(indptr[i], indptr[i + 1]):
            t += values[k] * v[indices[k]]
        t *= h[i]
        shift += t
        for k in range(indptr[i], indptr[i + 1]):
            out[indices[k]] += t * values[k]
    return shift


@compiled
def gram(indptr, indices, values, lo, hi, h, out):
    """The lower triangle of out += sum_i h_i x_i x_i', for rows with ascending columns."""
    for i in range(lo, hi):
        start, end = indptr[i], indptr[i + 1]
        if h[i] == 0.0:
            continue
        for p in range(start, end):
            t = h[i] * values[p]
            row = out[indices[p]]
            for q in range(start, p + 1):
                row[indices[q]] += t * values[q]


@compiled
def losses(z, y, c, lo, hi, loss, eps, shift):
    """sum_i c_i phi(z_i + shift), its first and its second derivative by `shift`."""
    total, first, second = 0.0, 0.0, 0.0
    for i in range(lo, hi):
        zi = z[i] + shift
        total += c[i] * value(loss, zi, y[i], eps)
        first += c[i] * slope(loss, zi, y[i], eps)
        second += c[i] * curvature(loss, zi, y[i], eps)
    return total, first, second


@compiled
def slopes(z, y, c, lo, hi, loss, eps, out):
    """out_i = c_i phi'(z_i)."""
    for i in range(lo, hi):
        out[i] = c[i] * slope(loss, z[i], y[i], eps)


@compiled
def curvatures(z, y, c, lo, hi, loss, eps, out):
    """out_i = c_i phi''(z_i)."""
    for i in range(lo, hi):
        out[i] = c[i] * curvature(loss, z[i], y[i], eps)


@compiled
def squared_norms(indptr, values, lo, hi, out):
    for i in range(lo, hi):
        total = 0.0
        for k in range(indptr[i], indptr[i + 1]):
            total += values[k] * values[k]
        out[i] = total
