"""Columns: the data set in CSC form, for solvers that go coordinate by coordinate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from manyhands.kernels.compile import U64, compiled
from manyhands.linear.passes.row_kernels import add, ahead, dot
from manyhands.linear.passes.rows import Array, Rows, Threads


@dataclass(frozen=True)
class Columns:
    """Column j has rows indices[indptr[j]:indptr[j+1]], ascending, with those values."""

    indptr: Array
    indices: Array
    values: Array
    rows: int

    @classmethod
    def from_rows(cls, rows: Rows, first: int = 0, last: int | None = None) -> Columns:
        """The columns first..last of `rows`."""
        last = rows.columns if last is None else last
        counts = np.zeros(last - first + 1, np.int64)
        _count(rows.indices, rows.indptr[0], rows.indptr[-1], first, last, counts)
        indptr = np.cumsum(counts)
        indices = np.empty(indptr[-1], np.int32)
        values = np.empty(indptr[-1], rows.values.dtype)
        _fill(*rows.csr, first, last, indptr.copy(), indices, values)
        return cls(indptr, indices, values, rows.count)

    @property
    def count(self) -> int:
        return len(self.indptr) - 1

    @property
    def csc(self) -> tuple[Array, Array, Array]:
        return self.indptr, self.indices, self.values

    def transposed(self, threads: Threads, r: Array, out: Array) -> None:
        """out = X'r: each column for itself, so threads share nothing."""
        cuts = np.linspace(0, self.indptr[-1], threads.count + 1)[1:-1]
        edges = [0, *np.searchsorted(self.indptr, cuts).tolist(), self.count]
        threads.run(lambda t: _products(*self.csc, edges[t], edges[t + 1], r, out))

    def add(self, w: Array, which: Array, out: Array) -> None:
        """out += X[:, which] w."""
        _add(*self.csc, which, w, out)

    def moments(self, which: Array, h: Array) -> tuple[Array, Array]:
        """sum_i h_i x_ij and sum_i h_i x_ij^2 of the columns `which`; of the others zero."""
        first, second = np.zeros(self.count), np.zeros(self.count)
        _moments(*self.csc, which, h, first, second)
        return first, second


@compiled
def _count(indices, start, end, first, last, counts):
    for k in range(start, end):
        if first <= indices[k] < last:
            counts[indices[k] - first + 1] += 1


@compiled
def _fill(indptr, indices, values, first, last, at, to, out):
    for i in range(len(indptr) - 1):
        for k in range(indptr[i], indptr[i + 1]):
            j = indices[k] - first
            if 0 <= j < last - first:
                to[at[j]] = i
                out[at[j]] = values[k]
                at[j] += 1


@compiled
def _products(indptr, indices, values, lo, hi, r, out):
    for j in range(lo, hi):
        start, end = U64(indptr[j]), U64(indptr[j + 1])
        ahead(indices, values, start, end)
        out[j] = dot(indices, values, start, end, r)


@compiled
def _add(indptr, indices, values, which, w, out):
    for t in range(len(which)):
        j = which[t]
        if w[t] != 0.0:
            add(indices, values, U64(indptr[j]), U64(indptr[j + 1]), w[t], out)


@compiled
def _moments(indptr, indices, values, which, h, first, second):
    for t in range(len(which)):
        j = which[t]
        a, b = 0.0, 0.0
        for k in range(indptr[j], indptr[j + 1]):
            hx = h[indices[k]] * values[k]
            a += hx
            b += hx * values[k]
        first[j], second[j] = a, b
