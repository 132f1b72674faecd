"""Update kernels: the equations of server optimizers, and the loops that apply them to tables.

An equation updates one row `w` by its gradient `g`. `a` and `b` are state as long as the row, `c`
is one number of state. `p` are the numbers of this push (learning rate, decay, ...) in the table's
dtype, `q` the same in float64. The same equation runs over rows scattered through a sparse table
and over the one long row of a dense table.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from manyhands.kernels.compile import U64, compiled, inlined
from manyhands.kernels.instructions import fma, prefetch
from manyhands.server.tables.row_kernels import lines_of

PREFETCH_PUSH = 16  # rows between the prefetch of a line and its use
BLOCK = 64  # rows of one number that are updated together

SUM, SGD, MOMENTUM, ADAGRAD, ROWWISE_ADAGRAD, ADAM, LAZY_ADAM, FTRL = range(8)


@inlined
def _sum(w, g, p):
    """w += g"""
    for j in range(w.size):
        w[j] += g[j]


@inlined
def _sgd(w, g, p):
    """g += decay w;   w -= lr g"""
    lr, decay = p[0], p[1]
    for j in range(w.size):
        w[j] = fma(-lr, fma(decay, w[j], g[j]), w[j])


@inlined
def _momentum(w, g, a, c, p):
    """a = mu a + (1 - dampening) g (the first time: g)
    w -= lr a, or with nesterov lr (g + mu a)
    """
    lr, decay, mu, rest, nesterov = p[0], p[1], p[2], p[3], p[4]
    if c.size > 0:  # only kept where there is dampening: otherwise a = 0 gives the first time's
        if c[0] == 0:
            rest = p[5]
        c[0] = 1
    if nesterov != 0:
        for j in range(w.size):
            x = fma(decay, w[j], g[j])
            v = fma(rest, x, a[j] * mu)
            a[j] = v
            w[j] = fma(-lr, fma(mu, v, x), w[j])
    else:
        for j in range(w.size):
            v = fma(rest, fma(decay, w[j], g[j]), a[j] * mu)
            a[j] = v
            w[j] = fma(-lr, v, w[j])


@inlined
def _adagrad(w, g, a, p):
    """a += g g;   w -= lr g / (sqrt a + eps)"""
    lr, decay, eps = p[0], p[1], p[2]
    for j in range(w.size):
        x = fma(decay, w[j], g[j])
        n = fma(x, x, a[j])
        a[j] = n
        w[j] -= lr * x / (np.sqrt(n) + eps)


@inlined
def _rowwise_adagrad(w, g, c, p):
    """c += mean(g g);   w -= lr g / (sqrt c + eps)"""
    lr, decay, eps = p[0], p[1], p[2]
    square = decay * 0
    for j in range(w.size):
        x = fma(decay, w[j], g[j])
        square += x * x
    c[0] += square / w.dtype.type(w.size)
    rate = lr / (np.sqrt(c[0]) + eps)
    for j in range(w.size):
        w[j] -= rate * fma(decay, w[j], g[j])


@inlined
def _adam(w, g, a, b, p):
    """a = beta1 a + (1 - beta1) g;   b = beta2 b + (1 - beta2) g g
    w -= lr / (1 - beta1^t) a / (sqrt(b / (1 - beta2^t)) + eps)

    where t counts the pushes of the table. `keep` is 1, or with decoupled decay (adamw)
    1 - lr decay.
    """
    rate, decay, keep = p[0], p[1], p[2]
    beta1, rest1, beta2, rest2, root, eps = p[3], p[4], p[5], p[6], p[7], p[8]
    for j in range(w.size):
        x = fma(decay, w[j], g[j])
        m = fma(rest1, x, beta1 * a[j])
        v = fma(rest2, x * x, beta2 * b[j])
        a[j] = m
        b[j] = v
        w[j] = keep * w[j] - rate * m / (np.sqrt(v) * root + eps)


@inlined
def _lazy_adam(w, g, a, b, c, p, q):
    """As adam, where t counts the pushes of this row."""
    c[0] += 1
    decay, beta1, rest1, beta2, rest2, eps = p[1], p[2], p[3], p[4], p[5], p[6]
    rate = w.dtype.type(q[0] / (1.0 - q[2] ** np.float64(c[0])))
    root = w.dtype.type(1.0 / np.sqrt(1.0 - q[4] ** np.float64(c[0])))
    for j in range(w.size):
        x = fma(decay, w[j], g[j])
        m = fma(rest1, x, beta1 * a[j])
        v = fma(rest2, x * x, beta2 * b[j])
        a[j] = m
        b[j] = v
        w[j] -= rate * m / (np.sqrt(v) * root + eps)


@inlined
def _ftrl(w, g, a, b, p):
    """s = (sqrt(b + g g) - sqrt b) / lr;   a += g - s w;   b += g g
    w = 0 where |a| <= l1, else -(a - sgn(a) l1) / ((beta + sqrt b) / lr + l2)
    """
    lr, decay, beta, l1, l2 = p[0], p[1], p[2], p[3], p[4]
    zero = lr * 0
    for j in range(w.size):
        x = fma(decay, w[j], g[j])
        z, old = a[j], np.sqrt(b[j])
        # before its first gradient w has its first value, whatever lr is: the z that gives it
        if b[j] == zero:
            z = -(w[j] * (beta / lr + l2) + (l1 if w[j] > zero else -l1 if w[j] < zero else zero))
        n = fma(x, x, b[j])
        new = np.sqrt(n)
        z += x - (new - old) / lr * w[j]
        a[j] = z
        b[j] = n
        shrunk = z - l1 if z > l1 else z + l1 if z < -l1 else zero
        w[j] = -shrunk / ((beta + new) / lr + l2) if n > zero else w[j]


@inlined
def _update(kind, w, g, a, b, c, p, q):
    if kind == SUM:
        _sum(w, g, p)
    elif kind == SGD:
        _sgd(w, g, p)
    elif kind == MOMENTUM:
        _momentum(w, g, a, c, p)
    elif kind == ADAGRAD:
        _adagrad(w, g, a, p)
    elif kind == ROWWISE_ADAGRAD:
        _rowwise_adagrad(w, g, c, p)
    elif kind == ADAM:
        _adam(w, g, a, b, p)
    elif kind == LAZY_ADAM:
        _lazy_adam(w, g, a, b, c, p, q)
    else:
        _ftrl(w, g, a, b, p)


# -- kernels: `kind` is a constant of each closure, so one branch of _update is left in it, and
#    numba's cache tells the closures apart by their constants --


def _scalar_kernel(kind: int) -> Any:
    keeps_a, keeps_b = kind in (ADAGRAD, ADAM, FTRL), kind in (ADAM, FTRL)

    @compiled
    def update_scalars(slab, rows, grads, first, dim, stride, wide, narrow, p, q):
        """Update rows of one number, BLOCK at a time side by side: vector instructions."""
        w, g, a, b = np.empty((4, BLOCK), slab.dtype)
        stride = U64(stride)
        n, none, one, two = rows.size, slab[:0], U64(1), U64(2)
        for start in range(0, n, BLOCK):
            m, at_start = U64(min(BLOCK, n - start)), U64(start)
            for i in range(U64(min(BLOCK, max(0, n - start - BLOCK)))):
                prefetch(slab, U64(rows[at_start + U64(BLOCK) + i]) * stride, 0)
            for i in range(m):
                at = U64(rows[at_start + i]) * stride
                w[i], g[i] = slab[at], grads[U64(first[at_start + i])]
                if keeps_a:
                    a[i] = slab[at + one]
                if keeps_b:
                    b[i] = slab[at + two]
            _update(kind, w[:m], g[:m], a[:m], b[:m], none, p, q)
            for i in range(m):
                at = U64(rows[at_start + i]) * stride
                slab[at] = w[i]
                if keeps_a:
                    slab[at + one] = a[i]
                if keeps_b:
                    slab[at + two] = b[i]

    return update_scalars


def _row_kernel(kind: int) -> Any:
    @compiled
    def update_rows(slab, rows, grads, first, dim, stride, wide, narrow, p, q):
        """Update rows of a sparse table. `wide`: the length of a and b together; `narrow`: of c."""
        n, lines = rows.size, lines_of(slab, stride, stride)
        dim, stride = U64(dim), U64(stride)
        la, lb = min(U64(wide), dim), U64(wide) - min(U64(wide), dim)
        for i in range(n):
            if i + PREFETCH_PUSH < n:
                later = U64(rows[i + PREFETCH_PUSH]) * stride
                for j in range(lines):
                    prefetch(slab, later, j)
            at, grad = U64(rows[i]) * stride, U64(first[i]) * dim
            ia = at + dim
            ib, ic = ia + la, ia + la + lb
            w, g = slab[at : at + dim], grads[grad : grad + dim]
            a, b, c = slab[ia : ia + la], slab[ib : ib + lb], slab[ic : ic + U64(narrow)]
            _update(kind, w, g, a, b, c, p, q)

    return update_rows


def _dense_kernel(kind: int) -> Any:
    @compiled
    def update_dense(w, g, a, b, c, dim, p, q):
        """Update one long row; where one number of state belongs to each row, rows of `dim`."""
        if c.size == 0:
            _update(kind, w, g, a, b, c, p, q)
            return
        dim = U64(dim)
        for i in range(U64(c.size)):
            one, no = slice(i * dim, i * dim + dim), U64(0)
            ai, bi = a[one] if a.size > no else a, b[one] if b.size > no else b
            _update(kind, w[one], g[one], ai, bi, c[i : i + U64(1)], p, q)

    return update_dense


_KINDS = range(8)
_SCALARS = {kind: _scalar_kernel(kind) for kind in (SGD, ADAGRAD, ADAM, FTRL)}
_ROWS = [_row_kernel(kind) for kind in _KINDS]
_DENSE = [_dense_kernel(kind) for kind in _KINDS]


def kernels_of(kind: int, dim: int) -> tuple[Any, Any]:
    """(sparse, dense) kernels of an optimizer for rows of `dim`; compiled when first called."""
    return _SCALARS.get(kind, _ROWS[kind]) if dim == 1 else _ROWS[kind], _DENSE[kind]
