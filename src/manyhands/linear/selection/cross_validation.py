"""Cross-validation over one copy of the data: folds are weights, and processes map the same memory.

    fold k:  c_i = 0 for the rows that are held out        the problem of the other rows, exactly
    path:    fits from strong to weak regularisation, each from the solution of the one before

A fold is an array of row numbers. The others are trained by weights of zero for its rows, and its
rows are scored from the margins of all, so nothing is copied for a fold or for a process. With
plan="data=4" four processes of this host share out folds and paths.

    found = cross_validate(LogisticRegression(), X, y, cv=5, plan="data=2")
"""

from __future__ import annotations

import pickle
import signal
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import clone, is_classifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import get_scorer

from manyhands.assembly.rank_context import Options
from manyhands.core import Plan
from manyhands.entry import run_store, start
from manyhands.errors import LaunchError, PlanError
from manyhands.launch import environment
from manyhands.linear.estimators.base import LinearEstimator
from manyhands.linear.estimators.sgd_fits import StochasticEstimator
from manyhands.linear.passes.rows import Array, threads_of
from manyhands.linear.selection.fold_data import (
    Fold,
    HandedData,
    Params,
    SplitData,
    make_folds,
    split_data,
)
from manyhands.linear.selection.fold_scores import of_all_rows, score_rows
from manyhands.plan import words as plan_words

WORDS = ("data", "timeout_s", "grace_s", "stall_s")
# strong to weak: a solution is near to that of a little less regularisation
WEAKER = {"C": 1.0, "alpha": -1.0}


@dataclass(frozen=True)
class FoldResult:
    """One fit: a fold and a candidate, with its scores."""

    fold: int
    candidate: int
    fit_s: float
    score_s: float
    test: dict[str, float]
    train: dict[str, float]
    rounds: int
    converged: bool
    model: Any = None


@dataclass(frozen=True)
class FoldFits:
    """All fits of a cross-validation, without the data."""

    estimator: LinearEstimator
    candidates: Sequence[Params]
    folds: Sequence[Fold]
    scorers: Mapping[str, Any]
    classes: Array | None  # y is the number of a row's class
    train_scores: bool = False
    keep_models: bool = False

    @property
    def items(self) -> list[tuple[int, list[int]]]:
        """(fold, candidates in the order to fit them in): what a process takes at a time."""
        return [(k, path) for path in paths(self.candidates) for k in range(len(self.folds))]

    def item(self, data: SplitData, fold: int, path: Sequence[int]) -> list[FoldResult]:
        """The fits of a path on one fold, each from the solution of the one before."""
        model = clone(self.estimator)
        weights, found = self.folds[fold].weights(data.weights), []
        for number in path:
            model.set_params(**self.candidates[number])
            model.warm_start = len(path) > 1 or getattr(self.estimator, "warm_start", False)
            try:
                found.append(self._fit(model, data, fold, number, weights))
            except ValueError as e:
                e.add_note(f"in fold {fold} with {self.candidates[number] or 'no parameters'}")
                raise
        return found

    def _fit(
        self, model: Any, data: SplitData, fold: int, number: int, weights: Array
    ) -> FoldResult:
        source, y = data.source_for(model), data.labels(self.classes)
        began = time.perf_counter()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model.fit(source, None if data.stored else y, sample_weight=weights)
        fitted = time.perf_counter()
        unfinished = [w for w in said if issubclass(w.category, ConvergenceWarning)]
        for other in said:
            if other not in unfinished:
                warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
        with threads_of(model._threads()) as threads:
            known = of_all_rows(model, source, threads)
        held = self.folds[fold]
        test = score_rows(model, known, y, held.test, self.scorers)
        train: dict[str, float] = {}
        if self.train_scores:
            train = score_rows(model, known, y, held.trained(len(y)), self.scorers)
        return FoldResult(
            fold, number, fitted - began, time.perf_counter() - fitted, test, train,
            int(np.max(model.n_iter_)), not unfinished,
            clone_fitted(model) if self.keep_models else None,
        )  # fmt: skip


def clone_fitted(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def paths(candidates: Sequence[Params]) -> list[list[int]]:
    """Candidates that differ in their regularisation only, from strong to weak."""
    groups: dict[str, list[int]] = {}
    for number, params in enumerate(candidates):
        rest = {k: v for k, v in params.items() if k not in WEAKER}
        groups.setdefault(repr(sorted(rest.items())), []).append(number)

    def strength(number: int) -> tuple[float, ...]:
        given = candidates[number]
        return tuple(
            sign * float(given[name])
            for name, sign in WEAKER.items()
            if isinstance(given.get(name), int | float | np.number)
        )

    return [sorted(group, key=strength) for group in groups.values()]


# -- the fits --


def run(fits: FoldFits, data: SplitData, words: str) -> list[FoldResult]:
    """All fits, in the order of candidates and folds; on processes where the plan says so."""
    plan = parsed(words, fits)
    began = environment.process_info()
    if plan.layout.size == 1:
        found = [r for fold, path in fits.items for r in fits.item(data, fold, path)]
    elif began.started_by != "alone":
        raise PlanError(
            f"plan={words!r}: cross-validation starts its own processes, which {began.started_by} "
            "has done already; leave the plan out, and each of them does all folds"
        )
    else:
        found = _on_processes(fits, data, words)
    _warn(fits, found)
    return sorted(found, key=lambda r: (r.candidate, r.fold))


def parsed(words: str, fits: FoldFits) -> Plan:
    given = plan_words.overlay(words)
    for word in sorted(set(given) - set(WORDS)):
        raise PlanError(
            f"{word}={given[word]} has no effect on cross-validation; {', '.join(WORDS)} have"
        )
    model: Any = fits.estimator
    if not isinstance(model, LinearEstimator) or isinstance(model, StochasticEstimator):
        raise TypeError(
            f"{type(model).__name__} is not cross-validated here: folds are weights on one copy of "
            "the rows, and only estimators that are fitted to the minimum of an objective leave "
            "rows without weight out of it; take cross_validate or GridSearchCV of scikit-learn"
        )
    if model.directory is not None or model.resume:
        raise PlanError("directory= and resume= are for one fit: leave them out of the estimator")
    plan = plan_words.parse(words)
    if plan.layout.size > 1 and model.plan.strip():
        raise PlanError(
            f"plan={words!r} shares folds out to processes, and the estimator's own plan="
            f"{model.plan!r} splits each fit; give one of them"
        )
    return plan


def _warn(fits: FoldFits, found: Sequence[FoldResult]) -> None:
    unfinished = [r for r in found if not r.converged]
    if unfinished:
        first = unfinished[0]
        warnings.warn(
            f"{len(unfinished)} of {len(found)} fits failed to converge within max_iter, the first "
            f"in fold {first.fold} with {fits.candidates[first.candidate] or 'no parameters'}; "
            "increase max_iter, or tol",
            ConvergenceWarning,
            stacklevel=4,
        )


def _on_processes(fits: FoldFits, data: SplitData, words: str) -> list[FoldResult]:
    made = tempfile.TemporaryDirectory(prefix="manyhands-cv-", ignore_cleanup_errors=True)
    with made as folder, data.handed() as handed:
        try:
            start(FoldProcess(fits, handed, folder), words, Options("linear-cv", quiet=True))
        except LaunchError as e:
            said = str(e).partition(";")[0]
            if not said.startswith("stopped by"):
                raise
            why = f"{said}: nothing of a cross-validation is kept; start it again"
            raise LaunchError(why, e.exit_code, e.kind) from None
        parts = [pickle.loads(path.read_bytes()) for path in sorted(Path(folder).glob("rank-*"))]
    return [result for part in parts for result in part]


@dataclass
class FoldProcess:
    """One process of a cross-validation: it claims folds and paths until none is left."""

    fits: FoldFits
    handed: HandedData
    folder: str

    def __call__(self, plan: Plan, options: Options) -> dict[str, Any]:
        here, found = environment.process_info(), list[FoldResult]()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # there is nothing to save first
        store, data, items = run_store(here, plan.timeout_s), self.handed.open(), self.fits.items
        while (claimed := store.add("claimed", 1) - 1) < len(items):
            found += self.fits.item(data, *items[claimed])
        Path(self.folder, f"rank-{here.rank}").write_bytes(pickle.dumps(found))
        return {}


# -- results --


def named_scorers(scoring: Any, estimator: Any) -> dict[str, Any]:
    """Scorers by name, as scikit-learn's `scoring` says it; None: accuracy, or r2."""
    if scoring is None:
        return {"score": get_scorer("accuracy" if is_classifier(estimator) else "r2")}
    if isinstance(scoring, str) or callable(scoring):
        return {"score": get_scorer(scoring)}
    if isinstance(scoring, Mapping):
        return {name: get_scorer(each) for name, each in scoring.items()}
    return {name: get_scorer(name) for name in scoring}


def cross_validate(
    estimator: LinearEstimator,
    X: Any,
    y: Any = None,
    *,
    cv: Any = None,
    scoring: Any = None,
    groups: Any = None,
    sample_weight: Any = None,
    plan: str = "",
    return_train_score: bool = False,
    return_estimator: bool = False,
) -> dict[str, Any]:
    """Scores by cross-validation, as scikit-learn's `cross_validate` gives them: arrays with one
    number a fold, by the names fit_time, score_time, test_score, ...

    X may also be a libsvm file, a parquet file or `RowShards`, with y=None. `plan`: "data=4" for
    four processes, which share out the folds.
    """
    data, classes = split_data(estimator, X, y, sample_weight, [{}])
    folds = make_folds(cv, estimator, X, data.y, groups)
    scorers = named_scorers(scoring, estimator)
    fits = FoldFits(estimator, [{}], folds, scorers, classes, return_train_score, return_estimator)
    found = run(fits, data, plan)
    results: dict[str, Any] = {
        "fit_time": np.array([r.fit_s for r in found]),
        "score_time": np.array([r.score_s for r in found]),
    }
    if return_estimator:
        results["estimator"] = [r.model for r in found]
    for name in scorers:
        results[f"test_{name}"] = np.array([r.test[name] for r in found])
        if return_train_score:
            results[f"train_{name}"] = np.array([r.train[name] for r in found])
    return results
