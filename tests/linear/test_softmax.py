"""Multinomial logistic regression: one softmax over all classes, with a duality gap."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.sparse as sparse

pytest.importorskip("sklearn")

import sklearn.linear_model as peer
from sklearn.datasets import load_digits, load_iris, load_wine
from sklearn.preprocessing import StandardScaler

from manyhands.exchange.solo import SoloGroup
from manyhands.linear import LogisticRegression
from manyhands.linear.losses import LOGISTIC
from manyhands.linear.minimise import Stopping, minimise, start_at
from manyhands.linear.passes.rows import threads_of
from manyhands.linear.solvers.bfgs import BFGS
from manyhands.linear.solvers.dfp import DFP
from manyhands.linear.solvers.lbfgs import LinearLBFGS
from support.linear_problems import class_problem, data, iterates, row_problem

ALONE = SoloGroup()
KINDS = pytest.mark.parametrize("dense", [True, False])


def classes_of(rows=90, columns=7, classes=4, dense=False, seed=0):
    """X, y and weights of several classes."""
    rng = np.random.default_rng(seed)
    x, _, c = data(rows, columns, dense=True, seed=seed)
    z = x @ (rng.standard_normal((columns, classes)) / np.abs(x).mean(0)[:, None]) / columns
    y = (z + rng.gumbel(size=z.shape)).argmax(1).astype(np.int32)
    return (x if dense else sparse.csr_matrix(x)), y, c


def loaded(name):
    x, y = {"iris": load_iris, "wine": load_wine, "digits": load_digits}[name](return_X_y=True)
    return (StandardScaler().fit_transform(x) if name == "wine" else x), y.astype(np.int32)


def solved(problem, tol=1e-12, solver=None):
    solver = LinearLBFGS() if solver is None else solver
    found = minimise(problem, solver, start_at(problem, None), Stopping(tol, 3000))
    assert found.converged
    return found


def anywhere(problem, seed=0):
    return np.random.default_rng(seed).standard_normal(problem.size) * 0.3


# -- the problem --


@KINDS
@pytest.mark.parametrize("intercept", [True, False])
def test_value_and_gradient_are_those_of_the_formula(dense, intercept):
    x, y, c = classes_of(dense=dense)
    problem = class_problem(ALONE, x, y, c, 4, l2=0.3, intercept=intercept)
    theta = anywhere(problem)
    rows = theta.reshape(4, -1)
    w, b = rows[:, :7], rows[:, 7] if intercept else np.zeros(4)
    z = x @ w.T + b
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    f, g = problem.value_and_gradient(theta)
    expected = -(c * np.log(p[np.arange(len(y)), y])).sum() + 0.15 * (w * w).sum()
    assert f == pytest.approx(expected) == pytest.approx(problem.objective(theta))
    r = c[:, None] * (p - np.eye(4)[y])
    parts = [r.T @ x + 0.3 * w, r.sum(0)[:, None]] if intercept else [r.T @ x + 0.3 * w]
    np.testing.assert_allclose(g, np.hstack(parts).ravel(), rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(problem.chances(), p, rtol=1e-12)


@KINDS
def test_hessian_products_are_differences_of_gradients(dense):
    problem = class_problem(ALONE, *classes_of(dense=dense), 4, l2=0.3)
    theta, v, step = anywhere(problem), anywhere(problem, 1), 1e-5
    above, below = (problem.value_and_gradient(theta + s * v)[1] for s in (step, -step))
    problem.margins(theta)
    found = problem.hessian_product(problem.chances(), v)
    np.testing.assert_allclose(found, (above - below) / (2 * step), rtol=1e-6, atol=1e-7)


def test_margins_far_from_zero_do_not_overflow():
    problem = class_problem(ALONE, *classes_of(), 4)
    f, g = problem.value_and_gradient(1e4 * anywhere(problem))
    assert math.isfinite(f) and np.isfinite(g).all()


def test_threads_do_not_change_the_gradient():
    xyc = classes_of(rows=30_000)
    alone = class_problem(ALONE, *xyc, 4, l2=0.3)
    theta = anywhere(alone)
    with threads_of(3) as threads:
        problem = class_problem(ALONE, *xyc, 4, l2=0.3, threads=threads)
        f, g = problem.value_and_gradient(theta)
        certificate = problem.certify(theta.copy())
    expected, gradient = alone.value_and_gradient(theta)
    assert f == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(g, gradient, rtol=1e-9, atol=1e-9)
    assert certificate.dual == pytest.approx(alone.certify(theta.copy()).dual, rel=1e-9)


def test_labels_that_are_no_class_are_refused():
    x, y, c = classes_of()
    with pytest.raises(ValueError, match="labels from 0 to 3 for 3 classes"):
        class_problem(ALONE, x, y, c, 3)


# -- its certificate --


@KINDS
@pytest.mark.parametrize("intercept", [True, False])
def test_the_gap_bounds_the_distance_to_the_minimum_anywhere(dense, intercept):
    problem = class_problem(ALONE, *classes_of(dense=dense), 4, l2=0.3, intercept=intercept)
    best = solved(problem, 1e-13).certificate.objective
    for seed in range(5):
        theta = anywhere(problem, seed)
        found = problem.certify(theta)
        assert found.objective == pytest.approx(problem.objective(theta))
        assert found.dual <= best * (1 + 1e-12) <= found.objective * (1 + 1e-12)


def test_the_gap_of_the_solver_is_that_of_the_problem():
    problem, solver = class_problem(ALONE, *classes_of(), 4, l2=0.3), LinearLBFGS()
    theta = np.zeros(problem.size)
    state = solver.init(problem, theta)
    for _ in range(8):
        solver.round(problem, theta, state)
        own, general = solver.certify(problem, theta, state), problem.certify(theta.copy())
        assert own.objective == pytest.approx(general.objective, rel=1e-12)
        assert own.gap == pytest.approx(general.gap, rel=1e-6, abs=1e-10)


def test_a_dual_point_is_mixed_until_its_sums_are_right():
    x, y, c = classes_of()
    problem = class_problem(ALONE, x, y, c, 4, l2=0.3)
    p = np.random.default_rng(0).dirichlet(np.ones(4), len(y))
    q = problem._feasible(p)
    np.testing.assert_allclose(c @ q, np.bincount(y, c), rtol=1e-12)
    np.testing.assert_allclose(q.sum(1), 1.0)
    assert q.min() >= 0.0
    np.testing.assert_allclose(problem._feasible(q), q, atol=1e-15)


@pytest.mark.parametrize("intercept", [True, False])
def test_the_null_objective_is_that_of_the_best_intercepts(intercept):
    x, y, c = classes_of()
    problem = class_problem(ALONE, x * 0.0, y, c, 4, l2=1.0, intercept=intercept)
    found = problem.certify(np.zeros(problem.size))
    assert problem.null_objective() == pytest.approx(found.objective, rel=1e-12)
    assert found.gap == pytest.approx(0.0, abs=1e-9)


def test_a_class_without_weight_leaves_the_rest_as_it_is():
    x, y, c = classes_of(dense=True)
    c[y == 2] = 0.0
    with_it = solved(class_problem(ALONE, x, y, c, 4, l2=0.3), 1e-10).theta.reshape(4, -1)
    kept = y != 2
    y3 = np.where(y == 3, 2, y)[kept].astype(np.int32)
    without = solved(class_problem(ALONE, x[kept], y3, c[kept], 3, l2=0.3), 1e-10)
    assert np.isfinite(with_it).all()
    np.testing.assert_allclose(
        with_it[[0, 1, 3], :7], without.theta.reshape(3, -1)[:, :7], atol=1e-4
    )


# -- solvers --


@pytest.mark.parametrize("solver", [LinearLBFGS, BFGS, DFP])
def test_the_number_of_row_shards_does_not_change_iterates(solver):
    xyc = classes_of()

    def make(group):
        return class_problem(group, *xyc, 4, l2=0.3)

    [alone], _ = iterates(1, make, solver(), 6)
    for size in (2, 3):
        for rank in iterates(size, make, solver(), 6)[0]:
            np.testing.assert_allclose(rank, alone, rtol=1e-8, atol=1e-10)


def test_two_classes_are_logistic_regression_with_half_of_l2():
    x, y, c = data()
    two = solved(class_problem(ALONE, x, (y > 0).astype(np.int32), c, 2, l2=1.0)).theta
    one = solved(row_problem(ALONE, x, y, c, LOGISTIC, l2=0.5)).theta
    both = two.reshape(2, -1)
    np.testing.assert_allclose(both[1] - both[0], one, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(both.sum(0), 0.0, atol=1e-9)


@pytest.mark.parametrize("l2", [0.3, 0.0])
def test_the_coefficients_of_all_classes_sum_to_zero(l2):
    xyc = classes_of(rows=300, dense=True)
    theta = solved(class_problem(ALONE, *xyc, 4, l2=l2), 1e-10).theta
    np.testing.assert_allclose(theta.reshape(4, -1).sum(0), 0.0, atol=1e-9)


def test_weights_are_repeated_rows():
    x, y, c = classes_of(dense=True)
    c = np.round(c) + 1.0
    times = c.astype(int)
    weighted = solved(class_problem(ALONE, x, y, c, 4, l2=0.3)).theta
    many = np.repeat(x, times, 0), np.repeat(y, times), np.ones(times.sum())
    np.testing.assert_allclose(
        weighted, solved(class_problem(ALONE, *many, 4, l2=0.3)).theta, atol=1e-5
    )


# -- against scikit-learn --


@pytest.mark.parametrize("solver", ["lbfgs", "bfgs", "auto"])
@pytest.mark.parametrize("name", ["iris", "wine", "digits"])
def test_coefficients_are_those_of_scikit_learn(name, solver):
    x, y = loaded(name)
    if (name, solver) == ("digits", "bfgs"):
        x = StandardScaler().fit_transform(x[:, ::4])  # a whole matrix of 160 x 160
    theirs = peer.LogisticRegression(solver="newton-cg", tol=1e-9, max_iter=10_000).fit(x, y)
    ours = LogisticRegression(solver=solver, tol=1e-13, max_iter=5000).fit(x, y)
    for a, b in ((ours.coef_, theirs.coef_), (ours.intercept_, theirs.intercept_)):
        assert np.abs(a - b).max() <= 1e-4 * np.abs(b).max()
    assert ours.dual_gap_ >= 0.0
    np.testing.assert_allclose(ours.predict_proba(x), theirs.predict_proba(x), atol=1e-4)


def test_auto_takes_lbfgs_for_several_classes_and_sparse_rows_give_the_same():
    x, y = loaded("iris")
    dense = LogisticRegression(tol=1e-10).fit(x, y)
    for matrix in (sparse.csr_matrix(x), sparse.csc_matrix(x)):
        ours = LogisticRegression(tol=1e-10).fit(matrix, y)
        assert ours.solver_ == "lbfgs"
        np.testing.assert_allclose(ours.coef_, dense.coef_, rtol=1e-6)


def test_a_warm_start_at_the_solution_stops_at_once():
    x, y = loaded("wine")
    model = LogisticRegression(tol=1e-8, warm_start=True).fit(x, y)
    assert model.fit(x, y).n_iter_[0] <= 2


def test_solvers_without_softmax_are_refused_by_name():
    x, y = loaded("iris")
    with pytest.raises(ValueError, match=r"newton.*does not support multiclass.*'lbfgs'"):
        LogisticRegression(solver="newton").fit(x, y)
