"""L-BFGS over ranks: the same iterates on any number of them, few bytes, two passes a round."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")

from sklearn.linear_model import LogisticRegression, Ridge

from manyhands.exchange.solo import SoloGroup
from manyhands.linear.certificate import certify
from manyhands.linear.losses import (
    HINGE,
    HUBER,
    LOGISTIC,
    MODIFIED_HUBER,
    SQUARED,
    SQUARED_HINGE,
)
from manyhands.linear.minimise import Stopping, minimise, start_at
from manyhands.linear.solvers.lbfgs import LinearLBFGS
from manyhands.quasi_newton import History, two_loop
from support.linear_data import libsvm
from support.linear_problems import column_problem, data, iterates, row_problem

ALONE = SoloGroup()


def solved(problem, tol=1e-12, **options):
    found = minimise(problem, LinearLBFGS(**options), start_at(problem, None), Stopping(tol, 2000))
    assert found.converged
    return found


def advanced(problem, solver, rounds):
    theta = np.zeros(problem.size)
    state = solver.init(problem, theta)
    for _ in range(rounds):
        solver.round(problem, theta, state)
    return theta, state


# -- over ranks --


@pytest.mark.parametrize("loss", [LOGISTIC, SQUARED, SQUARED_HINGE])
@pytest.mark.parametrize("intercept", [True, False])
def test_the_number_of_row_shards_does_not_change_iterates(loss, intercept):
    xyc = data(loss=loss)

    def make(group):
        return row_problem(group, *xyc, loss, l2=0.5, intercept=intercept)

    [alone], _ = iterates(1, make, LinearLBFGS(), 8)
    for size in (2, 3):
        for rank in iterates(size, make, LinearLBFGS(), 8)[0]:
            np.testing.assert_allclose(rank, alone, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dense", [False, True])
def test_split_columns_have_the_iterates_of_rows(dense):
    xyc = data(dense=dense)
    options = {"l2": 0.5, "l2_intercept": 0.2}
    [alone], _ = iterates(
        1, lambda group: row_problem(group, *xyc, LOGISTIC, **options), LinearLBFGS(), 8
    )
    for size in (1, 2, 3):
        ranks, _ = iterates(
            size, lambda group: column_problem(group, *xyc, LOGISTIC, **options), LinearLBFGS(), 8
        )
        for k, theta in enumerate(alone):
            whole = np.concatenate([rank[k][:-1] for rank in ranks])
            np.testing.assert_allclose(whole, theta[:-1], rtol=1e-9, atol=1e-12)
            assert all(rank[k][-1] == pytest.approx(theta[-1], rel=1e-9) for rank in ranks)


def test_a_round_sends_a_gradient_a_direction_and_dot_products():
    columns, memory = 3000, 5
    xyc = data(60, columns)
    _, sent = iterates(
        2,
        lambda group: row_problem(group, *xyc, LOGISTIC, l2=1.0),
        LinearLBFGS(memory=memory),
        7,
    )
    dots = 8 * (3 * 2 * memory + 9 + 1)
    scalars = 8 * (3 + 4 * 8)  # a tangent, and at most eight looks of the line search
    for nbytes in sent:
        assert 2 * 8 * columns + dots < nbytes <= 2 * 8 * columns + dots + scalars


def test_split_columns_send_margins_and_dot_products():
    rows, memory = 60, 5
    xyc = data(rows, 3000)
    _, sent = iterates(
        2,
        lambda group: column_problem(group, *xyc, LOGISTIC, l2=1.0),
        LinearLBFGS(memory=memory),
        7,
    )
    assert sent == [8 * (rows + 3) + 8 * (3 * 2 * memory + 9 + 1)] * 2


def test_a_round_is_two_passes_over_the_rows():
    problem = row_problem(ALONE, *data(), LOGISTIC, l2=0.1)
    solver, theta = LinearLBFGS(), np.zeros(problem.size)
    state = solver.init(problem, theta)
    before = problem.source.passes
    for _ in range(10):
        solver.round(problem, theta, state)
        solver.certify(problem, theta, state)
    assert problem.source.passes - before == 20


# -- the algorithm --


def test_the_direction_from_dot_products_is_that_of_the_two_loop_recursion():
    problem = row_problem(ALONE, *data(), LOGISTIC, l2=0.5)
    solver = LinearLBFGS(memory=4)
    _, state = advanced(problem, solver, 9)
    history, basis = History(4), state["basis"]
    for k in solver._places(state):
        history.add(torch.from_numpy(basis[k]), torch.from_numpy(basis[4 + k]))
    assert len(history) == 4
    q, slope = solver._direction(state)
    expected = two_loop(torch.from_numpy(basis[-1]), history).numpy()
    np.testing.assert_allclose(q @ basis, expected, rtol=1e-9)
    assert slope == pytest.approx(float(expected @ basis[-1]))


def test_the_gram_matrix_is_that_of_the_basis():
    _, state = advanced(row_problem(ALONE, *data(), LOGISTIC, l2=0.5), LinearLBFGS(memory=3), 8)
    basis = state["basis"]
    np.testing.assert_allclose(state["gram"], basis @ basis.T, rtol=1e-9, atol=1e-20)


def test_the_implied_inverse_maps_the_newest_y_to_s_and_is_positive_definite():
    problem, solver = row_problem(ALONE, *data(), LOGISTIC, l2=0.5), LinearLBFGS(memory=4)
    _, state = advanced(problem, solver, 6)
    newest, basis = solver._places(state)[-1], state["basis"]

    def applied(v):
        copy = {name: value.copy() for name, value in state.items()}
        copy["basis"][-1] = v
        copy["gram"] = copy["basis"] @ copy["basis"].T
        return -solver._direction(copy)[0] @ copy["basis"]

    np.testing.assert_allclose(applied(basis[4 + newest]), basis[newest], rtol=1e-9)
    h = np.stack([applied(e) for e in np.eye(basis.shape[1])])
    np.testing.assert_allclose(h, h.T, rtol=1e-8, atol=1e-12)
    assert np.linalg.eigvalsh(h).min() > 0.0


def test_the_intercept_is_at_its_best_value_after_every_round():
    problem, solver = row_problem(ALONE, *data(), LOGISTIC, l2=0.5), LinearLBFGS()
    theta = np.zeros(problem.size)
    state = solver.init(problem, theta)
    for _ in range(5):
        solver.round(problem, theta, state)
        _, g = problem.value_and_gradient(theta)
        assert abs(g[-1]) <= 1e-9
        np.testing.assert_allclose(state["z"], problem.margins(theta), rtol=1e-10)


def test_without_l2_the_unit_of_a_column_does_not_matter():
    x, y, c = data(dense=True)
    scale = 2.0 ** np.arange(-4, 5)
    thetas = [
        advanced(row_problem(ALONE, each, y, c, LOGISTIC), LinearLBFGS(), 6)[0]
        for each in (x, x * scale)
    ]
    np.testing.assert_allclose(thetas[0][:-1], thetas[1][:-1] * scale, rtol=1e-7)


def test_preconditioning_saves_most_rounds_where_columns_differ():
    xyc = data(400, 60, seed=3)
    rounds = [
        solved(row_problem(ALONE, *xyc, LOGISTIC, l2=0.01), 1e-6, precondition=p).rounds
        for p in (True, False)
    ]
    assert rounds[0] < 0.5 * rounds[1]


# -- certificates and stopping --


@pytest.mark.parametrize("loss", [LOGISTIC, SQUARED, SQUARED_HINGE])
def test_its_certificate_is_the_duality_gap(loss):
    problem = row_problem(ALONE, *data(loss=loss), loss, l2=0.5)
    solver = LinearLBFGS()
    for rounds in (1, 4, 9):
        theta, state = advanced(problem, solver, rounds)
        own, general = solver.certify(problem, theta, state), certify(problem, theta.copy())
        assert own.objective == pytest.approx(general.objective, rel=1e-12)
        assert own.gap == pytest.approx(general.gap, rel=1e-6, abs=1e-9 * own.objective)


@pytest.mark.parametrize("loss", [HUBER, MODIFIED_HUBER])
def test_losses_without_a_conjugate_have_a_gap_by_strong_convexity(loss):
    xyc = data(loss=SQUARED if loss == HUBER else LOGISTIC)
    options = {"l2": 0.5, "eps": 1.3}
    best = solved(row_problem(ALONE, *xyc, loss, **options)).certificate.objective
    problem, solver = row_problem(ALONE, *xyc, loss, **options), LinearLBFGS()
    for rounds in (1, 3, 6):
        found = solver.certify(problem, *advanced(problem, solver, rounds))
        assert found.objective - best <= found.gap + 1e-12 * best


def test_without_l2_it_stops_by_its_estimate():
    x, y, c = data(dense=True)
    found = solved(row_problem(ALONE, x, y, c, LOGISTIC), 1e-13)
    assert found.certificate.dual == -math.inf
    theirs = LogisticRegression(C=np.inf, tol=1e-10, max_iter=10_000).fit(x, y, c)
    np.testing.assert_allclose(found.theta[:-1], theirs.coef_[0], rtol=1e-4)


def test_at_the_minimum_a_round_changes_nothing():
    problem = row_problem(ALONE, *data(), LOGISTIC, l2=0.5)
    theta, solver = solved(problem, 1e-15).theta, LinearLBFGS()
    start, state = theta.copy(), solver.init(problem, theta)
    for _ in range(5):
        estimate = solver.round(problem, theta, state)
        assert estimate == math.inf or estimate <= 1e-9
    np.testing.assert_allclose(theta, start, rtol=1e-6)


def test_certifying_every_round_does_not_change_the_iterates():
    thetas = []
    for every in (False, True):
        problem = row_problem(ALONE, *data(), LOGISTIC, l2=0.1)
        stopping = Stopping(1e-30, 12, every_round=every)
        thetas.append(minimise(problem, LinearLBFGS(), start_at(problem, None), stopping).theta)
    np.testing.assert_array_equal(*thetas)


def test_it_goes_on_from_a_saved_state():
    solver = LinearLBFGS()
    whole, _ = advanced(row_problem(ALONE, *data(), LOGISTIC, l2=0.5), solver, 9)
    theta, state = advanced(row_problem(ALONE, *data(), LOGISTIC, l2=0.5), solver, 5)
    again = row_problem(ALONE, *data(), LOGISTIC, l2=0.5)
    for _ in range(4):
        solver.round(again, theta, state)
    np.testing.assert_array_equal(theta, whole)


# -- against scikit-learn --


@pytest.mark.parametrize("name", ["a9a", "heart_scale"])
def test_coefficients_are_those_of_scikit_learn(name):
    x, y = libsvm(name)
    problem = row_problem(ALONE, x, y, np.full(len(y), 0.1), LOGISTIC, l2=1.0)
    theirs = LogisticRegression(C=0.1, solver="newton-cholesky", tol=1e-12).fit(x, y)
    w = solved(problem).theta
    np.testing.assert_allclose(w[:-1], theirs.coef_[0], rtol=0, atol=1e-5)
    assert w[-1] == pytest.approx(theirs.intercept_[0], abs=1e-5)


def test_squared_loss_over_three_ranks_is_ridge_regression():
    x, y, c = data(loss=SQUARED)
    [theta, *_], _ = iterates(
        3, lambda group: row_problem(group, x, y, c, SQUARED, l2=0.7), LinearLBFGS(), 40
    )
    theirs = Ridge(0.7, solver="svd").fit(x.toarray(), y, c)
    np.testing.assert_allclose(theta[-1][:-1], theirs.coef_, rtol=1e-7, atol=1e-9)


# -- what it refuses --


@pytest.mark.parametrize(
    "options", [{"memory": 0}, {"c1": 0.5, "c2": 0.4}, {"c2": 1.0}, {"gamma": 0.0}]
)
def test_options_without_sense_are_refused(options):
    with pytest.raises(ValueError, match="needed"):
        LinearLBFGS(**options)


@pytest.mark.parametrize(
    "loss, options, word",
    [(LOGISTIC, {"l1": 0.1}, "l1=0.1"), (SQUARED, {"positive": True}, "positive"), (HINGE, {}, "")],
)
def test_objectives_without_a_gradient_are_refused(loss, options, word):
    problem = row_problem(ALONE, *data(), loss, **options)
    with pytest.raises(ValueError, match=f"{word}.*choose"):
        LinearLBFGS().init(problem, np.zeros(problem.size))
