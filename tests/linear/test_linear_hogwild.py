"""Hogwild!: one thread is serial SGD to the last bit, many threads reach the same optimum."""

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sparse

from manyhands.exchange.inproc import World
from manyhands.linear.fit_data import FitData
from manyhands.linear.losses import HINGE, HUBER, LOGISTIC, SQUARED
from manyhands.linear.minimise import Stopping, minimise, start_at
from manyhands.linear.passes.rows import Rows
from manyhands.linear.problem import Problem
from manyhands.linear.solvers.hogwild import LinearHogwild
from manyhands.linear.solvers.sdca import SDCA
from manyhands.linear.stochastic.sgd_steps import shuffle, thread_seed
from support.linear_runs import problem_of as whole_problem
from support.linear_runs import spec_of
from support.serial_sgd import problem_of, serial_sgd, sparse_rows

ROWS = sparse_rows()
CASES = {
    "plain": (LOGISTIC, {}, {}),
    "l2": (LOGISTIC, {"l2": 0.5}, {}),
    "l1 and l2": (SQUARED, {"l1": 0.3, "l2": 0.5}, {}),
    "positive": (SQUARED, {"l1": 0.1, "positive": True}, {}),
    "hinge, rate of Bottou": (HINGE, {"l2": 0.5}, {"schedule": "optimal"}),
    "inverse scaling": (LOGISTIC, {"l2": 0.5}, {"schedule": "invscaling", "eta0": 0.5}),
    "huber, penalised intercept": (HUBER, {"l2": 0.5, "l2_intercept": 0.1, "eps": 0.3}, {}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("intercept", [False, True])
def test_one_thread_is_serial_sgd_to_the_last_bit(case: str, intercept: bool) -> None:
    loss, options, of_solver = CASES[case]
    solver = LinearHogwild(**of_solver)
    with problem_of(ROWS, 1, loss, intercept=intercept, **options) as problem:
        theta = start_at(problem, None)
        state = solver.init(problem, theta)
        w, b, paid = np.zeros(ROWS.columns), 0.0, np.zeros(ROWS.columns)
        for epoch in range(3):
            before = {k: v.copy() for k, v in state.items()} | {"round": state["round"] + 1.0}
            a, arrays = solver.arguments(problem, before)
            solver.round(problem, theta, state)
            order = np.arange(ROWS.count, dtype=np.int32)
            shuffle(order, 0, ROWS.count, thread_seed(problem, epoch + 1, 0, 0))
            one_by_one = [np.array([i]) for i in order]
            b, seen = serial_sgd(problem, one_by_one, w, b, a, arrays, paid)
            np.testing.assert_array_equal(theta[: ROWS.columns], w)
            assert problem.unpack(theta)[1] == b
            objective = (seen + problem.penalty(theta)) / problem.total_weight
            assert state["objective"][0] == pytest.approx(objective, rel=1e-12)


def parts_apart(threads: int) -> Rows:
    """Rows of which each thread's part has columns of its own."""
    each = [sparse_rows(50, 40, 3, seed) for seed in range(threads)]
    counts = np.concatenate([np.full(50, 3) for _ in each])
    indices = [
        np.sort(np.random.default_rng(k).integers(0, 13, (50, 3)) + np.array([0, 13, 26]) + 40 * k)
        for k in range(threads)
    ]
    indptr = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    flat = np.concatenate(indices).ravel().astype(np.int32)
    return Rows(indptr, flat, np.random.default_rng(9).standard_normal(len(flat)), 40 * threads)


@pytest.mark.parametrize("writes", ["shared", "locked", "atomic"])
def test_threads_whose_rows_share_no_column_take_serial_steps(writes: str) -> None:
    rows, found = parts_apart(4), []
    for threads in (1, 4):
        solver = LinearHogwild(shuffle=False, writes=writes)
        with problem_of(rows, threads, l2=0.1, intercept=False) as problem:
            theta = start_at(problem, None)
            state = solver.init(problem, theta)
            for _ in range(3):
                solver.round(problem, theta, state)
            found.append(theta)
    if writes == "atomic":  # adds differences, which rounds otherwise
        np.testing.assert_allclose(found[1], found[0], rtol=1e-12)
    else:
        np.testing.assert_array_equal(found[1], found[0])


@pytest.mark.parametrize("writes", ["locked", "atomic"])
def test_no_step_is_lost_where_steps_are_atomic_or_locked(writes: str) -> None:
    """Every row steps the same columns by the same power of two, so any order gives one sum."""
    count, columns = 20_000, 3
    indptr = np.arange(0, count * columns + 1, columns, dtype=np.int64)
    rows = Rows(indptr, np.tile(np.arange(columns, dtype=np.int32), count),
                np.ones(count * columns), columns)  # fmt: skip
    eta = 2.0**-30  # so small that every margin stays below 1: the slope is -1 in all steps
    solver = LinearHogwild(eta0=eta, schedule="constant", writes=writes, by_rows=True)
    with problem_of(rows, 4, HINGE) as problem:
        problem.y[:], problem.c[:] = 1.0, 1.0
        theta = start_at(problem, None)
        state = solver.init(problem, theta)
        for done in (1, 2):
            solver.round(problem, theta, state)
            np.testing.assert_array_equal(theta[:columns], np.full(columns, done * count * eta))


def test_the_intercept_of_threads_loses_no_step() -> None:
    count = 20_000
    rows = Rows(np.zeros(count + 1, np.int64), np.empty(0, np.int32), np.empty(0), 1)
    solver = LinearHogwild(eta0=2.0**-30, schedule="constant", by_rows=True)
    with problem_of(rows, 4, HINGE) as problem:
        problem.y[:], problem.c[:] = 1.0, 1.0
        theta = start_at(problem, None)
        state = solver.init(problem, theta)
        a, _ = solver.arguments(problem, state | {"round": np.ones(1)})
        solver.round(problem, theta, state)
        assert theta[-1] == pytest.approx(count * a.eta * a.eta_b, rel=1e-12)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("penalty", [{"l2": 1.0}, {"l1": 0.5, "l2": 1.0}])
def test_it_comes_near_the_optimum(threads: int, penalty: dict[str, float]) -> None:
    rows = sparse_rows(3000, 500, 8)
    with problem_of(rows, 1, **penalty) as problem:
        best = minimise(problem, SDCA(), start_at(problem, None), Stopping(1e-8, 500))
    with problem_of(rows, threads, **penalty) as problem:
        found = minimise(problem, LinearHogwild(), start_at(problem, None), Stopping(1e-3, 100))
    assert best.converged and found.converged
    assert found.certificate.objective < best.certificate.objective * 1.002
    assert found.certificate.dual <= best.certificate.objective * (1 + 1e-9)


def test_the_average_is_the_mean_of_all_later_iterates() -> None:
    since = 100
    solver = LinearHogwild(average=since, schedule="constant", eta0=0.3, shuffle=False)
    with problem_of(ROWS, 1, l2=0.5) as problem:
        theta = start_at(problem, None)
        state = solver.init(problem, theta)
        a, arrays = solver.arguments(problem, state | {"round": np.ones(1)})
        solver.round(problem, theta, state)
        w, b, sums = np.zeros(ROWS.columns), 0.0, np.zeros(ROWS.columns + 1)
        for t in range(ROWS.count):
            one = [np.array([t])]
            b, _ = serial_sgd(problem, one, w, b, a._replace(done=float(t)), arrays, np.zeros(1))
            if t + 1 >= since:
                sums += np.append(w, b)
        np.testing.assert_allclose(theta, sums / (ROWS.count - since + 1), rtol=1e-9, atol=1e-15)
        np.testing.assert_allclose(state["w"], np.append(w, b), rtol=1e-12)


def test_weights_of_columns_without_rows_fade_like_the_others() -> None:
    rows = Rows(ROWS.indptr, ROWS.indices, ROWS.values, ROWS.columns + 2)
    with problem_of(rows, 1, l2=0.5) as problem:
        theta = start_at(problem, None)
        theta[-3:-1] = 4.0, -4.0
        solver = LinearHogwild()
        state = solver.init(problem, theta)
        solver.round(problem, theta, state)
        total = float(state["eta"][0]) * rows.count * problem.l2 / problem.total_weight
        np.testing.assert_allclose(theta[-3:-1], np.array([4.0, -4.0]) / (1.0 + total), rtol=1e-12)


def test_ranks_average_their_weights_by_rows() -> None:
    """One epoch of two ranks: the mean of what each would have found by itself."""
    data = FitData(ROWS, np.ones(ROWS.count), np.ones(ROWS.count))
    solver = LinearHogwild(eta0=0.3, schedule="constant", shuffle=False)

    def main(group: Any) -> tuple[np.ndarray, np.ndarray, int]:
        source, y, c = data.part(group.rank, group.size, False)
        problem = Problem(source, y, c, LOGISTIC, intercept=False, group=group)
        theta = start_at(problem, None)
        solver.round(problem, theta, solver.init(problem, theta))
        alone = Problem(source, y, c, LOGISTIC, intercept=False)
        own = start_at(alone, None)
        solver.round(alone, own, solver.init(alone, own))
        return theta, own, source.count

    found = World(2).run(main)
    np.testing.assert_array_equal(found[0][0], found[1][0])
    total = sum(count for _, _, count in found)
    mean = sum(own * (count / total) for _, own, count in found)
    np.testing.assert_allclose(found[0][0], mean, rtol=1e-12)


def test_options_that_mean_nothing_are_refused() -> None:
    for options, said in (
        ({"writes": "free"}, "known: shared, locked, atomic"),
        ({"schedule": "slow"}, "known: epoch, constant"),
        ({"eta0": 0.0}, "more than 0"),
        ({"schedule": "adaptive"}, "give tol"),
        ({"decay": 1.5}, "at most 1"),
    ):
        with pytest.raises(ValueError, match=said):
            LinearHogwild(**options)  # type: ignore[arg-type]


def test_weights_that_overflow_are_an_error() -> None:
    with problem_of(ROWS, 1, SQUARED) as problem:
        problem.y[:] = 1e200
        with pytest.raises(ValueError, match=r"Floating-point under-/overflow .* smaller eta0"):
            minimise(problem, LinearHogwild(eta0=1e150), start_at(problem, None), Stopping(1e-3, 9))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_copies_of_threads_whose_rows_share_no_column_have_the_bits_of_serial_steps(
    threads: int,
) -> None:
    n, each = 60, 4
    x = sparse.csr_matrix(
        (
            np.random.default_rng(0).normal(size=n * each),
            np.arange(n * each, dtype=np.int32),
            np.arange(0, n * each + 1, each),
        )
    )
    y = np.where(np.arange(n) % 2 == 0, 1.0, -1.0)
    spec = spec_of(l2=0.1, intercept=False)
    found = []
    for solver, count in (
        (LinearHogwild(shuffle=False), 1),
        (LinearHogwild(shuffle=False, copies=threads > 1), threads),
    ):
        problem = whole_problem(spec, x, y, threads=count)
        theta = np.zeros(problem.size)
        state = solver.init(problem, theta)
        for _ in range(3):
            solver.round(problem, theta, state)
        found.append(theta)
        problem.threads.close()
    assert found[0].tobytes() == found[1].tobytes()


def test_copies_lose_no_change() -> None:
    """Every row steps every weight by a constant; the changes of all threads add up."""
    n, d = 4000, 40
    x = sparse.csr_matrix(np.ones((n, d)))
    problem = whole_problem(
        spec_of(SQUARED, l2=0.0, intercept=False), x, np.full(n, 1e9), threads=3
    )
    eta = 2.0**-40  # so small that a slope of -1e9 hardly changes
    solver = LinearHogwild(eta0=eta, schedule="constant", copies=True)
    theta = np.zeros(problem.size)
    solver.round(problem, theta, solver.init(problem, theta))
    problem.threads.close()
    np.testing.assert_allclose(theta, n * eta * 1e9, rtol=1e-2)


@pytest.mark.parametrize("solver", ["hogwild", "cyclades"])
def test_the_intercept_stays_calm_beside_columns_of_small_scale(solver: str) -> None:
    rows, y = pytest.importorskip("sklearn.datasets").load_diabetes(
        return_X_y=True
    )  # rows of length 0.15 on average, y around 152
    from manyhands.linear import Ridge

    best = Ridge(alpha=0.1).fit(rows, y)
    found = Ridge(alpha=0.1, solver=solver, tol=1e-3, max_iter=200).fit(rows, y)
    assert found.objective_ <= 1.001 * best.objective_
