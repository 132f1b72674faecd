"""SGDClassifier and SGDRegressor: scikit-learn's parameters, streams, threads and ranks."""

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")

import scipy.sparse as sparse
import sklearn.linear_model as theirs
from sklearn.base import clone
from sklearn.datasets import make_classification, make_regression
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.estimator_checks import parametrize_with_checks

from manyhands.errors import PlanError
from manyhands.linear import SGDClassifier, SGDRegressor
from manyhands.linear.solvers.cyclades import Cyclades
from manyhands.linear.solvers.hogwild import LinearHogwild
from support.linear_data import libsvm

# what scikit-learn expects of its own SGD estimators: steps on repeated rows are no long step
NOT_FOR_SGD = {
    f"check_sample_weight_equivalence_on_{kind}_data": "sample_weight is not repetition for SGD"
    for kind in ("dense", "sparse")
}
ESTIMATORS = [
    SGDClassifier(),
    SGDRegressor(),
    SGDClassifier(loss="log_loss", average=True, solver="cyclades", n_jobs=2),
    SGDRegressor(penalty="elasticnet", solver="cyclades"),
]
X, Y = make_classification(400, 12, n_informative=6, random_state=0)
X3, Y3 = make_classification(600, 12, n_informative=8, n_classes=3, random_state=1)
XR, YR = make_regression(400, 10, noise=1.0, random_state=0)
YR = YR / np.abs(YR).max()


@parametrize_with_checks(ESTIMATORS, expected_failed_checks=lambda _: NOT_FOR_SGD)
def test_an_estimator_passes_the_checks_of_scikit_learn(estimator: Any, check: Any) -> None:
    check(estimator)


# -- fits like scikit-learn's --

LOSSES = ["hinge", "log_loss", "modified_huber", "squared_hinge", "perceptron", "squared_error"]
RATES: list[dict[str, Any]] = [
    {},
    {"learning_rate": "constant"},
    {"learning_rate": "invscaling", "eta0": 0.1},
    {"learning_rate": "adaptive", "eta0": 0.05},
    {"learning_rate": "pa1", "eta0": 0.1},
    {"learning_rate": "pa2", "eta0": 0.1},
]


def classifiers(**options: Any) -> tuple[Any, Any]:
    return (
        SGDClassifier(random_state=0, **options).fit(X, Y),
        theirs.SGDClassifier(random_state=0, **options).fit(X, Y),
    )


@pytest.mark.parametrize("rate", RATES, ids=lambda rate: rate.get("learning_rate", "optimal"))
def test_every_learning_rate_scores_as_scikit_learn_does(rate: dict[str, Any]) -> None:
    ours, other = classifiers(**rate)
    assert ours.score(X, Y) > other.score(X, Y) - 0.03
    assert ours.coef_.shape == other.coef_.shape and ours.intercept_.shape == (1,)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("penalty", ["l2", "l1", "elasticnet", None])
def test_every_loss_and_penalty_scores_as_scikit_learn_does(loss: str, penalty: str | None) -> None:
    options = {"loss": loss, "penalty": penalty, "alpha": 0.01, "average": True}
    rate = {"learning_rate": "invscaling", "eta0": 0.02}
    ours, other = classifiers(**options, **rate)
    assert ours.score(X, Y) > other.score(X, Y) - 0.03


@pytest.mark.parametrize("loss", ["squared_error", "huber", "epsilon_insensitive"])
@pytest.mark.parametrize("average", [False, True])
def test_a_regressor_explains_what_scikit_learns_does(loss: str, average: bool) -> None:
    options = {"loss": loss, "random_state": 0, "average": average, "max_iter": 3000}
    ours, other = SGDRegressor(**options).fit(XR, YR), theirs.SGDRegressor(**options).fit(XR, YR)
    assert ours.score(XR, YR) > other.score(XR, YR) - 0.02
    assert ours.coef_.shape == other.coef_.shape and ours.intercept_.shape == (1,)


def test_a_slow_rate_reaches_the_same_coefficients() -> None:
    """Both minimise one objective."""
    options = {"loss": "log_loss", "alpha": 0.01, "learning_rate": "adaptive", "eta0": 0.05}
    ours, other = classifiers(**options, tol=1e-6, max_iter=3000)
    np.testing.assert_allclose(ours.coef_, other.coef_, rtol=0.02, atol=0.01)
    np.testing.assert_allclose(ours.intercept_, other.intercept_, rtol=0.05, atol=0.02)


def test_classes_are_fitted_one_against_the_rest() -> None:
    model = SGDClassifier(loss="log_loss", random_state=0).fit(X3, Y3)
    assert model.coef_.shape == (3, 12) and model.intercept_.shape == (3,)
    one = SGDClassifier(loss="log_loss", random_state=0).fit(X3, Y3 == 1)
    np.testing.assert_array_equal(one.coef_[0], model.coef_[1])
    assert model.t_ == 1 + model.n_iter_ * len(Y3)


@pytest.mark.parametrize("loss", ["log_loss", "modified_huber"])
@pytest.mark.parametrize("classes", [2, 3])
def test_probabilities_are_those_of_scikit_learn(loss: str, classes: int) -> None:
    x, y = (X, Y) if classes == 2 else (X3, Y3)
    ours = SGDClassifier(loss=loss, alpha=0.1, random_state=0).fit(x, y)
    other = theirs.SGDClassifier(loss=loss).fit(x, y)
    other.coef_, other.intercept_ = ours.coef_, ours.intercept_
    np.testing.assert_allclose(ours.predict_proba(x), other.predict_proba(x), rtol=1e-12)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(ours.predict_log_proba(x), np.log(ours.predict_proba(x)))
    assert not hasattr(SGDClassifier(), "predict_proba")


def test_weights_of_rows_and_classes_multiply() -> None:
    by_class = SGDClassifier(class_weight={0: 3.0, 1: 0.5}, random_state=0).fit(X, Y)
    by_row = SGDClassifier(random_state=0).fit(X, Y, sample_weight=np.where(Y == 0, 3.0, 0.5))
    np.testing.assert_array_equal(by_class.coef_, by_row.coef_)
    balanced = SGDClassifier(class_weight="balanced", random_state=0).fit(X, Y)
    assert balanced.score(X, Y) > 0.7


def test_a_fit_can_be_repeated_and_begun_where_one_ended() -> None:
    first = SGDClassifier(loss="log_loss", random_state=0).fit(X, Y)
    again = SGDClassifier(loss="log_loss", random_state=0).fit(X, Y)
    np.testing.assert_array_equal(first.coef_, again.coef_)
    options = {"loss": "log_loss", "random_state": 0, "max_iter": 1, "tol": None}
    warm = SGDClassifier(warm_start=True, **options).fit(X, Y).fit(X, Y)
    once = SGDClassifier(**options).fit(X, Y)
    given = SGDClassifier(**options).fit(X, Y, once.coef_, once.intercept_)
    np.testing.assert_array_equal(warm.coef_, given.coef_)
    assert not np.array_equal(warm.coef_, once.coef_)
    with pytest.raises(ValueError, match="coef_init does not match dataset"):
        SGDClassifier().fit(X, Y, coef_init=np.zeros(5))
    with pytest.raises(ValueError, match="intercept_init does not match dataset"):
        SGDClassifier().fit(X, Y, intercept_init=np.zeros(2))


def test_the_fit_ends_when_the_objective_stalls() -> None:
    model = SGDClassifier(loss="log_loss", alpha=0.01, tol=1e-3, random_state=0).fit(X, Y)
    assert 5 < model.n_iter_ < 200 and len(model.history_) == model.n_iter_
    assert model.objective_ == model.history_[-1].objective
    with pytest.warns(ConvergenceWarning, match="Maximum number of iteration"):
        SGDClassifier(max_iter=3).fit(X, Y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert SGDClassifier(max_iter=7, tol=None).fit(X, Y).n_iter_ == 7


@pytest.mark.parametrize("rate", ["optimal", "adaptive"])
def test_early_stopping_watches_rows_that_are_held_out(rate: str) -> None:
    options = {"early_stopping": True, "random_state": 0, "learning_rate": rate, "eta0": 0.1}
    for x, y in ((X, Y), (X3, Y3), (sparse.csr_array(X), Y)):
        model = SGDClassifier(**options).fit(x, y)
        assert model.n_iter_ < 200 and model.score(x, y) > (0.6 if y is Y else 0.45)
        assert not any("held" in name for name in vars(model))
    assert SGDRegressor(early_stopping=True, random_state=0, tol=1e-4).fit(XR, YR).score(
        XR, YR
    ) == pytest.approx(1.0, abs=0.1)
    with pytest.raises(ValueError, match="validation set are all zero"):
        chosen = SGDClassifier(early_stopping=True, random_state=0)  # holds out other rows than 0
        chosen.fit(X[:20], Y[:20], sample_weight=np.eye(20)[0])


def test_sparse_rows_cost_what_they_have_of_non_zeros_and_are_fitted_alike() -> None:
    x = np.where(np.random.default_rng(0).random(X.shape) < 0.2, X, 0.0)
    kinds = [sparse.csr_matrix, sparse.csr_array, sparse.csc_matrix, sparse.coo_array]
    found = [SGDClassifier(random_state=0).fit(kind(x), Y).coef_ for kind in kinds]
    for coef in found[1:]:
        np.testing.assert_array_equal(coef, found[0])
    model = SGDClassifier(penalty="l1", alpha=0.05, random_state=0).fit(sparse.csr_array(x), Y)
    model.sparsify()
    assert model.coef_.nnz < 12
    np.testing.assert_array_equal(model.predict(x), model.densify().predict(x))


# -- streams --


def batches(x: Any, y: Any, size: int = 50) -> Any:
    return ((x[k : k + size], y[k : k + size]) for k in range(0, len(y), size))


@pytest.mark.parametrize("solver", ["hogwild", "cyclades"])
@pytest.mark.parametrize("average", [False, True])
def test_a_stream_learns_what_an_epoch_would(solver: str, average: bool) -> None:
    options = {"loss": "log_loss", "solver": solver, "average": average, "shuffle": False}
    stream = SGDClassifier(**options)
    for _ in range(3):
        for x, y in batches(X, Y):
            stream.partial_fit(x, y, classes=[0, 1])
    whole = SGDClassifier(**options, max_iter=3, tol=None).fit(X, Y)
    assert stream.t_ == whole.t_ == 1 + 3 * len(Y)
    np.testing.assert_allclose(stream.coef_, whole.coef_, rtol=0.3, atol=0.3)
    assert stream.score(X, Y) > whole.score(X, Y) - 0.05


def test_a_stream_of_one_batch_is_a_fit_of_one_epoch() -> None:
    options = {"random_state": 0, "loss": "squared_error", "learning_rate": "invscaling"}
    stream = SGDRegressor(**options).partial_fit(XR, YR)
    whole = SGDRegressor(**options, max_iter=1, tol=None).fit(XR, YR)
    np.testing.assert_array_equal(stream.coef_, whole.coef_)
    np.testing.assert_array_equal(stream.intercept_, whole.intercept_)


def test_a_stream_can_be_pickled_between_batches_and_follow_a_fit() -> None:
    parts = list(batches(X, Y, 100))
    through, stopped = SGDClassifier(average=True), SGDClassifier(average=True)
    for x, y in parts:
        through.partial_fit(x, y, classes=[0, 1])
    for x, y in parts:
        stopped = pickle.loads(pickle.dumps(stopped)).partial_fit(x, y, classes=[0, 1])
    np.testing.assert_array_equal(stopped.coef_, through.coef_)
    fitted = SGDClassifier(random_state=0).fit(X, Y)
    before = fitted.t_
    fitted.partial_fit(X[:50], Y[:50])
    assert fitted.t_ == before + 50 and fitted.score(X, Y) > 0.7
    assert clone(fitted).get_params() == fitted.get_params()


def test_streams_refuse_what_scikit_learn_refuses() -> None:
    with pytest.raises(ValueError, match=r"classes must be passed on the first call"):
        SGDClassifier().partial_fit(X, Y)
    model = SGDClassifier().partial_fit(X, Y, classes=[0, 1])
    with pytest.raises(ValueError, match=r"X has 5 features, but SGDClassifier is expecting 12"):
        model.partial_fit(X[:, :5], Y)
    with pytest.raises(ValueError, match=r"is not the same as on last call"):
        model.partial_fit(X, Y, classes=[0, 2])
    with pytest.raises(ValueError, match=r"y holds \[7\], which are not in classes"):
        model.partial_fit(X, np.full(len(Y), 7))
    with pytest.raises(ValueError, match="early_stopping should be False"):
        SGDClassifier(early_stopping=True).partial_fit(X, Y, classes=[0, 1])
    with pytest.raises(ValueError, match="'balanced' is not supported for partial_fit"):
        SGDClassifier(class_weight="balanced").partial_fit(X, Y, classes=[0, 1])
    for name, value in (("plan", "data=2"), ("directory", "run"), ("resume", True)):
        with pytest.raises(ValueError, match=f"{name}=.* has no effect on partial_fit"):
            SGDRegressor(**{name: value}).partial_fit(XR, YR)


# -- threads, ranks, directories --


def test_cyclades_finds_the_same_on_any_number_of_threads() -> None:
    x = sparse.random_array((3000, 20_000), density=3e-4, rng=np.random.default_rng(0)).tocsr()
    y = (np.random.default_rng(1).random(3000) < 0.5).astype(int)
    options = {"loss": "log_loss", "solver": "cyclades", "random_state": 0, "max_iter": 20}
    found = [
        SGDClassifier(n_jobs=jobs, **options, tol=None).fit(x, y).coef_ for jobs in (None, 2, 3)
    ]
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])


def test_ranks_that_average_fit_as_well_as_one_whatever_the_order_of_rows() -> None:
    x, y = libsvm("a9a")
    order = np.argsort(y[:4000], kind="stable")  # the first rank's rows would be of one class
    x, y = x[order], y[order]
    options = {"loss": "log_loss", "random_state": 0, "alpha": 1e-3}
    one = SGDClassifier(**options).fit(x, y)
    two = SGDClassifier(**options, plan="data=2").fit(x, y)
    assert two.score(x, y) > one.score(x, y) - 0.02
    assert two.objective_ == pytest.approx(one.objective_, rel=0.05)


def test_a_run_directory_is_written_and_resumed(tmp_path: Path) -> None:
    options = {"loss": "log_loss", "random_state": 0, "tol": None, "average": True}
    whole = SGDClassifier(**options, max_iter=9).fit(X3, Y3)
    run = {"directory": str(tmp_path / "run"), "plan": "save=epoch"}
    SGDClassifier(**options, max_iter=4, **run).fit(X3, Y3)
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"class-0", "class-1", "class-2"}
    second = SGDClassifier(**options, max_iter=9, **run, resume=True).fit(X3, Y3)
    np.testing.assert_array_equal(second.coef_, whole.coef_)
    assert second.n_iter_ == 9 and second.run_directory_


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "solver": ({"solver": "sdca"}, r"must be a str among \['hogwild', 'cyclades'\]"),
    "rate of a solver": ({"solver": LinearHogwild(decay=0.5)}, "decay has no effect"),
    "loss": ({"loss": "huge"}, "The 'loss' parameter of SGDClassifier must be a str among"),
    "alpha": ({"alpha": -1.0}, "The 'alpha' parameter of SGDClassifier must be a float in"),
    "no alpha": ({"alpha": 0.0}, "alpha must be > 0 since learning_rate is 'optimal'"),
    "pa1": ({"learning_rate": "pa1", "loss": "log_loss"}, "only works with loss 'hinge'"),
    "l1_ratio": ({"penalty": "elasticnet", "l1_ratio": None}, "l1_ratio must be set"),
    "threads": ({"n_jobs": 0}, "a number of threads, or -1"),
    "early": ({"early_stopping": True, "plan": "data=2"}, "works in this process, without plan="),
    "columns": ({"plan": "tensor=2 split=by_feature"}, "does not support split=by_feature"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_effect_is_refused_by_name(case: str) -> None:
    options, said = REFUSED[case]
    with pytest.raises(ValueError, match=said):
        SGDClassifier(**options).fit(X, Y)


def test_words_of_a_plan_without_effect_are_refused() -> None:
    with pytest.raises(PlanError, match="seed=3 has no effect on a linear model"):
        SGDClassifier(plan="seed=3").fit(X, Y)


def test_a_solver_object_brings_its_own_options() -> None:
    model = SGDClassifier(solver=Cyclades(batch=16, keep=1), random_state=0).fit(X, Y)
    assert model.score(X, Y) > 0.7
    model = SGDClassifier(solver=LinearHogwild(writes="atomic"), n_jobs=2, random_state=0).fit(X, Y)
    assert model.score(X, Y) > 0.7
