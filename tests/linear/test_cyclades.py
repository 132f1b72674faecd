"""Cyclades: serial SGD in the sampled order to the last bit, on any number of threads."""

import runpy
from typing import Any

import numpy as np
import pytest

from manyhands.linear.losses import HINGE, LOGISTIC, SQUARED
from manyhands.linear.minimise import Stopping, minimise, start_at
from manyhands.linear.passes.rows import Rows, Threads, threads_of
from manyhands.linear.solvers.cyclades import Cyclades
from manyhands.linear.stochastic import conflict_batches
from manyhands.linear.stochastic.conflict_batches import (
    MOST_ROWS,
    ConflictFree,
    batch_size,
    conflict_free,
    planned,
)
from support.paths import EXAMPLES
from support.serial_sgd import problem_of, serial_sgd, sparse_rows

ROWS = sparse_rows(500, 2000, 4)
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "plain": (LOGISTIC, {}, {}),
    "l2": (LOGISTIC, {"l2": 0.5}, {}),
    "l1 and l2": (SQUARED, {"l1": 0.3, "l2": 0.5}, {}),
    "hinge, rate of Bottou": (HINGE, {"l2": 0.5}, {"schedule": "optimal"}),
    "inverse scaling": (LOGISTIC, {"l2": 0.5}, {"schedule": "invscaling", "eta0": 0.5}),
    "all rows drawn anew": (LOGISTIC, {"l2": 0.5}, {"keep": 1}),
    "batches of 100": (LOGISTIC, {"l2": 0.5}, {"batch": 100}),
}


def columns_of(rows: Rows, some: Any) -> set[int]:
    return {int(j) for i in some for j in rows.indices[rows.indptr[i] : rows.indptr[i + 1]]}


# -- steps --


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("intercept", [False, True])
def test_any_number_of_threads_takes_serial_steps_in_the_sampled_order(
    case: str, intercept: bool
) -> None:
    loss, options, of_solver = CASES[case]
    solver, found = Cyclades(**of_solver), []
    for threads in (1, 2, 3, 5):
        with problem_of(ROWS, threads, loss, intercept=intercept, **options) as problem:
            theta = start_at(problem, None)
            state = solver.init(problem, theta)
            for _ in range(4):
                solver.round(problem, theta, state)
            found.append((theta, float(state["objective"][0])))
    for theta, objective in found[1:]:
        np.testing.assert_array_equal(theta, found[0][0])
        assert objective == found[0][1]  # so the same epoch is the last one
    w, b, paid = np.zeros(ROWS.columns), 0.0, np.zeros(ROWS.columns)
    with problem_of(ROWS, 1, loss, intercept=intercept, **options) as problem:
        theta = start_at(problem, None)
        state = solver.init(problem, theta)
        for _ in range(4):
            before = {k: v.copy() for k, v in state.items()} | {"round": state["round"] + 1.0}
            a, arrays = solver.arguments(problem, before)
            solver.round(problem, theta, state)
            plan, sequence = planned(problem, ROWS, state, solver.keep, True)
            batches = [plan.order[k * plan.batch : (k + 1) * plan.batch] for k in sequence]
            b, _ = serial_sgd(problem, batches, w, b, a, arrays, paid)
    np.testing.assert_array_equal(found[0][0][: ROWS.columns], w)
    if intercept:
        assert found[0][0][-1] == b


def test_the_average_does_not_depend_on_threads_either() -> None:
    found = []
    for threads in (1, 3):
        with problem_of(ROWS, threads, l2=0.5) as problem:
            solver, theta = Cyclades(average=50), start_at(problem, None)
            state = solver.init(problem, theta)
            for _ in range(3):
                solver.round(problem, theta, state)
            found.append(theta)
    np.testing.assert_array_equal(found[1], found[0])


def test_it_comes_as_near_to_the_optimum_as_hogwild() -> None:
    rows = sparse_rows(3000, 500, 8)
    with problem_of(rows, 2, l2=1.0) as problem:
        found = minimise(problem, Cyclades(), start_at(problem, None), Stopping(1e-3, 100))
    assert found.converged


# -- plans --


def plan_of(rows: Rows, threads: Threads, batch: int, seed: int = 0) -> ConflictFree:
    order = np.random.default_rng(seed).permutation(rows.count).astype(np.int32)
    return conflict_free(threads, rows.indptr, rows.indices, rows.columns, order, batch)


@pytest.mark.parametrize("batch", [8, 37, 500, 1000])
@pytest.mark.parametrize("cores", [2, 3, 7])
def test_cores_share_no_column_and_every_row_is_visited_once(cores: int, batch: int) -> None:
    with threads_of(cores) as threads:
        plan = plan_of(ROWS, threads, batch)
    assert plan.cores == cores and plan.batches == -(-ROWS.count // batch)
    np.testing.assert_array_equal(np.sort(plan.positions), np.arange(ROWS.count))
    for b in range(plan.batches):
        assert plan.cuts[b, 0] == b * batch
        assert plan.cuts[b, -1] == min((b + 1) * batch, ROWS.count)
        parts = [plan.positions[plan.cuts[b, k] : plan.cuts[b, k + 1]] for k in range(cores)]
        assert all((np.diff(part) > 0).all() for part in parts)  # the order of the sample
        used = [columns_of(ROWS, plan.order[part]) for part in parts]
        assert sum(map(len, used)) == len(set().union(*used))


def test_the_largest_components_go_first_to_the_least_loaded_core() -> None:
    """Components of 3, 2, 2 and 1 rows of one column each, on two cores: 3 + 1 and 2 + 2."""
    indices = np.array([0, 1, 2, 0, 1, 2, 0, 3], dtype=np.int32)
    rows = Rows(np.arange(9, dtype=np.int64), indices, np.ones(8), 4)
    with threads_of(2) as threads:
        order = np.arange(8, dtype=np.int32)
        plan = conflict_free(threads, rows.indptr, rows.indices, 4, order, 8)
    parts = [plan.positions[plan.cuts[0, k] : plan.cuts[0, k + 1]].tolist() for k in range(2)]
    assert parts == [[0, 3, 6, 7], [1, 2, 4, 5]]


def test_columns_with_equal_low_bits_count_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conflict_batches, "SLOTS", 64)
    with threads_of(3) as threads:
        plan = plan_of(ROWS, threads, 16)
    np.testing.assert_array_equal(np.sort(plan.positions), np.arange(ROWS.count))
    for b in range(plan.batches):
        parts = [plan.positions[plan.cuts[b, k] : plan.cuts[b, k + 1]] for k in range(3)]
        used = [{j % 64 for j in columns_of(ROWS, plan.order[part])} for part in parts]
        assert sum(map(len, used)) == len(set().union(*used))


def test_rows_that_all_conflict_are_for_one_core() -> None:
    dense = Rows.from_dense(np.ones((200, 3)))
    assert batch_size(np.full(3, 200.0), 200.0) == 1
    with threads_of(3) as threads:
        assert plan_of(dense, threads, 1).cores == 1
    found = []
    for count in (1, 3):
        with problem_of(dense, count) as problem:
            solver, theta = Cyclades(), start_at(problem, None)
            state = solver.init(problem, theta)
            solver.round(problem, theta, state)
            found.append(theta)
    np.testing.assert_array_equal(found[0], found[1])


def test_a_batch_has_fewer_conflicts_than_rows() -> None:
    """n rows with k of d columns each: a row conflicts with n k^2 / d others."""
    n, d, k = 50_000, 20_000, 10
    counts = np.full(d, n * k / d)
    assert batch_size(counts, n) == pytest.approx(0.9 * d / k**2, rel=0.1)
    assert batch_size(np.ones(d), 10.0**9) == MOST_ROWS  # no conflicts at all
    assert batch_size(np.ones(d), 160.0) == 10  # an epoch has several batches


def test_a_plan_serves_some_epochs_with_its_batches_in_another_order() -> None:
    with problem_of(ROWS, 2) as problem:
        solver, theta = Cyclades(keep=2), start_at(problem, None)
        state, seen = solver.init(problem, theta), []
        for _ in range(4):
            solver.round(problem, theta, state)
            plan, sequence = planned(problem, ROWS, state, 2, True)
            seen.append((plan.order.tolist(), sequence.tolist()))
    orders = [order for order, _ in seen]
    assert orders[0] == orders[1] != orders[2] == orders[3]
    assert len({tuple(sequence) for _, sequence in seen}) == 4
    assert all(sorted(order) == list(range(ROWS.count)) for order in orders)


def test_a_plan_of_more_threads_is_made_again() -> None:
    with problem_of(ROWS, 4) as problem:
        solver, theta = Cyclades(), start_at(problem, None)
        state = solver.init(problem, theta)
        solver.round(problem, theta, state)
        ahead, there = theta.copy(), {k: v.copy() for k, v in state.items()}
        solver.round(problem, ahead, state)
    with problem_of(ROWS, 2) as problem:
        solver.round(problem, theta, there)
    np.testing.assert_array_equal(theta, ahead)


def test_batches_without_rows_are_refused() -> None:
    for options in ({"batch": 0}, {"keep": 0}):
        with pytest.raises(ValueError, match="1 or more is needed"):
            Cyclades(**options)


# -- the example --


def test_the_example_factorises_alike_on_one_and_two_threads() -> None:
    names = runpy.run_path(str(EXAMPLES / "cyclades.py"))
    data, found = names["known"](20_000), []
    for count in (1, 2):
        with threads_of(count) as threads:
            found.append(names["factorise"](*data, threads, epochs=3))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])
    assert found[1][2] == pytest.approx(found[0][2], rel=1e-12)
    with threads_of(2) as threads:
        assert names["factorise"](*data, threads, epochs=6)[2] < found[1][2]
