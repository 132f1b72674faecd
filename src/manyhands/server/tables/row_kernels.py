"""Row kernels of a sparse table: initialise rows and copy them out of the slab.

A row is `dim` values followed by its optimizer state, in one piece of memory of `stride` elements.
Copies prefetch the cache lines of later rows: this, and not the arithmetic, decides the speed.
Rows are 1-D slices, since 2-D indexing costs numba a check for negative numbers per access.
"""

import numpy as np

from manyhands.kernels.compile import U32, U64, compiled, inlined
from manyhands.kernels.instructions import copy, prefetch
from manyhands.server.tables.hashing import mix, mix32

NOWHERE = np.int64(-1)  # the row number of an id that has no row
PREFETCH_ROWS = 32  # rows between the prefetch of a line and its use
ZEROS, UNIFORM, NORMAL = range(3)
INITS = {"zeros": ZEROS, "uniform": UNIFORM, "normal": NORMAL}


@inlined
def lines_of(array, width, stride):
    """How many cache lines `width` elements touch at most, in rows of `stride` elements."""
    return (width * array.itemsize + 63) // 64 + ((stride * array.itemsize) % 64 != 0)


@inlined
def first_values(out, number, seed, kind, unit):
    """Initialise the row of an id: a function of the id and the seed.

    `unit` is the value of a step of 2^-31 (uniform) or the standard deviation (normal).
    """
    if kind == ZEROS:
        for j in range(out.size):
            out[j] = 0
        return
    bits = mix(U64(number) ^ seed)
    low, high = U32(bits), U32(bits >> U64(32))
    if kind == UNIFORM:
        for j in range(out.size):
            word = mix32(U32(U32(low + U32(U32(j) * U32(0x9E3779B9))) ^ high))
            out[j] = out.dtype.type(np.int32(word)) * unit
        return
    for j in range(out.size):  # Box and Muller
        one = mix32(U32(U32(low + U32(U32(j) * U32(0x9E3779B9))) ^ high))
        two = mix32(U32(one ^ low))
        length = np.sqrt(-2.0 * np.log((np.float64(one) + 0.5) * 2.0**-32))
        out[j] = unit * out.dtype.type(length * np.cos(np.float64(two) * (2.0**-31 * np.pi)))


@compiled
def gather(slab, rows, out, dim, stride):
    """Copy rows to `out`; returns how many were NOWHERE, whose places are left as they are."""
    n, missing, lines = rows.size, 0, lines_of(slab, dim, stride)
    for i in range(n):
        if i + PREFETCH_ROWS < n:
            later = U64(rows[i + PREFETCH_ROWS]) * U64(stride)
            for j in range(lines):
                prefetch(slab, later, j)
        if rows[i] == NOWHERE:
            missing += 1
        else:
            copy(out, U64(i) * U64(dim), slab, U64(rows[i]) * U64(stride), U64(dim))
    return missing


@compiled
def gather_first(rows, out, dim, ids, seed, kind, unit):
    """Fill in what `gather` left: an id without a row reads as its row would start."""
    for i in range(rows.size):
        if rows[i] == NOWHERE:
            first_values(out[U64(i) * U64(dim) : U64(i + 1) * U64(dim)], ids[i], seed, kind, unit)
