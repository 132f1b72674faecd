"""Loops over CSR rows and over margins for several classes: K margins a row, a softmax over them.

    z_i = W x_i + b;   p_i = softmax(z_i);   phi(z_i, y_i) = log sum_k exp z_ik - z_iy
    r_i = c_i (p_i - e_y), the slope of c_i phi

`w` has a row of K numbers for each column of the data, so that an entry x_ij meets K neighbours in
memory. Other arguments are as in `row_kernels`.
"""

from __future__ import annotations

import math

from manyhands.kernels.compile import U64, compiled


@compiled
def margins(indptr, indices, values, lo, hi, w, b, out):
    """out_i = W x_i + b."""
    for i in range(lo, hi):
        z = out[i]
        z[:] = b
        for k in range(U64(indptr[i]), U64(indptr[i + 1])):
            x, row = values[k], w[U64(indices[k])]
            for m in range(len(z)):
                z[m] += x * row[m]


@compiled
def scatter(indptr, indices, values, lo, hi, r, out):
    """out_j += sum_i x_ij r_i."""
    for i in range(lo, hi):
        ri = r[i]
        for k in range(U64(indptr[i]), U64(indptr[i + 1])):
            x, row = values[k], out[U64(indices[k])]
            for m in range(len(ri)):
                row[m] += x * ri[m]


@compiled
def along(z, dz, step, shift, y, c, lo, hi, r, first):
    """r_i = c_i (p_i - e_y) at z_i + t dz_i + b; first += sum_i r_i. Returns the loss and its slope
    by t."""
    total, by_step = 0.0, 0.0
    for i in range(lo, hi):
        ri, zi, di = r[i], z[i], dz[i]
        top = -math.inf
        for m in range(len(shift)):
            ri[m] = zi[m] + (step * di[m] + shift[m])
            top = max(top, ri[m])
        label, over = ri[y[i]], 0.0
        for m in range(len(shift)):
            ri[m] = math.exp(ri[m] - top)
            over += ri[m]
        total += c[i] * (math.log(over) + top - label)
        scale = c[i] / over
        for m in range(len(shift)):
            ri[m] *= scale
        ri[y[i]] -= c[i]
        for m in range(len(shift)):
            by_step += ri[m] * di[m]
            first[m] += ri[m]
    return total, by_step


@compiled
def curved(r, y, c, dz, lo, hi, mixed):
    """The second derivative by t of the loss; mixed_k += those by t and by b_k.

    H_i = c (diag p - p p') with c p = r + c e_y.
    """
    second = 0.0
    for i in range(lo, hi):
        if c[i] <= 0.0:
            continue
        ri, di = r[i], dz[i]
        mean = c[i] * di[y[i]]
        for m in range(len(ri)):
            mean += ri[m] * di[m]
        mean /= c[i]
        for m in range(len(ri)):
            t = (ri[m] + (c[i] if m == y[i] else 0.0)) * (di[m] - mean)
            mixed[m] += t
            second += t * di[m]
    return second


@compiled
def entropies(q, c, lo, hi):
    """sum_i c_i sum_k -q_ik log q_ik."""
    total = 0.0
    for i in range(lo, hi):
        for m in range(q.shape[1]):
            if q[i, m] > 0.0:
                total -= c[i] * q[i, m] * math.log(q[i, m])
    return total
