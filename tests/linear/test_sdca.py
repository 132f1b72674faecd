"""SDCA and CoCoA+: the certificate holds in every round, and one vector a rank travels."""

import numpy as np
import pytest

from manyhands.exchange.inproc import World
from manyhands.exchange.observed import ObservedGroup
from manyhands.linear.certificate import certify
from manyhands.linear.losses import HINGE, LOGISTIC, SQUARED, SQUARED_HINGE
from manyhands.linear.minimise import Stopping
from manyhands.linear.solvers.sdca import SDCA
from support.linear_runs import (
    lowest,
    problem_of,
    rows_and_labels,
    solve,
    solve_on_ranks,
    spec_of,
)

LOSSES = [LOGISTIC, SQUARED, SQUARED_HINGE]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_gap_bounds_the_suboptimality_of_every_round(loss, intercept, ranks):
    x, y = rows_and_labels(loss=loss)
    spec = spec_of(loss, l2=0.5, intercept=intercept)
    least = lowest(spec, x, y)
    found = solve_on_ranks(ranks, spec, x, y, SDCA(), Stopping(1e-8, 3000, every_round=True))[0]
    assert found.converged
    assert len(found.history) == found.rounds
    for record in found.history:
        assert -1e-10 * least <= record.objective - least <= record.gap + 1e-10 * least


@pytest.mark.parametrize("loss", [*LOSSES, HINGE])
def test_the_dual_objective_never_decreases(loss):
    x, y = rows_and_labels(loss=loss)
    problem = problem_of(spec_of(loss, l2=0.3, intercept=False), x, y)
    solver, theta = SDCA(), np.zeros(problem.size)
    state = solver.init(problem, theta)
    duals = []
    for _ in range(20):
        solver.round(problem, theta, state)
        duals.append(certify(problem, theta, solver.dual(state)).dual)
    assert np.all(np.diff(duals) >= -1e-12 * abs(duals[-1]))


@pytest.mark.parametrize("ranks", [1, 3])
def test_coefficients_are_those_of_the_dual_variables(ranks):
    """w = X'a / l2, over the rows of all ranks."""
    x, y = rows_and_labels()
    spec = spec_of(l2=0.7, intercept=False)

    def rank(group):
        problem, solver = problem_of(spec, x, y, group=group), SDCA()
        theta = np.zeros(problem.size)
        state = solver.init(problem, theta)
        for _ in range(5):
            solver.round(problem, theta, state)
        return theta, state["a"]

    found = World(ranks).run(rank)
    a = np.concatenate([own for _, own in found])
    for theta, _ in found:
        np.testing.assert_allclose(theta, x.T @ a / 0.7, rtol=1e-10, atol=1e-12)


def test_all_ranks_have_the_same_coefficients_to_the_bit():
    x, y = rows_and_labels()
    found = solve_on_ranks(3, spec_of(), x, y, SDCA(), Stopping(1e-6, 500))
    for other in found[1:]:
        assert other.theta.tobytes() == found[0].theta.tobytes()


@pytest.mark.parametrize("ranks", [2, 5])
def test_ranks_find_what_one_finds(ranks):
    x, y = rows_and_labels()
    spec, stop = spec_of(l2=0.5), Stopping(1e-13, 5000)
    one = solve(spec, x, y, SDCA(), stop)
    many = solve_on_ranks(ranks, spec, x, y, SDCA(), stop)[0]
    np.testing.assert_allclose(many.theta, one.theta, rtol=1e-5, atol=1e-6)


def test_averaging_converges_too_but_adding_is_faster():
    x, y = rows_and_labels(400, 30)
    stop = Stopping(1e-5, 3000)
    added = solve_on_ranks(4, spec_of(), x, y, SDCA(), stop)[0]
    averaged = solve_on_ranks(4, spec_of(), x, y, SDCA(gamma=0.25, sigma=1.0), stop)[0]
    assert added.converged and averaged.converged
    assert added.rounds < averaged.rounds


def test_adding_without_a_factor_is_refused_because_it_can_diverge():
    x, y = rows_and_labels()
    with pytest.raises(ValueError, match="can diverge; give sigma >= gamma"):
        solve_on_ranks(2, spec_of(), x, y, SDCA(gamma=1.0, sigma=1.0), Stopping(1e-3, 5))


def theory(x, l2, ranks, gap):
    """Rounds that suffice for logistic loss (Ma et al. 2015, theorem 11), adding with sigma' = K,
    when a local epoch visits each of the rank's rows once."""
    strong, own = 4.0 * l2, x.shape[0] // ranks  # its conjugate is 4-strongly convex
    row = max(x.multiply(x).sum(1))
    kept = (1 - strong / (ranks * row + strong) / own) ** own
    parts = [x[k * own : (k + 1) * own].toarray() for k in range(ranks)]
    largest = max(np.linalg.norm(part, 2) ** 2 for part in parts)
    return (strong + largest * ranks) / strong / (1 - kept) * np.log(1 / gap)


@pytest.mark.parametrize("intercept", [False, True])
def test_rounds_to_a_gap_do_not_grow_with_ranks_beyond_theory(intercept):
    x, y = rows_and_labels(1600, 40, density=0.2)
    rounds = {}
    for ranks in (1, 2, 4, 8):
        stop, spec = Stopping(1e-3, 300, every_round=True), spec_of(l2=1.6, intercept=intercept)
        found = solve_on_ranks(ranks, spec, x, y, SDCA(), stop)[0]
        assert found.converged
        rounds[ranks] = found.rounds
        assert found.rounds <= theory(x, 1.6, ranks, 1e-3)
    assert rounds[8] < 4 * rounds[2], rounds  # less than proportionally


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_vector_a_rank_travels_in_a_round(ranks):
    x, y = rows_and_labels()

    def rank(group):
        observed = ObservedGroup(group, lambda event: None)
        problem, solver = problem_of(spec_of(), x, y, group=observed), SDCA()
        theta = np.zeros(problem.size)
        state, before = solver.init(problem, theta), observed.nbytes
        calls = observed.calls
        solver.round(problem, theta, state)
        return observed.nbytes - before, observed.calls - calls

    columns = x.shape[1]
    # the change of w, of the intercept, and an estimate of the gap
    assert World(ranks).run(rank) == [(8 * (columns + 2), 1)] * ranks


def test_threads_reach_the_same_minimum():
    x, y = rows_and_labels(2000, 50)
    spec = spec_of(l2=0.5)
    least = lowest(spec, x, y)
    found = solve(spec, x, y, SDCA(), Stopping(1e-7, 2000), threads=2)
    assert found.converged
    assert found.certificate.objective - least <= found.certificate.gap + 1e-9 * least


def test_rows_without_entries_and_rows_of_weight_zero_change_nothing():
    x, y = rows_and_labels()
    x = x.tolil()
    x[3] = 0.0
    x, c = x.tocsr(), np.ones(len(y))
    c[5] = 0.0
    spec = spec_of(intercept=False)
    kept = np.arange(len(y)) != 5
    whole = solve(spec, x, y, SDCA(), Stopping(1e-12, 2000), c=c)
    without = solve(spec, x[kept], y[kept], SDCA(), Stopping(1e-12, 2000))
    np.testing.assert_allclose(whole.theta, without.theta, atol=1e-6)
