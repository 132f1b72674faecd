"""Fits with a run directory: plan words, events, checkpoints, exact resume. In this process; with
several in `tests/process/test_linear_process.py`."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")

import scipy.sparse as sparse

from manyhands.errors import CheckpointError, LaunchError, PlanError, RunBusy
from manyhands.linear import LinearSVC, LogisticRegression, Ridge
from manyhands.linear.catalogue import SOLVERS
from manyhands.linear.estimators.base import as_source
from manyhands.linear.fit_data import FitData, shared
from manyhands.linear.solvers.ftrl import FTRL
from manyhands.observe import convergence
from manyhands.observe.events import read
from manyhands.recover.checkpoint import Checkpoints

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


def rows(count: int = 300, columns: int = 12) -> tuple[Any, np.ndarray]:
    rng = np.random.default_rng(3)
    X = sparse.random_array((count, columns), density=0.4, rng=rng, format="csr")
    margins = X @ rng.standard_normal(columns) * 3 + 0.3 * rng.standard_normal(count)
    return X, (margins > np.median(margins)).astype(int)


X, Y = rows()


def logistic(directory: Path | None = None, **options: Any) -> LogisticRegression:
    given = {"solver": "sdca", "C": 10.0, **options}
    return LogisticRegression(directory=None if directory is None else str(directory), **given)


def coefficients(model: Any) -> np.ndarray:
    return np.append(model.coef_.ravel(), model.intercept_)


# -- words --


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("data=2 merge=local_sgd", "merge=local_sgd has no effect on a linear model; choose"),
        ("seed=3", "seed=3 has no effect on a linear model; give the estimator random_state"),
        ("epochs=3", "epochs=3 has no effect on a linear model; give the estimator max_iter"),
        ("pipe=2", "pipe=2 has no effect on a linear model"),
        ("tensor=2", "tensor=2 splits columns over ranks; say so with split=by_feature"),
        ("data=2 split=by_feature", "give tensor=2 alone"),
        ("data=2 tensor=2 split=by_feature", "give tensor=4 alone"),
        ("data=2 split=ordered", "rows are split over data= ranks as they are stored"),
        ("device=cuda", "linear models are computed on CPUs"),
        ("save=5", "save=5 has no effect on this fit: it is about checkpoints; give directory="),
        ("restarts=2", "restarts=2 has no effect on this fit"),
        ("link=gloo", "link=gloo has no effect on this fit: it is about several ranks"),
        ("grace_s=3", "grace_s=3 has no effect on this fit: it is about a run"),
        ("dta=2", "dta=2 has no effect on a linear model"),
        ("data=0", "at least 1 rank is needed"),
    ],
)
def test_a_word_without_effect_is_refused_by_name(words: str, said: str) -> None:
    with pytest.raises(PlanError) as found:
        logistic(plan=words).fit(X, Y)
    assert said in str(found.value)


def test_resume_needs_a_directory_that_holds_a_run(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="resume=True without a directory"):
        logistic(resume=True).fit(X, Y)
    with pytest.raises(CheckpointError, match="there is no run to resume"):
        logistic(tmp_path / "none", resume=True).fit(X, Y)


# -- the directory --


def test_a_run_leaves_its_plan_events_a_checkpoint_and_a_picture(tmp_path: Path) -> None:
    model = logistic(tmp_path / "run", record=True, tol=1e-6).fit(X, Y)
    assert model.run_directory_ == str(tmp_path / "run")
    there = {path.name for path in (tmp_path / "run").iterdir()}
    assert there >= {"plan.toml", "words.txt", "events", "checkpoints", "curves.png"}
    found = convergence.collect("run", read(tmp_path / "run"))
    assert found.finished and len(found.rounds) == model.n_iter_[0] == len(model.history_)
    assert [r.objective for r in found.rounds] == [r.objective for r in model.history_]
    assert found.rounds[-1].gap == model.dual_gap_
    rounds = [e for e in read(tmp_path / "run") if e.name == "round"]
    assert [e.round for e in rounds] == list(range(1, int(model.n_iter_[0]) + 1))


def test_a_run_without_record_certifies_fewer_and_fewer_rounds(tmp_path: Path) -> None:
    model = logistic(tmp_path, tol=1e-12, max_iter=30).fit(X, Y)
    assert [r.round for r in model.history_] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 30]


def test_a_directory_that_holds_a_run_is_not_written_over(tmp_path: Path) -> None:
    logistic(tmp_path).fit(X, Y)
    with pytest.raises(RunBusy, match="holds an earlier run"):
        logistic(tmp_path).fit(X, Y)


@pytest.mark.parametrize(
    ("words", "saved"),
    [("save=off", []), ("save=4 keep=2", [8, 10]), ("save=epoch keep=3", [8, 9, 10]), ("", [10])],
)
def test_checkpoints_are_saved_as_the_plan_says(
    tmp_path: Path, words: str, saved: list[int]
) -> None:
    logistic(tmp_path, plan=words, tol=1e-300, max_iter=10).fit(X, Y)
    names = [path.name for path in Checkpoints(tmp_path / "checkpoints").all()]
    assert names == [f"step-{round:08d}" for round in saved]


def test_each_of_several_fits_of_an_estimator_has_a_folder(tmp_path: Path) -> None:
    y = np.digitize(np.asarray(X.sum(axis=1)).ravel(), [1.8, 2.6])
    model = LinearSVC(solver="sdca", directory=str(tmp_path / "svc"), max_iter=5).fit(X, y)
    assert {p.name for p in (tmp_path / "svc").iterdir()} == {"class-0", "class-1", "class-2"}
    again = LinearSVC(solver="sdca", directory=str(tmp_path / "svc"), resume=True, max_iter=5).fit(
        X, y
    )
    np.testing.assert_array_equal(again.coef_, model.coef_)
    targets = np.asarray(X[:, :2].todense())
    Ridge(directory=str(tmp_path / "ridge"), solver="newton").fit(X[:, 2:], targets)
    assert {p.name for p in (tmp_path / "ridge").iterdir()} == {"target-0", "target-1"}


def test_verbose_tells_about_rounds(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plain = logistic(tol=1e-6).fit(X, Y)
    assert capfd.readouterr().out == ""
    told = logistic(tol=1e-6, verbose=1).fit(X, Y)
    out = capfd.readouterr().out
    assert "SDCA on 300 rows, 12 columns" in out and "round 1" in out and "converged after" in out
    np.testing.assert_array_equal(coefficients(told), coefficients(plain))
    logistic(tmp_path, tol=1e-6, verbose=1).fit(X, Y)
    out = capfd.readouterr().out
    assert "round 1" in out and "objective" in out and "picture" in out


# -- resume --


def able(name: str) -> bool:
    can = SOLVERS[name]
    return 0 in can.losses  # logistic, with an l2 penalty


@pytest.mark.parametrize("name", [name for name in SOLVERS if able(name)])
def test_a_resumed_run_does_to_the_last_bit_what_it_would_have_done(
    tmp_path: Path, name: str
) -> None:
    solver = FTRL(passes=9) if name == "ftrl" else name  # max_iter would change its penalties
    options: dict[str, Any] = {"solver": solver, "record": True, "tol": 1e-300}
    whole = logistic(tmp_path / "whole", max_iter=9, **options).fit(X, Y)
    logistic(tmp_path / "two", max_iter=4, **options).fit(X, Y)
    second = logistic(tmp_path / "two", max_iter=9, resume=True, **options).fit(X, Y)
    np.testing.assert_array_equal(coefficients(second), coefficients(whole))
    assert second.dual_gap_ == whole.dual_gap_ and second.n_iter_[0] == whole.n_iter_[0]
    told = [(r.round, r.objective, r.gap) for r in second.history_]
    assert told == [(r.round, r.objective, r.gap) for r in whole.history_]


def test_a_run_that_had_converged_is_not_run_again(tmp_path: Path) -> None:
    first = logistic(tmp_path, tol=1e-5).fit(X, Y)
    again = logistic(tmp_path, tol=1e-5, resume=True).fit(X, Y)
    np.testing.assert_array_equal(coefficients(again), coefficients(first))
    assert again.n_iter_[0] == first.n_iter_[0]
    better = logistic(tmp_path, tol=1e-9, resume=True).fit(X, Y)
    assert better.n_iter_[0] > first.n_iter_[0] and better.dual_gap_ < first.dual_gap_


CHANGES: dict[str, tuple[Callable[[], Any], str]] = {
    "rows": (lambda: (logistic, X[:, ::-1], Y), r"the rows \(X\) are others"),
    "labels": (lambda: (logistic, X, 1 - Y), r"the labels \(y\) are others"),
    "C": (lambda: (lambda d, **o: logistic(d, C=2.0, **o), X, Y), r"the weights \(C, class_weight"),
    "intercept": (
        lambda: (lambda d, **o: logistic(d, fit_intercept=False, **o), X, Y),
        "intercept was True and is False",
    ),
    "solver": (
        lambda: (lambda d, **o: logistic(d, **{**o, "solver": "newton"}), X, Y),
        "solver was SDCA.* and is Newton",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_of_another_problem_is_not_resumed(tmp_path: Path, change: str) -> None:
    logistic(tmp_path, max_iter=3).fit(X, Y)
    make, said = CHANGES[change]
    build, x, y = make()
    with pytest.raises(PlanError, match=said):
        build(tmp_path, max_iter=5, resume=True).fit(sparse.csr_array(x), y)


def test_a_file_that_asks_to_stop_ends_a_fit_with_a_checkpoint(tmp_path: Path) -> None:
    notice, run = tmp_path / "stop", tmp_path / "run"
    plan = f"preempt_file={notice}"
    options: dict[str, Any] = {"plan": plan, "C": 1e6, "tol": 1e-13, "max_iter": 10**6}
    notice.touch()
    with pytest.raises(PlanError, match="exists already"):
        logistic(run, **options).fit(X, Y)
    notice.unlink()

    def touch_at_work() -> None:
        events = run / "events" / "rank-0.jsonl"
        while not (events.exists() and b'"round"' in events.read_bytes()):
            events.parent.exists()
        notice.touch()

    asker = threading.Thread(target=touch_at_work)
    asker.start()
    try:
        with pytest.raises(LaunchError, match=r"stopped by the file .* resume=True") as found:
            logistic(run, **options).fit(X, Y)
    finally:
        asker.join()
    assert found.value.exit_code == 128 + signal.SIGTERM
    assert Checkpoints(run / "checkpoints").all()


# -- shared data --


@pytest.mark.parametrize("kind", ["csr", "csc", "dense"])
def test_handed_data_is_the_same_memory_for_all_who_open_it(kind: str) -> None:
    source = as_source(np.asarray(X.todense()) if kind == "dense" else X.asformat(kind))
    data = FitData(source, Y.astype(float), np.ones(len(Y)))
    with shared(data) as handed:
        found = handed.open()
        for name in ("indptr", "indices", "values"):
            np.testing.assert_array_equal(getattr(found.source, name), getattr(source, name))
        np.testing.assert_array_equal(found.y, data.y)
        assert found.y.flags.writeable  # copy on write: the loops need no second compilation
        found.y[0] = 17.0
        assert handed.open().y[0] == data.y[0]
    with pytest.raises(OSError):
        handed.open()


def test_pictures_of_several_runs_share_their_lower_bound(tmp_path: Path) -> None:
    for name in ("newton", "sdca"):
        logistic(tmp_path / name, solver=name, record=True, tol=1e-6).fit(X, Y)
    out = convergence.draw([tmp_path / "newton", tmp_path / "sdca"], tmp_path / "both.png")
    assert out.read_bytes()[:4] == b"\x89PNG"
    runs = [convergence.collect(n, read(tmp_path / n)) for n in ("newton", "sdca")]
    figure = convergence.figure(runs)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == [
        "objective above its lower bound over seconds",
        "objective above its lower bound over rounds",
        "duality gap over seconds",
        "duality gap over rounds",
    ]
    bound = max(run.bound for run in runs)
    assert all(r.objective >= bound - 1e-9 for run in runs for r in run.rounds)


def test_checkpoints_say_what_they_belong_to(tmp_path: Path) -> None:
    logistic(tmp_path, max_iter=3).fit(X, Y)
    (path,) = Checkpoints(tmp_path / "checkpoints").all()
    meta = json.loads((path / "manifest.json").read_text())["meta"]
    assert meta["linear"] == 1 and meta["ranks"] == 1 and meta["solver"].startswith("SDCA(")
    assert meta["standing"]["rounds"] == 3
