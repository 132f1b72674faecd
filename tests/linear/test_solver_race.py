"""Races of solvers: who reaches a duality gap first, from events."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn")

from manyhands.linear import LogisticRegression, Ridge, SGDClassifier, race

RNG = np.random.default_rng(1)
X = RNG.standard_normal((200, 6))
Y = (X @ np.arange(6.0) + RNG.standard_normal(200) > 0).astype(int)


def test_a_race_orders_solvers_by_the_time_to_a_gap(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    racing = {
        "newton": LogisticRegression(solver="newton"),
        "too short": LogisticRegression(solver="sdca", max_iter=2),
    }
    found = race(X, Y, racing, target=1e-7, seeds=2, folder=tmp_path / "race")
    first, last = found.race.entries
    assert (first.label, first.num_reached, len(first.runs)) == ("newton", 2, 2)
    assert (last.label, last.num_reached) == ("too short", 0)
    assert all(run.reached is not None and run.reached.value <= 1e-7 for run in first.runs)
    assert found.picture.read_bytes()[:4] == b"\x89PNG"
    numbers = json.loads((tmp_path / "race" / "results.json").read_text())
    assert [plan["label"] for plan in numbers["plans"]] == ["newton", "too short"]
    out = capfd.readouterr().out
    assert "newton reached relative_gap" in out and "not reached" in out


def test_an_estimator_that_fails_is_reported_and_the_others_run(tmp_path: Path) -> None:
    racing = {
        "fails": LogisticRegression(solver="newton", l1_ratio=1.0),
        "runs": LogisticRegression(solver="scd", l1_ratio=1.0),
    }
    found = race(X, Y, racing, target=1e-5, folder=tmp_path / "race", quiet=True)
    assert [entry.label for entry in found.race.entries] == ["runs", "fails"]
    assert "supports only 'l2'" in found.race.entries[1].runs[0].error
    assert "supports only 'l2'" in str(found)


def test_estimators_with_other_objectives_do_not_race(tmp_path: Path) -> None:
    racing = {"a": LogisticRegression(), "b": LogisticRegression(C=2.0)}
    with pytest.raises(ValueError, match=r"'a' and 'b' minimise different objectives \(weights"):
        race(X, Y, racing, folder=tmp_path / "race", quiet=True)
    racing = {"a": Ridge(1.0), "b": Ridge(2.0)}
    with pytest.raises(ValueError, match=r"different objectives \(l2 differ\)"):
        race(X, Y, racing, folder=tmp_path / "other", quiet=True)


def test_a_race_needs_estimators_a_target_and_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no estimator is given"):
        race(X, Y, {})
    with pytest.raises(ValueError, match="a gap between 0 and 1 is needed"):
        race(X, Y, {"a": Ridge()}, target=0.0)
    (tmp_path / "mine.txt").touch()
    with pytest.raises(ValueError, match="is not empty"):
        race(X, Y, {"a": Ridge()}, folder=tmp_path)
    with pytest.raises(ValueError, match="too alike"):
        race(X, Y, {"a b": Ridge(), "a  b": Ridge()}, folder=tmp_path / "x")


def test_estimators_that_certify_no_gap_are_refused_by_name(tmp_path: Path) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    for foreign in (linear_model.LogisticRegression(), SGDClassifier()):
        with pytest.raises(TypeError, match=f"'it' is {type(foreign).__name__}, which certifies"):
            race(X, Y, {"it": foreign}, folder=tmp_path / "race", quiet=True)
