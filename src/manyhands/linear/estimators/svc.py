"""Linear support vector classifier: hinge or squared hinge, one against the rest."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, ClassVar

import numpy as np
import scipy.sparse as sparse  # type: ignore[import-untyped]
from sklearn.base import ClassifierMixin
from sklearn.linear_model._base import LinearClassifierMixin, SparseCoefMixin
from sklearn.utils._param_validation import Interval, StrOptions

from manyhands.linear.catalogue import SOLVERS, Shape
from manyhands.linear.data.shards import RowShards
from manyhands.linear.estimators.base import LinearEstimator, as_source, is_stored, refuse_unable
from manyhands.linear.estimators.logistic import class_weights, encoded, seed_of
from manyhands.linear.fit_data import FitData
from manyhands.linear.losses import HINGE, SQUARED_HINGE
from manyhands.linear.minimise import Stopping
from manyhands.linear.passes.columns import Columns
from manyhands.linear.passes.rows import Array, Rows
from manyhands.linear.solvers.sdca import SDCA
from manyhands.linear.spec import FitSpec


class LinearSVC(LinearClassifierMixin, SparseCoefMixin, ClassifierMixin, LinearEstimator):
    """Linear support vector machine, with liblinear's objective.

        min  C sum_i s_i loss(y_i (x_i'w + b)) + |w|^2/2 + (b / intercept_scaling)^2/2

    The intercept is the weight of one more column, `intercept_scaling`, and penalised like the
    others. Parameters are those of scikit-learn's LinearSVC, and `solver`, `plan`, `directory`,
    `record`, `n_jobs` as for `LogisticRegression`.
    """

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        **LinearEstimator._parameter_constraints,
        "C": [Interval(Real, 0, None, closed="neither")],
        "tol": [Interval(Real, 0, None, closed="neither")],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "intercept_scaling": [Interval(Real, 0, None, closed="neither")],
        "dual": ["boolean", StrOptions({"auto"})],
        "class_weight": [StrOptions({"balanced"}), dict, None],
    }

    def __init__(
        self,
        penalty: str = "l2",
        loss: str = "squared_hinge",
        *,
        dual: Any = "auto",
        tol: float = 1e-4,
        C: float = 1.0,
        multi_class: str = "ovr",
        fit_intercept: bool = True,
        intercept_scaling: float = 1,
        class_weight: Any = None,
        verbose: int = 0,
        random_state: Any = None,
        max_iter: int = 1000,
        solver: Any = "auto",
        n_jobs: int | None = None,
        plan: str = "",
        directory: str | None = None,
        resume: bool = False,
        record: bool = False,
    ):
        self.penalty = penalty
        self.loss = loss
        self.dual = dual
        self.tol = tol
        self.C = C
        self.multi_class = multi_class
        self.fit_intercept = fit_intercept
        self.intercept_scaling = intercept_scaling
        self.class_weight = class_weight
        self.verbose = verbose
        self.random_state = random_state
        self.max_iter = max_iter
        self.solver = solver
        self.n_jobs = n_jobs
        self.plan = plan
        self.directory = directory
        self.resume = resume
        self.record = record

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _check_parameters(self) -> None:
        self._validate_params()
        if self.penalty not in ("l1", "l2") or self.loss not in ("hinge", "squared_hinge"):
            raise ValueError(
                f"penalty must be 'l1' or 'l2', loss 'hinge' or 'squared_hinge'. Got "
                f"penalty={self.penalty!r}, loss={self.loss!r} instead."
            )
        if self.penalty == "l1" and self.loss == "hinge":
            raise ValueError(
                "Unsupported set of arguments: The combination of penalty='l1' and loss='hinge' is "
                "not supported; loss='squared_hinge' is."
            )
        self._check_dual()
        if self.multi_class != "ovr":
            raise ValueError(f"multi_class={self.multi_class!r} is not supported; 'ovr' is")

    def _check_dual(self) -> None:
        """Refuse what liblinear refuses, and a solver of the other problem."""
        if self.dual == "auto":
            return
        if (self.penalty if self.dual else self.loss) == ("l1" if self.dual else "hinge"):
            raise ValueError(
                f"Unsupported set of arguments: The combination of penalty={self.penalty!r} and "
                f"loss={self.loss!r} is not supported when dual={self.dual}"
            )
        in_dual = self.solver == "sdca" or isinstance(self.solver, SDCA)
        if self.solver != "auto" and in_dual != self.dual:
            raise ValueError(
                f"dual={self.dual} with solver={self.solver!r}: sdca is the solver of the dual "
                "problem; leave one of them out"
            )

    def _solver(self, spec: FitSpec, data: FitData, size: int, columns_split: bool) -> Any:
        found = super()._solver(spec, data, size, columns_split)
        if self.dual == "auto" or self.solver != "auto" or isinstance(found, SDCA) == self.dual:
            return found
        shape = Shape(len(data.y), data.columns, data.nonzeros, size, columns_split, data.in_memory)
        name = "sdca" if self.dual else "lbfgs"
        refuse_unable(name, spec, shape)
        self.solver_, self.solver_reason_ = name, f"dual={self.dual}"
        return SOLVERS[name].make()

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> LinearSVC:
        """Fit to rows X with labels y; to files and shards with their own labels."""
        self._check_parameters()
        source, y = self._stored(X, y) if is_stored(X) else self._given(X, y)
        weights = self._weights(sample_weight, len(y))
        self.classes_, codes = encoded(self, y)
        each = class_weights(self, self.classes_, codes, weights)
        columns = int(self.n_features_in_)
        l1 = 1.0 if self.penalty == "l1" else 0.0
        # l1 on the intercept too, as liblinear has it: then it is a column like the others
        extra = bool(l1 and self.fit_intercept)
        if extra:
            source = with_constant(source, float(self.intercept_scaling))
        spec = FitSpec(
            HINGE if self.loss == "hinge" else SQUARED_HINGE, l1, 1.0 - l1,
            bool(self.fit_intercept) and not extra, None, Stopping(),
            l2_intercept=1.0 / float(self.intercept_scaling) ** 2, seed=seed_of(self.random_state),
        )  # fmt: skip
        positives = [1] if len(self.classes_) == 2 else list(range(len(self.classes_)))
        coef, intercept, rounds = [], [], []
        for k in positives:
            # of several classes, the weight is that of the one: the rest has 1, as in liblinear
            rest = each[0] if len(positives) == 1 else 1.0
            c = float(self.C) * weights * np.where(codes == k, each[k], rest)
            data = FitData(source, np.where(codes == k, 1.0, -1.0), c)
            part = f"class-{k}" if len(positives) > 1 else ""
            found = self._minimise(spec, data, None, self.tol, self.max_iter, part)
            coef.append(found.theta[:columns])
            b = found.theta[-1] if self.fit_intercept else 0.0
            intercept.append(b * self.intercept_scaling if extra else b)
            rounds.append(found.rounds)
        self.coef_ = np.stack(coef)
        self.intercept_ = np.asarray(intercept) if self.fit_intercept else 0.0
        self.n_iter_ = max(rounds)
        return self


def with_constant(source: Rows | Columns | RowShards, value: float) -> Rows | Columns:
    """The same rows with one more column, of `value`."""
    if isinstance(source, RowShards):
        raise ValueError(
            "penalty='l1' with an intercept is not possible on shards; set fit_intercept=False and "
            "write a column of ones, or take penalty='l2'"
        )
    if isinstance(source, Columns):
        stored = sparse.csc_array(
            (source.values, source.indices, source.indptr), shape=(source.rows, source.count)
        )
        return as_source(sparse.hstack([stored, np.full((source.rows, 1), value)], format="csc"))
    if source.dense is not None:
        return Rows.from_dense(np.hstack([source.dense, np.full((source.count, 1), value)]))
    stored = sparse.csr_array(
        (source.values, source.indices, source.indptr), shape=(source.count, source.columns)
    )
    more: Array = np.full((source.count, 1), value)
    return as_source(sparse.hstack([stored, more], format="csr"))
