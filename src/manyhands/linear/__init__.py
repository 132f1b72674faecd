"""Linear models: scikit-learn style estimators over sparse data, on threads and processes.

    model = LogisticRegression(C=0.5, plan="data=2").fit(X, y)
    model.solver_, model.solver_reason_, model.dual_gap_

Solvers are words, `solver="sdca"`, or objects with options, `solver=SDCA(epochs=2)`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyhands.linear.catalogue import SOLVERS
    from manyhands.linear.estimators.logistic import LogisticRegression
    from manyhands.linear.estimators.regression import ElasticNet, Lasso, LinearRegression, Ridge
    from manyhands.linear.estimators.sgd import SGDClassifier, SGDRegressor
    from manyhands.linear.estimators.svc import LinearSVC
    from manyhands.linear.selection.cross_validation import cross_validate
    from manyhands.linear.selection.grid_search import GridSearch
    from manyhands.linear.selection.solver_race import race

__all__ = [
    "SOLVERS",
    "ElasticNet",
    "GridSearch",
    "Lasso",
    "LinearRegression",
    "LinearSVC",
    "LogisticRegression",
    "Ridge",
    "SGDClassifier",
    "SGDRegressor",
    "cross_validate",
    "race",
]

ESTIMATORS = "manyhands.linear.estimators"
SOLVER_FILES = "manyhands.linear.solvers"
# loaded when they are asked for: the ranks of a fit need no estimator, and no scikit-learn
WHERE = {
    "SOLVERS": "manyhands.linear.catalogue",
    "ElasticNet": f"{ESTIMATORS}.regression",
    "GridSearch": "manyhands.linear.selection.grid_search",
    "Lasso": f"{ESTIMATORS}.regression",
    "LinearRegression": f"{ESTIMATORS}.regression",
    "LinearSVC": f"{ESTIMATORS}.svc",
    "LogisticRegression": f"{ESTIMATORS}.logistic",
    "Ridge": f"{ESTIMATORS}.regression",
    "SGDClassifier": f"{ESTIMATORS}.sgd",
    "SGDRegressor": f"{ESTIMATORS}.sgd",
    "cross_validate": "manyhands.linear.selection.cross_validation",
    "race": "manyhands.linear.selection.solver_race",
    # solvers with options
    "BFGS": f"{SOLVER_FILES}.bfgs",
    "Cyclades": f"{SOLVER_FILES}.cyclades",
    "DFP": f"{SOLVER_FILES}.dfp",
    "FTRL": f"{SOLVER_FILES}.ftrl",
    "LinearHogwild": f"{SOLVER_FILES}.hogwild",
    "LinearADMM": f"{SOLVER_FILES}.admm",
    "LinearLBFGS": f"{SOLVER_FILES}.lbfgs",
    "Newton": f"{SOLVER_FILES}.newton",
    "NewtonCG": f"{SOLVER_FILES}.newton_cg",
    "OLBFGS": f"{SOLVER_FILES}.olbfgs",
    "SAGA": f"{SOLVER_FILES}.saga",
    "SCD": f"{SOLVER_FILES}.scd",
    "SDCA": f"{SOLVER_FILES}.sdca",
    "SQN": f"{SOLVER_FILES}.sqn",
}


def __getattr__(name: str) -> Any:
    if name not in WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(WHERE[name]), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("sklearn", "scipy"):
            raise
        raise ModuleNotFoundError(
            f"manyhands.linear.{name} needs scikit-learn, which is not installed; "
            "pip install 'manyhands[sklearn]'",
            name=error.name,
        ) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *WHERE})
