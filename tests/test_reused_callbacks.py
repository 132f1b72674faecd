"""Callbacks given to several runs, and those whose beginning never comes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
from support.small_task import saved_weights, small_data, small_task


def train(folder: Path, words: str, resume: bool = False, **given: Any) -> mh.Result:
    data = small_data(31)
    return mh.train(
        lambda: small_task(**{"train": data, "test": data, **given}),
        f"device=cpu {words}",
        directory=folder,
        resume=resume,
        quiet=True,
        argv=False,
    )


def said(result: mh.Result, kind: str = "notice") -> str:
    files = Path(result.directory).glob("events/*.jsonl")
    events = [json.loads(line) for f in files for line in f.read_text().splitlines()]
    return "\n".join(e["value"] for e in events if e["name"] == kind)


@pytest.mark.parametrize(
    "callback",
    [
        lambda: mh.EarlyStopping(patience=1, restore_best=True),
        lambda: mh.EMA(0.5),
        lambda: mh.SWA(1),
        mh.BestModel,
    ],
)
def test_one_object_serves_several_runs_one_after_the_other(
    tmp_path: Path, callback: Callable[[], mh.Callback]
) -> None:
    one = callback()
    first = train(tmp_path / "first", "epochs=3", callbacks=[one])
    again = train(tmp_path / "again", "epochs=3", callbacks=[one])
    assert again.metrics == {**first.metrics, "train_loss": again.metrics["train_loss"]}
    assert again.stop_reason == first.stop_reason
    left = saved_weights(tmp_path / "first")
    assert all(v.equal(left[k]) for k, v in saved_weights(tmp_path / "again").items())
    # and goes on where a checkpoint says, whatever it has seen since
    train(tmp_path / "first", "epochs=5", resume=True, callbacks=[one])
    train(tmp_path / "again", "epochs=5", resume=True, callbacks=[callback()])
    left = saved_weights(tmp_path / "first")
    assert all(v.equal(left[k]) for k, v in saved_weights(tmp_path / "again").items())


@pytest.mark.parametrize(
    ("callback", "words"),
    [(lambda: mh.SWA(5), "steps=7"), (lambda: mh.EMA(start=50), "epochs=1")],
)
def test_an_average_that_never_began_is_said(
    tmp_path: Path, callback: Callable[[], mh.Callback], words: str
) -> None:
    result = train(tmp_path / "run", words, callbacks=[callback()])
    assert "has averaged nothing, as the run ended before its start" in said(result)


def test_an_average_that_began_says_nothing(tmp_path: Path) -> None:
    assert "averaged" not in said(train(tmp_path / "run", "epochs=2", callbacks=[mh.SWA(2)]))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: mh.EMA(start=7), "start=7 would never come, in a run of 7 steps"),
        (lambda: mh.EarlyStopping(min_delta="0.1"), "min_delta='0.1', but 0 or more is needed"),  # type: ignore[arg-type]
    ],
)
def test_numbers_that_make_no_sense_are_refused(
    tmp_path: Path, make: Callable[[], mh.Callback], says: str
) -> None:
    with pytest.raises(mh.TaskError, match=says):
        train(tmp_path / "run", "steps=7", callbacks=[make()])
