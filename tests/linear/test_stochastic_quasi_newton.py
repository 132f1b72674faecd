"""Online L-BFGS and SQN: what they are with all rows in a batch; and they reach the minimum."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")

from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from manyhands.exchange.solo import SoloGroup
from manyhands.linear.losses import LOGISTIC, SQUARED
from manyhands.linear.minimise import Stopping, minimise, start_at
from manyhands.linear.passes.rows import InMemory
from manyhands.linear.solvers.lbfgs import LinearLBFGS
from manyhands.linear.solvers.olbfgs import OLBFGS
from manyhands.linear.solvers.sqn import SQN
from manyhands.linear.stochastic.mini_batches import Scaling, mini_batches
from manyhands.quasi_newton import History, two_loop
from support.linear_data import libsvm
from support.linear_problems import data, iterates, row_problem, rows_of

ALONE = SoloGroup()
BOTH = pytest.mark.parametrize("solver", [OLBFGS, SQN])
ALL = 10**6  # rows of a batch: all there are
PLAIN = {"batch": ALL, "anchored": False, "precondition": False}


def quadratic(**options):
    """Squared loss over the sum of weights, and its Hessian A."""
    x, y, c = data(60, 6, SQUARED, dense=True)
    problem = row_problem(ALONE, x, y, c, SQUARED, l2=0.5, intercept=False, **options)
    a = (x * c[:, None]).T @ x + 0.5 * np.eye(6)
    return problem, a / problem.total_weight


def advanced(problem, solver, rounds):
    theta = np.zeros(problem.size)
    state = solver.init(problem, theta)
    for _ in range(rounds):
        solver.round(problem, theta, state)
    return theta, state


class Blocks(InMemory):
    """Rows that come in blocks, as from disk."""

    def blocks(self):
        for start in range(0, self.count, 50):
            part = self.rows.take(np.arange(start, min(start + 50, self.count)))
            part.start = start
            yield part


# -- with all rows in a batch --


def test_olbfgs_with_all_rows_is_lbfgs_with_a_fixed_step():
    problem, a = quadratic()
    solver = OLBFGS(**PLAIN, eta=0.5, lam=0.0, mean_gamma=False, memory=3)
    theta, state = np.zeros(problem.size), solver.init(problem, np.zeros(problem.size))
    u, history = torch.zeros(6, dtype=torch.float64), History(3)

    def gradient(at):
        return torch.from_numpy(problem.value_and_gradient(at.numpy())[1] / problem.total_weight)

    for k in range(10):
        g = gradient(u)
        gamma = None if k else float(g @ g / (g @ torch.from_numpy(a) @ g))
        s = 0.5 * two_loop(g, history, gamma)
        history.add(s, gradient(u + s) - g)
        u = u + s
        solver.round(problem, theta, state)
        assert state["eta"][0] == 0.5, "no epoch was taken back"
        np.testing.assert_allclose(theta, u, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("lam", [0.0, 0.3])
def test_y_of_olbfgs_is_the_hessian_times_s_with_damping(lam):
    problem, a = quadratic()
    _, state = advanced(problem, OLBFGS(**PLAIN, lam=lam), 5)
    assert state["pairs"][0] == 5
    for s, y in zip(state["s"][:5], state["y"][:5], strict=True):
        np.testing.assert_allclose(y, a @ s + lam * s, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("precondition", [True, False])
def test_y_of_sqn_is_the_hessian_times_s(precondition):
    problem, a = quadratic()
    solver = SQN(batch=10, batch_h=ALL, every=2, precondition=precondition)
    _, state = advanced(problem, solver, 6)
    scale = state["scale"]
    assert state["pairs"][0] >= 3
    for s, y in zip(state["s"], state["y"], strict=True):
        np.testing.assert_allclose(y, scale * (a @ (scale * s)), rtol=1e-8, atol=1e-14)


def test_s_of_sqn_is_the_difference_of_averages():
    problem, _ = quadratic()
    solver, theta = SQN(**PLAIN, batch_h=ALL, every=3, eta=0.3), np.zeros(problem.size)
    state, us = solver.init(problem, theta), []
    for _ in range(9):
        solver.round(problem, theta, state)
        us.append(state["u"].copy())
    means = np.array(us).reshape(3, 3, -1).mean(1)
    np.testing.assert_allclose(state["s"][:2], np.diff(means, axis=0), rtol=1e-10)


def test_the_first_two_averages_of_sqn_are_gradient_descent():
    problem, a = quadratic()
    every = 4
    solver, theta = SQN(**PLAIN, every=every, batch_h=ALL), np.zeros(problem.size)
    state, gamma = solver.init(problem, theta), None
    for k in range(2 * every + 1):
        u, g = state["u"].copy(), state["g"].copy()
        gamma = gamma or g @ g / (g @ a @ g)
        solver.round(problem, theta, state)
        descends = np.allclose(state["u"] - u, -gamma * g, rtol=1e-9, atol=1e-14)
        assert descends == (k < 2 * every)


# -- batches --


def test_an_epoch_visits_every_row_once_in_another_order_each_time():
    x, y, c = data(110)
    y = np.arange(110.0)  # names of rows
    problem = row_problem(ALONE, x, y, c, SQUARED)
    problem.source = Blocks(rows_of(x))
    orders = []
    for epoch in range(2):
        seen = []
        for batch in mini_batches(problem, Scaling.none(problem), 20, epoch):
            if batch.rows is None:
                break
            np.testing.assert_array_equal(batch.c, c[batch.y.astype(int)])
            seen += batch.y.tolist()
        assert sorted(seen) == y.tolist()
        orders.append(seen)
    assert orders[0] != orders[1]


def test_the_gradients_of_an_epoch_have_the_whole_gradient_as_their_mean():
    problem = row_problem(ALONE, *data(120), LOGISTIC, l2=0.5)
    problem.margins(np.zeros(problem.size))
    scaling = Scaling.at(problem)
    u, total, rows = np.full(problem.size, 0.1), 0.0, 0.0
    for batch in mini_batches(problem, scaling, 30, 0):
        g, count = batch.gradient(u)
        if not count:
            break
        total, rows = total + count * g, rows + count
    _, whole = problem.value_and_gradient(scaling.theta(u))
    expected = scaling.gradient(whole) / problem.total_weight
    np.testing.assert_allclose(total / rows, expected, rtol=1e-9, atol=1e-12)


def test_scaled_coordinates_have_a_hessian_with_a_unit_diagonal_apart_from_the_intercept():
    problem = row_problem(ALONE, *data(120), LOGISTIC, l2=0.5)
    problem.margins(np.zeros(problem.size))
    scaling = Scaling.at(problem)
    theta = np.random.default_rng(0).standard_normal(problem.size)
    np.testing.assert_allclose(scaling.theta(scaling.u(theta)), theta, rtol=1e-10)
    batch = next(mini_batches(problem, scaling, ALL, 0))
    at = np.zeros(problem.size)
    h = np.stack([batch.curvature(at, e) for e in np.eye(problem.size)])
    np.testing.assert_allclose(np.diag(h), 1.0, rtol=1e-9)
    np.testing.assert_allclose(h[-1, :-1], 0.0, atol=1e-10)
    np.testing.assert_allclose(h, h.T, atol=1e-10)


# -- over ranks --


@BOTH
def test_with_all_rows_in_a_batch_the_number_of_ranks_does_not_change_iterates(solver):
    xyc = data()

    def make(group):
        return row_problem(group, *xyc, LOGISTIC, l2=0.5)

    options = {"batch_h": ALL, "every": 2} if solver is SQN else {}
    [alone], _ = iterates(1, make, solver(batch=ALL, **options), 8)
    for size in (2, 3):
        for rank in iterates(size, make, solver(batch=ALL, **options), 8)[0]:
            np.testing.assert_allclose(rank, alone, rtol=1e-7, atol=1e-10)


@BOTH
@pytest.mark.parametrize("rows", [61, 2])
def test_ranks_with_different_numbers_of_batches_agree(solver, rows):
    """Three ranks: the last ones have fewer rows, or none."""
    xyc = data(rows)

    def make(group):
        return row_problem(group, *xyc, LOGISTIC, l2=0.5)

    ranks, _ = iterates(3, make, solver(batch=7), 5)
    for rank in ranks[1:]:
        np.testing.assert_array_equal(rank, ranks[0])


@pytest.mark.parametrize("anchored", [True, False])
@pytest.mark.parametrize("solver, gradients", [(SQN(every=100), 1), (OLBFGS(), 2)])
def test_what_a_round_sends_is_known(solver, gradients, anchored):
    """By batch; then the empty batch at the end, and the whole gradient."""
    xyc, batches = data(40, 500), 4
    changed = {"batch": 10, "eta": 0.01, "anchored": anchored}
    solver = type(solver)(**vars(solver) | changed)
    _, sent = iterates(2, lambda group: row_problem(group, *xyc, LOGISTIC, l2=1.0), solver, 3)
    assert sent == [8 * 502 * ((gradients + anchored) * batches + 2)] * 2


# -- minima --


@BOTH
@pytest.mark.parametrize("name", ["a9a", "heart_scale", "breast_cancer"])
def test_coefficients_are_those_of_scikit_learn(solver, name):
    if name == "breast_cancer":
        x, y = load_breast_cancer(return_X_y=True)
        x, y = StandardScaler().fit_transform(x), np.where(y == 1, 1.0, -1.0)
    else:
        x, y = libsvm(name)
    problem = row_problem(ALONE, x, y, np.full(len(y), 0.02), LOGISTIC, l2=1.0)
    found = minimise(problem, solver(), start_at(problem, None), Stopping(1e-10, 1000))
    assert found.converged
    theirs = LogisticRegression(C=0.02, solver="newton-cholesky", tol=1e-12).fit(x, y)
    expected = np.append(theirs.coef_, theirs.intercept_)
    assert np.linalg.norm(found.theta - expected) <= 1e-4 * np.linalg.norm(expected)


@BOTH
@pytest.mark.parametrize("anchored", [True, False])
def test_no_epoch_ends_higher_than_it_began_however_large_eta_is(solver, anchored):
    problem = row_problem(ALONE, *data(300), LOGISTIC, l2=0.5)
    theta, solver = np.zeros(problem.size), solver(batch=30, eta=50.0, anchored=anchored)
    state = solver.init(problem, theta)
    objective, first = problem.objective(theta), problem.objective(theta)
    for _ in range(25):
        solver.round(problem, theta, state)
        now = problem.objective(theta)
        assert now <= objective * (1 + 1e-12)
        objective = now
    assert objective < 0.9 * first


@BOTH
def test_at_the_minimum_anchored_batches_stay_there(solver):
    problem = row_problem(ALONE, *data(), LOGISTIC, l2=0.5)
    best = minimise(problem, LinearLBFGS(), start_at(problem, None), Stopping(1e-15, 500)).theta
    theta, solver = best.copy(), solver(batch=20)
    solver.round(problem, theta, solver.init(problem, theta))
    np.testing.assert_allclose(theta, best, rtol=1e-5, atol=1e-8)


@BOTH
def test_rows_in_blocks_reach_the_minimum_too(solver):
    x, y, c = data(220)
    problem = row_problem(ALONE, x, y, c, LOGISTIC, l2=0.5)
    problem.source = Blocks(rows_of(x))
    found = minimise(problem, solver(), start_at(problem, None), Stopping(1e-6, 300))
    assert found.converged


@BOTH
def test_certifying_every_round_does_not_change_the_iterates(solver):
    thetas = []
    for every in (False, True):
        problem = row_problem(ALONE, *data(), LOGISTIC, l2=0.1)
        stopping = Stopping(1e-30, 6, every_round=every)
        found = minimise(problem, solver(batch=30), start_at(problem, None), stopping)
        thetas.append(found.theta)
    np.testing.assert_array_equal(*thetas)


@BOTH
def test_a_falling_eta_falls_with_epochs(solver):
    problem = row_problem(ALONE, *data(300), LOGISTIC, l2=0.5)
    moves = []
    for decay in (math.inf, 1e-3):
        _, state = advanced(problem, solver(batch=30, eta=0.1, decay=decay), 1)
        moves.append(np.linalg.norm(state["u"]))
    assert moves[1] < 0.5 * moves[0]


# -- what they refuse --


@BOTH
@pytest.mark.parametrize(
    "options", [{"batch": 0}, {"memory": 0}, {"eta": 0.0}, {"eta": math.inf}, {"decay": 0.0}]
)
def test_options_without_sense_are_refused(solver, options):
    with pytest.raises(ValueError, match="needed"):
        solver(**options)


def test_options_of_one_solver_without_sense_are_refused():
    for wrong in (lambda: OLBFGS(lam=-1.0), lambda: SQN(every=0), lambda: SQN(batch_h=0)):
        with pytest.raises(ValueError, match="needed"):
            wrong()


@BOTH
def test_l1_is_refused(solver):
    problem = row_problem(ALONE, *data(), LOGISTIC, l1=0.1)
    with pytest.raises(ValueError, match=r"l1=0\.1.*choose"):
        solver().init(problem, np.zeros(problem.size))
