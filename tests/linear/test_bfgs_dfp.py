"""BFGS and DFP: their formulas, their iterates on quadratics, and what they are beside L-BFGS."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("sklearn")

from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from manyhands.exchange.solo import SoloGroup
from manyhands.linear.losses import LOGISTIC, SQUARED
from manyhands.linear.minimise import Stopping, minimise, start_at
from manyhands.linear.solvers.bfgs import BFGS, bfgs_update
from manyhands.linear.solvers.dfp import DFP, dfp_update
from manyhands.linear.solvers.lbfgs import LinearLBFGS
from support.linear_data import libsvm
from support.linear_problems import column_problem, data, iterates, row_problem

ALONE = SoloGroup()
BOTH = pytest.mark.parametrize("solver", [BFGS, DFP])
UPDATES = pytest.mark.parametrize("update", [bfgs_update, dfp_update])
PLAIN = {"precondition": False, "gamma": 1.0}
EXACT = PLAIN | {"c2": 1e-10}


def matrices(seed=0, d=6):
    """A positive definite H, and s and y with s'y > 0."""
    rng = np.random.default_rng(seed)
    root = rng.standard_normal((d, d))
    s, y = rng.standard_normal(d), rng.standard_normal(d)
    return root @ root.T + np.eye(d), s, y if s @ y > 0 else -y


def quadratic(d=6, seed=0):
    """Squared loss with l2 and without intercept, and the Hessian A of it."""
    x, y, c = data(60, d, SQUARED, dense=True, seed=seed)
    a = (x * c[:, None]).T @ x + 0.5 * np.eye(d)
    return row_problem(ALONE, x, y, c, SQUARED, l2=0.5, intercept=False), a


def walked(problem, solver, rounds):
    theta = np.zeros(problem.size)
    state, found = solver.init(problem, theta), [theta.copy()]
    for _ in range(rounds):
        solver.round(problem, theta, state)
        found.append(theta.copy())
    return np.array(found), state


# -- the formulas --


@UPDATES
@pytest.mark.parametrize("seed", range(4))
def test_the_new_matrix_maps_y_to_s_is_symmetric_and_positive_definite(update, seed):
    h, s, y = matrices(seed)
    update(h, s, y)
    np.testing.assert_allclose(h @ y, s, rtol=1e-10)
    np.testing.assert_array_equal(h, h.T)
    assert np.linalg.eigvalsh(h).min() > 0.0


@UPDATES
def test_without_curvature_the_new_matrix_is_not_positive_definite(update):
    h, s, y = matrices()
    update(h, s, -y)
    assert np.linalg.eigvalsh(h).min() < 0.0


def test_dfp_is_bfgs_for_the_inverse_with_s_and_y_exchanged():
    h, s, y = matrices()
    b = np.linalg.inv(h)
    bfgs_update(h, s, y)
    dfp_update(b, y, s)
    np.testing.assert_allclose(np.linalg.inv(h), b, rtol=1e-9)


# -- quadratics --


def test_with_exact_searches_both_take_the_same_steps_and_find_the_inverse():
    paths, inverses = [], []
    for solver in (BFGS(**EXACT), DFP(**EXACT)):
        problem, a = quadratic()
        path, state = walked(problem, solver, problem.size)
        paths.append(path)
        inverses.append(state["H"])
    np.testing.assert_allclose(paths[0], paths[1], rtol=1e-6, atol=1e-9)
    for h in inverses:
        np.testing.assert_allclose(h, np.linalg.inv(a), rtol=1e-5, atol=1e-8)


@BOTH
def test_with_exact_searches_a_quadratic_ends_after_as_many_steps_as_columns(solver):
    problem, _ = quadratic()
    start = np.abs(problem.value_and_gradient(np.zeros(problem.size))[1]).max()
    path, _ = walked(problem, solver(**EXACT), problem.size)
    assert np.abs(problem.value_and_gradient(path[-1])[1]).max() <= 1e-9 * start


@BOTH
def test_after_every_round_h_maps_the_last_y_to_s(solver):
    problem = row_problem(ALONE, *data(dense=True), LOGISTIC, l2=0.5, intercept=False)
    theta, solver = np.zeros(problem.size), solver()
    state = solver.init(problem, theta)
    for _ in range(6):
        before, g = theta.copy(), state["g"].copy()
        solver.round(problem, theta, state)
        np.testing.assert_allclose(state["H"] @ (state["g"] - g), theta - before, rtol=1e-8)


# -- beside L-BFGS, and over ranks --


@pytest.mark.parametrize("precondition", [True, False])
def test_lbfgs_that_remembers_all_pairs_takes_the_steps_of_bfgs(precondition):
    options = {"precondition": precondition, "gamma": 0.7}
    paths = [
        walked(row_problem(ALONE, *data(), LOGISTIC, l2=0.5), solver, 10)[0]
        for solver in (BFGS(**options), LinearLBFGS(memory=10, **options))
    ]
    np.testing.assert_allclose(*paths, rtol=1e-6, atol=1e-9)


@BOTH
def test_the_number_of_row_shards_does_not_change_iterates(solver):
    xyc = data()

    def make(group):
        return row_problem(group, *xyc, LOGISTIC, l2=0.5)

    [alone], _ = iterates(1, make, solver(), 8)
    for size in (2, 3):
        ranks, _ = iterates(size, make, solver(), 8)
        for rank in ranks:
            np.testing.assert_allclose(rank, alone, rtol=1e-8, atol=1e-11)


@BOTH
@pytest.mark.parametrize("name", ["a9a", "heart_scale", "breast_cancer"])
def test_coefficients_are_those_of_scikit_learn(solver, name):
    if name == "breast_cancer":
        x, y = load_breast_cancer(return_X_y=True)
        x, y = StandardScaler().fit_transform(x), np.where(y == 1, 1.0, -1.0)
    else:
        x, y = libsvm(name)
    problem = row_problem(ALONE, x, y, np.full(len(y), 0.5), LOGISTIC, l2=1.0)
    found = minimise(problem, solver(), start_at(problem, None), Stopping(1e-12, 1000))
    assert found.converged
    theirs = LogisticRegression(C=0.5, solver="newton-cholesky", tol=1e-12).fit(x, y)
    expected = np.append(theirs.coef_, theirs.intercept_)
    assert np.linalg.norm(found.theta - expected) <= 1e-4 * np.linalg.norm(expected)


@BOTH
def test_without_l2_it_stops_by_its_estimate(solver):
    x, y, c = data(loss=SQUARED, dense=True)
    problem = row_problem(ALONE, x, y, c, SQUARED)
    found = minimise(problem, solver(), start_at(problem, None), Stopping(1e-13, 300))
    assert found.converged
    whole = np.c_[x, np.ones(len(y))] * np.sqrt(c)[:, None]
    expected = np.linalg.lstsq(whole, y * np.sqrt(c), rcond=None)[0]
    np.testing.assert_allclose(found.theta, expected, rtol=1e-4, atol=1e-6)


# -- what they refuse --


@BOTH
def test_too_many_columns_are_refused_with_the_memory_they_would_need(solver):
    problem = row_problem(ALONE, *data(20, 16_384), LOGISTIC, l2=0.5)
    name = solver.__name__.lower()
    with pytest.raises(ValueError, match=f"{name}.*2.0 GiB.*lbfgs"):
        solver().init(problem, np.zeros(problem.size))


@BOTH
def test_columns_split_over_ranks_are_refused(solver):
    with pytest.raises(ValueError, match=r"split over 2.*lbfgs"):
        iterates(2, lambda group: column_problem(group, *data(), LOGISTIC, l2=1.0), solver(), 1)


@BOTH
@pytest.mark.parametrize("options", [{"c1": 0.0}, {"c2": 1.5}, {"gamma": -1.0}])
def test_options_without_sense_are_refused(solver, options):
    with pytest.raises(ValueError, match="needed"):
        solver(**options)
