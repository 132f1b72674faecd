"""Grid search: cross-validated scores of all combinations of hyper-parameters, and the best model.

    search = GridSearch(LogisticRegression(), {"C": np.logspace(-3, 3, 13)}, plan="data=2")
    search.fit(X, y).best_params_

All fits share one copy of the data, and fits along a regularisation path start from each other: see
`cross_validation`. Results are those of scikit-learn's GridSearchCV, in `cv_results_`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import rankdata  # type: ignore[import-untyped]
from sklearn.base import BaseEstimator, MetaEstimatorMixin, clone
from sklearn.model_selection import ParameterGrid
from sklearn.utils import get_tags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

from manyhands.linear.estimators.base import LinearEstimator
from manyhands.linear.passes.rows import Array
from manyhands.linear.selection.cross_validation import (
    FoldFits,
    FoldResult,
    make_folds,
    named_scorers,
    run,
    split_data,
)


def _best_has(name: str) -> Any:
    def check(search: GridSearch) -> bool:
        getattr(getattr(search, "best_estimator_", search.estimator), name)  # its own error
        return True

    return available_if(check)


class GridSearch(MetaEstimatorMixin, BaseEstimator):
    """Search over `param_grid`, a dict of lists or several of them.

    - `cv`, `scoring`, `refit`, `return_train_score`: as in scikit-learn's GridSearchCV
    - `plan`: "data=4" for four processes, which share out folds and paths
    """

    def __init__(
        self,
        estimator: LinearEstimator,
        param_grid: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Sequence[Any]]],
        *,
        cv: Any = None,
        scoring: Any = None,
        refit: bool | str = True,
        plan: str = "",
        return_train_score: bool = False,
    ):
        self.estimator = estimator
        self.param_grid = param_grid
        self.cv = cv
        self.scoring = scoring
        self.refit = refit
        self.plan = plan
        self.return_train_score = return_train_score

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        inner = get_tags(self.estimator)
        tags.estimator_type = inner.estimator_type
        tags.classifier_tags, tags.regressor_tags = inner.classifier_tags, inner.regressor_tags
        tags.input_tags.sparse = inner.input_tags.sparse
        return tags

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None, groups: Any = None) -> Any:
        """Score all combinations, then fit the best to all rows."""
        candidates = list(ParameterGrid(self.param_grid))
        scorers = named_scorers(self.scoring, self.estimator)
        chosen = self._chosen(list(scorers))
        data, classes = split_data(self.estimator, X, y, sample_weight, candidates)
        folds = make_folds(self.cv, self.estimator, X, data.y, groups)
        fits = FoldFits(
            self.estimator, candidates, folds, scorers, classes, self.return_train_score
        )
        found = run(fits, data, self.plan)
        self.cv_results_ = cv_results(fits, found)
        self.n_splits_, self.scorer_ = len(folds), scorers
        if chosen is None:
            return self
        self.best_index_ = int(self.cv_results_[f"rank_test_{chosen}"].argmin())
        self.best_params_ = candidates[self.best_index_]
        self.best_score_ = float(self.cv_results_[f"mean_test_{chosen}"][self.best_index_])
        if self.refit:
            self.best_estimator_ = clone(self.estimator).set_params(**self.best_params_)
            self.best_estimator_.fit(X, y, sample_weight=sample_weight)
            self.n_features_in_ = self.best_estimator_.n_features_in_
            if hasattr(self.best_estimator_, "feature_names_in_"):
                self.feature_names_in_ = self.best_estimator_.feature_names_in_
        return self

    def _chosen(self, names: list[str]) -> str | None:
        """The score by which the best is chosen; None: there are several, and none is named."""
        if isinstance(self.refit, str):
            if self.refit not in names:
                raise ValueError(f"refit={self.refit!r} is no score; {', '.join(names)} are")
            return self.refit
        if len(names) == 1:
            return names[0]
        if self.refit:
            raise ValueError(
                f"refit=True with the scores {', '.join(names)}: give refit the name of the one "
                "that chooses, or refit=False"
            )
        return None

    # -- the best model --

    @property
    def classes_(self) -> Array:
        return np.asarray(self._best().classes_)

    def _best(self) -> Any:
        check_is_fitted(self, "best_estimator_")
        return self.best_estimator_

    def predict(self, X: Any) -> Array:
        return np.asarray(self._best().predict(X))

    def score(self, X: Any, y: Any) -> float:
        """By the score that chose the best."""
        best, chosen = self._best(), self._chosen(list(self.scorer_))
        assert chosen is not None  # or there were no best model
        return float(self.scorer_[chosen](best, X, y))

    @_best_has("decision_function")
    def decision_function(self, X: Any) -> Array:
        return np.asarray(self._best().decision_function(X))

    @_best_has("predict_proba")
    def predict_proba(self, X: Any) -> Array:
        return np.asarray(self._best().predict_proba(X))

    @_best_has("predict_log_proba")
    def predict_log_proba(self, X: Any) -> Array:
        return np.asarray(self._best().predict_log_proba(X))


def cv_results(fits: FoldFits, found: Sequence[FoldResult]) -> dict[str, Any]:
    """Results as GridSearchCV names them; `mean_n_iter` besides: rounds of a fit."""
    folds, count = len(fits.folds), len(fits.candidates)
    table = lambda of: np.array([of(r) for r in found], np.float64).reshape(count, folds)
    results: dict[str, Any] = {}
    for name, of in (("fit_time", lambda r: r.fit_s), ("score_time", lambda r: r.score_s)):
        each = table(of)
        results[f"mean_{name}"], results[f"std_{name}"] = each.mean(axis=1), each.std(axis=1)
    results["mean_n_iter"] = table(lambda r: r.rounds).mean(axis=1)
    for param in sorted({name for params in fits.candidates for name in params}):
        values = np.ma.masked_all(count, dtype=object)
        for i, params in enumerate(fits.candidates):
            if param in params:
                values[i] = params[param]
        results[f"param_{param}"] = values
    results["params"] = list(fits.candidates)
    for kind in ("test", "train") if fits.train_scores else ("test",):
        for name in fits.scorers:
            each = table(lambda r, kind=kind, name=name: getattr(r, kind)[name])
            for k in range(folds):
                results[f"split{k}_{kind}_{name}"] = each[:, k]
            mean = each.mean(axis=1)
            results[f"mean_{kind}_{name}"], results[f"std_{kind}_{name}"] = mean, each.std(axis=1)
            if kind == "test":
                ranks = rankdata(-np.nan_to_num(mean, nan=-np.inf), method="min")
                results[f"rank_test_{name}"] = ranks.astype(np.int32)
    return results
