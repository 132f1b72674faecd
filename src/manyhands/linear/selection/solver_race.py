"""Race of solvers: several estimators on one objective until each is near enough to its minimum.

    race(X, y, {"newton": LogisticRegression(solver="newton"),
                "sdca, 2 ranks": LogisticRegression(solver="sdca", plan="data=2")}, target=1e-6)

The target is a duality gap, relative to the objective without features (`tol` of the estimators),
so that no run is called done which is not. Every round is certified; seconds and bytes of
certificates are left out, those of exchanges are in. Compiled loops are loaded before.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning

from manyhands.core import Goal
from manyhands.errors import ManyhandsError
from manyhands.linear.estimators.base import LinearEstimator
from manyhands.observe import convergence
from manyhands.observe.events import read
from manyhands.observe.race import live, text_table
from manyhands.observe.race.results import Entry, Race, RunResult, follow, say_target
from manyhands.plan import words as plan_words
from manyhands.recover import directory

PICTURE, RESULTS = "race.png", "results.json"


@dataclasses.dataclass(frozen=True)
class RaceReport:
    """What a race found, and where its files are."""

    race: Race
    directory: Path
    picture: Path

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(highlight=False, width=130, no_color=True)
        with console.capture() as text:
            console.print(text_table.table(self.race, console.width))
            for label, result in text_table.failures(self.race):
                console.print(f"{label}, seed {result.seed}: {result.error}", markup=False)
            console.print(text_table.verdict(self.race), markup=False)
        return text.get()


def race(
    X: Any,
    y: Any,
    estimators: Mapping[str, LinearEstimator],
    target: float = 1e-4,
    *,
    seeds: int = 1,
    folder: str | Path | None = None,
    quiet: bool = False,
) -> RaceReport:
    """Fit each estimator until its gap is `target` times the objective without features, with each
    seed; returns the results, the fastest first, and draws them. `folder`: for the runs."""
    if not estimators:
        raise ValueError("no estimator is given; a dict of names and estimators is needed")
    for label, estimator in estimators.items():
        _refuse_uncertified(label, estimator)
    if not 0 < target < 1:
        raise ValueError(f"target={target!r}: a gap between 0 and 1 is needed, such as 1e-6")
    if seeds < 1:
        raise ValueError(f"seeds={seeds!r} is given; 1 or more is needed")
    folders = {label: _folder_name(label) for label in estimators}
    if len(set(folders.values())) < len(folders):
        raise ValueError(f"the names {', '.join(folders)} are too alike for folders of runs")
    path = directory.choose(Path("runs"), "linear-race", None, False) if folder is None else folder
    path = Path(path)
    if path.exists() and any(path.iterdir()):
        raise ValueError(f"{path} is not empty; give another folder for the race")
    goal = Goal("relative_gap", target, at_most=True)
    stream = None if quiet else sys.stdout
    runs: dict[str, list[RunResult]] = {label: [] for label in estimators}
    for estimator in estimators.values():
        _warm_up(estimator, X, y)
    # seed by seed: a busy minute of the machine affects all, and each has a result early
    for seed in range(seeds):
        for label, estimator in estimators.items():
            run = path / folders[label] / f"seed-{seed}"
            runs[label].append(_run(estimator, X, y, target, seed, run, goal))
            live.line(stream, "race", f"{label}, seed {seed}: {_said(runs[label][-1])}")
            _refuse_others({k: path / folders[k] / "seed-0" for k in estimators})
    found = Race(goal, [Entry(k, repr(estimators[k]), done) for k, done in runs.items()])
    (path / RESULTS).write_text(json.dumps(found.plain(), indent=1) + "\n")
    names = [e.label for e in found.entries if e.ran]
    drawn = [path / folders[name] / "seed-0" for name in names]
    picture, title = path / PICTURE, f"The race to {say_target(goal)}"
    if drawn:
        convergence.draw(drawn, picture, names, title)
    report = RaceReport(found, path, picture)
    if stream is not None:
        print(report)
        print(f"{'picture':<12}{picture}")
    return report


def _refuse_uncertified(label: str, estimator: Any) -> None:
    if not isinstance(estimator, LinearEstimator) or "record" not in estimator.get_params():
        raise TypeError(
            f"{label!r} is {type(estimator).__name__}, which certifies no duality gap round by "
            "round; estimators of manyhands.linear that minimise an objective are needed: "
            "LogisticRegression, LinearSVC, LinearRegression, Ridge, Lasso, ElasticNet. Time "
            "others beside it"
        )


def _warm_up(estimator: LinearEstimator, X: Any, y: Any) -> None:
    """One round in this process, so that its loops are compiled and loaded."""
    known = estimator.get_params()
    plain = {"max_iter": 1, "directory": None, "plan": "", "verbose": 0}
    options = {name: value for name, value in plain.items() if name in known}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        try:
            clone(estimator).set_params(**options).fit(X, y)
        except (ManyhandsError, ValueError):
            pass  # the race says so


def _run(
    estimator: LinearEstimator,
    X: Any,
    y: Any,
    target: float,
    seed: int,
    run: Path,
    goal: Goal,
) -> RunResult:
    words = plan_words.overlay(estimator.plan or "", "save=off")
    options = {"plan": plan_words.line(words), "directory": str(run), "tol": target, "record": True}
    known = estimator.get_params()
    if "random_state" in known:
        options["random_state"] = seed
    error = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        try:
            clone(estimator).set_params(**options).fit(X, y)
        except (ManyhandsError, ValueError) as e:
            error = str(e).strip().splitlines()[-1] if str(e).strip() else type(e).__name__
    if error and not (run / "events").exists():
        return RunResult(seed, error=error)
    return follow(run, seed, goal, None if y is None else len(y), error=error)


def _said(result: RunResult) -> str:
    if result.error:
        return f"failed: {result.error}"
    if result.reached is None:
        return f"not reached: best {result.best:.2g} in {text_table.seconds(result.seconds)}"
    epochs = f"{result.reached.epoch:g} rounds"
    return f"{result.reached.value:.2g} after {text_table.seconds(result.time_s)}, {epochs}"


def _folder_name(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9.=_-]+", "-", label).strip("-") or "run"


def _refuse_others(runs: Mapping[str, Path]) -> None:
    """Runs compare only where all minimise the same."""
    first: tuple[str, dict[str, Any]] | None = None
    for label, run in runs.items():
        if not (run / "events").exists():
            continue
        told = next((e.value for e in read(run) if e.name == "objective"), "{}")
        model: dict[str, Any] = json.loads(str(told))
        first = first or (label, model)
        others = [k for k, value in model.items() if first[1].get(k) != value]
        if others:
            raise ValueError(
                f"{first[0]!r} and {label!r} minimise different objectives ({', '.join(others)} "
                "differ), so their gaps do not compare; give them the same parameters"
            )
