"""Bad input is refused in scikit-learn's words, and no option is wrong in silence."""

import warnings

import numpy as np
import pytest
import scipy.sparse as sparse
from sklearn.datasets import make_classification, make_regression
from sklearn.exceptions import ConvergenceWarning, NotFittedError

from manyhands.errors import PlanError
from manyhands.linear import (
    ElasticNet,
    Lasso,
    LinearRegression,
    LinearSVC,
    LogisticRegression,
    Ridge,
    SGDClassifier,
    SGDRegressor,
)

X, Y = make_classification(200, 10, random_state=0)
XR, YR = make_regression(200, 10, noise=3.0, random_state=0)
CLASSIFIERS = (LogisticRegression, LinearSVC, SGDClassifier)
REGRESSORS = (LinearRegression, Ridge, Lasso, ElasticNet, SGDRegressor)
ALL = CLASSIFIERS + REGRESSORS


def data_of(kind):
    return (X, Y) if kind in CLASSIFIERS else (XR, YR)


@pytest.mark.parametrize("kind", ALL)
def test_rows_labels_and_weights_are_checked(kind):
    x, y = data_of(kind)
    for bad, words in ((np.nan, "contains NaN"), (np.inf, "contains infinity")):
        broken, target = x.copy(), y.astype(float)
        broken[3, 2], target[0] = bad, bad
        for rows in (broken, sparse.csr_matrix(broken), sparse.csc_matrix(broken)):
            with pytest.raises(ValueError, match=f"Input X {words}"):
                kind().fit(rows, y)
        with pytest.raises(ValueError, match=f"Input y {words}"):
            kind().fit(x, target)
    weights = {
        "Negative values in data passed to `sample_weight`": -np.ones(200),
        "must contain at least one non-zero number": np.zeros(200),
        r"sample_weight.shape == \(199,\), expected \(200,\)": np.ones(199),
        "Input sample_weight contains NaN": np.full(200, np.nan),
    }
    for words, given in weights.items():
        with pytest.raises(ValueError, match=words):
            kind().fit(x, y, sample_weight=given)
    for rows, words in ((x[:0], "0 sample"), (x[:, :0], "0 feature"), (x[:, 0], "Expected 2D")):
        with pytest.raises(ValueError, match=words):
            kind().fit(rows, y[: len(rows)])
    with pytest.raises(NotFittedError):
        kind().predict(x)
    with pytest.raises(ValueError, match=r"X has 5 features, but .* is expecting 10 features"):
        kind().fit(x, y).predict(x[:, :5])


@pytest.mark.parametrize("kind", ALL)
def test_numbers_out_of_range_are_refused(kind):
    x, y = data_of(kind)
    wrong = [("max_iter", 0), ("max_iter", 1.5), ("max_iter", "a"), ("tol", -1), ("tol", "a")]
    wrong += [("tol", np.nan), ("n_jobs", 0), ("n_jobs", 1.5), ("solver", "liblinear")]
    if "C" in kind().get_params():
        wrong += [("C", value) for value in (0, -1, np.nan, "1", None)]
    if "alpha" in kind().get_params():
        wrong += [("alpha", value) for value in (-1, np.nan, np.inf, "1", None)]
    for name, value in wrong:
        with pytest.raises(ValueError, match=name):
            kind(**{name: value}).fit(x, y)
    with pytest.raises(ValueError, match="'C' parameter"):
        LinearSVC(C=np.inf).fit(X, Y)


@pytest.mark.parametrize("kind", ALL)
def test_plan_words_without_effect_are_refused(kind):
    x, y = data_of(kind)
    for plan in ("data=2 merge=local_sgd", "tensor=2", "data=0", "dta=2", "epochs=3", "save=1"):
        with pytest.raises(PlanError, match=plan.split()[-1].partition("=")[0]):
            kind(plan=plan).fit(x, y)


@pytest.mark.parametrize("kind", (LogisticRegression, LinearSVC))
def test_classes_and_their_weights(kind):
    with pytest.raises(ValueError, match=r"at least 2 classes .* only one class"):
        kind().fit(X, np.zeros(200))
    for weights in ({0: -5, 1: 1}, {0: np.nan}, {0: 0, 1: 0}):
        with pytest.raises(ValueError, match="class_weight="):
            kind(class_weight=weights).fit(X, Y)
    names = np.where(Y > 0, "yes", "no")
    model = kind(class_weight={"no": 2, "yes": 1}).fit(X, names)
    assert set(model.predict(X)) == {"no", "yes"}
    with pytest.warns(ConvergenceWarning, match="failed to converge after 1 rounds"):
        kind(max_iter=1).fit(X, Y)


def test_a_solver_that_cannot_names_those_that_can():
    for solver in ("lbfgs", "sdca"):
        with pytest.raises(ValueError, match="'scd', 'admm', 'ftrl', 'saga'") as e:
            LogisticRegression(solver=solver, l1_ratio=1.0).fit(X, Y)
        assert "'sdca'" not in str(e.value)  # it needs l2, so l1 alone is not for it
    with pytest.raises(ValueError, match="No solver supports 'l1' penalty with 3 classes"):
        LogisticRegression(l1_ratio=1.0).fit(X, Y + (X[:, 0] > 1))


def test_penalties_of_ridge_match_its_targets():
    with pytest.raises(ValueError, match="targets and number of penalties do not correspond: 2"):
        Ridge(alpha=[1.0, 2.0, 3.0]).fit(XR, np.c_[YR, YR])


def test_indices_outside_of_a_sparse_matrix_are_refused():
    rows = sparse.csr_matrix(X)
    for wrong in (99, -1):
        rows.indices[5] = wrong
        with pytest.raises(ValueError, match="outside of it"):
            LogisticRegression().fit(rows, Y)


BAD_LINES = {
    "foo": "'foo' does not parse",
    "1:x": "'1:x' does not parse",
    "3:1 1:2": "sorted and unique, but 1 follows 3",
    "2:1 2:3": "sorted and unique, but 2 follows 2",
    "-2:1": "Invalid index -2",
    "2:nan": "contains NaN or infinity",
    "3000000000:1": "index 3000000000 is too large",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_libsvm_line_that_does_not_parse_is_named(tmp_path, line):
    path = tmp_path / "rows.libsvm"
    path.write_text(f"1 1:1 2:2\n-1 1:2\n1 {line}\n")
    with pytest.raises(ValueError, match=f"rows.libsvm, line 3: .*{BAD_LINES[line]}"):
        LogisticRegression().fit(path)


def test_a_file_without_rows_is_refused(tmp_path):
    (tmp_path / "empty.libsvm").write_text("")
    with pytest.raises(ValueError, match="0 sample"):
        LogisticRegression().fit(tmp_path / "empty.libsvm")


@pytest.mark.parametrize("solver", ("auto", "scd", "newton", "newton_cg", "lbfgs", "admm", "saga"))
def test_without_a_penalty_every_exact_solver_finds_the_minimum(solver):
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        model = LinearRegression(solver=solver, max_iter=2000, tol=1e-8).fit(XR, YR)
    w = np.linalg.lstsq(np.c_[XR, np.ones(200)], YR, rcond=None)[0]
    np.testing.assert_allclose(model.coef_, w[:-1], rtol=1e-3, atol=1e-2)
    LinearRegression(positive=True).fit(XR - 0.3, YR)


def test_a_column_of_huge_scale_is_no_reason_to_drop_the_others():
    scale = np.ones(10)
    scale[0] = 1e8
    plain, scaled = LinearRegression().fit(XR, YR), LinearRegression().fit(XR * scale, YR)
    np.testing.assert_allclose(scaled.coef_ * scale, plain.coef_, rtol=1e-6)
    model = LogisticRegression().fit(X * scale, Y)
    assert model.dual_gap_ < 0.1
    assert model.score(X * scale, Y) > 0.9


def test_warm_start_goes_on_from_sparse_coefficients():
    model = LogisticRegression(warm_start=True).fit(X, Y).sparsify()
    np.testing.assert_allclose(model.fit(X, Y).coef_, LogisticRegression().fit(X, Y).coef_, 1e-3)


@pytest.mark.parametrize("kind", (LinearRegression, Ridge, Lasso))
def test_targets_whose_squares_overflow_are_refused(kind):
    with pytest.raises(ValueError, match="overflow occurred: the objective without features"):
        kind().fit(XR, YR * 1e300)


def test_derivatives_that_overflow_are_refused_with_what_to_do():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for kind in (LogisticRegression, LinearSVC):
            with pytest.raises(ValueError, match="overflow occurred in the derivatives"):
                kind().fit(X * 1e200, Y)


def test_solvers_that_are_named_can_do_all_that_is_asked_for():
    refused = {
        "'hogwild', 'cyclades' can; 'scd' can split": LinearRegression(
            positive=True, plan="data=2", solver="scd"
        ),
        "no solver can do all": LinearSVC(loss="hinge", plan="tensor=2 split=by_feature"),
        "'scd' can": ElasticNet(solver="lbfgs", plan="tensor=2 split=by_feature"),
    }
    for words, model in refused.items():
        with pytest.raises(ValueError, match=words):
            model.fit(X, Y)
    with pytest.raises(ValueError, match="Got 'newton-cg' instead; here 'newton_cg' does its work"):
        LogisticRegression(solver="newton-cg").fit(X, Y)


def test_dual_chooses_between_solvers_of_a_support_vector_machine():
    assert LinearSVC(dual=True).fit(X, Y).solver_ == "sdca"
    assert LinearSVC(dual=False).fit(X, Y).solver_ != "sdca"
    refused = {
        "penalty='l1' and loss='squared_hinge' is not": LinearSVC("l1", dual=True),
        "penalty='l2' and loss='hinge' is not": LinearSVC(loss="hinge", dual=False),
        "dual=True with solver='newton'": LinearSVC(dual=True, solver="newton"),
        "dual=False with solver='sdca'": LinearSVC(dual=False, solver="sdca"),
        "'dual' parameter of LinearSVC": LinearSVC(dual="yes"),
    }
    for words, model in refused.items():
        with pytest.raises(ValueError, match=words):
            model.fit(X, Y)


@pytest.mark.parametrize("kind", (LogisticRegression, LinearSVC))
def test_an_unknown_class_weight_names_the_estimator(kind):
    with pytest.raises(ValueError, match=f"'class_weight' parameter of {kind.__name__}"):
        kind(class_weight="equal").fit(X, Y)


@pytest.mark.parametrize("solver", ("hogwild", "cyclades"))
def test_without_a_bound_a_step_that_fades_is_no_convergence(solver):
    with pytest.warns(ConvergenceWarning, match="failed to converge after 300 rounds"):
        LinearRegression(solver=solver, tol=1e-9, max_iter=300).fit(XR, YR)
