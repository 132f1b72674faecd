"""Linear regression with squared loss: without a penalty, ridge, lasso and elastic net."""

from __future__ import annotations

from numbers import Real
from typing import Any, ClassVar

import numpy as np
import scipy.sparse as sparse  # type: ignore[import-untyped]
from sklearn.base import MultiOutputMixin, RegressorMixin
from sklearn.utils._param_validation import Interval

from manyhands.linear.estimators.base import LinearEstimator, is_stored
from manyhands.linear.estimators.logistic import seed_of
from manyhands.linear.estimators.partial_fit import StreamingRegressor
from manyhands.linear.fit_data import FitData
from manyhands.linear.losses import SQUARED
from manyhands.linear.minimise import Stopping
from manyhands.linear.passes.rows import Array
from manyhands.linear.spec import FitSpec


class LinearRegressor(MultiOutputMixin, RegressorMixin, LinearEstimator):
    """Base of the regressors; each target of a two-dimensional y is fitted for itself."""

    _flat = True  # whether coef_ is a vector where y is one column, as scikit-learn has it

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _penalties(self, weight: float, target: int, targets: int = 1) -> tuple[float, float]:
        """l1 and l2 of the sum of squares / 2 of one target."""
        raise NotImplementedError

    def _limits(self) -> tuple[float, int]:
        self._validate_params()
        return max(float(self.tol), 1e-14), int(self.max_iter or 1000)

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Fit to rows X with targets y; to files and shards with their own targets."""
        tol, max_iter = self._limits()
        checks = {"multi_output": True, "y_numeric": True}
        source, y = self._stored(X, y) if is_stored(X) else self._given(X, y, **checks)
        y = np.asarray(y, np.float64)
        weights = self._weights(sample_weight, len(y))
        targets = y[:, None] if y.ndim == 1 else y
        coef, intercept, rounds = [], [], []
        for k in range(targets.shape[1]):
            data = FitData(source, np.ascontiguousarray(targets[:, k]), weights)
            l1, l2 = self._penalties(float(weights.sum()), k, targets.shape[1])
            spec = FitSpec(
                SQUARED, l1, l2, bool(self.fit_intercept), None, Stopping(),
                positive=bool(self.positive), seed=seed_of(getattr(self, "random_state", None)),
            )  # fmt: skip
            part = f"target-{k}" if targets.shape[1] > 1 else ""
            found = self._minimise(spec, data, self._start(k, data.columns), tol, max_iter, part)
            coef.append(found.theta[: data.columns])
            intercept.append(found.theta[-1] if self.fit_intercept else 0.0)
            rounds.append(found.rounds)
        one = y.ndim == 1
        self.coef_ = coef[0] if one or (len(coef) == 1 and self._flat) else np.stack(coef)
        self.intercept_: Any = np.float64(intercept[0]) if one else np.asarray(intercept)
        if not self.fit_intercept:
            self.intercept_ = 0.0
        self.n_iter_ = rounds[0] if one else rounds
        return self

    def _start(self, target: int, columns: int) -> Array | None:
        if not getattr(self, "warm_start", False) or not hasattr(self, "coef_"):
            return None
        coef = np.atleast_2d(self.coef_)
        if target >= len(coef) or coef.shape[1] != columns:
            return None
        b = np.broadcast_to(self.intercept_, len(coef))[target]
        return np.append(coef[target], b) if self.fit_intercept else coef[target].copy()

    def predict(self, X: Any) -> Array:
        return self._decision(X)


class LinearRegression(StreamingRegressor, LinearRegressor):
    """Least squares; where columns depend on each other, the solution with the smallest |w|.

        min  1/2 sum_i s_i (x_i'w + b - y_i)^2

    Parameters are those of scikit-learn, and those of `LogisticRegression` here: `solver`, `plan`,
    `directory`, `record`.
    """

    _flat = False

    def __init__(
        self,
        *,
        fit_intercept: bool = True,
        copy_X: bool = True,
        tol: float = 1e-6,
        n_jobs: int | None = None,
        positive: bool = False,
        solver: Any = "auto",
        max_iter: int = 1000,
        plan: str = "",
        directory: str | None = None,
        resume: bool = False,
        record: bool = False,
    ):
        self.fit_intercept = fit_intercept
        self.copy_X = copy_X
        self.tol = tol
        self.n_jobs = n_jobs
        self.positive = positive
        self.solver = solver
        self.max_iter = max_iter
        self.plan = plan
        self.directory = directory
        self.resume = resume
        self.record = record

    def _penalties(self, weight: float, target: int, targets: int = 1) -> tuple[float, float]:
        return 0.0, 0.0


class Ridge(StreamingRegressor, LinearRegressor):
    """Least squares with an l2 penalty.

    min  1/2 sum_i s_i (x_i'w + b - y_i)^2 + alpha/2 |w|^2
    """

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        **LinearEstimator._parameter_constraints,
        "alpha": [Interval(Real, 0, None, closed="left"), "array-like"],
    }

    def __init__(
        self,
        alpha: Any = 1.0,
        *,
        fit_intercept: bool = True,
        copy_X: bool = True,
        max_iter: int | None = None,
        tol: float = 1e-4,
        solver: Any = "auto",
        positive: bool = False,
        random_state: Any = None,
        n_jobs: int | None = None,
        plan: str = "",
        directory: str | None = None,
        resume: bool = False,
        record: bool = False,
    ):
        self.alpha = alpha
        self.fit_intercept = fit_intercept
        self.copy_X = copy_X
        self.max_iter = max_iter
        self.tol = tol
        self.solver = solver
        self.positive = positive
        self.random_state = random_state
        self.n_jobs = n_jobs
        self.plan = plan
        self.directory = directory
        self.resume = resume
        self.record = record

    def _penalties(self, weight: float, target: int, targets: int = 1) -> tuple[float, float]:
        each = np.asarray(self.alpha, np.float64).ravel()
        if len(each) not in (1, targets):
            raise ValueError(
                "Number of targets and number of penalties do not correspond: "
                f"{targets} != {len(each)}"
            )
        alpha = float(each[target if len(each) > 1 else 0])
        if not 0 <= alpha < np.inf:
            raise ValueError(f"The 'alpha' parameter of Ridge must be >= 0. Got {self.alpha!r}.")
        return 0.0, alpha


class ElasticNet(LinearRegressor):
    """Least squares with l1 and l2 penalties.

        min  1/(2n) sum_i s_i (x_i'w + b - y_i)^2
             + alpha l1_ratio |w|_1 + alpha (1 - l1_ratio)/2 |w|^2

    n is the sum of the weights s. `selection` is "cyclic": coordinates of a working set in turn.
    """

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        **LinearEstimator._parameter_constraints,
        "alpha": [Interval(Real, 0, None, closed="left")],
        "l1_ratio": [Interval(Real, 0, 1, closed="both")],
    }

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        l1_ratio: float = 0.5,
        fit_intercept: bool = True,
        precompute: bool = False,
        max_iter: int = 1000,
        copy_X: bool = True,
        tol: float = 1e-4,
        warm_start: bool = False,
        positive: bool = False,
        random_state: Any = None,
        selection: str = "cyclic",
        solver: Any = "auto",
        n_jobs: int | None = None,
        plan: str = "",
        directory: str | None = None,
        resume: bool = False,
        record: bool = False,
    ):
        self.alpha = alpha
        self.l1_ratio = l1_ratio
        self.fit_intercept = fit_intercept
        self.precompute = precompute
        self.max_iter = max_iter
        self.copy_X = copy_X
        self.tol = tol
        self.warm_start = warm_start
        self.positive = positive
        self.random_state = random_state
        self.selection = selection
        self.solver = solver
        self.n_jobs = n_jobs
        self.plan = plan
        self.directory = directory
        self.resume = resume
        self.record = record

    @property
    def sparse_coef_(self) -> Any:
        """`coef_` as a CSR matrix."""
        return sparse.csr_matrix(self.coef_)

    def _penalties(self, weight: float, target: int, targets: int = 1) -> tuple[float, float]:
        if self.precompute is not False:
            raise ValueError(
                f"precompute={self.precompute!r}: no Gram matrix is kept here; leave it out"
            )
        if self.selection != "cyclic":
            raise ValueError(
                f"selection={self.selection!r}: coordinates are visited in turn; leave it out"
            )
        scale = weight * float(self.alpha)
        return scale * float(self.l1_ratio), scale * (1.0 - float(self.l1_ratio))


class Lasso(ElasticNet):
    """Least squares with an l1 penalty.

    min  1/(2n) sum_i s_i (x_i'w + b - y_i)^2 + alpha |w|_1
    """

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        fit_intercept: bool = True,
        precompute: bool = False,
        copy_X: bool = True,
        max_iter: int = 1000,
        tol: float = 1e-4,
        warm_start: bool = False,
        positive: bool = False,
        random_state: Any = None,
        selection: str = "cyclic",
        solver: Any = "auto",
        n_jobs: int | None = None,
        plan: str = "",
        directory: str | None = None,
        resume: bool = False,
        record: bool = False,
    ):
        super().__init__(
            alpha, fit_intercept=fit_intercept, precompute=precompute, max_iter=max_iter,
            copy_X=copy_X, tol=tol, warm_start=warm_start, positive=positive,
            random_state=random_state, selection=selection, solver=solver, n_jobs=n_jobs,
            plan=plan, directory=directory, resume=resume, record=record, l1_ratio=1.0,
        )  # fmt: skip

    @classmethod
    def _get_param_names(cls) -> list[str]:
        return [name for name in super()._get_param_names() if name != "l1_ratio"]
