"""Learning curves drawn from the events of small recorded runs."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from manyhands.core import Event
from manyhands.errors import ManyhandsError
from manyhands.observe.curves import collect, draw, smooth
from manyhands.observe.events import read
from support.recorded_runs import PLAN, ZERO_S, progress, record, whole_run


def evaluate(time_s: float, **value: float) -> Event:
    return Event(ZERO_S + time_s, 0, 0, "evaluate", value=value)


RUNS = {
    "one point": [progress(0, 0.5), evaluate(1, accuracy=0.5)],
    "no metrics": [progress(i, i / 10) for i in range(30)],
    "metrics only": [evaluate(1, accuracy=0.5), evaluate(2, accuracy=0.6)],
    "loss diverges": [progress(i, i / 10, loss=1.0 if i < 20 else math.nan) for i in range(30)],
    "all NaN": [
        *(progress(i, i / 10, loss=math.nan) for i in range(30)),
        evaluate(31, accuracy=math.nan),
    ],
    "huge range and five metrics": [
        *(progress(i, i / 10, loss=1e4 * math.exp(-i)) for i in range(30)),
        evaluate(31, a=1.0, b=1e-7, c=1e9, d=-3.0, loss=0.0),
    ],
    "start only": [Event(ZERO_S, 0, 0, "start", value="$x$ " + "word=value " * 60)],
}


@pytest.mark.parametrize("name", RUNS)
def test_any_run_draws(tmp_path: Path, name: str) -> None:
    run = record(tmp_path / f"${name}$", RUNS[name])
    assert draw(run) == run / "curves.png"
    with Image.open(run / "curves.png") as picture:
        pixels = np.asarray(picture.convert("L"))
    assert min(pixels.shape) > 600 and 0.001 < (pixels < 200).mean() < 0.2  # ink, on paper


def test_the_picture_of_a_whole_run_has_both_curves(tmp_path: Path) -> None:
    out = draw(whole_run(tmp_path / "run"), tmp_path / "elsewhere" / "picture.png")
    with Image.open(out) as picture:
        pixels = np.asarray(picture.convert("RGB")).astype(int)
    for colour in ((0x25, 0x63, 0xEB), (0x05, 0x96, 0x69)):
        assert (abs(pixels - colour).sum(axis=2) < 12).sum() > 300


def test_curves_hold_what_was_recorded(tmp_path: Path) -> None:
    curves = collect(read(whole_run(tmp_path, epochs=3)))
    assert curves.plan == PLAN and len(curves.loss) == 60
    assert [epoch for epoch, _ in curves.metrics["accuracy"]] == [1.0, 2.0, 3.0]
    assert curves.final == {"accuracy": pytest.approx(1 - math.exp(-3))}


def test_a_replay_after_a_crash_replaces_what_it_repeats() -> None:
    crashed = [progress(i, i / 4, loss=9.0) for i in range(1, 8)]
    resumed = [progress(10 + i, 1 + i / 4, loss=1.0) for i in range(1, 5)]
    evaluations = [evaluate(4.5, accuracy=0.1), evaluate(20, accuracy=0.2)]
    curves = collect(sorted([*crashed, *resumed, *evaluations], key=lambda event: event.time_s))
    epochs = [epoch for epoch, _ in curves.loss]
    assert epochs == sorted(epochs) and epochs[-1] == 2.0
    assert [loss for _, loss in curves.loss] == [9.0] * 4 + [1.0] * 4
    assert curves.metrics["accuracy"] == [(1.0, 0.1), (2.0, 0.2)]


def test_smoothing_keeps_lines_and_leaves_gaps() -> None:
    line = [3.0 - 0.01 * i for i in range(200)]
    assert smooth(line) == pytest.approx(line)  # also at both ends
    noisy = [x + 0.1 * (-1) ** i for i, x in enumerate(line)]
    assert np.abs(np.array(smooth(noisy)) - line)[10:-10].max() < 0.01
    line[50:60] = [math.nan] * 10
    assert [math.isnan(x) for x in smooth(line)] == [math.isnan(x) for x in line]
    assert smooth([1.0]) == [1.0] and smooth([1.0, math.nan, math.nan, math.nan])[0] == 1.0


def test_what_is_no_run_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ManyhandsError, match="no run directory"):
        draw(tmp_path)
