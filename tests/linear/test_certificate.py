"""The duality gap is a bound wherever it is asked for, not only near the minimum."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.linear.certificate import certify
from manyhands.linear.losses import HINGE, LOGISTIC, SQUARED, SQUARED_HINGE
from manyhands.linear.minimise import Stopping
from manyhands.linear.solvers.scd import SCD
from manyhands.linear.solvers.sdca import SDCA
from support.linear_runs import lowest, problem_of, rows_and_labels, solve, spec_of


@settings(max_examples=40, deadline=None)
@given(
    loss=st.sampled_from([LOGISTIC, SQUARED, SQUARED_HINGE]),
    l2=st.floats(0.01, 10.0),
    intercept=st.booleans(),
    size=st.floats(0.0, 5.0),
    seed=st.integers(0, 5),
)
def test_no_dual_value_is_above_the_minimum(loss, l2, intercept, size, seed):
    x, y = rows_and_labels(40, 6, loss, seed=seed)
    spec = spec_of(loss, l2=l2, intercept=intercept)
    problem = problem_of(spec, x, y)
    theta = size * np.random.default_rng(seed).normal(size=problem.size)
    found, least = certify(problem, theta), lowest(spec, x, y)
    assert found.dual <= least * (1 + 1e-9)
    assert found.objective >= least * (1 - 1e-9)


@pytest.mark.parametrize("loss", [LOGISTIC, SQUARED])
@pytest.mark.parametrize("l1, l2", [(1.0, 0.0), (0.5, 0.5)])
def test_with_l1_the_bound_holds_too(loss, l1, l2):
    x, y = rows_and_labels(60, 8, loss)
    spec = spec_of(loss, l1, l2)
    exact = solve(spec, x, y, SCD(), Stopping(1e-13, 3000), by_column=True).certificate
    random = np.random.default_rng(0)
    for _ in range(20):
        problem = problem_of(spec, x, y)
        found = certify(problem, random.normal(size=problem.size))
        assert found.dual <= exact.objective * (1 + 1e-9)


def test_the_gap_of_a_support_vector_machine_goes_to_zero():
    x, y = rows_and_labels()
    spec = spec_of(HINGE, l2=1.0, intercept=False)
    found = solve(spec, x, y, SDCA(), Stopping(1e-8, 20_000))
    assert found.converged
    assert found.certificate.gap <= 1e-8 * len(y)


def test_without_a_penalty_there_is_no_bound_and_none_is_claimed():
    x, y = rows_and_labels(loss=SQUARED)
    problem = problem_of(spec_of(SQUARED, l2=0.0), x, y)
    assert certify(problem, np.zeros(problem.size)).gap == np.inf
