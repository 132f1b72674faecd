"""SGD estimators: scikit-learn's SGDClassifier and SGDRegressor on threads and ranks."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.linear_model._base import LinearClassifierMixin
from sklearn.utils import compute_class_weight
from sklearn.utils._param_validation import StrOptions
from sklearn.utils.extmath import safe_sparse_dot
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import _check_partial_fit_first_call, check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from manyhands.linear.estimators.base import is_stored
from manyhands.linear.estimators.sgd_fits import StochasticEstimator
from manyhands.linear.losses import NAMES
from manyhands.linear.passes.rows import Array

REGRESSES = {"squared_error", "huber", "epsilon_insensitive", "squared_epsilon_insensitive"}


def _gives_probabilities(estimator: Any) -> bool:
    if estimator.loss in ("log_loss", "modified_huber"):
        return True
    raise AttributeError(f"probability estimates are not available for loss={estimator.loss!r}")


class SGDClassifier(LinearClassifierMixin, ClassifierMixin, StochasticEstimator):
    """Linear classifier by stochastic gradient steps; of several classes, each against the rest.

        min  1/n sum_i s_i phi(x_i'w + b, y_i) + alpha (l1_ratio |w|_1 + (1 - l1_ratio)/2 |w|^2)

    Parameters are those of scikit-learn's SGDClassifier, with

    - `solver`: "hogwild", whose threads share w without locks, or "cyclades", whose result does not
      depend on the number of threads; or a solver object
    - `n_jobs`: threads of this process, -1: all cores
    - `plan`: how many processes and threads, such as "data=2"; ranks average w after each epoch
    - `directory`, `resume`: a run directory for events and checkpoints; go on with it

    A step applies the penalty to the columns of its row only, the more the rarer they are, so it
    costs what the row has of non-zeros. X may be a libsvm file, a parquet file or `RowShards`, with
    y=None.
    """

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        **StochasticEstimator._parameter_constraints,
        "loss": [StrOptions(set(NAMES))],
        "class_weight": [StrOptions({"balanced"}), dict, None],
    }
    passive_aggressive = "hinge"

    def __init__(
        self,
        loss: str = "hinge",
        *,
        penalty: str | None = "l2",
        alpha: float = 0.0001,
        l1_ratio: float | None = 0.15,
        fit_intercept: bool = True,
        max_iter: int = 1000,
        tol: float | None = 1e-3,
        shuffle: bool = True,
        verbose: int = 0,
        epsilon: float = 0.1,
        n_jobs: int | None = None,
        random_state: Any = None,
        learning_rate: str = "optimal",
        eta0: float = 0.01,
        power_t: float = 0.5,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 5,
        class_weight: Any = None,
        warm_start: bool = False,
        average: bool | int = False,
        solver: Any = "hogwild",
        plan: str = "",
        directory: str | None = None,
        resume: bool = False,
    ):
        self.loss = loss
        self.penalty = penalty
        self.alpha = alpha
        self.l1_ratio = l1_ratio
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter
        self.tol = tol
        self.shuffle = shuffle
        self.verbose = verbose
        self.epsilon = epsilon
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.learning_rate = learning_rate
        self.eta0 = eta0
        self.power_t = power_t
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.class_weight = class_weight
        self.warm_start = warm_start
        self.average = average
        self.solver = solver
        self.plan = plan
        self.directory = directory
        self.resume = resume

    def fit(
        self,
        X: Any,
        y: Any = None,
        coef_init: Any = None,
        intercept_init: Any = None,
        sample_weight: Any = None,
    ) -> SGDClassifier:
        """Fit to rows X with labels y; to files and shards with their own labels."""
        self._check_parameters()
        source, y = self._stored(X, y) if is_stored(X) else self._rows(X, y)
        check_classification_targets(y)
        weights = self._weights(sample_weight, len(y))
        classes = np.unique(y)
        self._begin()
        columns = int(self.n_features_in_)
        starts = self._start(_problems(classes), columns, coef_init, intercept_init)
        self.classes_ = classes
        held = self._split(y, weights)
        thetas = []
        for k, (labels, c) in enumerate(self._one_against_rest(y, weights)):
            part = f"class-{k}" if len(classes) > 2 else ""
            thetas.append(self._fit_one(source, labels, c, starts[k], part, held))
        table = np.stack(thetas)
        self.coef_ = np.ascontiguousarray(table[:, :columns])
        self.intercept_ = table[:, -1].copy() if self.fit_intercept else np.zeros(len(table))
        self._end(len(y))
        return self

    def partial_fit(
        self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None
    ) -> SGDClassifier:
        """One epoch over more rows. The first call needs `classes`, all labels that may come."""
        self._check_parameters(stream=True)
        if self.class_weight == "balanced":
            raise ValueError(
                "class_weight 'balanced' is not supported for partial_fit. In order to use "
                "'balanced' weights, use compute_class_weight('balanced', classes=classes, y=y) on "
                "a large enough sample, and pass the result as the class_weight parameter."
            )
        first = not hasattr(self, "classes_")
        rows, y = self._rows(X, y, first)
        _check_partial_fit_first_call(self, classes)
        if strange := sorted(set(np.unique(y).tolist()) - set(self.classes_.tolist())):
            raise ValueError(
                f"y holds {strange}, which are not in classes={self.classes_.tolist()}"
            )
        weights = self._weights(sample_weight, len(y))
        pairs = self._one_against_rest(y, weights)
        self.coef_, self.intercept_ = self._learn(rows, *map(list, zip(*pairs, strict=True)))
        return self

    def _one_against_rest(self, y: Array, weights: Array) -> list[tuple[Array, Array]]:
        """Labels -1 and +1, and weights, of each binary problem."""
        classes = self.classes_
        if len(classes) < 2:
            raise ValueError(
                "The number of classes has to be greater than one; got "
                f"{len(classes)} class: {classes[0]!r}"
            )
        each = compute_class_weight(self.class_weight, classes=classes, y=y)
        pairs = []
        for k in range(len(classes)) if len(classes) > 2 else [1]:
            positive = y == classes[k]
            rest = each[0] if len(classes) == 2 else 1.0
            labels = np.where(positive, 1.0, -1.0)
            pairs.append((labels, weights * np.where(positive, each[k], rest)))
        return pairs

    @available_if(_gives_probabilities)
    def predict_proba(self, X: Any) -> Array:
        """Probabilities of the classes, one column each; for log_loss and modified_huber.

        Those of one class against the rest, divided by their sum.
        """
        check_is_fitted(self)
        if self.loss == "log_loss":
            return np.asarray(self._predict_proba_lr(X))
        scores = (np.clip(self.decision_function(X), -1.0, 1.0) + 1.0) / 2.0
        if scores.ndim == 1:
            return np.column_stack((1.0 - scores, scores))
        sums = scores.sum(axis=1, keepdims=True)
        return np.where(sums > 0.0, scores, 1.0) / np.where(sums > 0.0, sums, scores.shape[1])

    @available_if(_gives_probabilities)
    def predict_log_proba(self, X: Any) -> Array:
        return np.asarray(np.log(self.predict_proba(X)))


def _problems(classes: Array) -> int:
    return 1 if len(classes) <= 2 else len(classes)


class SGDRegressor(RegressorMixin, StochasticEstimator):
    """Linear regression by stochastic gradient steps.

        min  1/n sum_i s_i phi(x_i'w + b, y_i) + alpha (l1_ratio |w|_1 + (1 - l1_ratio)/2 |w|^2)

    Parameters are those of scikit-learn's SGDRegressor, and `solver`, `n_jobs`, `plan`,
    `directory`, `resume` as for `SGDClassifier`.
    """

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        **StochasticEstimator._parameter_constraints,
        "loss": [StrOptions(REGRESSES)],
    }
    passive_aggressive = "epsilon_insensitive"

    def __init__(
        self,
        loss: str = "squared_error",
        *,
        penalty: str | None = "l2",
        alpha: float = 0.0001,
        l1_ratio: float | None = 0.15,
        fit_intercept: bool = True,
        max_iter: int = 1000,
        tol: float | None = 1e-3,
        shuffle: bool = True,
        verbose: int = 0,
        epsilon: float = 0.1,
        random_state: Any = None,
        learning_rate: str = "invscaling",
        eta0: float = 0.01,
        power_t: float = 0.25,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 5,
        warm_start: bool = False,
        average: bool | int = False,
        n_jobs: int | None = None,
        solver: Any = "hogwild",
        plan: str = "",
        directory: str | None = None,
        resume: bool = False,
    ):
        self.loss = loss
        self.penalty = penalty
        self.alpha = alpha
        self.l1_ratio = l1_ratio
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter
        self.tol = tol
        self.shuffle = shuffle
        self.verbose = verbose
        self.epsilon = epsilon
        self.random_state = random_state
        self.learning_rate = learning_rate
        self.eta0 = eta0
        self.power_t = power_t
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.warm_start = warm_start
        self.average = average
        self.n_jobs = n_jobs
        self.solver = solver
        self.plan = plan
        self.directory = directory
        self.resume = resume

    def fit(
        self,
        X: Any,
        y: Any = None,
        coef_init: Any = None,
        intercept_init: Any = None,
        sample_weight: Any = None,
    ) -> SGDRegressor:
        """Fit to rows X with targets y; to files and shards with their own targets."""
        self._check_parameters()
        source, y = self._stored(X, y) if is_stored(X) else self._rows(X, y, y_numeric=True)
        weights = self._weights(sample_weight, len(y))
        self._begin()
        columns, y = int(self.n_features_in_), np.asarray(y, np.float64)
        start = self._start(1, columns, coef_init, intercept_init)[0]
        theta = self._fit_one(source, y, weights, start, "", self._split(y, weights))
        self.coef_ = theta[:columns].copy()
        self.intercept_ = theta[-1:].copy() if self.fit_intercept else np.zeros(1)
        self._end(len(y))
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> SGDRegressor:
        """One epoch over more rows."""
        self._check_parameters(stream=True)
        rows, y = self._rows(X, y, not hasattr(self, "coef_"), y_numeric=True)
        weights = self._weights(sample_weight, len(y))
        coef, self.intercept_ = self._learn(rows, [np.asarray(y, np.float64)], [weights])
        self.coef_ = coef[0]
        return self

    def predict(self, X: Any) -> Array:
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", reset=False)
        found = safe_sparse_dot(X, self.coef_.T, dense_output=True) + self.intercept_
        return np.asarray(found).ravel()
