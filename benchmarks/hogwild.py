"""Stochastic steps of threads on one sparse logistic model: updates a second.

500,000 rows of 50 non-zeros in 50,000 columns, l2, no intercept; every row once an epoch:

    threads     Hogwild! on two threads against one thread; both make as many epochs, and their
                objectives at the end are in the table, as are 1, 2, 4, 8 and 16 threads where the
                machine has the cores
    lock        Hogwild! against the same steps with one lock around each, on as many threads
    cyclades    Cyclades, whose weights are those of serial SGD to the last bit, against Hogwild!
                on as many threads: rows of 50 non-zeros in 5,000,000 columns, which rarely
                conflict; plans are made anew every eighth epoch and their time counts
    crowded     the same on the 50,000 columns above, where a batch has 18 rows (no bar)

The two-thread claims are measured with two threads. The lock is a spin lock that gives its core
away after a while; a mutex of the operating system would be slower. Before anything is timed,
Cyclades must give one and the same weights on all numbers of threads, or the benchmark fails.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import Claim, alternate, cores, median

from manyhands.linear.data.blocks import concatenate
from manyhands.linear.data.synthetic import SyntheticRows
from manyhands.linear.losses import LOGISTIC
from manyhands.linear.passes.rows import InMemory, Rows, threads_of
from manyhands.linear.problem import Problem
from manyhands.linear.solvers.cyclades import Cyclades
from manyhands.linear.solvers.hogwild import LinearHogwild
from manyhands.linear.stochastic.epochs import Stochastic

ROWS, COLUMNS, FEW_CONFLICTS, EACH = 500_000, 50_000, 5_000_000, 50
EPOCHS = 8  # of one timing: Cyclades then makes one plan in it
BARS = {"threads": 1.7, "lock": 5.0, "cyclades": 0.8, "crowded": 0.0}


class Fit:
    """A solver at work on some threads."""

    def __init__(self, solver: Stochastic, data: tuple[Rows, np.ndarray], threads: int):
        rows, y = data
        self.stack = contextlib.ExitStack()
        self.pool = self.stack.enter_context(threads_of(threads))
        c = np.ones(rows.count)
        self.problem = Problem(
            InMemory(rows), y, c, LOGISTIC, l2=1.0, intercept=False, threads=self.pool
        )
        self.solver, self.theta = solver, np.zeros(self.problem.size)
        self.state: dict[str, Any] = solver.init(self.problem, self.theta)

    def epochs(self, count: int = EPOCHS) -> float:
        """Updates a second."""
        start = time.perf_counter()
        for _ in range(count):
            self.solver.round(self.problem, self.theta, self.state)
        return self.problem.source.count * count / (time.perf_counter() - start)

    def objective(self) -> float:
        return self.problem.objective(self.theta) / self.problem.total_weight

    def close(self) -> None:
        self.stack.close()


def synthetic(rows: int, columns: int) -> tuple[Rows, np.ndarray]:
    found = concatenate(SyntheticRows(rows, columns, EACH).blocks(), np.float64, columns)
    return Rows(found.indptr, found.indices, found.values, columns), found.labels


def timed(
    kinds: dict[str, tuple[Stochastic, int]], data: tuple[Rows, np.ndarray], times: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Median updates a second of each, and its objective after all epochs."""
    fits = {name: Fit(solver, data, threads) for name, (solver, threads) in kinds.items()}
    try:
        for fit in fits.values():
            fit.epochs(1)  # compiles
        runs: dict[str, Callable[[], float]] = {name: fit.epochs for name, fit in fits.items()}
        rates = {name: median(found) for name, found in alternate(runs, times).items()}
        return rates, {name: fit.objective() for name, fit in fits.items()}
    finally:
        for fit in fits.values():
            fit.close()


def check_exact(data: tuple[Rows, np.ndarray], counts: list[int]) -> None:
    """The same bits on all numbers of threads, on some of the rows."""
    rows, y = data
    some = rows.take(np.arange(min(rows.count, 50_000))), y[:50_000]
    found = []
    for threads in counts:
        fit = Fit(Cyclades(), some, threads)
        fit.epochs(2)
        fit.close()
        found.append(fit.theta)
    if not all(np.array_equal(theta, found[0]) for theta in found):
        raise AssertionError(f"Cyclades gave other weights on some of {counts} threads")


def in_words(rates: dict[str, float]) -> str:
    return ", ".join(f"{name} {rate / 1e6:.2f}" for name, rate in rates.items()) + " million/s"


def many_threads(data: tuple[Rows, np.ndarray], times: int, counts: list[int]) -> list[Claim]:
    kinds: dict[str, tuple[Stochastic, int]] = {}
    for t in counts:
        kinds[f"hogwild {t}"] = LinearHogwild(), t
        kinds[f"lock {t}"] = LinearHogwild(writes="locked"), t
    kinds["atomic 2"] = LinearHogwild(writes="atomic"), 2
    rates, objectives = timed(kinds, data, times)
    ours, lock = rates["hogwild 2"], rates["lock 2"]
    table = {
        "Hogwild!": in_words({f"{t}": rates[f"hogwild {t}"] for t in counts}),
        "speed-up": ", ".join(
            f"{t}: {rates[f'hogwild {t}'] / rates['hogwild 1']:.2f}x" for t in counts
        ),
        "mean objective": ", ".join(f"{t}: {objectives[f'hogwild {t}']:.6f}" for t in counts),
        "atomic adds, 2 threads": f"{rates['atomic 2'] / 1e6:.2f} million/s",
    }
    locks = {
        "one lock": in_words({f"{t}": rates[f"lock {t}"] for t in counts}),
        "over one lock": ", ".join(
            f"{t}: {rates[f'hogwild {t}'] / rates[f'lock {t}']:.2f}x" for t in counts
        ),
    }
    unit, one = "updates/s", rates["hogwild 1"]
    return [
        Claim("threads", ours, one, unit, ours / one, BARS["threads"], table),
        Claim("lock", ours, lock, unit, ours / lock, BARS["lock"], locks),
    ]


def serial_equal(name: str, data: tuple[Rows, np.ndarray], times: int, counts: list[int]) -> Claim:
    check_exact(data, sorted({1, 2, 3, *counts}))
    kinds: dict[str, tuple[Stochastic, int]] = {}
    for t in counts:
        kinds[f"cyclades {t}"] = Cyclades(keep=EPOCHS), t
        kinds[f"hogwild {t}"] = LinearHogwild(), t
    kinds["drawn anew 2"] = Cyclades(keep=1), 2
    rates, objectives = timed(kinds, data, times)
    ours, peer = rates["cyclades 2"], rates["hogwild 2"]
    table = {
        "Cyclades": in_words({f"{t}": rates[f"cyclades {t}"] for t in counts}),
        "Hogwild!": in_words({f"{t}": rates[f"hogwild {t}"] for t in counts}),
        "batches drawn anew in each epoch": f"{rates['drawn anew 2'] / 1e6:.2f} million/s, "
        f"{rates['drawn anew 2'] / peer:.2f}x",
        "mean objective": f"{objectives['cyclades 2']:.6f}, Hogwild! {objectives['hogwild 2']:.6f}",
        "equal to serial": f"to the last bit on {sorted({1, 2, 3, *counts})} threads",
    }
    return Claim(name, ours, peer, "updates/s", ours / peer, BARS[name], table)


def measure(quick: bool, only: list[str]) -> list[Claim]:
    wanted = [name for name in BARS if not only or name in only]
    if cores() < 2:
        return [Claim(name, skipped="needs two cores") for name in wanted]
    rows, times = (100_000, 3) if quick else (ROWS, 9)
    counts = [t for t in (1, 2, 4, 8, 16) if t <= cores()]
    claims: dict[str, Claim] = {}
    crowded = synthetic(rows, COLUMNS)
    if {"threads", "lock"} & set(wanted):
        claims |= {claim.name: claim for claim in many_threads(crowded, times, counts)}
    if "crowded" in wanted:
        claims["crowded"] = serial_equal("crowded", crowded, times, counts)
    if "cyclades" in wanted:
        few = synthetic(rows, FEW_CONFLICTS)
        claims["cyclades"] = serial_equal("cyclades", few, times, counts)
    return [claims[name] for name in wanted]
