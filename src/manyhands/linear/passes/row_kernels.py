"""Loops over CSR rows: each reads a row once and does with it all that a pass needs.

Arguments: `indptr, indices, values` of the rows, `lo, hi` the rows to visit, `y` labels, `c`
weights, `w` coefficients and `b` the intercept. A row is in the first-level cache when its margin
is known, so gradient and Hessian products scatter it at once: one stream over the data, not two.
"""

from __future__ import annotations

from manyhands.kernels.compile import U64, compiled, inlined
from manyhands.linear.losses import curvature, slope, value

WHOLE = U64(0xFFFFFFFFFFFFFFFC)  # masks a length to a multiple of four


@inlined
def dot(indices, values, start, end, w):
    """x_i'w with four sums side by side: an addition waits for the one before it."""
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    whole = start + ((end - start) & WHOLE)
    for k in range(start, whole, U64(4)):
        a += values[k] * w[U64(indices[k])]
        b += values[k + U64(1)] * w[U64(indices[k + U64(1)])]
        c += values[k + U64(2)] * w[U64(indices[k + U64(2)])]
        d += values[k + U64(3)] * w[U64(indices[k + U64(3)])]
    for k in range(whole, end):
        a += values[k] * w[U64(indices[k])]
    return (a + b) + (c + d)


@inlined
def add(indices, values, start, end, r, out):
    """out += r x_i."""
    for k in range(start, end):
        out[U64(indices[k])] += r * values[k]


@compiled
def margins(indptr, indices, values, lo, hi, w, b, out):
    """out_i = x_i'w + b."""
    for i in range(lo, hi):
        out[i] = b + dot(indices, values, U64(indptr[i]), U64(indptr[i + 1]), w)


@compiled
def scatter(indptr, indices, values, lo, hi, r, out):
    """out += sum_i r_i x_i; returns sum_i r_i."""
    total = 0.0
    for i in range(lo, hi):
        total += r[i]
        if r[i] != 0.0:
            add(indices, values, U64(indptr[i]), U64(indptr[i + 1]), r[i], out)
    return total


@compiled
def gradient(indptr, indices, values, lo, hi, y, c, loss, eps, w, b, out, z):
    """out += sum_i c_i phi'(z_i) x_i, with z_i kept; returns the loss and sum_i c_i phi'(z_i)."""
    total, shift = 0.0, 0.0
    for i in range(lo, hi):
        start, end = U64(indptr[i]), U64(indptr[i + 1])
        zi = b + dot(indices, values, start, end, w)
        z[i] = zi
        total += c[i] * value(loss, zi, y[i], eps)
        r = c[i] * slope(loss, zi, y[i], eps)
        shift += r
        if r != 0.0:
            add(indices, values, start, end, r, out)
    return total, shift


@compiled
def hessian_product(indptr, indices, values, lo, hi, h, v, vb, out, xv):
    """out += sum_i h_i (x_i'v + vb) x_i, with xv_i = x_i'v + vb kept; returns the sum of h xv."""
    shift = 0.0
    for i in range(lo, hi):
        start, end = U64(indptr[i]), U64(indptr[i + 1])
        t = vb + dot(indices, values, start, end, v)
        xv[i] = t
        t *= h[i]
        if t != 0.0:
            shift += t
            add(indices, values, start, end, t, out)
    return shift


@compiled
def squares(indptr, indices, values, lo, hi, c, out):
    """out += sum_i c_i x_i^2; returns the sum of c."""
    total = 0.0
    for i in range(lo, hi):
        total += c[i]
        for k in range(U64(indptr[i]), U64(indptr[i + 1])):
            out[U64(indices[k])] += c[i] * values[k] * values[k]
    return total


@compiled
def gram(indptr, indices, values, lo, hi, h, out):
    """The lower triangle of out += sum_i h_i x_i x_i', for rows with ascending columns."""
    for i in range(lo, hi):
        start, end = U64(indptr[i]), U64(indptr[i + 1])
        if h[i] == 0.0:
            continue
        for p in range(start, end):
            add(indices, values, start, p + U64(1), h[i] * values[p], out[U64(indices[p])])


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
    """out_i = c_i phi''(z_i); returns their sum."""
    total = 0.0
    for i in range(lo, hi):
        out[i] = c[i] * curvature(loss, z[i], y[i], eps)
        total += out[i]
    return total


@compiled
def squared_norms(indptr, values, lo, hi, out):
    for i in range(lo, hi):
        total = 0.0
        for k in range(indptr[i], indptr[i + 1]):
            total += values[k] * values[k]
        out[i] = total
