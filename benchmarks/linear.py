"""Linear models: seconds of `fit` until the objective is within 1e-4 of its minimum, relatively.

On a9a (32,561 x 123) and on synthetic sparse rows (500,000 x 50,000, 50 non-zeros each):

    a9a_1, sparse_1         logistic regression with l2, one thread, against the fastest of
                            scikit-learn's solvers: liblinear (primal and dual), saga, lbfgs,
                            newton-cg and, where 50,000^2 numbers need not fit, newton-cholesky
    a9a_2, sparse_2         two threads of ours; scikit-learn's BLAS has two as well
    lasso_sklearn           Lasso at 1/100 of the l1 at which all coefficients are zero
    lasso_celer, _skglm     the same against celer and skglm
    ridge                   against the fastest of scikit-learn's Ridge solvers
    spark                   logistic regression on the sparse rows with two threads, against Spark
                            MLlib on local[2], whose rows are cached in memory before

Every solver is first given tolerances (or numbers of iterations), from loose to tight, until one is
enough; then all fit again in turn with those, and the medians count. Nobody fits an intercept,
because liblinear would penalise it. Rows are CSR with 32-bit indices for all. The minimum is the
lowest objective that our duality gap bounds to 1e-9.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sparse
import sklearn.linear_model as sk
from common import Claim, alternate, median
from sklearn.datasets import load_svmlight_file
from threadpoolctl import threadpool_limits

import manyhands.linear as ours
from manyhands.linear.data import SyntheticRows, write_libsvm
from manyhands.linear.data.blocks import RowBlock

BARS = {
    "a9a_1": 1.0,
    "a9a_2": 1.5,
    "sparse_1": 1.0,
    "sparse_2": 1.5,
    "lasso_sklearn": 1.0,
    "lasso_celer": 1.0,
    "lasso_skglm": 1.0,
    "ridge": 1.0,
    "spark": 10.0,
}
NEAR = 1e-4  # (P - P*) / P*
TOLERANCES = [10.0**e for e in (0, -0.5, -1, -1.5, -2, -2.5, -3, -3.5, -4, -5, -6, -7, -8)]
ITERATIONS = [1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 30, 50, 100, 200, 500, 1000]


@dataclass
class Solver:
    """Something that fits, and the settings to try, from the loosest on."""

    fit: Callable[[Any], np.ndarray]  # setting -> coefficients
    settings: list[Any] = field(default_factory=lambda: TOLERANCES)
    setting: Any = None
    threads: int = 1

    def seconds(self) -> float:
        with warnings.catch_warnings(), threadpool_limits(self.threads):
            warnings.simplefilter("ignore")
            start = time.perf_counter()
            self.fit(self.setting)
            return time.perf_counter() - start

    def tune(self, objective: Callable[[np.ndarray], float], lowest: float) -> bool:
        """Take the loosest setting that reaches the minimum."""
        for setting in self.settings:
            with warnings.catch_warnings(), threadpool_limits(self.threads):
                warnings.simplefilter("ignore")
                w = self.fit(setting)
            if objective(w) - lowest <= NEAR * lowest:
                self.setting = setting
                return True
        return False


def race(
    solvers: dict[str, Solver], objective: Callable[[np.ndarray], float], lowest: float, times: int
) -> dict[str, float]:
    """Median seconds of those that reach the minimum at all."""
    able = {name: s for name, s in solvers.items() if s.tune(objective, lowest)}
    found = alternate({name: s.seconds for name, s in able.items()}, times)
    return {name: median(seconds) for name, seconds in found.items()}


def claim(name: str, found: dict[str, float], own: str, peers: list[str], **more: Any) -> Claim:
    """Ours against the fastest of `peers`."""
    fastest = min((p for p in peers if p in found), key=found.__getitem__, default=None)
    if fastest is None:
        return Claim(name, skipped=f"none of {', '.join(peers)} is here, or came near the minimum")
    detail = {k: f"{v:.3f} s" for k, v in sorted(found.items(), key=lambda item: item[1])}
    return Claim(
        name, found[own], found[fastest], "s", found[fastest] / found[own], BARS[name],
        {"fastest peer": fastest, **detail, **more},
    )  # fmt: skip


# -- data --


def a9a() -> tuple[Any, np.ndarray] | None:
    path = Path(os.environ.get("MANYHANDS_DATA", "")) / "libsvm" / "a9a"
    if not path.is_file():
        return None
    x, y = load_svmlight_file(str(path), n_features=123)
    return small_indices(x), y


def synthetic(quick: bool) -> tuple[Any, np.ndarray]:
    rows, columns = (50_000, 10_000) if quick else (500_000, 50_000)
    blocks = list(SyntheticRows(rows, columns, 50, seed=1).blocks())
    arrays = [np.concatenate([getattr(b, k) for b in blocks]) for k in ("values", "indices")]
    indptr = np.arange(0, 50 * rows + 1, 50)
    x = sparse.csr_matrix((*arrays, indptr), shape=(rows, columns))
    return small_indices(x), np.concatenate([b.labels for b in blocks])


def small_indices(x: Any) -> Any:
    """liblinear takes 32-bit indices only."""
    x.indices, x.indptr = x.indices.astype(np.int32), x.indptr.astype(np.int32)
    return x


# -- logistic regression --


def logistic_objective(x: Any, y: np.ndarray) -> Callable[[np.ndarray], float]:
    return lambda w: float(np.logaddexp(0.0, -y * (x @ w)).sum() + 0.5 * (w @ w))


def logistic(x: Any, y: np.ndarray, threads: int) -> dict[str, Solver]:
    """Ours and scikit-learn's solvers, C = 1."""

    def own(tol: float) -> np.ndarray:
        model = ours.LogisticRegression(fit_intercept=False, tol=tol, n_jobs=threads)
        return model.fit(x, y).coef_.ravel()

    def peer(solver: str, dual: bool = False) -> Callable[[Any], np.ndarray]:
        def fit(setting: Any) -> np.ndarray:
            limit = {"max_iter": setting} if solver == "saga" else {"tol": setting}
            model = sk.LogisticRegression(
                fit_intercept=False, solver=solver, dual=dual, **({"max_iter": 1000} | limit)
            )
            if solver == "saga":
                model.tol = 1e-12
            return model.fit(x, y).coef_.ravel()

        return fit

    solvers = {
        "manyhands": Solver(own),
        "liblinear": Solver(peer("liblinear")),
        "liblinear dual": Solver(peer("liblinear", True)),
        "saga": Solver(peer("saga"), ITERATIONS),
        "lbfgs": Solver(peer("lbfgs")),
        "newton-cg": Solver(peer("newton-cg")),
    }
    if x.shape[1] <= 5000:
        solvers["newton-cholesky"] = Solver(peer("newton-cholesky"))
    for solver in solvers.values():
        solver.threads = threads
    return solvers


def logistic_claims(name: str, x: Any, y: np.ndarray, times: int, only: list[str]) -> list[Claim]:
    claims, objective = [], logistic_objective(x, y)
    exact = ours.LogisticRegression(fit_intercept=False, tol=1e-9, max_iter=1000).fit(x, y)
    for threads in (1, 2):
        if not only or f"{name}_{threads}" in only:
            solvers = logistic(x, y, threads)
            found = race(solvers, objective, exact.objective_, times)
            peers = [p for p in solvers if p != "manyhands"]
            chosen = {"solver": f"{exact.solver_} ({exact.solver_reason_})"}
            claims.append(claim(f"{name}_{threads}", found, "manyhands", peers, **chosen))
    return claims


# -- least squares --


def targets(x: Any, seed: int = 0) -> np.ndarray:
    """A sparse truth plus noise of a tenth of its size."""
    random = np.random.default_rng(seed)
    w = np.where(random.random(x.shape[1]) < 0.02, random.normal(size=x.shape[1]), 0.0)
    z = x @ w
    return z + 0.1 * z.std() * random.normal(size=len(z))


def lasso_claims(x: Any, times: int) -> list[Claim]:
    n, y = x.shape[0], targets(x)
    columns = x.tocsc()
    alpha = 0.01 * float(np.abs(x.T @ y).max()) / n
    objective = lambda w: float(((x @ w - y) ** 2).sum() / (2 * n) + alpha * np.abs(w).sum())
    exact = ours.Lasso(alpha, fit_intercept=False, tol=1e-10).fit(columns, y)
    lowest = objective(exact.coef_)

    def fit(make: Callable[[Any], Any]) -> Callable[[Any], np.ndarray]:
        return lambda tol: np.ravel(make(tol).fit(columns, y).coef_)

    solvers = {
        "manyhands": Solver(fit(lambda t: ours.Lasso(alpha, fit_intercept=False, tol=t))),
        "scikit-learn": Solver(fit(lambda t: sk.Lasso(alpha, fit_intercept=False, tol=t))),
    }
    claims = []
    for package in ("celer", "skglm"):
        try:
            peer = __import__(package).Lasso
        except ImportError:
            claims.append(Claim(f"lasso_{package}", skipped=f"{package} is not installed"))
            continue
        solvers[package] = Solver(fit(lambda t, peer=peer: peer(alpha, fit_intercept=False, tol=t)))
    found = race(solvers, objective, lowest, times)
    used = {"non-zero coefficients": int(np.count_nonzero(exact.coef_))}
    for package, peer in (("sklearn", "scikit-learn"), ("celer", "celer"), ("skglm", "skglm")):
        if peer in solvers:
            claims.append(claim(f"lasso_{package}", found, "manyhands", [peer], **used))
    return claims


def ridge_claims(x: Any, times: int) -> list[Claim]:
    y = targets(x)
    objective = lambda w: float(0.5 * ((x @ w - y) ** 2).sum() + 0.5 * (w @ w))
    lowest = objective(ours.Ridge(1.0, fit_intercept=False, tol=1e-12).fit(x, y).coef_)

    def peer(solver: str) -> Solver:
        fit = lambda t: sk.Ridge(1.0, fit_intercept=False, solver=solver, tol=t).fit(x, y).coef_
        return Solver(fit)

    own = lambda t: ours.Ridge(1.0, fit_intercept=False, tol=t).fit(x, y).coef_
    solvers = {"manyhands": Solver(own)}
    solvers |= {f"scikit-learn {s}": peer(s) for s in ("sparse_cg", "lsqr", "sag", "saga")}
    found = race(solvers, objective, lowest, times)
    return [claim("ridge", found, "manyhands", [s for s in solvers if s != "manyhands"])]


# -- Spark --


def while_asleep(process: int, fit: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`fit` while a process is stopped: an idle Java machine's threads take a tenth of ours."""

    def alone(setting: Any) -> Any:
        os.kill(process, signal.SIGSTOP)
        try:
            return fit(setting)
        finally:
            os.kill(process, signal.SIGCONT)

    return alone


def spark_claims(x: Any, y: np.ndarray, times: int) -> list[Claim]:
    try:
        from pyspark.ml.classification import LogisticRegression
        from pyspark.sql import SparkSession
    except ImportError:
        return [Claim("spark", skipped="pyspark is not installed")]
    objective, threads = logistic_objective(x, y), 2
    exact = ours.LogisticRegression(fit_intercept=False, tol=1e-9, max_iter=1000).fit(x, y)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.libsvm"
        labels = (y > 0).astype(float)  # Spark's classes are 0 and 1
        block = RowBlock(x.indptr.astype(np.int64), x.indices, x.data, labels)
        write_libsvm([block], path, digits=9)
        session = (
            SparkSession.builder.master("local[2]")
            .config("spark.driver.memory", "8g")
            .config("spark.ui.enabled", "false")
            .config("spark.local.dir", folder)
            .getOrCreate()
        )
        try:
            session.sparkContext.setLogLevel("ERROR")
            reader = session.read.format("libsvm").option("numFeatures", x.shape[1])
            rows = reader.load(str(path)).repartition(2).cache()
            rows.count()

            def fit(iterations: int) -> np.ndarray:
                model = LogisticRegression(
                    regParam=1.0 / len(y), standardization=False, fitIntercept=False,
                    maxIter=iterations, tol=1e-12,
                )  # fmt: skip
                return np.asarray(model.fit(rows).coefficients.toArray())

            own = logistic(x, y, threads)["manyhands"]
            own.fit = while_asleep(session.sparkContext._gateway.proc.pid, own.fit)
            solvers = {"manyhands": own, "Spark MLlib": Solver(fit, ITERATIONS)}
            found = race(solvers, objective, exact.objective_, times)
        finally:
            session.stop()
    return [claim("spark", found, "manyhands", ["Spark MLlib"])]


def measure(quick: bool, only: list[str]) -> list[Claim]:
    times, claims = (3 if quick else 5), []
    wanted = lambda *names: not only or any(o.startswith(names) for o in only)
    if wanted("a9a"):
        rows = a9a()
        if rows is None:
            claims.append(Claim("a9a_1", skipped="no a9a: set MANYHANDS_DATA"))
        else:
            claims += logistic_claims("a9a", *rows, 3 * times, only)
    if not wanted("sparse", "lasso", "ridge", "spark"):
        return claims
    x, y = synthetic(quick)
    if wanted("sparse"):
        claims += logistic_claims("sparse", x, y, times, only)
    if wanted("lasso"):
        claims += lasso_claims(x, times)
    if wanted("ridge"):
        claims += ridge_claims(x, times)
    if wanted("spark"):
        claims += spark_claims(x, y, min(times, 3))
    return claims
