"""Linear estimators pass the checks of scikit-learn."""

import pytest

pytest.importorskip("sklearn")

from sklearn.utils.estimator_checks import parametrize_with_checks

from manyhands.linear import (
    ElasticNet,
    Lasso,
    LinearRegression,
    LinearSVC,
    LogisticRegression,
    Ridge,
)

ESTIMATORS = [
    LogisticRegression(),
    LogisticRegression(solver="newton"),
    LinearRegression(),
    Ridge(),
    Lasso(),
    ElasticNet(),
    LinearSVC(),
]


@parametrize_with_checks(ESTIMATORS)
def test_an_estimator_passes_the_checks_of_scikit_learn(estimator, check):
    check(estimator)
