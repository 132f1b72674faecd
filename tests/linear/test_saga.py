"""SAGA: reaches the optimum, with any penalty, on any number of threads."""

from typing import Any

import numpy as np
import pytest

from manyhands.exchange.inproc import World
from manyhands.linear.certificate import certify
from manyhands.linear.losses import HINGE, HUBER, LOGISTIC, MODIFIED_HUBER, SQUARED, SQUARED_HINGE
from manyhands.linear.minimise import Stopping, minimise, null_objective, start_at
from manyhands.linear.passes.rows import Rows
from manyhands.linear.problem import Problem
from manyhands.linear.solvers.saga import SAGA
from manyhands.linear.stochastic.sgd_steps import own_counts
from support.serial_sgd import problem_of, sparse_rows

ROWS = sparse_rows(600, 80, 6)
PENALTIES = {
    "l2": {"l2": 1.0},
    "l1": {"l1": 2.0},
    "elastic net": {"l1": 1.0, "l2": 0.5},
    "l2 of the intercept too": {"l2": 1.0, "l2_intercept": 1.0},
    "positive": {"l1": 1.0, "l2": 0.5, "positive": True},
}


@pytest.mark.parametrize("loss", [LOGISTIC, SQUARED, SQUARED_HINGE])
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("intercept", [False, True])
def test_it_reaches_the_optimum(loss: int, penalty: str, intercept: bool) -> None:
    options = dict(PENALTIES[penalty], intercept=intercept)
    if not intercept:
        options.pop("l2_intercept", None)
    with problem_of(ROWS, 1, loss, **options) as problem:
        found = minimise(problem, SAGA(), start_at(problem, None), Stopping(1e-6, 1000))
        assert found.converged
        assert found.certificate.gap <= 1e-6 * null_objective(problem)
        # few rounds were certified: the estimate knows when the gap is small
        assert len(found.history) <= 12
        if options.get("positive"):
            assert (found.theta[: ROWS.columns] >= 0.0).all()
        if options.get("l1"):
            assert (found.theta[: ROWS.columns] == 0.0).any()


@pytest.mark.parametrize("loss", [HUBER, MODIFIED_HUBER])
def test_losses_without_a_gap_end_where_the_gradient_does(loss: int) -> None:
    with problem_of(ROWS, 1, loss, l2=1.0, eps=0.5) as problem:
        found = minimise(problem, SAGA(), start_at(problem, None), Stopping(1e-9, 1000))
        assert found.converged and found.rounds > 5
        _, gradient = problem.value_and_gradient(found.theta)
        _, first = problem.value_and_gradient(np.zeros(problem.size))
        assert np.abs(gradient).max() < 1e-3 * np.abs(first).max()


@pytest.mark.parametrize("intercept", [False, True])
def test_threads_change_no_bit(intercept: bool) -> None:
    rows, found = sparse_rows(500, 2000, 4), []
    for threads in (1, 2, 5):
        with problem_of(rows, threads, l1=0.01, l2=0.5, intercept=intercept) as problem:
            theta = start_at(problem, None)
            solver = SAGA(keep=2)
            state = solver.init(problem, theta)
            for _ in range(5):
                solver.round(problem, theta, state)
            found.append((theta, state["H"], state["a"]))
    for others in found[1:]:
        for ours, first in zip(others, found[0], strict=True):
            np.testing.assert_array_equal(ours, first)


def test_the_means_stay_those_of_the_slopes() -> None:
    with problem_of(ROWS, 2, l2=1.0) as problem:
        theta = start_at(problem, None)
        state = SAGA().init(problem, theta)
        for _ in range(7):
            SAGA().round(problem, theta, state)
        sums, total = problem.transposed(state["a"])
        counts = np.maximum(own_counts(problem), 1.0)
        np.testing.assert_allclose(state["H"][:-1], sums / counts, rtol=1e-9, atol=1e-12)
        assert state["H"][-1] == pytest.approx(total / ROWS.count, rel=1e-9)


def test_it_goes_on_from_where_it_is_put() -> None:
    with problem_of(ROWS, 1, l2=1.0) as problem:
        best = minimise(problem, SAGA(), start_at(problem, None), Stopping(1e-10, 2000))
        again = minimise(problem, SAGA(), start_at(problem, best.theta), Stopping(1e-8, 50))
        assert again.rounds == 1
        assert certify(problem, again.theta).objective == pytest.approx(
            best.certificate.objective, rel=1e-8
        )


def test_columns_without_rows_stay_zero() -> None:
    rows = Rows(ROWS.indptr, ROWS.indices, ROWS.values, ROWS.columns + 3)
    with problem_of(rows, 1, l2=1.0) as problem:
        found = minimise(problem, SAGA(), start_at(problem, None), Stopping(1e-6, 500))
        assert found.converged and not found.theta[ROWS.columns : -1].any()


def test_what_it_cannot_do_is_refused() -> None:
    with problem_of(ROWS, 1, HINGE, l2=1.0) as problem:
        with pytest.raises(ValueError, match="slope has no jump; hogwild takes any"):
            SAGA().init(problem, start_at(problem, None))

        def main(group: Any) -> None:
            own = Problem(problem.source, problem.y, problem.c, LOGISTIC, l2=1.0, group=group)
            with pytest.raises(ValueError, match="rows of one rank, got 2 ranks"):
                SAGA().init(own, start_at(own, None))

        World(2).run(main)
    for options in ({"step": 0.0}, {"step": 2.0}, {"batch": 0}, {"keep": 0}):
        with pytest.raises(ValueError, match="needed"):
            SAGA(**options)
