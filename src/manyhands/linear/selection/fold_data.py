"""Fold data: one copy of the rows that all fits of a cross-validation share, and their folds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.base import clone, is_classifier
from sklearn.model_selection import check_cv

from manyhands.linear.estimators.base import LinearEstimator, is_stored
from manyhands.linear.fit_data import FitData, SharedFitData, shared
from manyhands.linear.passes.columns import Columns
from manyhands.linear.passes.rows import Array, Rows
from manyhands.linear.selection.fold_scores import Source
from manyhands.linear.solvers.scd import SCD
from manyhands.linear.spec import InColumns

Params = dict[str, Any]


@dataclass(frozen=True)
class Fold:
    """Row numbers: those held out, and those trained; None: all others."""

    test: Array
    train: Array | None

    def weights(self, given: Array) -> Array:
        """The weights of rows with zero for those that are not trained."""
        if self.train is None:
            found = given.copy()
            found[self.test] = 0.0
            return found
        found = np.zeros_like(given)
        found[self.train] = given[self.train]
        return found

    def trained(self, count: int) -> Array:
        if self.train is not None:
            return self.train
        held = np.zeros(count, dtype=bool)
        held[self.test] = True
        return np.flatnonzero(~held)


@dataclass
class SplitData:
    """One copy of the rows, by row and by column where solvers need both."""

    sources: dict[str, Source]
    y: Array  # numbers of classes, or targets
    weights: Array

    @property
    def stored(self) -> bool:
        return "stored" in self.sources

    def source_for(self, model: Any) -> Source:
        wanted = "stored" if self.stored else "columns" if needs_columns(model) else "rows"
        return self.sources.get(wanted) or next(iter(self.sources.values()))

    def labels(self, classes: Array | None) -> Array:
        return self.y if classes is None else classes[self.y.astype(np.int64)]

    @contextlib.contextmanager
    def handed(self) -> Iterator[HandedData]:
        """The same for other processes of this host, which map it."""
        with contextlib.ExitStack() as stack:
            found = {
                kind: stack.enter_context(
                    shared(FitData(source, np.ascontiguousarray(self.y).reshape(-1), self.weights))
                )
                for kind, source in self.sources.items()
            }
            yield HandedData(found, self.y.shape)


@dataclass(frozen=True)
class HandedData:
    sources: dict[str, SharedFitData]
    shape: tuple[int, ...]  # of y

    def open(self) -> SplitData:
        opened = {kind: source.open() for kind, source in self.sources.items()}
        first = next(iter(opened.values()))
        sources: dict[str, Source] = {kind: data.source for kind, data in opened.items()}
        return SplitData(sources, first.y.reshape(self.shape), first.c)


def needs_columns(model: Any) -> bool:
    """Whether its solver goes through columns; where it chooses one itself, whether it would."""
    if model.solver == "scd" or isinstance(model.solver, SCD):
        return True
    penalty = getattr(model, "penalty", None)
    l1 = penalty == "l1" or (penalty in (None, "deprecated", "elasticnet") and _ratio(model) > 0)
    return model.solver == "auto" and bool(getattr(model, "positive", False) or l1)


def _ratio(model: Any) -> float:
    return float(getattr(model, "l1_ratio", 0.0) or 0.0)


def split_data(
    estimator: LinearEstimator, X: Any, y: Any, sample_weight: Any, candidates: Sequence[Params]
) -> tuple[SplitData, Array | None]:
    """The data as all fits share it, and the classes of a classifier."""
    probe, classes = clone(estimator), None
    if is_stored(X):
        source, y = probe._stored(X, y)
    elif is_classifier(probe):
        source, y = probe._given(X, y)
    else:
        source, y = probe._given(X, y, multi_output=True, y_numeric=True)
    if is_classifier(probe):
        classes, y = np.unique(y, return_inverse=True)
    sources = _forms(source, [clone(estimator).set_params(**params) for params in candidates])
    weights = probe._weights(sample_weight, len(y))
    return SplitData(sources, np.asarray(y, np.float64), weights), classes


def _forms(source: Any, models: Sequence[Any]) -> dict[str, Source]:
    """The rows in every form that a solver needs: otherwise each fit would make its own."""
    if not isinstance(source, Rows | Columns):
        return {"stored": source}
    found: dict[str, Source] = {}
    for kind in {"columns" if needs_columns(model) else "rows" for model in models}:
        if kind == "columns":
            found[kind] = source if isinstance(source, Columns) else Columns.from_rows(source)
        else:
            found[kind] = source
            if isinstance(source, Columns):
                found[kind] = next(InColumns(source).blocks())
    return found


def make_folds(cv: Any, estimator: Any, X: Any, y: Array, groups: Any) -> list[Fold]:
    """Row numbers of every split; a fold whose training rows lack a class is refused."""
    classifies, count = is_classifier(estimator), len(y)
    rows = X if hasattr(X, "shape") else np.empty((count, 1), dtype=np.uint8)
    folds = []
    for k, (train, test) in enumerate(
        check_cv(cv, y, classifier=classifies).split(rows, y, groups)
    ):
        if len(train) == 0 or len(test) == 0:
            raise ValueError(f"fold {k} has {len(train)} rows to train and {len(test)} to test")
        if classifies and len(missing := np.setdiff1d(y, y[train])):
            raise ValueError(
                f"fold {k} trains without any row of class {missing.tolist()}; use "
                "StratifiedKFold, or fewer folds"
            )
        alone = len(train) + len(test) == count and not np.isin(train, test).any()
        folds.append(Fold(np.asarray(test), None if alone else np.asarray(train)))
    return folds
