"""Linear models: scikit-learn style estimators over sparse data, on threads and processes."""

from manyhands.linear.catalogue import SOLVERS
from manyhands.linear.estimators.logistic import LogisticRegression
from manyhands.linear.estimators.regression import ElasticNet, Lasso, LinearRegression, Ridge
from manyhands.linear.estimators.svc import LinearSVC

__all__ = [
    "SOLVERS",
    "ElasticNet",
    "Lasso",
    "LinearRegression",
    "LinearSVC",
    "LogisticRegression",
    "Ridge",
]
