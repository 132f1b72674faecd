"""Loggers get the numbers of a run by step; they go on after a resume, and never end a run."""

from __future__ import annotations

import csv
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.core import Event
from manyhands.errors import ManyhandsError
from manyhands.observe.events import Recorder
from manyhands.observe.loggers import registry
from manyhands.observe.loggers.background import BackgroundSink
from manyhands.observe.loggers.csv_table import CsvTable
from manyhands.observe.loggers.scalar_sink import ScalarSink, keep, recall
from manyhands.observe.loggers.scalars import LoggedPoint
from support.docs import code_blocks
from support.paths import REPOSITORY
from support.recorded_runs import PLAN, ZERO_S, progress

START = Event(ZERO_S, 0, 0, "start", value=PLAN)


class Kept:
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self.points: list[LoggedPoint] = []
        self.ended: list[bool] = []

    def begin(self, config: dict[str, Any]) -> None:
        self.config = config

    def log(self, point: LoggedPoint) -> None:
        self.points.append(point)

    def end(self, finished: bool) -> None:
        self.ended.append(finished)


class Broken(Kept):
    """A logger whose network is gone."""

    def log(self, point: LoggedPoint) -> None:
        raise ConnectionError("no route to host")


def rows(directory: Path) -> list[dict[str, str]]:
    with (directory / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def write(directory: Path, *events: Event) -> list[dict[str, str]]:
    sink = ScalarSink(directory, CsvTable(directory))
    sink.write([START, *events])
    sink.close()
    return rows(directory)


# -- what every logger is given --


def test_a_logger_gets_the_plan_and_numbers_with_step_and_epoch(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('data = 2\nmerge = "local_sgd"\n"merge.period" = 8\n')
    sink = ScalarSink(tmp_path, logger := Kept())
    sink.write([START, progress(1, 0.5, loss=2.0, lr=0.1)])
    sink.write(
        [
            Event(ZERO_S, 0, 50, "round", 0.1),
            Event(ZERO_S, 0, 50, "evaluate", value={"accuracy": 0.9, "epoch": 0.5, "step": 400.0}),
            Event(ZERO_S, 0, 52, "log", value={"seen": 7.0}),
            Event(ZERO_S, 0, 60, "finish", value={"loss": 0.1}),
        ]
    )
    sink.close()
    assert logger.config == {"data": 2, "merge": "local_sgd", "merge.period": 8}
    assert [(p.step, p.epoch) for p in logger.points] == [(400, 0.5), (400, 0.5), (402, 0.5)]
    first, *others = [p.values for p in logger.points]
    assert first["train/loss"] == 2.0 and first["train/lr"] == 0.1
    assert not {"train/eta_s", "train/epochs", "train/step", "train/epoch"} & set(first)
    assert others == [{"evaluate/accuracy": 0.9}, {"seen": 7.0}]
    assert logger.ended == [True]


def test_a_run_that_did_not_finish_is_told_so(tmp_path: Path) -> None:
    sink = ScalarSink(tmp_path, logger := Kept())
    sink.close()
    assert logger.ended == []
    sink.write([START, progress(1, 0.5)])
    sink.close()
    sink.close()
    assert logger.ended == [False]


# -- csv --


def test_csv_has_a_line_for_a_step_and_a_column_that_comes_later(tmp_path: Path) -> None:
    found = write(
        tmp_path,
        progress(1, 0.5, loss=2.0),
        progress(2, 1.0, loss=1.0),
        Event(ZERO_S, 0, 100, "evaluate", value={"accuracy": 0.9, "epoch": 1.0, "step": 800.0}),
        Event(ZERO_S, 0, 103, "log", value={"seen": 7.0}),
    )
    assert [(r["step"], r["epoch"], r["train/loss"]) for r in found] == [
        ("400", "0.5", "2.0"),
        ("800", "1.0", "1.0"),
        ("803", "1.0", ""),
    ]
    assert [r["evaluate/accuracy"] for r in found] == ["", "0.9", ""]
    assert [r["seen"] for r in found] == ["", "", "7.0"]


def test_csv_of_a_resumed_run_replaces_the_steps_that_are_repeated(tmp_path: Path) -> None:
    write(tmp_path, *(progress(e, e, loss=9.0) for e in (0.5, 1.0, 1.5)))
    found = write(tmp_path, progress(1, 1.0, loss=1.0), progress(2, 2.0, loss=2.0))
    assert [(r["step"], r["train/loss"]) for r in found] == [
        ("400", "9.0"),
        ("800", "1.0"),
        ("1600", "2.0"),
    ]


def test_csv_does_not_write_over_a_table_of_the_users(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.csv").write_text("name,age\nAda,36\n")
    recorder = Recorder(tmp_path, 0, [ScalarSink(tmp_path, CsvTable(tmp_path))])
    recorder.emit(progress(1, 0.5))
    recorder.close()
    assert "begins with name, age and is no table of a run" in capsys.readouterr().err
    assert (tmp_path / "metrics.csv").read_text() == "name,age\nAda,36\n"


# -- in the background --


def test_a_logger_that_fails_is_named_once_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Broken()
    sink = BackgroundSink("wandb", ScalarSink(tmp_path, broken))
    recorder = Recorder(tmp_path, 0, [sink])
    for i in range(3):
        recorder.emit(progress(i, 0.5 + i))
        recorder.flush()
    recorder.close()
    said = capsys.readouterr().err
    assert said.count("log=wandb stopped (ConnectionError: no route to host)") == 1
    assert said.count("log=wandb") == 1 and broken.ended == [False]


def test_a_logger_that_hangs_is_left_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release = threading.Event()

    class Hanging(Kept):
        def log(self, point: LoggedPoint) -> None:
            release.wait()

    sink = BackgroundSink("mlflow", ScalarSink(tmp_path, Hanging()), close_s=0.05)
    sink.write([START, progress(1, 0.5)])
    thread = sink._thread
    sink.close()
    release.set()
    assert thread is not None
    thread.join()
    assert "log=mlflow did not end within 0 s" in capsys.readouterr().err


def test_what_loggers_keep_for_a_resume_is_kept_for_each(tmp_path: Path) -> None:
    assert recall(tmp_path, "wandb") == {}
    keep(tmp_path, "wandb", {"id": "a"})
    keep(tmp_path, "mlflow", {"run_id": "b"})
    assert recall(tmp_path, "wandb") == {"id": "a"} and recall(tmp_path, "mlflow")["run_id"] == "b"
    (tmp_path / "loggers.json").write_text("{torn")
    assert recall(tmp_path, "wandb") == {}


# -- whole runs --


class Seen(mh.Callback):
    """Logs a value of its own."""

    def on_round(self, run: Any, round: int, loss: Any) -> None:
        run.log(seen=round)


def train(directory: Path, words: str, **options: Any) -> mh.Result:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    data = (x, (x.sum(1) > 0).long())
    task = mh.Task(
        model=nn.Linear(4, 2),
        loss=nn.functional.cross_entropy,
        train=data,
        test=data,
        batch=16,
        metrics={"accuracy": mh.accuracy},
        optimizer=lambda p: torch.optim.SGD(p, lr=0.5),
        callbacks=[Seen()],
    )
    plan = f"device=cpu {words}"
    return mh.train(task, plan, directory=directory, quiet=True, argv=False, **options)


@pytest.mark.parametrize("merge", ["", "merge=local_sgd merge.period=2"])
def test_a_run_writes_csv_and_tensorboard_and_goes_on_after_a_resume(
    tmp_path: Path, merge: str
) -> None:
    pytest.importorskip("tensorboard")
    train(tmp_path / "run", f"epochs=1 log=csv+tensorboard {merge}")
    train(tmp_path / "run", "epochs=2", resume=True)
    found = rows(tmp_path / "run")
    steps = [int(r["step"]) for r in found]
    assert steps == sorted(set(steps)) and steps[-1] == 8
    at_ends = {r["step"]: r["epoch"] for r in found if r["evaluate/accuracy"]}
    assert at_ends == {"4": "1.0", "8": "2.0"}
    assert any(r["seen"] for r in found) and any(r["train/loss"] for r in found)
    assert list((tmp_path / "run").glob("events.out.tfevents.*"))


def test_the_example_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["page"])
    (code,) = code_blocks(REPOSITORY / "docs" / "loggers.md", "python")
    exec(code, {"__name__": "page"})
    assert "step,epoch,train/" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["wandb", "mlflow", "tensorboard"])
def test_a_logger_that_is_not_installed_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # how Python marks what cannot be imported
    said = rf"log={name}: {name} is not installed: pip install manyhands\[{name}\]"
    with pytest.raises(ManyhandsError, match=said):
        train(tmp_path / "run", f"log=csv+{name}")
    assert not (tmp_path / "run").exists()


def test_every_logger_has_a_row_on_the_page_and_those_with_packages_an_extra() -> None:
    page = (REPOSITORY / "docs" / "loggers.md").read_text()
    project = (REPOSITORY / "pyproject.toml").read_text()
    for name in registry.LOGGERS:
        assert f"| `{name}` |" in page
        assert (f'\n{name} = ["{name}"]\n' in project) == (name in registry.PACKAGES)


def test_wandb_is_written_offline_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    train(tmp_path / "run", "epochs=1 log=wandb")
    train(tmp_path / "run", "epochs=2", resume=True)
    known = json.loads((tmp_path / "run" / "loggers.json").read_text())["wandb"]["id"]
    folders = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert len(folders) in (1, 2) and all(f.name.endswith(known) for f in folders)
    assert all(list(f.glob("*.wandb")) for f in folders)
    wandb.teardown()  # its service stays for further runs of this process
    os.environ.pop("WANDB_SERVICE", None)


def test_mlflow_has_parameters_and_metrics_by_step_of_a_resumed_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    train(tmp_path / "run", "epochs=1 log=mlflow")
    train(tmp_path / "run", "epochs=2", resume=True)
    known = json.loads((tmp_path / "run" / "loggers.json").read_text())["mlflow"]
    client = MlflowClient(tracking_uri=known["uri"])
    found = client.get_run(known["run_id"])
    assert found.info.status == "FINISHED" and found.data.params["batch"] == "16"
    history = client.get_metric_history(known["run_id"], "evaluate/accuracy")
    assert [m.step for m in history] == [4, 8]
