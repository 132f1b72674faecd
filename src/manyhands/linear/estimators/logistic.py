"""Logistic regression: two classes by any solver, more by one softmax over all of them."""

from __future__ import annotations

import warnings
from numbers import Integral, Real
from typing import Any, ClassVar

import numpy as np
import scipy.sparse as sparse  # type: ignore[import-untyped]
from sklearn.base import ClassifierMixin
from sklearn.linear_model._base import LinearClassifierMixin, SparseCoefMixin
from sklearn.preprocessing import LabelEncoder
from sklearn.utils import check_random_state, compute_class_weight
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.extmath import softmax
from sklearn.utils.multiclass import check_classification_targets

from manyhands.linear.catalogue import SOLVERS
from manyhands.linear.estimators.base import LinearEstimator, is_stored
from manyhands.linear.estimators.partial_fit import StreamingClassifier
from manyhands.linear.fit_data import FitData
from manyhands.linear.losses import LOGISTIC
from manyhands.linear.minimise import Stopping
from manyhands.linear.passes.rows import Array
from manyhands.linear.spec import FitSpec


def seed_of(random_state: Any) -> int:
    """A seed; None: always the same one, so that a fit can be repeated."""
    if random_state is None:
        return 0
    return int(check_random_state(random_state).randint(1 << 30))


def encoded(estimator: Any, y: Any, least: int = 2) -> tuple[Array, Array]:
    """Classes and the number of each row's class; refuses a single one."""
    check_classification_targets(y)
    encoder = LabelEncoder().fit(y)
    classes = encoder.classes_
    if len(classes) < least:
        raise ValueError(
            "This solver needs samples of at least 2 classes in the data, but the data contains "
            f"only one class: {classes[0]!r}"
        )
    return classes, encoder.transform(y)


def class_weights(estimator: Any, classes: Array, codes: Array, weights: Array) -> Array:
    """The weight of each class: 1 without class_weight."""
    if estimator.class_weight is None:
        return np.ones(len(classes))
    each = compute_class_weight(
        estimator.class_weight, classes=classes, y=classes[codes], sample_weight=weights
    )
    if not (np.isfinite(each).all() and (each >= 0).all() and each.any()):
        raise ValueError(
            f"class_weight={estimator.class_weight!r}: finite numbers of 0 or more are needed, and "
            "one of them more than 0"
        )
    return np.asarray(each)


class LogisticRegression(
    StreamingClassifier, LinearClassifierMixin, SparseCoefMixin, ClassifierMixin, LinearEstimator
):
    """Logistic regression with l1, l2 or elastic-net penalty.

        min  C sum_i s_i log(1 + exp(-y_i (x_i'w + b))) + l1_ratio |w|_1 + (1 - l1_ratio)/2 |w|^2

    Parameters are those of scikit-learn's LogisticRegression, with

    - `solver`: "auto", or one of `manyhands.linear.SOLVERS`, or a solver object with options;
      `solver_` and `solver_reason_` say which was taken and why
    - `tol`: the duality gap at which to stop, relative to the objective without features
    - `plan`: how many processes and threads, such as "data=4" or "tensor=2 split=by_feature"
    - `directory`: a run directory for events, checkpoints and a picture; None: none
    - `resume`: go on from the last checkpoint in `directory`, with the same data and parameters
    - `record`: certify every round and keep them in `history_`
    - `n_jobs`: threads of this process, -1: all cores

    X may also be a libsvm file, a parquet file or `RowShards`, with y=None.
    """

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        **LinearEstimator._parameter_constraints,
        "C": [Interval(Real, 0, None, closed="right")],
        "tol": [Interval(Real, 0, None, closed="neither")],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "class_weight": [StrOptions({"balanced"}), dict, None],
    }

    def __init__(
        self,
        penalty: Any = "deprecated",
        *,
        C: float = 1.0,
        l1_ratio: float | None = 0.0,
        dual: bool = False,
        tol: float = 1e-4,
        fit_intercept: bool = True,
        intercept_scaling: float = 1,
        class_weight: Any = None,
        random_state: Any = None,
        solver: Any = "auto",
        max_iter: int = 100,
        verbose: int = 0,
        warm_start: bool = False,
        n_jobs: int | None = None,
        plan: str = "",
        directory: str | None = None,
        resume: bool = False,
        record: bool = False,
    ):
        self.penalty = penalty
        self.C = C
        self.l1_ratio = l1_ratio
        self.dual = dual
        self.tol = tol
        self.fit_intercept = fit_intercept
        self.intercept_scaling = intercept_scaling
        self.class_weight = class_weight
        self.random_state = random_state
        self.solver = solver
        self.max_iter = max_iter
        self.verbose = verbose
        self.warm_start = warm_start
        self.n_jobs = n_jobs
        self.plan = plan
        self.directory = directory
        self.resume = resume
        self.record = record

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        if self.solver in SOLVERS and not SOLVERS[self.solver].softmax:
            tags.classifier_tags.multi_class = False
        return tags

    def _penalties(self) -> tuple[float, float, float]:
        """C, l1 and l2."""
        ratio = 0.0 if self.l1_ratio is None else float(self.l1_ratio)
        if self.penalty not in ("deprecated", "elasticnet"):
            fixed = {"l1": 1.0, "l2": 0.0, None: 0.0}
            if self.penalty not in fixed:
                raise ValueError(
                    "The 'penalty' parameter of LogisticRegression must be a str among "
                    f"{{'l1', 'l2', 'elasticnet'}} or None. Got {self.penalty!r} instead."
                )
            if ratio not in (0.0, fixed[self.penalty]):
                raise ValueError(
                    f"penalty={self.penalty!r} with l1_ratio={ratio}: give l1_ratio alone"
                )
            ratio = fixed[self.penalty]
        if np.isinf(self.C) or self.penalty is None:
            return 1.0, 0.0, 0.0
        return float(self.C), ratio, 1.0 - ratio

    def _check_parameters(self) -> None:
        self._validate_params()
        if self.dual:
            raise ValueError("dual=True: choose solver='sdca', which works in the dual")
        if self.intercept_scaling != 1:
            raise ValueError(
                f"intercept_scaling={self.intercept_scaling} has no effect: the intercept is not "
                "penalised here; leave it out"
            )

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> LogisticRegression:
        """Fit to rows X with labels y; to files and shards with their own labels."""
        self._check_parameters()
        C, l1, l2 = self._penalties()
        data = self._weighted(X, y, sample_weight, C)
        count = len(self.classes_)
        spec = FitSpec(
            LOGISTIC, l1, l2, bool(self.fit_intercept), None, Stopping(),
            seed=seed_of(self.random_state), classes=count,
        )  # fmt: skip
        rows = 1 if count == 2 else count
        found = self._minimise(spec, data, self._start(rows, data.columns), self.tol, self.max_iter)
        theta = found.theta.reshape(rows, -1)
        self.coef_ = theta[:, : data.columns].copy()
        self.intercept_ = theta[:, -1].copy() if self.fit_intercept else np.zeros(rows)
        self.n_iter_ = np.array([found.rounds], dtype=np.int32)
        return self

    def _weighted(self, X: Any, y: Any, sample_weight: Any, C: float) -> FitData:
        """The rows with labels as numbers and weights. What leads there is not kept: a vector of
        all rows is as large as a shard."""
        source, y = self._stored(X, y) if is_stored(X) else self._given(X, y)
        weights = self._weights(sample_weight, len(y))
        self.classes_, codes = encoded(self, y)
        weights = weights * class_weights(self, self.classes_, codes, weights)[codes]
        labels = codes if len(self.classes_) > 2 else np.where(codes == 1, 1.0, -1.0)
        return FitData(source, np.asarray(labels, np.float64), C * weights)

    def _start(self, rows: int, columns: int) -> Array | None:
        """Where the last fit ended, with warm_start."""
        if not self.warm_start or not hasattr(self, "coef_"):
            return None
        if self.coef_.shape != (rows, columns):
            warnings.warn(
                f"warm_start has no effect: the last fit had coefficients of shape "
                f"{self.coef_.shape}, this one has {(rows, columns)}",
                stacklevel=3,
            )
            return None
        coef: Any = self.coef_  # sparse after sparsify()
        coef = coef.toarray() if sparse.issparse(coef) else coef
        parts = [coef, self.intercept_[:, None]] if self.fit_intercept else [coef]
        return np.hstack(parts).ravel()

    def predict_proba(self, X: Any) -> Array:
        """Probabilities of the classes, one column each."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            scores = np.c_[-scores, scores] * 0.5  # softmax of these is the logistic function
        return np.asarray(softmax(scores, copy=False))

    def predict_log_proba(self, X: Any) -> Array:
        return np.asarray(np.log(self.predict_proba(X)))
