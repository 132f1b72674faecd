"""Loops over CSR rows: each reads a row once and does with it all that a pass needs.

Arguments: `indptr, indices, values` of the rows, `lo, hi` the rows to visit, `y` labels, `c`
weights, `w` coefficients and `b` the intercept. A row is in the first-level cache when its margin
is known, so gradient and Hessian products scatter it at once: one stream over the data, not two.
"""

from __future__ import annotations

from manyhands.kernels.compile import U64, compiled, inlined
from manyhands.kernels.instructions import prefetch_once
from manyhands.linear.losses import curvature, derivatives, slope

WHOLE = U64(0xFFFFFFFFFFFFFFFC)  # masks a length to a multiple of four
AHEAD = U64(256)  # entries: rows are read once, so their lines need not push w out of the cache


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
def ahead(indices, values, start, end):
    for k in range(start, end, U64(8)):
        prefetch_once(values, k + AHEAD)
    for k in range(start, end, U64(16)):
        prefetch_once(indices, k + AHEAD)


@inlined
def add(indices, values, start, end, r, out):
    """out += r x_i."""
    for k in range(start, end):
        out[U64(indices[k])] += r * values[k]


@compiled
def margins(indptr, indices, values, lo, hi, w, b, out):
    """out_i = x_i'w + b."""
    for i in range(lo, hi):
        start, end = U64(indptr[i]), U64(indptr[i + 1])
        ahead(indices, values, start, end)
        out[i] = b + dot(indices, values, start, end, w)


@compiled
def scatter(indptr, indices, values, lo, hi, r, out):
    """out += sum_i r_i x_i; returns sum_i r_i."""
    total = 0.0
    for i in range(lo, hi):
        total += r[i]
        if r[i] != 0.0:
            start, end = U64(indptr[i]), U64(indptr[i + 1])
            ahead(indices, values, start, end)
            add(indices, values, start, end, r[i], out)
    return total


@compiled
def gradient(indptr, indices, values, lo, hi, y, c, loss, eps, w, b, out, z):
    """out += sum_i c_i phi'(z_i) x_i, with z_i kept; returns the loss and sum_i c_i phi'(z_i)."""
    total, shift = 0.0, 0.0
    for i in range(lo, hi):
        start, end = U64(indptr[i]), U64(indptr[i + 1])
        ahead(indices, values, start, end)
        zi = b + dot(indices, values, start, end, w)
        z[i] = zi
        lost, first, _ = derivatives(loss, zi, y[i], eps)
        total += c[i] * lost
        r = c[i] * first
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
        ahead(indices, values, start, end)
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
        start, end = U64(indptr[i]), U64(indptr[i + 1])
        ahead(indices, values, start, end)
        for k in range(start, end):
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
        a, b, d = derivatives(loss, z[i] + shift, y[i], eps)
        total += c[i] * a
        first += c[i] * b
        second += c[i] * d
    return total, first, second


@compiled
def sweep(z, y, c, lo, hi, loss, eps, r, h):
    """r_i = c_i phi'(z_i), h_i = c_i phi''(z_i); returns the loss and the sums of both."""
    total, first, second = 0.0, 0.0, 0.0
    for i in range(lo, hi):
        a, b, d = derivatives(loss, z[i], y[i], eps)
        r[i], h[i] = c[i] * b, c[i] * d
        total += c[i] * a
        first += r[i]
        second += h[i]
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
