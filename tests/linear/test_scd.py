"""Coordinate descent by column: the objective only falls, also where ranks own the columns."""

import numpy as np
import pytest

from manyhands.exchange.inproc import World
from manyhands.exchange.observed import ObservedGroup
from manyhands.linear.losses import LOGISTIC, SQUARED, SQUARED_HINGE
from manyhands.linear.minimise import Stopping
from manyhands.linear.solvers.scd import SCD
from support.linear_runs import (
    lowest,
    problem_of,
    rows_and_labels,
    solve,
    solve_on_ranks,
    spec_of,
)

PENALTIES = [(0.0, 1.0), (2.0, 0.0), (1.0, 0.5)]


def correlated(loss, seed=0):
    """Columns that are nearly equal: ranks that step them at once overshoot without sigma'."""
    x, y = rows_and_labels(100, 12, loss, density=0.8, seed=seed)
    base = np.asarray(x.todense())[:, :1]
    noise = np.random.default_rng(seed).normal(size=x.shape)
    return type(x)(base + 0.05 * noise), y


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("loss", [SQUARED, LOGISTIC, SQUARED_HINGE])
@pytest.mark.parametrize("l1, l2", PENALTIES)
def test_the_objective_never_increases_even_on_correlated_columns(loss, l1, l2, ranks):
    x, y = correlated(loss)
    stop = Stopping(1e-10, 60, every_round=True)
    found = solve_on_ranks(ranks, spec_of(loss, l1, l2), x, y, SCD(), stop, by_column=True)[0]
    objectives = [r.objective for r in found.history]
    assert np.all(np.diff(objectives) <= 1e-11 * abs(objectives[0]))


@pytest.mark.parametrize("loss", [SQUARED, LOGISTIC])
@pytest.mark.parametrize("l1, l2", PENALTIES)
def test_ranks_with_columns_find_what_one_finds(loss, l1, l2):
    x, y = rows_and_labels(loss=loss)
    spec, stop = spec_of(loss, l1, l2), Stopping(1e-12, 4000)
    one = solve(spec, x, y, SCD(), stop, by_column=True)
    many = solve_on_ranks(3, spec, x, y, SCD(), stop, by_column=True)
    w = np.concatenate([m.theta[:-1] for m in many])
    np.testing.assert_allclose(w, one.theta[:-1], atol=2e-5)
    for rank in many:  # the intercept is everybody's
        assert rank.theta[-1] == many[0].theta[-1]
        assert rank.theta[-1] == pytest.approx(one.theta[-1], abs=2e-5)


@pytest.mark.parametrize("loss", [SQUARED, LOGISTIC])
@pytest.mark.parametrize("l1, l2", PENALTIES)
def test_the_gap_bounds_the_suboptimality_of_every_round(loss, l1, l2):
    x, y = rows_and_labels(loss=loss)
    spec = spec_of(loss, l1, l2)
    exact = solve(spec, x, y, SCD(), Stopping(1e-14, 4000), by_column=True).certificate
    stop = Stopping(1e-9, 1000, every_round=True)
    found = solve_on_ranks(2, spec, x, y, SCD(start=2), stop, by_column=True)[0]
    for record in found.history:
        assert record.objective - exact.dual <= record.gap + 1e-9 * abs(exact.objective)


def test_a_lasso_fulfils_its_optimality_conditions():
    """|X_j'r| <= l1 where w_j = 0, and X_j'r = l1 sign(w_j) elsewhere."""
    x, y = rows_and_labels(loss=SQUARED)
    found = solve(spec_of(SQUARED, 3.0, 0.0), x, y, SCD(), Stopping(1e-14, 4000), by_column=True)
    w, b = found.theta[:-1], found.theta[-1]
    pull = x.T @ (y - x @ w - b)
    assert 0 < np.count_nonzero(w) < len(w)
    assert np.all(np.abs(pull[w == 0]) <= 3.0 + 1e-6)
    np.testing.assert_allclose(pull[w != 0], 3.0 * np.sign(w[w != 0]), atol=1e-5)


def test_smooth_problems_reach_the_minimum_of_newton():
    x, y = rows_and_labels()
    spec = spec_of(l2=0.3)
    found = solve(spec, x, y, SCD(), Stopping(1e-12, 4000), by_column=True)
    assert found.certificate.objective == pytest.approx(lowest(spec, x, y), rel=1e-10)


def test_only_margins_travel_in_a_round():
    x, y = rows_and_labels()

    def rank(group):
        observed = ObservedGroup(group, lambda event: None)
        problem = problem_of(spec_of(l1=1.0), x, y, group=observed, by_column=True)
        solver, theta = SCD(), np.zeros(problem.size)
        state, before = solver.init(problem, theta), observed.nbytes
        solver.round(problem, theta, state)
        return observed.nbytes - before

    vector, numbers = 8 * len(y), 8 * 20
    assert all(vector <= sent <= vector + numbers for sent in World(2).run(rank))
