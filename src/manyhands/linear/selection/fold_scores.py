"""Fold scores: scikit-learn's scorers on rows that are never copied.

Margins of all rows are computed in one pass over the shared data; a scorer is given row numbers in
the place of rows, and an estimator that looks its margins up by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from manyhands.linear.data.shards import RowShards
from manyhands.linear.passes.columns import Columns
from manyhands.linear.passes.rows import Array, Rows, Threads
from manyhands.linear.shard_source import OnDisk

Source = Rows | Columns | RowShards


def margins(source: Source, coef: Array, intercept: Array, threads: Threads) -> Array:
    """X W' + b of all rows: a column for each row of `coef`."""
    count = source.n_rows if isinstance(source, RowShards) else _rows(source)
    out = np.empty((len(coef), count))
    for k, (w, b) in enumerate(zip(coef, intercept, strict=True)):
        if isinstance(source, Columns):
            used = np.flatnonzero(w)
            out[k] = b
            source.add(np.ascontiguousarray(w[used]), used, out[k])
            continue
        blocks = OnDisk(source).blocks() if isinstance(source, RowShards) else [source]
        for rows in blocks:
            at = slice(rows.start, rows.start + rows.count)
            rows.margins(threads, np.ascontiguousarray(w), float(b), out[k, at])
    return out.T


def _rows(source: Rows | Columns) -> int:
    return source.rows if isinstance(source, Columns) else source.count


def of_all_rows(model: Any, source: Source, threads: Threads) -> Array:
    """What `decision_function` or `predict` of a fitted model gives for all rows."""
    coef = np.atleast_2d(model.coef_)
    intercept = np.broadcast_to(np.atleast_1d(model.intercept_), len(coef))
    found = margins(source, coef, intercept, threads)
    one = model.coef_.ndim == 1 or (hasattr(model, "classes_") and len(coef) == 1)
    return found[:, 0] if one else found


def view_of(model: Any, known: Array) -> Any:
    """The model, whose rows are row numbers: `known` has the margins of all rows."""

    def decision_function(self: Any, rows: Array) -> Array:
        return known[rows]

    kind = type(model)
    methods: dict[str, Any] = {"_decision": decision_function}
    if hasattr(kind, "decision_function"):
        methods["decision_function"] = decision_function
    view: Any = object.__new__(type(kind.__name__, (kind,), methods))
    view.__dict__.update(model.__dict__)
    return view


def score_rows(
    model: Any, known: Array, y: Array, rows: Array, scorers: Mapping[str, Any]
) -> dict[str, float]:
    """Every scorer's score of the model on some rows."""
    view, truth = view_of(model, known), y[rows]
    return {name: float(scorer(view, rows, truth)) for name, scorer in scorers.items()}
