"""Callbacks given to several runs, and those whose beginning never comes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

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
        (lambda: mh.EarlyStopping(min_delta=cast("float", "0.1")), "min_delta='0.1', but 0 or"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(
    tmp_path: Path, make: Callable[[], mh.Callback], says: str
) -> None:
    with pytest.raises(mh.TaskError, match=says):
        train(tmp_path / "run", "steps=7", callbacks=[make()])


@pytest.mark.parametrize(
    ("callback", "words", "says"),
    [
        (lambda: mh.EarlyStopping("perplexity"), "", "='perplexity' takes a larger perplexity"),
        (lambda: mh.BestModel("-accuracy"), "", "BestModel: metric='-accuracy' takes a smaller"),
        (None, "best=perplexity", "best=perplexity takes a larger perplexity for a better one"),
        (None, "until=perplexity:9999", "until=perplexity:9999 takes a larger .*, with a minus"),
        (None, "until=-accuracy:0", "until=-accuracy:0 takes a smaller accuracy for a better one"),
    ],
)
def test_a_metric_that_grows_where_it_gets_worse_is_doubted(
    tmp_path: Path, callback: Callable[[], mh.Callback] | None, words: str, says: str
) -> None:
    metrics = {"perplexity": mh.metrics.Perplexity(), "accuracy": mh.accuracy}
    given = {"metrics": metrics, "callbacks": [callback()] if callback else []}
    assert re.search(says, said(train(tmp_path / "run", f"epochs=1 {words}", **given), "warning"))


def test_a_metric_in_its_usual_direction_is_not_doubted(tmp_path: Path) -> None:
    metrics = {"perplexity": mh.metrics.Perplexity(), "accuracy": mh.accuracy, "odd": mh.accuracy}
    stopping = [mh.EarlyStopping("-perplexity"), mh.BestModel("odd")]
    words = "epochs=1 best=accuracy until=-perplexity:0"
    result = train(tmp_path / "run", words, metrics=metrics, callbacks=stopping)
    assert "better" not in said(result, "warning")
