"""Every habit's example on one process, on two ranks, and with local steps: the numbers of one."""

from __future__ import annotations

import csv
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyhands.assembly.rank_context import Options
from support.habit_runs import BATCH, HABITS, MERGES, every, one, pretrained, read
from support.pooled import start

OPTIONS = Options(quiet=True, float64=True)
PLACES = [(merge, habit) for merge in MERGES for habit in HABITS]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One job of two ranks runs all of them, one after the other."""
    folder = tmp_path_factory.mktemp("habits")
    start(functools.partial(every, str(folder)), "data=2 timeout_s=20 device=cpu", OPTIONS)
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    for habit in HABITS:
        one(habit, folder / habit, {"device": "cpu"}, BATCH, OPTIONS)
    return folder


def rows(folder: Path) -> dict[str, Any]:
    return dict(np.load(folder / "rows.npz"))


@pytest.mark.parametrize("habit", HABITS)
def test_two_ranks_have_the_rates_metrics_end_and_model_of_one_process(
    ran: Path, alone: Path, habit: str
) -> None:
    ours, theirs = read(ran / "every gradient" / habit), read(alone / habit)
    assert ours["steps"] == theirs["steps"]
    assert ours["rates"] == pytest.approx(theirs["rates"], rel=1e-12)
    assert len(ours["metrics"]) == len(theirs["metrics"])
    for mine, other in zip(ours["metrics"], theirs["metrics"], strict=True):
        assert mine == pytest.approx(other, rel=1e-6)  # mh.accuracy is a mean in float32
    here, there = rows(ran / "every gradient" / habit), rows(alone / habit)
    np.testing.assert_allclose(here["outputs"], there["outputs"], rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(here["targets"], there["targets"])


@pytest.mark.parametrize(("merge", "habit"), PLACES)
def test_both_ranks_see_the_same_and_what_is_saved_is_what_was_evaluated(
    ran: Path, merge: str, habit: str
) -> None:
    folder = ran / merge / habit
    here, there = read(folder), read(folder, 1)
    assert here["metrics"] == there["metrics"] and here["rates"] == there["rates"]
    shown = [m["loss"] for m in here["metrics"]]
    found = json.loads((folder / "evaluated.json").read_text())
    # weights are saved in float32, the run was in float64
    assert min(abs(found["loss"] - loss) for loss in shown) < 1e-5 * max(1.0, found["loss"])


@pytest.mark.parametrize("merge", MERGES)
def test_the_example_of_callbacks_ends_early_with_its_average(ran: Path, merge: str) -> None:
    found = read(ran / merge / "callbacks")
    best = [m["accuracy"] for m in found["metrics"]]
    assert 30 < found["steps"] < 150 and max(best[:-3]) >= max(best[-3:]), "of patience=3"


@pytest.mark.parametrize("merge", MERGES)
def test_metrics_of_every_kind_are_in_each_evaluation(ran: Path, merge: str) -> None:
    last = read(ran / merge / "metrics")["metrics"][-1]
    assert last["f1"] == pytest.approx(last["f1_of_sklearn"]) and last["auc"] > 0.9
    assert last["perplexity"] == pytest.approx(np.exp(last["loss"]))
    assert last.keys() >= {"accuracy", "confused/most", "confused/digit"}


@pytest.mark.parametrize("merge", MERGES)
def test_every_rank_starts_from_the_weights_that_were_given(ran: Path, merge: str) -> None:
    wanted = float(pretrained()["body.0.weight"].double().sum())
    for rank in range(2):
        assert read(ran / merge / "fine tuning", rank)["first"] == pytest.approx(wanted, rel=1e-6)


def test_loggers_write_the_rates_and_metrics_that_ranks_have_seen(ran: Path, alone: Path) -> None:
    for folder in (*(ran / merge / "by epoch" for merge in MERGES), alone / "by epoch"):
        table = list(csv.DictReader((folder / "run" / "metrics.csv").open()))
        written = [float(row["evaluate/f1"]) for row in table if row["evaluate/f1"]]
        assert written == pytest.approx([m["f1"] for m in read(folder)["metrics"]])
        rates = {float(row["train/lr"]) for row in table if row["train/lr"]}
        assert rates and rates <= set(read(folder)["rates"])
