"""Linear models: scikit-learn style estimators over sparse data, on threads and processes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyhands.linear.estimators.logistic import LogisticRegression
    from manyhands.linear.estimators.regression import ElasticNet, Lasso, LinearRegression, Ridge
    from manyhands.linear.estimators.sgd import SGDClassifier, SGDRegressor
    from manyhands.linear.estimators.svc import LinearSVC
    from manyhands.linear.solver_race import race

__all__ = [
    "ElasticNet",
    "Lasso",
    "LinearRegression",
    "LinearSVC",
    "LogisticRegression",
    "Ridge",
    "SGDClassifier",
    "SGDRegressor",
    "race",
]

ESTIMATORS = "manyhands.linear.estimators"
# loaded when they are asked for: the ranks of a fit need no estimator, and no scikit-learn
WHERE = {
    "ElasticNet": f"{ESTIMATORS}.regression",
    "Lasso": f"{ESTIMATORS}.regression",
    "LinearRegression": f"{ESTIMATORS}.regression",
    "LinearSVC": f"{ESTIMATORS}.svc",
    "LogisticRegression": f"{ESTIMATORS}.logistic",
    "Ridge": f"{ESTIMATORS}.regression",
    "SGDClassifier": f"{ESTIMATORS}.sgd",
    "SGDRegressor": f"{ESTIMATORS}.sgd",
    "race": "manyhands.linear.solver_race",
}


def __getattr__(name: str) -> Any:
    if name not in WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
