"""What all linear estimators share: checked input, a chosen solver, one fit, fitted attributes."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import scipy.sparse as sparse  # type: ignore[import-untyped]
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils._param_validation import Interval
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from manyhands.launch.environment import cores
from manyhands.linear.catalogue import SOLVERS, Shape, choose, names_where
from manyhands.linear.data import RowShards
from manyhands.linear.fit_data import FitData
from manyhands.linear.fitting import Where, by_feature, fit, parsed
from manyhands.linear.losses import NAMES
from manyhands.linear.minimise import Solution, Stopping
from manyhands.linear.passes.columns import Columns
from manyhands.linear.passes.rows import Array, Rows
from manyhands.linear.shard_source import stored_rows
from manyhands.linear.spec import FitSpec

LOSS_NAMES = {number: name for name, number in NAMES.items()}
# solvers of scikit-learn under names that nothing has here, and what to take in their place
INSTEAD = {
    "liblinear": "'newton' (l2) or 'scd' (l1)",
    "newton-cg": "'newton_cg'",
    "newton-cholesky": "'newton'",
    "cholesky": "'newton'",
    "svd": "'newton'",
    "lsqr": "'newton_cg'",
    "sparse_cg": "'newton_cg'",
    "sag": "'saga'",
}


def is_stored(X: Any) -> bool:
    """Whether X names rows on disk: a libsvm or parquet file, or a folder of shards."""
    return isinstance(X, str | os.PathLike | RowShards)


class LinearEstimator(BaseEstimator):
    """Base of the estimators; their parameters are scikit-learn's, with `plan` and `directory`."""

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        "fit_intercept": ["boolean"],
        "positive": ["boolean"],
        "warm_start": ["boolean"],
        "verbose": ["verbose"],
        "random_state": ["random_state"],
        "tol": [Interval(Real, 0, None, closed="left")],
        "max_iter": [Interval(Integral, 1, None, closed="left"), None],
        "l1_ratio": [Interval(Real, 0, 1, closed="both"), None],
    }

    # -- input --

    def _stored(self, X: Any, y: Any) -> tuple[Rows | RowShards, Array]:
        """Rows of a file or of shards, with the labels that stand beside them."""
        if y is not None:
            raise ValueError("files and shards hold their own labels: leave y out")
        source, labels = stored_rows(X)
        columns = source.columns if isinstance(source, Rows) else source.n_features
        if not len(labels):
            raise ValueError(
                f"Found array with 0 sample(s) in {X} while a minimum of 1 is required."
            )
        self.n_features_in_ = columns
        return source, labels

    def _given(self, X: Any, y: Any, **checks: Any) -> tuple[Rows | Columns, Array]:
        """Arrays, as scikit-learn checks them; sparse ones stay sparse, float32 stays float32. What
        cross-validation hands over was checked before."""
        if isinstance(X, Rows | Columns):
            self.n_features_in_ = X.columns if isinstance(X, Rows) else X.count
            return X, np.asarray(y)
        X, y = validate_data(
            self, X, y, accept_sparse=["csr", "csc"], dtype=[np.float64, np.float32],
            accept_large_sparse=True, **checks,
        )  # fmt: skip
        return as_source(X), y

    def _weights(self, sample_weight: Any, rows: int) -> Array:
        weights = _check_sample_weight(
            sample_weight, np.empty((rows, 1)), dtype=np.float64, ensure_non_negative=True
        )
        if sample_weight is not None and not weights.any():
            raise ValueError("Sample weights must contain at least one non-zero number.")
        return np.asarray(weights)

    # -- solver --

    def _threads(self) -> int:
        jobs = getattr(self, "n_jobs", None)
        if jobs is None:
            return 1
        if not isinstance(jobs, int | np.integer) or jobs == 0:
            raise ValueError(
                f"n_jobs={jobs!r}: a number of threads, or -1 for all cores, is needed"
            )
        return int(jobs) if jobs > 0 else max(1, cores() + 1 + int(jobs))

    def _solver(self, spec: FitSpec, data: FitData, size: int, columns_split: bool) -> Any:
        """The solver object; refuses what it cannot do, and says which can."""
        shape = Shape(len(data.y), data.columns, data.nonzeros, size, columns_split, data.in_memory)
        given = self.solver
        if isinstance(given, str) and given == "auto":
            name, why = choose(shape, spec.loss, spec.l1, spec.l2, spec.classes, spec.positive)
            solver = SOLVERS[name].make()
        elif isinstance(given, str):
            if given not in SOLVERS:
                ours = f"; here {INSTEAD[given]} does its work" if given in INSTEAD else ""
                raise ValueError(
                    f"The solver parameter of {type(self).__name__} must be a str among "
                    f"{sorted(SOLVERS)} or 'auto'. Got {given!r} instead{ours}."
                )
            name, why, solver = given, "as asked for", SOLVERS[given].make()
        else:
            found = [n for n, can in SOLVERS.items() if isinstance(given, can.make)]
            if not found:
                raise ValueError(
                    f"The solver parameter of {type(self).__name__} must be a str or a solver of "
                    f"manyhands.linear. Got {given!r} instead."
                )
            name, why, solver = found[0], "as asked for", given
        refuse_unable(name, spec, shape)
        self.solver_, self.solver_reason_ = name, why
        if getattr(self, "verbose", 0):
            print(f"solver={name}: {why}")
        return solver

    # -- fit --

    def _minimise(
        self,
        spec: FitSpec,
        data: FitData,
        theta: Array | None,
        tol: float,
        max_iter: int,
        part: str = "",
    ) -> Solution:
        """`part`: of several fits of one estimator, which have a folder each in its directory."""
        plan = parsed(self.plan)
        split = by_feature(plan)
        solver = self._solver(spec, data, plan.layout.size, split)
        stopping = Stopping(tol, max_iter, bool(getattr(self, "record", False)))
        spec = replace(spec, solver=solver, stopping=stopping, threads=self._threads())
        directory = None if self.directory is None else Path(self.directory) / part
        # of several fits, those that had not begun yet have nothing to resume
        resume = bool(self.resume) and not (
            part and directory is not None and not (directory / "checkpoints").exists()
        )
        where = Where(
            self.plan, None if directory is None else str(directory), resume,
            quiet=not getattr(self, "verbose", 0),
        )  # fmt: skip
        found = fit(spec, data, where, theta)
        if not np.isfinite(found.theta).all():
            raise ValueError(
                f"Solver {self.solver_} diverged: coefficients are not finite; scale the features, "
                "or choose another solver"
            )
        if not found.converged:
            warnings.warn(
                f"{self.solver_} failed to converge after {found.rounds} rounds: the duality gap "
                f"is {found.certificate.gap:.3g}, above tol={tol:g} of the objective at zero. "
                "Increase max_iter, scale the data, or choose another solver.",
                ConvergenceWarning,
                stacklevel=4,
            )
        self.objective_ = found.certificate.objective
        self.dual_gap_ = found.certificate.gap
        self.history_ = found.history
        self.run_directory_ = found.directory
        return found

    def _decision(self, X: Any) -> Array:
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", reset=False)
        scores = X @ self.coef_.T + self.intercept_
        return np.asarray(scores)


def as_source(X: Any) -> Rows | Columns:
    """CSR, CSC or dense, without a copy where types fit."""
    if not sparse.issparse(X):
        return Rows.from_dense(X)
    if not X.has_canonical_format:
        X = X.copy()
        X.sum_duplicates()
    if X.nnz and not 0 <= X.indices.min() <= X.indices.max() < X.shape[X.format == "csr"]:
        raise ValueError(
            f"Sparse X of shape {X.shape} has indices from {X.indices.min()} to {X.indices.max()}, "
            "which are outside of it; X.check_format() says more"
        )
    if X.format == "csr":
        return Rows.from_csr(X)
    if X.shape[0] > np.iinfo(np.int32).max:
        raise ValueError(
            f"Found array with {X.shape[0]} rows in CSC, at most 2^31 - 1 are possible"
        )
    indices = X.indices.astype(np.int32, copy=False)
    return Columns(X.indptr.astype(np.int64, copy=False), indices, X.data, X.shape[0])


def refuse_unable(name: str, spec: FitSpec, shape: Shape) -> None:
    """Refuse what a solver cannot do, in scikit-learn's words, and name those that can do all."""
    can, several = SOLVERS[name], spec.classes > 2
    rows_split = shape.ranks > 1 and not shape.by_feature
    penalty = "elasticnet" if spec.l1 and spec.l2 else "l1" if spec.l1 else "l2"
    able = names_where(
        bool(spec.l2), loss=spec.loss, l1=bool(spec.l1), softmax=several, positive=spec.positive,
        ranks=rows_split, by_feature=shape.by_feature, shards=not shape.in_memory,
    )  # fmt: skip
    do = f"{able} can" if able else "no solver can do all that is asked for"
    if several and spec.l1 and not can.l1:
        raise ValueError(
            f"No solver supports {penalty!r} penalty with {spec.classes} classes at once, got "
            f"solver {name}; wrap the estimator in OneVsRestClassifier"
        )
    if shape.by_feature and several:
        raise ValueError(
            f"split=by_feature with {spec.classes} classes: a softmax needs the margins of all "
            "classes; split rows (plan='data=K'), or wrap the estimator in OneVsRestClassifier"
        )
    if spec.l1 and not can.l1:
        raise ValueError(
            f"Solver {name} supports only 'l2' or None penalties, got {penalty!r} penalty; {do}."
        )
    if can.needs_l2 and not spec.l2:
        given = "l1 alone" if spec.l1 else "none"
        raise ValueError(f"Solver {name} needs an l2 penalty, got {given}; {do}.")
    if spec.loss not in can.losses and not several:
        raise ValueError(f"Solver {name} does not support loss={LOSS_NAMES[spec.loss]!r}; {do}.")
    if several and not can.softmax:
        raise ValueError(
            f"Only binary classification is supported. The '{name}' solver does not support "
            f"multiclass classification (n_classes >= 3); {do}. "
            "Or wrap the estimator in OneVsRestClassifier."
        )
    if spec.positive and not can.positive:
        raise ValueError(f"Solver {name} does not support positive=True; {do}.")
    if shape.by_feature and not can.by_feature:
        raise ValueError(f"Solver {name} does not support split=by_feature; {do}.")
    if rows_split and not can.ranks:
        columns = names_where(
            bool(spec.l2), loss=spec.loss, l1=bool(spec.l1), softmax=several,
            positive=spec.positive, by_feature=True, shards=not shape.in_memory,
        )  # fmt: skip
        other = f"; {columns} can split columns (plan='tensor=K split=by_feature')"
        raise ValueError(
            f"Solver {name} does not support rows split over {shape.ranks} ranks; {do}"
            f"{other if columns else ''}."
        )
    if not shape.in_memory and not can.shards:
        raise ValueError(f"Solver {name} needs all rows in memory, got shards on disk; {do}.")
