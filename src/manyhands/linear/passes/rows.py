"""Rows: one block of a data set in memory, sparse (CSR) or dense, and the passes over it."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from manyhands.linear.passes import row_kernels as kernels

Array = NDArray[Any]
SMALL = 20_000  # elements below which a thread costs more than it brings


class Threads:
    """Threads of one process. Compiled passes release the interpreter's lock, so they compute at
    the same time; each has its own rows and its own sums."""

    def __init__(self, count: int = 1):
        self.count = count
        self._pool = ThreadPoolExecutor(count - 1, "linear") if count > 1 else None
        self._kept: dict[str, Array] = {}

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """`work(t)` for t = 0 ... count - 1, one of them in this thread."""
        if self._pool is None:
            return [work(0)]
        others = [self._pool.submit(work, t) for t in range(1, self.count)]
        try:
            first = work(0)
        finally:
            done = [other.exception() for other in others]
        for error in filter(None, done):
            raise error
        return [first, *(other.result() for other in others)]

    def memory(self, name: str, shape: int | tuple[int, ...], dtype: type = np.float64) -> Array:
        """Memory for a pass, not cleared; the next pass gets the same. Fresh pages cost faults, for
        which the threads of a process wait one after the other."""
        wanted = (shape,) if isinstance(shape, int) else shape
        kept = self._kept.get(name)
        if kept is None or kept.shape != wanted or kept.dtype != dtype:
            kept = self._kept[name] = np.empty(wanted, dtype)
        return kept

    def over(self, length: int, work: Callable[[int, int], Any]) -> list[Any]:
        """`work(lo, hi)` on as many parts of 0 ... length as there are threads."""
        if self.count == 1 or length < SMALL:
            return [work(0, length)]
        cuts = [length * t // self.count for t in range(self.count + 1)]
        return self.run(lambda t: work(cuts[t], cuts[t + 1]))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


class Rows:
    """A block of rows: CSR arrays, and the dense array where there is one.

    `start` is the number of the first row among all rows of this rank.
    """

    def __init__(
        self,
        indptr: Array,
        indices: Array,
        values: Array,
        columns: int,
        start: int = 0,
        dense: Array | None = None,
    ):
        self.indptr, self.indices, self.values = indptr, indices, values
        self.columns, self.start, self.dense = columns, start, dense

    @classmethod
    def from_dense(cls, x: Array, start: int = 0) -> Rows:
        """All entries of a dense array; the values are not copied where it is C-contiguous."""
        rows, columns = x.shape
        x = np.ascontiguousarray(x)
        indptr = np.arange(0, rows * columns + 1, max(columns, 1), dtype=np.int64)[: rows + 1]
        indices = np.tile(np.arange(columns, dtype=np.int32), rows)
        return cls(indptr, indices, x.reshape(-1), columns, start, x)

    @classmethod
    def from_csr(cls, x: Any, start: int = 0) -> Rows:
        """A scipy CSR matrix; its arrays are not copied where their types fit."""
        x.sort_indices()
        indptr, indices = x.indptr.astype(np.int64, copy=False), x.indices
        if x.shape[1] > np.iinfo(np.int32).max:
            raise ValueError(
                f"Found array with {x.shape[1]} features, at most 2^31 - 1 are possible"
            )
        return cls(indptr, indices.astype(np.int32, copy=False), x.data, x.shape[1], start)

    @property
    def count(self) -> int:
        return len(self.indptr) - 1

    @property
    def nonzeros(self) -> int:
        return int(self.indptr[-1] - self.indptr[0])

    @property
    def csr(self) -> tuple[Array, Array, Array]:
        return self.indptr, self.indices, self.values

    def parts(self, count: int) -> list[tuple[int, int]]:
        """`count` runs of rows with about as many non-zeros each."""
        cuts = np.linspace(self.indptr[0], self.indptr[-1], count + 1)[1:-1]
        inner = np.searchsorted(self.indptr, cuts).tolist()
        edges = [0, *inner, self.count]
        return list(itertools.pairwise(edges))

    def take(self, rows: Array) -> Rows:
        """A copy of some rows, in that order."""
        lengths = self.indptr[rows + 1] - self.indptr[rows]
        indptr = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        at = np.repeat(self.indptr[rows] - indptr[:-1], lengths) + np.arange(indptr[-1])
        dense = None if self.dense is None else self.dense[rows]
        return Rows(indptr, self.indices[at], self.values[at], self.columns, 0, dense)

    # -- passes; `y`, `c`, `z` and the like are of this block's rows --

    def margins(self, threads: Threads, w: Array, b: float, out: Array) -> None:
        if self.dense is not None:
            np.matmul(self.dense, w, out=out)
            out += b
            return
        parts = self.parts(threads.count)
        threads.run(lambda t: kernels.margins(*self.csr, *parts[t], w, b, out))

    def scatter(self, threads: Threads, r: Array, out: Array) -> float:
        """out += X'r; returns the sum of r."""
        if self.dense is not None:
            out += r @ self.dense
            return float(r.sum())
        parts, sums = self.parts(threads.count), _private(threads, out)
        done = threads.run(lambda t: kernels.scatter(*self.csr, *parts[t], r, sums[t]))
        _collect(out, sums)
        return float(sum(done))

    def gradient(
        self,
        threads: Threads,
        y: Array,
        c: Array,
        loss: int,
        eps: float,
        w: Array,
        b: float,
        out: Array,
        z: Array,
    ) -> tuple[float, float]:
        """out += X'(c phi'(z)), z = Xw + b; returns the loss and the sum of c phi'(z)."""
        if self.dense is not None:
            self.margins(threads, w, b, z)
            total, shift, _ = kernels.losses(z, y, c, 0, len(z), loss, eps, 0.0)
            r = np.empty_like(z)
            kernels.slopes(z, y, c, 0, len(z), loss, eps, r)
            out += r @ self.dense
            return total, shift
        parts, sums = self.parts(threads.count), _private(threads, out)
        done = threads.run(
            lambda t: kernels.gradient(*self.csr, *parts[t], y, c, loss, eps, w, b, sums[t], z)
        )
        _collect(out, sums)
        return float(sum(d[0] for d in done)), float(sum(d[1] for d in done))

    def hessian_product(
        self, threads: Threads, h: Array, v: Array, vb: float, out: Array, xv: Array
    ) -> float:
        """out += X'(h xv) with xv = Xv + vb; returns the sum of h xv."""
        if self.dense is not None:
            self.margins(threads, v, vb, xv)
            t = h * xv
            out += t @ self.dense
            return float(t.sum())
        parts, sums = self.parts(threads.count), _private(threads, out)
        done = threads.run(
            lambda t: kernels.hessian_product(*self.csr, *parts[t], h, v, vb, sums[t], xv)
        )
        _collect(out, sums)
        return float(sum(done))

    def squares(self, threads: Threads, c: Array, out: Array) -> float:
        """out += the sums of c x^2 by column; returns the sum of c."""
        if self.dense is not None:
            out += c @ (self.dense * self.dense)
            return float(c.sum())
        parts, sums = self.parts(threads.count), _private(threads, out)
        done = threads.run(lambda t: kernels.squares(*self.csr, *parts[t], c, sums[t]))
        _collect(out, sums)
        return float(sum(done))

    def gram(self, threads: Threads, h: Array, out: Array) -> None:
        """out += X' diag(h) X."""
        if self.dense is not None:
            out += (self.dense * h[:, None]).T @ self.dense
            return
        parts = self.parts(threads.count)
        sums = [np.zeros_like(out) for _ in range(threads.count)]
        threads.run(lambda t: kernels.gram(*self.csr, *parts[t], h, sums[t]))
        lower = sum(sums[1:], start=sums[0])
        out += lower + np.tril(lower, -1).T


def _private(threads: Threads, out: Array) -> list[Array]:
    """A sum for each thread; the first is `out` itself."""
    return [out, *(np.zeros_like(out) for _ in range(threads.count - 1))]


def _collect(out: Array, sums: list[Array]) -> None:
    for more in sums[1:]:
        out += more


class BlockSource(Protocol):
    """A rank's rows, block by block; in memory there is one block."""

    count: int
    columns: int
    nonzeros: int

    def blocks(self) -> Iterator[Rows]: ...


class InMemory:
    """Rows that are in memory: one block."""

    def __init__(self, rows: Rows):
        self.rows, self.count, self.columns = rows, rows.count, rows.columns
        self.nonzeros = rows.nonzeros

    def blocks(self) -> Iterator[Rows]:
        yield self.rows


@contextlib.contextmanager
def threads_of(count: int, source: BlockSource | None = None) -> Iterator[Threads]:
    """Threads for the time of the block. Unless rows are dense, BLAS gets one thread meanwhile: it
    would use the others for products of vectors, and spin on their cores for milliseconds after."""
    dense = isinstance(source, InMemory) and source.rows.dense is not None
    threads = Threads(count)
    try:
        with contextlib.nullcontext() if dense else _one_blas_thread():
            yield threads
    finally:
        threads.close()


def _one_blas_thread() -> Any:
    controller = _blas_controller()
    return contextlib.nullcontext() if controller is None else controller.limit(limits=1)


@functools.cache
def _blas_controller() -> Any:
    """None without threadpoolctl, which scikit-learn brings; it is slow to look for libraries."""
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:
        return None
    return ThreadpoolController().select(user_api="blas")
