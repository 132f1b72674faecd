"""Fits by stochastic gradient steps: what SGDClassifier and SGDRegressor share."""

from __future__ import annotations

import warnings
from dataclasses import fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import scipy.sparse as sparse  # type: ignore[import-untyped]
from sklearn.base import is_classifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model._base import SparseCoefMixin
from sklearn.metrics import r2_score
from sklearn.model_selection import ShuffleSplit, StratifiedShuffleSplit
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.validation import validate_data

from manyhands.linear.catalogue import SOLVERS, Shape
from manyhands.linear.estimators.base import LinearEstimator, as_source, refuse_unable
from manyhands.linear.estimators.logistic import seed_of
from manyhands.linear.fit_data import FitData
from manyhands.linear.fit_plan import Where, by_feature, parsed
from manyhands.linear.fitting import fit
from manyhands.linear.losses import NAMES
from manyhands.linear.minimise import Stopping, start_at
from manyhands.linear.passes.rows import Array, InMemory, Rows, threads_of
from manyhands.linear.problem import Problem
from manyhands.linear.spec import FitSpec
from manyhands.linear.stochastic.epochs import State, Stochastic

STEPPERS = ("hogwild", "cyclades")


class StochasticEstimator(SparseCoefMixin, LinearEstimator):
    """Base of the estimators that take stochastic gradient steps on

    min  1/n sum_i s_i phi(x_i'w + b, y_i) + alpha (l1_ratio |w|_1 + (1 - l1_ratio)/2 |w|^2)
    """

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        "penalty": [StrOptions({"l2", "l1", "elasticnet"}), None],
        "alpha": [Interval(Real, 0, None, closed="left")],
        "l1_ratio": [Interval(Real, 0, 1, closed="both"), None],
        "fit_intercept": ["boolean"],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "tol": [Interval(Real, 0, None, closed="left"), None],
        "shuffle": ["boolean"],
        "verbose": ["verbose"],
        "epsilon": [Interval(Real, 0, None, closed="left")],
        "random_state": ["random_state"],
        "learning_rate": [
            StrOptions({"constant", "optimal", "invscaling", "adaptive", "pa1", "pa2"})
        ],
        "eta0": [Interval(Real, 0, None, closed="neither")],
        "power_t": [Interval(Real, 0, None, closed="left")],
        "early_stopping": ["boolean"],
        "validation_fraction": [Interval(Real, 0, 1, closed="neither")],
        "n_iter_no_change": [Interval(Integral, 1, None, closed="left")],
        "warm_start": ["boolean"],
        "average": [Interval(Integral, 0, None, closed="neither"), "boolean"],
        "n_jobs": [Integral, None],
    }
    n_iter_: int
    _streams: list[State]
    passive_aggressive = ""  # the loss that learning_rate="pa1" and "pa2" are for

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _check_parameters(self, stream: bool = False) -> None:
        self._validate_params()
        if self.learning_rate == "optimal" and self.alpha == 0:
            raise ValueError(
                "alpha must be > 0 since learning_rate is 'optimal'. alpha is used to compute the "
                "optimal learning rate."
            )
        if self.learning_rate in ("pa1", "pa2") and self.loss != self.passive_aggressive:
            raise ValueError(
                f"Learning rate '{self.learning_rate}' only works with loss "
                f"'{self.passive_aggressive}'."
            )
        if self.penalty == "elasticnet" and self.l1_ratio is None:
            raise ValueError("l1_ratio must be set when penalty is 'elasticnet'")
        if stream and self.early_stopping:
            raise ValueError("early_stopping should be False with partial_fit")
        for name in ("plan", "directory", "resume"):
            if stream and getattr(self, name):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} has no effect on partial_fit, which learns in "
                    "this process; leave it out, or call fit"
                )
            if self.early_stopping and getattr(self, name):
                raise ValueError(
                    f"early_stopping=True works in this process, without {name}="
                    f"{getattr(self, name)!r}; leave one of them out"
                )

    def _stepper(self) -> Stochastic:
        """The solver, with the options of the estimator."""
        given: Any = self.solver
        if isinstance(given, str) and given in STEPPERS:
            given = SOLVERS[given].make()
        if not isinstance(given, Stochastic):
            raise ValueError(
                f"The solver parameter of {type(self).__name__} must be a str among "
                f"{list(STEPPERS)} or a solver of that kind. Got {self.solver!r} instead."
            )
        for field in fields(Stochastic):
            if getattr(given, field.name) != field.default:
                raise ValueError(
                    f"solver={given!r}: {field.name} has no effect, the parameters of "
                    f"{type(self).__name__} say it; leave it out"
                )
        return replace(
            given, eta0=float(self.eta0), schedule=self.learning_rate, power=float(self.power_t),
            alpha=float(self.alpha) or None, shuffle=bool(self.shuffle), average=int(self.average),
            tol=-np.inf if self.tol is None else float(self.tol), by_rows=True,
            patience=int(self.n_iter_no_change),
        )  # fmt: skip

    def _spec(self, rows: int) -> FitSpec:
        ratio = {"l2": 0.0, "l1": 1.0, "elasticnet": self.l1_ratio, None: 0.0}[self.penalty]
        scale = 0.0 if self.penalty is None else float(self.alpha) * rows
        stopping = Stopping(0.0, int(self.max_iter), every_round=True)  # the solver says when
        return FitSpec(
            NAMES[self.loss], scale * ratio, scale * (1.0 - ratio), bool(self.fit_intercept),
            self._stepper(), stopping, eps=float(self.epsilon), seed=seed_of(self.random_state),
            threads=self._threads(),
        )  # fmt: skip

    def _rows(self, X: Any, y: Any, reset: bool = True, **checks: Any) -> tuple[Rows, Array]:
        X, y = validate_data(
            self, X, y, accept_sparse="csr", dtype=[np.float64, np.float32], reset=reset,
            accept_large_sparse=True, **checks,
        )  # fmt: skip
        source = as_source(X)
        assert isinstance(source, Rows)
        return source, np.asarray(y)

    # -- fit --

    def _fit_one(
        self, source: Any, y: Array, c: Array, theta: Array | None, part: str, held: Array | None
    ) -> Array:
        """theta of one binary problem or one target; adds to n_iter_ and history_."""
        if held is not None:
            return self._fit_held(source, y, c, theta, held)
        spec, plan = self._spec(len(y)), parsed(self.plan)
        if plan.layout.size > 1 and self.shuffle and isinstance(source, Rows):
            order = np.random.default_rng(spec.seed).permutation(len(y))  # ranks get alike rows
            source, y, c = source.take(order), y[order], c[order]
        data = FitData(source, y, c)
        shape = Shape(
            len(y), data.columns, data.nonzeros, plan.layout.size, by_feature(plan), data.in_memory
        )
        name = next(n for n in STEPPERS if isinstance(spec.solver, SOLVERS[n].make))
        refuse_unable(name, spec, shape)
        directory = None if self.directory is None else str(Path(self.directory) / part)
        begun = part == "" or (directory is not None and (Path(directory) / "checkpoints").exists())
        where = Where(self.plan, directory, bool(self.resume) and begun, quiet=not self.verbose)
        found = fit(spec, data, where, theta)
        self.objective_, self.history_ = found.certificate.objective, found.history
        self.run_directory_ = found.directory
        self._ended(found.rounds, found.converged)
        return found.theta

    def _fit_held(self, source: Any, y: Array, c: Array, theta: Array | None, held: Array) -> Array:
        """The same, until the score of held-out rows does not rise any more."""
        if not isinstance(source, Rows):
            raise ValueError("early_stopping=True needs rows in memory, got shards on disk")
        kept, out = np.flatnonzero(~held), np.flatnonzero(held)
        spec, test, z = self._spec(len(kept)), source.take(out), np.empty(len(out))
        solver: Any = spec.solver
        done, rounds = False, 0
        with threads_of(spec.threads) as threads:
            problem = spec.problem(InMemory(source.take(kept)), y[kept], c[kept], threads)
            theta = start_at(problem, theta)
            state = solver.init(problem, theta)
            while not done and rounds < self.max_iter:
                self.objective_ = solver.pass_over(problem, theta, state) * solver.per(problem)
                rounds += 1
                w, b = problem.unpack(theta)
                test.margins(threads, w, b, z)
                score = self._score_of(z, y[out], self._held_weights[out])
                done = solver.progress(problem, state, -score) == 0.0
        self.history_, self.run_directory_ = [], ""
        self._ended(rounds, done)
        return theta

    def _score_of(self, z: Array, y: Array, weights: Array) -> float:
        if is_classifier(self):
            return float(np.average((z > 0.0) == (y > 0.0), weights=weights))
        return float(r2_score(y, z, sample_weight=weights))

    def _split(self, y: Array, weights: Array) -> Array | None:
        """Which rows are held out, with early_stopping."""
        if not self.early_stopping:
            return None
        kind = StratifiedShuffleSplit if is_classifier(self) else ShuffleSplit
        splits = kind(test_size=self.validation_fraction, random_state=self.random_state)
        kept, out = next(splits.split(np.zeros((len(y), 1)), y))
        if not weights[out].any():
            raise ValueError(
                "The sample weights for validation set are all zero, consider using a different "
                "random state."
            )
        if not len(kept) or not len(out):
            raise ValueError(
                f"Splitting {len(y)} samples into a train set and a validation set with "
                f"validation_fraction={self.validation_fraction!r} led to an empty set "
                f"({len(kept)} and {len(out)} samples). Please either change validation_fraction, "
                "increase number of samples, or disable early_stopping."
            )
        self._held_weights = weights
        mask = np.zeros(len(y), dtype=bool)
        mask[out] = True
        return mask

    def _ended(self, rounds: int, converged: bool) -> None:
        self.n_iter_ = max(self.n_iter_, rounds)
        if not converged and self.tol is not None:
            warnings.warn(
                "Maximum number of iteration reached before convergence. Consider increasing "
                "max_iter to improve the fit.",
                ConvergenceWarning,
                stacklevel=5,
            )

    def _begin(self) -> None:
        self.n_iter_, self._streams = 0, []

    def _end(self, rows: int) -> None:
        """After a fit: the steps taken, as scikit-learn counts them."""
        self.t_ = 1.0 + self.n_iter_ * rows
        self.__dict__.pop("_held_weights", None)

    # -- where a fit begins --

    def _start(
        self, targets: int, columns: int, coef_init: Any, intercept_init: Any
    ) -> list[Array | None]:
        """theta of each target: what is given, or with warm_start the last fit's."""
        warm = self.warm_start and hasattr(self, "coef_")
        coef = self._coefficients() if coef_init is None and warm else coef_init
        b = self.intercept_ if intercept_init is None and warm else intercept_init
        if coef is None and b is None:
            return [None] * targets
        coef = np.zeros((targets, columns)) if coef is None else np.asarray(coef, np.float64)
        b = np.zeros(targets) if b is None else np.asarray(b, np.float64)
        if coef.size != targets * columns or (targets > 1 and coef.shape != (targets, columns)):
            what = "coef_" if targets > 1 else "coef_init"
            raise ValueError(f"Provided {what} does not match dataset.")
        if b.size != targets:
            raise ValueError("Provided intercept_init does not match dataset.")
        table = coef.reshape(targets, columns)
        if self.fit_intercept:
            table = np.column_stack((table, b.reshape(targets)))
        return list(np.ascontiguousarray(table))

    def _coefficients(self) -> Array:
        """coef_ as a table, also after `sparsify`."""
        coef = self.coef_.toarray() if sparse.issparse(self.coef_) else self.coef_
        return np.atleast_2d(coef)

    # -- streams --

    def _learn(self, rows: Rows, y: list[Array], c: list[Array]) -> tuple[Array, Array]:
        """One epoch of each target over these rows; coefficients and intercepts."""
        spec = self._spec(rows.count)
        # a row is met once, so no plan of batches can be used again
        solver: Any = replace(spec.solver, keep=1) if hasattr(spec.solver, "keep") else spec.solver
        warm = hasattr(self, "coef_")
        coef = self._coefficients() if warm else np.zeros((len(y), rows.columns))
        b = np.asarray(self.intercept_, np.float64) if warm else np.zeros(len(y))
        if not hasattr(self, "t_"):
            self.t_ = 1.0
        streams: list[State] = getattr(self, "_streams", [])
        out = np.zeros((len(y), rows.columns + 1))
        with threads_of(spec.threads) as threads:
            for k in range(len(y)):
                problem = spec.problem(InMemory(rows), y[k], c[k], threads)
                theta = np.append(coef[k], b[k])[: problem.size]
                if len(streams) <= k:
                    streams.append(self._stream(solver, problem, theta))
                else:
                    solver.see(problem, streams[k])
                solver.pass_over(problem, theta, streams[k])
                for name in [name for name in streams[k] if "/" in name]:  # of these rows alone
                    del streams[k][name]
                out[k, : problem.size] = theta
        self._streams, self.n_iter_ = streams, 1
        self.t_ += rows.count
        return np.ascontiguousarray(out[:, :-1]), np.ascontiguousarray(out[:, -1])

    def _stream(self, solver: Stochastic, problem: Problem, theta: Array) -> State:
        """The state of a stream that begins, maybe after a fit."""
        state = solver.init(problem, theta)
        state["t"][0] = self.t_ - 1.0
        state["since"][0] = max(float(solver.average), self.t_) if solver.average else 0.0
        return state
