"""Fit spec: what is minimised, by which solver, until when; plain data that travels to ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from manyhands.core import Group
from manyhands.exchange.solo import SoloGroup
from manyhands.linear.column_problem import ColumnProblem
from manyhands.linear.minimise import Stopping
from manyhands.linear.passes.columns import Columns
from manyhands.linear.passes.rows import Array, BlockSource, InMemory, Rows, Threads
from manyhands.linear.problem import Problem
from manyhands.linear.softmax_problem import SoftmaxProblem
from manyhands.split.data import rank_range


@dataclass(frozen=True)
class FitSpec:
    """A linear model and how it is fitted. `c` of a row is its weight times `scale`."""

    loss: int
    l1: float
    l2: float
    intercept: bool
    solver: Any
    stopping: Stopping
    l2_intercept: float = 0.0
    eps: float = 0.0
    positive: bool = False
    seed: int = 0
    threads: int = 1
    classes: int = 2  # more: softmax over so many

    def problem(
        self,
        source: BlockSource,
        y: Array,
        c: Array,
        threads: Threads,
        group: Group | None = None,
        by_column: bool = False,
    ) -> Any:
        """The problem that the solver sees: this rank's rows, or its columns of all rows."""
        group = SoloGroup() if group is None else group
        if self.classes > 2:
            if by_column:
                raise ValueError(
                    f"split=by_feature with {self.classes} classes: a softmax needs the margins of "
                    "all classes; split rows (data=K), or wrap the estimator in OneVsRestClassifier"
                )
            return SoftmaxProblem(
                source, y.astype(np.int32), c, self.classes, l2=self.l2, intercept=self.intercept,
                threads=threads, group=group, seed=self.seed,
            )  # fmt: skip
        make: Any = Problem
        held: Any = source
        if by_column:
            if not isinstance(source, InMemory | InColumns):
                raise ValueError(
                    "coordinate descent goes through the columns of all rows, which must be in "
                    "memory; these rows are read from shards: choose solver='sdca', 'lbfgs' or "
                    "'saga'"
                )
            make, held = ColumnProblem, own_columns(source, group)
        return make(
            held, y, c, self.loss, l1=self.l1, l2=self.l2, intercept=self.intercept,
            l2_intercept=self.l2_intercept, eps=self.eps, threads=threads, group=group,
            seed=self.seed, positive=self.positive,
        )  # fmt: skip


class InColumns:
    """All rows in memory, stored by column (CSC)."""

    def __init__(self, columns: Columns):
        self.stored, self.count, self.columns = columns, columns.rows, columns.count
        self.nonzeros = int(columns.indptr[-1])
        self._rows: Rows | None = None

    def blocks(self) -> Any:
        """Rows again, for solvers that need them; kept, because each pass asks for them."""
        if self._rows is None:
            turned = Columns.from_rows(
                Rows(self.stored.indptr, self.stored.indices, self.stored.values, self.count)
            )
            self._rows = Rows(turned.indptr, turned.indices, turned.values, self.columns)
        yield self._rows


def own_columns(source: InMemory | InColumns, group: Group) -> Columns:
    own = rank_range(source.columns, group.rank, group.size)
    first, last = own.start, own.stop
    if isinstance(source, InColumns):
        if group.size == 1:
            return source.stored
        stored = source.stored
        start, end = stored.indptr[first], stored.indptr[last]
        return Columns(
            stored.indptr[first : last + 1] - start,
            stored.indices[start:end],
            stored.values[start:end],
            stored.rows,
        )
    return Columns.from_rows(source.rows, first, last)
