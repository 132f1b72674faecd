"""Streams: estimators that learn from one batch of rows after the other, by solver ftrl.

    model = LogisticRegression(solver="ftrl")
    for X, y in batches:
        model.partial_fit(X, y, classes=[0, 1])

A row is seen once, in the order given; the penalties count once for the whole stream. What the
solver keeps of a column stays with the estimator, and is pickled with it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import validate_data

from manyhands.linear.estimators.base import as_source
from manyhands.linear.losses import LOGISTIC, SQUARED
from manyhands.linear.minimise import Stopping
from manyhands.linear.passes.columns import Columns
from manyhands.linear.passes.rows import Array, InMemory, threads_of
from manyhands.linear.solvers.ftrl import FTRL
from manyhands.linear.spec import FitSpec, InColumns


def _streams(estimator: Any) -> bool:
    if estimator.solver == "ftrl" or isinstance(estimator.solver, FTRL):
        return True
    raise AttributeError(
        f"partial_fit needs solver='ftrl', which learns from rows as they come; got "
        f"solver={estimator.solver!r}"
    )


class Streaming:
    """What `partial_fit` of classifiers and regressors share."""

    _stream: tuple[dict[str, Array], Any]

    def _begins(self) -> bool:
        """Whether nothing has been learnt yet; refuses what has no effect on a stream."""
        given: Any = self
        given._validate_params()
        for name in ("plan", "directory", "resume", "record"):
            if value := getattr(given, name):
                raise ValueError(
                    f"{name}={value!r} has no effect on partial_fit, which learns in this process; "
                    "leave it out, or call fit"
                )
        return not hasattr(self, "coef_")

    def _rows(self, X: Any, y: Any, begins: bool, numeric: bool) -> tuple[InMemory, Array]:
        X, y = validate_data(
            self, X, y, reset=begins, accept_sparse=["csr", "csc"], y_numeric=numeric,
            dtype=[np.float64, np.float32], accept_large_sparse=True,
        )  # fmt: skip
        source = as_source(X)
        if isinstance(source, Columns):
            source = next(InColumns(source).blocks())
        return InMemory(source), np.asarray(y)

    def _learn(self, spec: FitSpec, rows: InMemory, y: Array, c: Array) -> tuple[Array, float]:
        """One pass over the rows; returns coefficients and intercept."""
        given: Any = self
        solver = given.solver if isinstance(given.solver, FTRL) else FTRL()
        solver = replace(solver, passes=1, shuffle=False)
        state, coef = getattr(self, "_stream", (None, None))
        with threads_of(given._threads()) as threads:
            problem = spec.problem(rows, y, c, threads)
            theta = np.zeros(problem.size)
            if hasattr(self, "coef_"):
                theta[: problem.columns] = given.coef_.ravel()
                if spec.intercept:
                    theta[-1] = np.ravel(given.intercept_)[0]
            if state is None or coef is not given.coef_:  # of an earlier `fit`: a new stream
                state = solver.init(problem, theta)
            solver.round(problem, theta, state)
        w, b = problem.unpack(theta)
        self._stream = state, w.copy()
        return self._stream[1], b


class StreamingClassifier(Streaming):
    @available_if(_streams)
    def partial_fit(
        self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None
    ) -> StreamingClassifier:
        """Learn from more rows. The first call needs `classes`, both labels that may come."""
        given: Any = self
        given._check_parameters()
        C, l1, l2 = given._penalties()
        if given.class_weight == "balanced":
            raise ValueError(
                "class_weight 'balanced' is not supported for partial_fit, which does not know the "
                "rows to come; give a dict of weights"
            )
        begins = self._begins()
        if begins and classes is None:
            raise ValueError("classes must be passed on the first call to partial_fit.")
        rows, y = self._rows(X, y, begins, numeric=False)
        known = np.unique(classes) if classes is not None else given.classes_
        if not begins and not np.array_equal(known, given.classes_):
            raise ValueError(
                f"`classes={known}` is not the same as on last call to partial_fit, was: "
                f"{given.classes_}"
            )
        if len(known) != 2:
            raise ValueError(f"partial_fit is for two classes, classes has {len(known)}")
        if strange := sorted(set(np.unique(y).tolist()) - set(known.tolist())):
            raise ValueError(f"y holds {strange}, which are not in classes={known.tolist()}")
        weights = given._weights(sample_weight, len(y))
        if given.class_weight is not None:
            each = np.array([float(given.class_weight.get(k, 1.0)) for k in known.tolist()])
            weights = weights * each[np.searchsorted(known, y)]
        spec = FitSpec(LOGISTIC, l1, l2, bool(given.fit_intercept), None, Stopping())
        labels = np.where(y == known[1], 1.0, -1.0)
        coef, intercept = self._learn(spec, rows, labels, C * weights)
        given.classes_ = known
        given.coef_, given.intercept_ = coef[None, :], np.array([intercept])
        self._stream = self._stream[0], given.coef_
        return self


class StreamingRegressor(Streaming):
    @available_if(_streams)
    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> StreamingRegressor:
        """Learn from more rows."""
        given: Any = self
        begins = self._begins()
        rows, y = self._rows(X, y, begins, numeric=True)
        weights = given._weights(sample_weight, len(y))
        l1, l2 = given._penalties(float(weights.sum()), 0)
        if given.positive:
            raise ValueError("Solver ftrl does not support positive=True; 'scd' does.")
        spec = FitSpec(SQUARED, l1, l2, bool(given.fit_intercept), None, Stopping())
        coef, intercept = self._learn(spec, rows, y.astype(np.float64), weights)
        given.coef_, given.intercept_ = coef, intercept
        return self
