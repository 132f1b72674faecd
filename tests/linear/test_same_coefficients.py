"""Coefficients are those of scikit-learn and liblinear, whatever the solver."""

import numpy as np
import pytest

pytest.importorskip("sklearn")

import sklearn.linear_model as peer
import sklearn.svm
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris, load_wine
from sklearn.preprocessing import StandardScaler

from manyhands.linear import (
    ElasticNet,
    Lasso,
    LinearRegression,
    LinearSVC,
    LogisticRegression,
    Ridge,
)
from support.linear_data import libsvm

CLASSIFICATION = ("a9a", "heart_scale", "breast_cancer")
SMOOTH_SOLVERS = ("newton", "newton_cg", "sdca", "lbfgs", "admm", "scd", "saga", "bfgs", "dfp")


def two_classes(name):
    if name == "breast_cancer":
        x, y = load_breast_cancer(return_X_y=True)
        return StandardScaler().fit_transform(x), np.where(y == 1, 1, -1)
    return libsvm(name)


def close(ours, theirs, rtol=1e-4):
    """The error relative to the whole vector of coefficients, intercept included."""
    a = np.append(np.ravel(ours.coef_), ours.intercept_)
    b = np.append(np.ravel(theirs.coef_), theirs.intercept_)
    assert np.linalg.norm(a - b) <= rtol * np.linalg.norm(b)


@pytest.mark.parametrize("name", CLASSIFICATION)
@pytest.mark.parametrize("solver", [*SMOOTH_SOLVERS, "auto"])
def test_logistic_regression_with_l2(name, solver):
    if solver == "admm" and name == "a9a":
        pytest.skip("takes 20 s: columns depend on each other")
    # l2 = 1: |w - w*|^2 <= 2 gap
    tol = {"tol": 1e-9 if solver == "admm" else 1e-12, "max_iter": 5000}
    x, y = two_classes(name)
    theirs = peer.LogisticRegression(C=0.5, solver="newton-cholesky", tol=1e-12, max_iter=1000)
    close(LogisticRegression(C=0.5, solver=solver, **tol).fit(x, y), theirs.fit(x, y))


@pytest.mark.parametrize("name", ["heart_scale", "breast_cancer"])
def test_logistic_regression_with_l1_equals_liblinear(name):
    x, y = two_classes(name)
    theirs = peer.LogisticRegression(
        C=0.2, l1_ratio=1.0, solver="liblinear", tol=1e-12, max_iter=5000, fit_intercept=False
    )
    ours = LogisticRegression(C=0.2, l1_ratio=1.0, tol=1e-11, fit_intercept=False)
    close(ours.set_params(max_iter=5000).fit(x, y), theirs.fit(x, y))


def test_logistic_regression_with_l1_has_the_objective_of_liblinear_on_a9a():
    # columns of a9a depend on each other, so that other coefficients are as good
    x, y = two_classes("a9a")
    theirs = peer.LogisticRegression(
        C=0.2, l1_ratio=1.0, solver="liblinear", tol=1e-9, max_iter=2000, fit_intercept=False
    ).fit(x, y)
    w = theirs.coef_.ravel()
    objective = 0.2 * np.logaddexp(0, -y * (x @ w)).sum() + np.abs(w).sum()
    ours = LogisticRegression(C=0.2, l1_ratio=1.0, tol=1e-9, fit_intercept=False).fit(x, y)
    assert ours.objective_ == pytest.approx(objective, rel=1e-8)


@pytest.mark.parametrize("loss", ["hinge", "squared_hinge"])
@pytest.mark.parametrize("name", ["heart_scale", "breast_cancer"])
def test_linear_svc_equals_liblinear(name, loss):
    x, y = two_classes(name)
    theirs = sklearn.svm.LinearSVC(C=0.1, loss=loss, dual=True, tol=1e-10, max_iter=2_000_000)
    ours = LinearSVC(C=0.1, loss=loss, tol=1e-9, max_iter=200_000)
    close(ours.fit(x, y), theirs.fit(x, y))


def test_linear_svc_with_squared_hinge_equals_liblinear_on_a9a():
    x, y = libsvm("a9a")
    theirs = sklearn.svm.LinearSVC(C=0.1, dual=False, tol=1e-10, max_iter=100_000)
    close(LinearSVC(C=0.1, tol=1e-11, max_iter=5000).fit(x, y), theirs.fit(x, y))


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (LinearRegression(tol=1e-12), peer.LinearRegression()),
        (Ridge(alpha=0.3, tol=1e-12), peer.Ridge(alpha=0.3)),
        (Ridge(alpha=0.3, tol=1e-12, solver="sdca", max_iter=20_000), peer.Ridge(alpha=0.3)),
        (Ridge(alpha=0.3, tol=1e-12, solver="newton_cg"), peer.Ridge(alpha=0.3)),
        (Lasso(alpha=0.1, tol=1e-12), peer.Lasso(alpha=0.1, tol=1e-12)),
        (
            ElasticNet(alpha=0.01, l1_ratio=0.7, tol=1e-12),
            peer.ElasticNet(alpha=0.01, l1_ratio=0.7, tol=1e-12),
        ),
        (
            ElasticNet(alpha=0.01, l1_ratio=0.7, tol=1e-12, solver="sdca", max_iter=20_000),
            peer.ElasticNet(alpha=0.01, l1_ratio=0.7, tol=1e-12),
        ),
        (
            Lasso(alpha=0.1, positive=True, tol=1e-12),
            peer.Lasso(alpha=0.1, positive=True, tol=1e-12),
        ),
    ],
    ids=repr,
)
def test_regressors_on_diabetes(ours, theirs):
    x, y = load_diabetes(return_X_y=True)
    close(ours.fit(x, y), theirs.set_params(**_many(theirs)).fit(x, y))


def _many(theirs):
    return {"max_iter": 100_000} if "max_iter" in theirs.get_params() else {}


@pytest.mark.parametrize("load", [load_iris, load_wine])
def test_several_classes_are_one_softmax(load):
    x, y = load(return_X_y=True)
    x = StandardScaler().fit_transform(x)
    theirs = peer.LogisticRegression(tol=1e-12, max_iter=10_000).fit(x, y)
    ours = LogisticRegression(tol=1e-10, max_iter=10_000).fit(x, y)
    close(ours, theirs)
    np.testing.assert_allclose(ours.predict_proba(x), theirs.predict_proba(x), atol=1e-4)


def test_weights_of_samples_and_classes_count_as_in_scikit_learn():
    x, y = two_classes("breast_cancer")
    weights = np.random.default_rng(0).integers(0, 4, len(y)).astype(float)
    options = {"C": 0.3, "class_weight": "balanced"}
    theirs = peer.LogisticRegression(solver="newton-cholesky", tol=1e-12, **options)
    ours = LogisticRegression(tol=1e-10, **options)
    close(ours.fit(x, y, weights), theirs.fit(x, y, weights))


@pytest.mark.parametrize("fit_intercept", [True, False])
def test_class_weights_of_several_classes_count_as_in_liblinear(fit_intercept):
    x, y = load_iris(return_X_y=True)
    x, y = StandardScaler().fit_transform(x)[20:], y[20:]
    for weights in ({0: 1, 1: 3, 2: 0.5}, "balanced"):
        options = {"C": 0.1, "class_weight": weights, "fit_intercept": fit_intercept}
        theirs = sklearn.svm.LinearSVC(dual=False, tol=1e-10, max_iter=100_000, **options).fit(x, y)
        ours = LinearSVC(tol=1e-10, **options).fit(x, y)
        close(ours, theirs)
        assert np.shape(ours.intercept_) == np.shape(theirs.intercept_)


@pytest.mark.parametrize("kind", ["LinearRegression", "Ridge", "Lasso", "ElasticNet"])
@pytest.mark.parametrize("fit_intercept", [True, False])
def test_fitted_attributes_of_regressors_have_the_shapes_of_scikit_learn(kind, fit_intercept):
    x, y = load_diabetes(return_X_y=True)
    ours = globals()[kind](fit_intercept=fit_intercept)
    theirs = getattr(peer, kind)(fit_intercept=fit_intercept)
    for target in (y, y[:, None], np.c_[y, -y]):
        a, b = ours.fit(x, target), theirs.fit(x, target)
        for name in ("coef_", "intercept_"):
            assert np.shape(getattr(a, name)) == np.shape(getattr(b, name))
            assert isinstance(getattr(a, name), type(getattr(b, name)))
        assert a.predict(x).shape == b.predict(x).shape
    if kind == "Lasso":
        assert (ours.sparse_coef_ != theirs.sparse_coef_).nnz <= 20
