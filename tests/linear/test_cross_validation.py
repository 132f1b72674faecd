"""Cross-validation and grid search over one copy of the data: scikit-learn's numbers, no copies."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")

import scipy.sparse as sparse
from sklearn.base import is_classifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import (
    GridSearchCV,
    KFold,
    ShuffleSplit,
    TimeSeriesSplit,
    cross_val_score,
)
from sklearn.model_selection import cross_validate as theirs

from manyhands.errors import PlanError
from manyhands.linear import (
    ElasticNet,
    GridSearch,
    Lasso,
    LinearSVC,
    LogisticRegression,
    Ridge,
    SGDClassifier,
    cross_validate,
)
from manyhands.linear.data import write_shards
from manyhands.linear.selection.cross_validation import paths

RNG = np.random.default_rng(9)
X = sparse.random_array((300, 15), density=0.5, rng=RNG, format="csr")
MARGINS = X @ RNG.standard_normal(15) * 2
TARGETS = MARGINS + 0.3 * RNG.standard_normal(300)
NAMES = np.array(["no", "yes"])[(np.median(TARGETS) < TARGETS).astype(int)]
THREE = np.digitize(TARGETS, np.quantile(TARGETS, [0.3, 0.6]))

CASES: dict[str, tuple[Any, Any, Any]] = {
    "two classes": (LogisticRegression(solver="newton", tol=1e-8), X, NAMES),
    "dense": (LogisticRegression(solver="newton", tol=1e-8), X.toarray(), NAMES),
    "columns": (LogisticRegression(solver="newton", tol=1e-8), X.tocsc(), NAMES),
    "three classes": (LogisticRegression(solver="lbfgs", tol=1e-8), X, THREE),
    "balanced": (LogisticRegression(solver="newton", class_weight="balanced"), X, NAMES),
    "svc": (LinearSVC(solver="newton", tol=1e-8), X, THREE),
    "ridge": (Ridge(0.3, solver="newton", tol=1e-10), X, TARGETS),
    "two targets": (Ridge(0.3, solver="newton"), X, np.c_[TARGETS, -2 * MARGINS]),
    "lasso": (Lasso(0.01, tol=1e-8), X, TARGETS),
    "elastic net": (ElasticNet(0.01, tol=1e-8), X.toarray(), TARGETS),
}


@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_fits_to_copies_of_the_folds(case: str) -> None:
    model, x, y = CASES[case]
    expected = theirs(model, x, y, return_train_score=True)
    found = cross_validate(model, x, y, return_train_score=True)
    assert set(found) == set(expected)
    for name in ("test_score", "train_score"):
        np.testing.assert_allclose(found[name], expected[name], atol=2e-3)


@pytest.mark.parametrize(
    "cv", [3, KFold(4, shuffle=True, random_state=0), ShuffleSplit(3, random_state=0),
           TimeSeriesSplit(3), [(np.arange(200), np.arange(200, 300))]]
)  # fmt: skip
def test_any_splitter_of_scikit_learn_makes_folds(cv: Any) -> None:
    model = Ridge(0.3, solver="newton", tol=1e-12)
    expected = theirs(model, X, TARGETS, cv=cv)
    found = cross_validate(model, X, TARGETS, cv=cv)
    np.testing.assert_allclose(found["test_score"], expected["test_score"], rtol=1e-6)


def test_several_scores_and_the_models_come_back() -> None:
    scoring = ["accuracy", "neg_log_loss", "roc_auc"]
    model = LogisticRegression(solver="newton", tol=1e-9)
    expected = theirs(model, X, NAMES, scoring=scoring)
    found = cross_validate(model, X, NAMES, scoring=scoring, return_estimator=True)
    for name in scoring:
        np.testing.assert_allclose(found[f"test_{name}"], expected[f"test_{name}"], atol=1e-5)
    assert [type(m) for m in found["estimator"]] == [LogisticRegression] * 5
    assert found["estimator"][0].predict(X).shape == (300,)
    own = {"mine": lambda est, rows, y: float((est.predict(rows) == y).mean())}
    np.testing.assert_array_equal(
        cross_validate(model, X, NAMES, scoring=own)["test_mine"], found["test_accuracy"]
    )


def test_a_grid_search_finds_what_scikit_learns_finds() -> None:
    grid = {"C": [0.01, 100.0, 1.0], "fit_intercept": [True, False]}
    model = LogisticRegression(solver="newton", tol=1e-9)
    expected = GridSearchCV(model, grid, scoring="neg_log_loss").fit(X, NAMES)
    found = GridSearch(model, grid, scoring="neg_log_loss").fit(X, NAMES)
    assert found.best_params_ == expected.best_params_
    ours, others = found.cv_results_, expected.cv_results_
    assert set(ours) - set(others) == {"mean_n_iter"} and set(others) <= set(ours)
    for name in ("mean_test_score", "std_test_score", "split3_test_score"):
        np.testing.assert_allclose(ours[name], others[name], atol=1e-5)
    np.testing.assert_array_equal(ours["rank_test_score"], others["rank_test_score"])
    assert ours["params"] == others["params"]
    assert found.score(X, NAMES) == pytest.approx(expected.score(X, NAMES), abs=1e-5)
    np.testing.assert_array_equal(found.predict(X), expected.predict(X))
    assert is_classifier(found) and found.predict_proba(X).shape == (300, 2)
    assert cross_val_score(found, X, NAMES, cv=3).shape == (3,)


def test_fits_of_a_path_start_from_each_other() -> None:
    candidates = [{"C": 1.0, "l1_ratio": 0.0}, {"C": 0.1, "l1_ratio": 1.0},
                  {"C": 0.01, "l1_ratio": 0.0}, {"C": 10.0, "l1_ratio": 1.0}]  # fmt: skip
    assert paths(candidates) == [[2, 0], [1, 3]]
    assert paths([{"alpha": 0.1}, {"alpha": 10.0}, {"alpha": 1.0}]) == [[1, 2, 0]]
    assert paths([{"solver": "newton"}, {"solver": "sdca"}]) == [[0], [1]]
    grid = {"C": np.logspace(-2, 2, 9).tolist()}
    model = LogisticRegression(solver="lbfgs", tol=1e-6, max_iter=500)
    warm = GridSearch(model, grid, refit=False).fit(X, NAMES).cv_results_
    cold = [
        np.mean([m.n_iter_[0] for m in cross_validate(
            LogisticRegression(solver="lbfgs", tol=1e-6, max_iter=500, C=C), X, NAMES,
            return_estimator=True)["estimator"]])
        for C in grid["C"]
    ]  # fmt: skip
    assert warm["mean_n_iter"].sum() < 0.9 * sum(cold)


@pytest.mark.parametrize("name", ["LogisticRegression", "Lasso", "Ridge", "LinearSVC"])
def test_scikit_learns_own_search_takes_the_estimators(name: str) -> None:
    model, param = {
        "LogisticRegression": (LogisticRegression(), "C"),
        "Lasso": (Lasso(), "alpha"),
        "Ridge": (Ridge(), "alpha"),
        "LinearSVC": (LinearSVC(), "C"),
    }[name]
    y = NAMES if is_classifier(model) else TARGETS
    search = GridSearchCV(model, {param: [0.01, 0.1]}, cv=3).fit(X, y)
    assert search.best_params_[param] in (0.01, 0.1)
    assert np.isfinite(cross_val_score(model, X, y, cv=3)).all()


# -- one copy --

WIDE = sparse.random_array((4000, 500), density=0.2, rng=RNG, format="csr")
WIDE_Y = np.asarray(WIDE[:, :3].sum(axis=1)).ravel() > 0.3
NBYTES = WIDE.data.nbytes + WIDE.indices.nbytes


@pytest.mark.parametrize(
    ("solver", "kind"), [("lbfgs", "rows"), ("sdca", "rows"), ("scd", "rows"), ("sdca", "dense")]
)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_a_fold_is_no_copy_of_rows(solver: str, kind: str) -> None:
    x: Any = WIDE if kind == "rows" else WIDE.toarray()
    model = LogisticRegression(solver=solver, max_iter=2)
    cross_validate(model, x, WIDE_Y, cv=2)  # compiled loops are loaded
    tracemalloc.start()
    try:
        cross_validate(model, x, WIDE_Y, cv=8)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # dense rows get an index of their entries, and scd its columns, once for all folds
    nonzeros = WIDE.nnz if kind == "rows" else 4000 * 500
    forms = {"rows": 0, "dense": 4 * nonzeros}[kind] + (13 * nonzeros if solver == "scd" else 0)
    vectors = 60 * 8 * 4000
    assert peak < 1.1 * forms + vectors
    assert kind == "dense" or vectors < 0.5 * NBYTES


def test_shards_are_cross_validated_out_of_core(tmp_path: Path) -> None:
    labels = (NAMES == "yes").astype(float)
    shards = write_shards(X, tmp_path / "shards", shard_bytes=8000, labels=labels)
    model = LogisticRegression(solver="newton", tol=1e-9)
    found = cross_validate(model, shards, cv=3)["test_score"]
    np.testing.assert_allclose(found, theirs(model, X, labels, cv=3)["test_score"])
    by_name = GridSearch(model, {"C": [0.1, 1.0]}, cv=3).fit(str(tmp_path / "shards"))
    assert by_name.best_estimator_.coef_.shape == (1, 15)


def test_weights_of_rows_count_in_folds() -> None:
    weights = RNG.integers(0, 3, 300).astype(float)
    model = Ridge(0.1, solver="newton", tol=1e-12)
    found = cross_validate(model, X, TARGETS, sample_weight=weights, return_estimator=True)
    test = np.arange(60)  # the first fold of KFold(5)
    kept = np.setdiff1d(np.arange(300), test)
    alone = Ridge(0.1, solver="newton", tol=1e-12).fit(X[kept], TARGETS[kept], weights[kept])
    np.testing.assert_allclose(found["estimator"][0].coef_, alone.coef_, rtol=1e-8)


# -- refusals --


def test_what_makes_no_sense_is_refused_by_name() -> None:
    model = LogisticRegression(solver="newton")
    rare = np.array(["a"] * 299 + ["b"])
    with pytest.raises(ValueError, match="fold 4 trains without any row of class"):
        cross_validate(model, X, rare, cv=KFold(5))
    with pytest.raises(PlanError, match="merge=local_sgd has no effect on cross-validation"):
        cross_validate(model, X, NAMES, plan="data=2 merge=local_sgd")
    with pytest.raises(PlanError, match="give one of them"):
        cross_validate(LogisticRegression(plan="data=2"), X, NAMES, plan="data=2")
    with pytest.raises(PlanError, match="are for one fit"):
        cross_validate(LogisticRegression(directory="x"), X, NAMES)
    with pytest.raises(ValueError, match="give refit the name of the one that chooses"):
        GridSearch(model, {"C": [1]}, scoring=["accuracy", "roc_auc"]).fit(X, NAMES)
    with pytest.raises(ValueError, match="refit='f2' is no score"):
        GridSearch(model, {"C": [1]}, refit="f2").fit(X, NAMES)
    with pytest.raises(ValueError, match="supports only 'l2'") as found:
        GridSearch(model, {"l1_ratio": [1.0]}).fit(X, NAMES)
    with pytest.raises(TypeError, match="SGDClassifier is not cross-validated here"):
        cross_validate(SGDClassifier(), X, NAMES)
    assert found.value.__notes__ == ["in fold 0 with {'l1_ratio': 1.0}"]


def test_fits_that_did_not_converge_are_counted_in_one_warning() -> None:
    model = LogisticRegression(solver="sdca", tol=1e-12, max_iter=1)
    with pytest.warns(ConvergenceWarning, match="5 of 5 fits failed to converge") as said:
        cross_validate(model, X, NAMES)
    assert len(said) == 1
