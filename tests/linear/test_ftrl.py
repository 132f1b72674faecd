"""FTRL-proximal: its equations, the same numbers through tables, and streams."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")

import scipy.sparse as sparse
from sklearn.base import clone

from manyhands.errors import PlanError
from manyhands.linear import LogisticRegression, Ridge
from manyhands.linear.losses import LOGISTIC, SQUARED
from manyhands.linear.passes.rows import InMemory, Rows, Threads
from manyhands.linear.problem import Problem
from manyhands.linear.solvers.ftrl import FTRL
from manyhands.server.local_store import LocalStore
from manyhands.server.shard import Shard

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")

RNG = np.random.default_rng(5)
X = sparse.random_array((400, 30), density=0.2, rng=RNG, format="csr")
MARGINS = X @ (RNG.standard_normal(30) * (np.arange(30) < 10) * 3)
Y = (MARGINS + 0.3 * RNG.standard_normal(400) > 0).astype(int)
TARGETS = MARGINS + 0.1 * RNG.standard_normal(400)


def problem(loss: int = LOGISTIC, **options: Any) -> Problem:
    y = np.where(Y == 1, 1.0, -1.0) if loss == LOGISTIC else TARGETS
    return Problem(InMemory(Rows.from_csr(X)), y, np.ones(len(y)), loss, **options)


def test_two_updates_of_one_column_are_those_of_the_equations() -> None:
    rows = InMemory(Rows.from_dense(np.array([[2.0], [1.0]])))
    one = Problem(rows, np.array([1.0, 3.0]), np.ones(2), SQUARED, l1=0.5, l2=0.25, intercept=False)
    solver, theta = FTRL(alpha=0.1, beta=1.0, passes=1, shuffle=False), np.zeros(1)
    state = solver.init(one, theta)
    solver.round(one, theta, state)
    g = (0.0 - 1.0) * 2.0  # z = 0
    z, n = g, g * g
    w = -(z + 0.5) / ((1.0 + 2.0) / 0.1 + 0.25)
    g = w - 3.0
    z += g - (math.sqrt(n + g * g) - 2.0) / 0.1 * w
    n += g * g
    w = -(z + 0.5) / ((1.0 + math.sqrt(n)) / 0.1 + 0.25)
    np.testing.assert_allclose([theta[0], state["z"][0], state["n"][0]], [w, z, n], rtol=1e-14)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("loss", [LOGISTIC, SQUARED])
def test_tables_give_the_same_coefficients_as_arrays(
    loss: int, intercept: bool, shards: int
) -> None:
    solver = FTRL(batch=7, passes=3)
    options = {"l1": 0.2, "l2": 0.1, "intercept": intercept}
    here, there = problem(loss, **options), problem(loss, **options)
    there.store = LocalStore(0, 1, [Shard() for _ in range(shards)])  # type: ignore[attr-defined]
    thetas = []
    for each in (here, there):
        theta = np.zeros(each.size)
        theta[:5] = 0.1  # as with warm_start
        state = solver.init(each, theta)
        for _ in range(3):
            solver.round(each, theta, state)
        thetas.append(theta)
    np.testing.assert_allclose(thetas[1], thetas[0], rtol=1e-9, atol=1e-12)


def test_what_tables_hold_comes_back_from_a_checkpoint() -> None:
    solver = FTRL(batch=5, passes=4)
    whole, cut = problem(l1=0.1), problem(l1=0.1)
    whole.store, cut.store = LocalStore(), LocalStore()  # type: ignore[attr-defined]
    first, second = np.zeros(whole.size), np.zeros(cut.size)
    state, other = solver.init(whole, first), solver.init(cut, second)
    for _ in range(2):
        solver.round(whole, first, state)
        solver.round(cut, second, other)
    kept = {name: value.copy() for name, value in solver.captured(cut, other).items()}
    cut.store = LocalStore()  # type: ignore[attr-defined]
    solver.open_tables(cut, second, kept)
    for _ in range(2):
        solver.round(whole, first, state)
        solver.round(cut, second, kept)
    np.testing.assert_array_equal(second, first)


@pytest.mark.parametrize("l1_ratio", [0.0, 0.5, 1.0])
def test_passes_lead_to_the_minimum_of_the_estimators_objective(l1_ratio: float) -> None:
    options: dict[str, Any] = {"l1_ratio": l1_ratio, "C": 2.0}
    best = LogisticRegression(solver="scd", tol=1e-9, **options).fit(X, Y)
    found = LogisticRegression(solver=FTRL(alpha=0.3), max_iter=100, **options).fit(X, Y)
    assert best.objective_ <= found.objective_ < best.objective_ * 1.02
    if l1_ratio == 1.0:
        assert 0 < np.count_nonzero(found.coef_) < 30
    least = Ridge(0.5, solver="newton").fit(X, TARGETS)
    ridge = Ridge(0.5, solver=FTRL(alpha=0.5), max_iter=100).fit(X, TARGETS)
    np.testing.assert_allclose(ridge.coef_, least.coef_, rtol=0.05, atol=0.05)


# -- streams --


def test_a_stream_in_pieces_learns_what_one_pass_learns() -> None:
    once = LogisticRegression(solver=FTRL(shuffle=False), max_iter=1).fit(X, Y)
    model = LogisticRegression(solver="ftrl")
    for start in range(0, 400, 50):
        piece = slice(start, start + 50)
        model.partial_fit(X[piece], Y[piece], classes=[0, 1])
        model = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(model.coef_, once.coef_)
    # a fit ends with the best intercept for its coefficients
    np.testing.assert_allclose(model.intercept_, once.intercept_, atol=0.1)
    assert model.score(X, Y) > 0.7
    ridge = Ridge(solver=FTRL(alpha=1.0)).partial_fit(X, TARGETS)
    once = ridge.score(X, TARGETS)
    assert 0.5 < once < ridge.partial_fit(X, TARGETS).score(X, TARGETS)


def test_a_stream_goes_on_from_a_fit() -> None:
    model = LogisticRegression(solver="ftrl", max_iter=5).fit(X, Y)
    before = model.coef_.copy()
    model.partial_fit(X[:1], Y[:1])
    held = X[:1].indices
    others = np.setdiff1d(np.arange(30), held)
    np.testing.assert_array_equal(model.coef_[0, others], before[0, others])
    assert (model.coef_[0, held] != before[0, held]).any()


def test_only_estimators_with_ftrl_learn_from_streams() -> None:
    assert not hasattr(LogisticRegression(), "partial_fit")
    assert hasattr(clone(LogisticRegression(solver="ftrl")), "partial_fit")
    with pytest.raises(AttributeError, match="partial_fit"):
        Ridge(solver="newton").partial_fit(X, TARGETS)


def refusals() -> list[tuple[str, Any]]:
    make = LogisticRegression
    start = lambda model, **given: model.partial_fit(X, Y, **given)
    return [
        ("classes must be passed", lambda: start(make(solver="ftrl"))),
        ("for two classes", lambda: start(make(solver="ftrl"), classes=[0, 1, 2])),
        ("not in classes", lambda: start(make(solver="ftrl"), classes=[1, 2])),
        ("plan='data=2' has no effect", lambda: start(make(solver="ftrl", plan="data=2"))),
        ("directory='x' has no effect", lambda: start(make(solver="ftrl", directory="x"))),
        (
            "'balanced' is not supported",
            lambda: start(make(solver="ftrl", class_weight="balanced")),
        ),
        ("2 threads have no effect", lambda: make(solver="ftrl", n_jobs=2).fit(X, Y)),
        ("alpha above 0", lambda: FTRL(alpha=0.0)),
        ("batch=0: 1 or more", lambda: FTRL(batch=0)),
        ("does not support multiclass", lambda: make(solver="ftrl").fit(X, np.arange(400) % 3)),
    ]


@pytest.mark.parametrize("said", [said for said, _ in refusals()])
def test_what_has_no_effect_on_a_stream_is_refused(said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        dict(refusals())[said]()


@pytest.mark.parametrize(
    ("solver", "words", "said"),
    [
        ("ftrl", "data=2", "solver ftrl on 2 ranks keeps its columns on servers"),
        ("sdca", "data=2 servers=1", "SDCA keeps nothing on servers"),
        ("ftrl", "data=2 servers=1 compress=topk", "over servers fp16, bf16, int8 are possible"),
        ("sdca", "data=2 compress=int8", "compress=int8 is about what goes to servers"),
        ("ftrl", "shards=2", "shards=2 is about tables on servers, but the plan has none"),
        ("ftrl", "servers=1 cache=100", "cache=100 has no effect on a linear model"),
        ("ftrl", "tensor=2 split=by_feature", "does not support split=by_feature"),
    ],
)
def test_plans_without_sense_for_tables_are_refused(solver: str, words: str, said: str) -> None:
    with pytest.raises((PlanError, ValueError)) as found:
        LogisticRegression(solver=solver, plan=words).fit(X, Y)
    assert said in str(found.value)


def test_one_thread_a_problem() -> None:
    threads = Threads(2)
    try:
        with pytest.raises(ValueError, match="use ranks"):
            two = problem(threads=threads)
            FTRL(passes=1).init(two, np.zeros(two.size))
    finally:
        threads.close()


def test_a_step_that_is_too_long_is_an_error() -> None:
    with pytest.raises(ValueError, match="smaller alpha"):
        Ridge(solver=FTRL(alpha=1e300), fit_intercept=False).fit(X * 1e200, TARGETS)


def test_a_saved_stream_resumes_in_a_directory(tmp_path: Path) -> None:
    options: dict[str, Any] = {"solver": FTRL(passes=6, batch=4), "record": True, "tol": 1e-300}
    whole = LogisticRegression(max_iter=6, directory=str(tmp_path / "a"), **options).fit(X, Y)
    LogisticRegression(max_iter=2, directory=str(tmp_path / "b"), **options).fit(X, Y)
    again = LogisticRegression(max_iter=6, directory=str(tmp_path / "b"), resume=True, **options)
    np.testing.assert_array_equal(again.fit(X, Y).coef_, whole.coef_)
