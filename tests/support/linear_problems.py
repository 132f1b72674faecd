"""Small linear problems on in-process ranks: rows or columns of one data set over a world."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import scipy.sparse as sparse

from manyhands.core import Group
from manyhands.exchange.inproc import World
from manyhands.exchange.observed import ObservedGroup
from manyhands.linear.column_problem import ColumnProblem
from manyhands.linear.losses import LOGISTIC, SQUARED
from manyhands.linear.passes.columns import Columns
from manyhands.linear.passes.rows import InMemory, Rows
from manyhands.linear.problem import Problem
from manyhands.linear.softmax_problem import SoftmaxProblem
from manyhands.split.data import rank_range

Array = Any


class CountingRows(InMemory):
    """Counts passes over the rows."""

    passes = 0

    def blocks(self) -> Iterator[Rows]:
        self.passes += 1
        yield from super().blocks()


def rows_of(x: Any) -> Rows:
    return Rows.from_csr(x) if sparse.issparse(x) else Rows.from_dense(x)


def data(
    rows: int = 120, columns: int = 9, loss: int = LOGISTIC, dense: bool = False, seed: int = 0
) -> tuple[Any, Array, Array]:
    """X, y and weights; columns are of different size and are not centred."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, columns)) * (rng.random((rows, columns)) < 0.6)
    x = (x + 0.5 * (x != 0)) * np.logspace(-1, 1, columns)
    z = x @ (rng.standard_normal(columns) / np.logspace(-1, 1, columns)) + 0.3
    if loss == SQUARED:
        y = z + 0.3 * rng.standard_normal(rows)
    else:
        y = np.where(rng.random(rows) < 1.0 / (1.0 + np.exp(-z)), 1.0, -1.0)
    return (x if dense else sparse.csr_matrix(x)), y, rng.uniform(0.5, 1.5, rows)


def row_problem(group: Group, x: Any, y: Array, c: Array, loss: int, **options: Any) -> Problem:
    """This rank's rows."""
    own = rank_range(len(y), group.rank, group.size)
    part = slice(own.start, own.stop)
    source = CountingRows(rows_of(x[part]))
    return Problem(source, y[part], c[part], loss, group=group, **options)


def column_problem(
    group: Group, x: Any, y: Array, c: Array, loss: int, **options: Any
) -> ColumnProblem:
    """This rank's columns of all rows."""
    own = rank_range(x.shape[1], group.rank, group.size)
    columns = Columns.from_rows(rows_of(x), own.start, own.stop)
    return ColumnProblem(columns, y, c, loss, group=group, **options)


def class_problem(
    group: Group, x: Any, y: Array, c: Array, classes: int, **options: Any
) -> SoftmaxProblem:
    own = rank_range(len(y), group.rank, group.size)
    part = slice(own.start, own.stop)
    source = CountingRows(rows_of(x[part]))
    return SoftmaxProblem(source, y[part], c[part], classes, group=group, **options)


def iterates(
    size: int, make: Callable[[Group], Any], solver: Any, rounds: int
) -> tuple[list[list[Array]], list[int]]:
    """theta after the start and after each round, by rank; and bytes of the last round by rank."""

    def main(bare: Group) -> tuple[list[Array], int]:
        group = ObservedGroup(bare, lambda event: None)
        problem = make(group)
        theta = np.zeros(problem.size)
        state = solver.init(problem, theta)
        found, before = [theta.copy()], 0
        for _ in range(rounds):
            before = group.nbytes
            solver.round(problem, theta, state)
            found.append(theta.copy())
        return found, group.nbytes - before

    ranks = World(size).run(main)
    return [r[0] for r in ranks], [r[1] for r in ranks]
