"""After training: evaluation and predictions of a saved run, in Python and as commands."""

from __future__ import annotations

import csv
import functools
import json
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import manyhands as mh
from manyhands.assembly.evaluation import prediction_file
from manyhands.assembly.evaluation.prediction_file import PredictionFile
from manyhands.cli import main
from manyhands.errors import CheckpointError, LaunchError, ManyhandsError, PlanError, TaskError
from support.small_task import small_data, small_task

X, Y = small_data(29)
METRICS = {"accuracy": mh.accuracy, "f1": mh.metrics.F1()}
JOB = """
import sys, torch, manyhands as mh
from torch import nn

G = torch.Generator().manual_seed(3)
DATA = torch.randn(29, 8, generator=G), torch.randint(0, 3, (29,), generator=G)

def task():
    return mh.Task(model=nn.Linear(8, 3), loss=nn.functional.cross_entropy, train=DATA,
                   test=(DATA[0] + len(sys.argv), DATA[1]), batch=16,
                   optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
                   metrics={"accuracy": mh.accuracy, "f1": mh.metrics.F1()})
"""


def make(**given: Any) -> mh.Task:
    return small_task(**{"test": (X, Y), "metrics": METRICS, **given})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    mh.train(make, "device=cpu epochs=3 best=accuracy", directory=folder, quiet=True)
    return folder


def outputs(run: Path) -> Tensor:
    with torch.no_grad():
        found: Tensor = mh.load(run, nn.Linear(8, 3))(X)
    return found


def read(file: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Outputs and targets of a file."""
    if file.suffix == ".npz":
        return dict(np.load(file))
    if file.suffix == ".pt":
        return {k: v.numpy() for k, v in torch.load(file).items()}
    if file.suffix == ".csv":
        rows = list(csv.DictReader(file.open()))
        table = {k: np.array([float(row[k]) for row in rows]) for k in rows[0]}
    else:
        table = {k: v.to_numpy() for k, v in _columns(pyarrow.parquet.read_table(file))}
    several = [v for k, v in table.items() if k != "targets"]
    return {"outputs": np.stack(several, 1), "targets": table["targets"]}


def _columns(table: Any) -> Iterator[tuple[str, Any]]:
    return zip(table.column_names, table.columns, strict=True)


# -- evaluate --


def test_a_saved_run_is_evaluated_as_it_was_while_it_trained(run: Path) -> None:
    last = mh.evaluate(make, run)
    with torch.no_grad():
        assert last["loss"] == pytest.approx(float(nn.functional.cross_entropy(outputs(run), Y)))
        assert last["accuracy"] == pytest.approx(float(mh.accuracy(outputs(run), Y)))
    scored = [
        json.loads(file.read_text())["metrics"]["accuracy"]
        for file in run.glob("checkpoints/*/manifest.json")
    ]
    assert mh.evaluate(make, run, best="accuracy")["accuracy"] == pytest.approx(max(scored))
    train = mh.evaluate(make, run, data="train")
    assert train["loss"] != last["loss"] and list(train) == ["loss", "accuracy", "f1"]


def test_a_model_object_keeps_its_own_weights_and_the_process_its_random_numbers(
    run: Path,
) -> None:
    net = nn.Linear(8, 3)
    before, state = net.weight.detach().clone(), torch.get_rng_state()
    mh.evaluate(make(model=net), run)
    assert torch.equal(net.weight, before) and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("words", ["data=2", "data=3", "tensor=2"])
def test_ranks_evaluate_and_predict_what_one_process_does(
    run: Path, tmp_path: Path, words: str
) -> None:
    assert mh.evaluate(make, run, words) == pytest.approx(mh.evaluate(make, run))
    assert mh.predict(make, run, tmp_path / "out.npz", words) == 29
    found = read(tmp_path / "out.npz")
    np.testing.assert_allclose(found["outputs"], outputs(run), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found["targets"], Y)


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))


def stepped(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def predicted(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return model(batch[0]), batch[1]


@pytest.mark.slow
def test_a_pipeline_predicts_by_its_last_stage_and_refuses_other_inputs(tmp_path: Path) -> None:
    def task(**more: Any) -> mh.Task:
        return mh.Task(
            model=deep,
            step=stepped,
            train=small_data(),
            test=(X, Y),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            batch=16,
            metrics=METRICS,
            **more,
        )

    known, run = functools.partial(task, predict=predicted), tmp_path / "run"
    trained = mh.train(known, "pipe=2 device=cpu", directory=run, quiet=True)
    alone = mh.evaluate(known, run)
    assert {k: trained.metrics[k] for k in alone} == pytest.approx(alone)
    assert mh.evaluate(known, run, "pipe=2 data=2") == pytest.approx(alone)
    mh.predict(known, run, tmp_path / "one.npz")
    mh.predict(known, run, tmp_path / "two.npz", "pipe=2 data=2")
    one, two = read(tmp_path / "one.npz"), read(tmp_path / "two.npz")
    np.testing.assert_allclose(one["outputs"], two["outputs"], rtol=1e-5, atol=1e-6)
    other = functools.partial(task, predict=lambda m, b: (m(2 * b[0]), b[1]))
    with pytest.raises(ManyhandsError, match="calls the model with other inputs than the training"):
        mh.evaluate(other, run, "pipe=2")


# -- predict --


@pytest.mark.parametrize("kind", prediction_file.FORMATS)
def test_a_file_has_one_row_for_each_sample_in_order(run: Path, tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"out{kind}"
    assert mh.predict(make, run, file, "batch=2") == 29
    found = read(file)
    np.testing.assert_allclose(found["outputs"], outputs(run), rtol=1e-6)
    np.testing.assert_array_equal(found["targets"], Y)
    assert os.listdir(tmp_path) == [file.name]


class Numbers(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(X, torch.arange(len(X)), strict=True))


def test_ranks_that_take_turns_in_a_stream_put_its_rows_in_order(run: Path, tmp_path: Path) -> None:
    mh.predict(
        functools.partial(make, test=Numbers(), metrics={}),
        run,
        tmp_path / "out.npz",
        "data=3 batch=1",
    )
    np.testing.assert_array_equal(read(tmp_path / "out.npz")["targets"], np.arange(29))


def test_outputs_with_names_are_columns_and_targets_may_be_missing(
    run: Path, tmp_path: Path
) -> None:
    def named(model: nn.Module, batch: Any) -> Any:
        scores = model(batch[0]).bfloat16()
        return {"best": scores.argmax(1), "score": scores.max(1).values}, None

    task = functools.partial(make, predict=named, metrics={})
    mh.predict(task, run, tmp_path / "out.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    assert table.column_names == ["best", "score"] and table.num_rows == 29


@pytest.mark.parametrize(
    ("given", "out", "says"),
    [
        (
            {"predict": lambda m, b: (m(b[0])[:1], b[1])},
            "o.npz",
            r"outputs of 29 samples are a ten",
        ),
        ({"predict": lambda m, b: ("no", b[1])}, "o.npz", r"outputs of 29 samples are a str"),
        ({"predict": lambda m, b: (b[0][:, None], b[1])}, "o.csv", r"outputs have rows of shape"),
        ({"loss": None, "step": stepped}, "o.npz", r"the task has step=, which does not say what"),
        ({}, "o.xls", r"o.xls: a file name that ends with .parquet, .csv, .npz, .pt is needed"),
        ({}, "none/o.csv", r"the folder .*none does not exist; make it first"),
        ({"test": None}, "o.csv", r"the task has no test data"),
    ],
)
def test_what_cannot_be_predicted_is_refused_and_leaves_no_file(
    run: Path, tmp_path: Path, given: dict[str, Any], out: str, says: str
) -> None:
    known: dict[str, Any] = {
        "model": nn.Linear(8, 3),
        "loss": nn.functional.cross_entropy,
        "train": small_data(),
        "test": (X, Y),
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1),
        "batch": 16,
    }
    with pytest.raises((TaskError, PlanError), match=says):
        mh.predict(lambda: mh.Task(**{**known, **given}), run, tmp_path / out)
    assert not os.listdir(tmp_path)


def test_a_file_that_exists_is_replaced_only_when_asked(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    out.write_text("mine")
    with pytest.raises(PlanError, match=r"out.csv exists; give another file, or --overwrite"):
        mh.predict(make, run, out)
    assert out.read_text() == "mine"
    assert mh.predict(make, run, out, overwrite=True) == 29 and "targets" in out.read_text()


@pytest.mark.parametrize("kind", prediction_file.FORMATS)
def test_a_full_disk_ends_in_one_line_and_leaves_nothing(tmp_path: Path, kind: str) -> None:
    """A limit on the size of files stands in for the disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    file = PredictionFile(tmp_path / f"out{kind}")
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(LaunchError, match=r"could not be written \(File too large\), and noth"):
            for _ in range(40):
                file.write({"outputs": torch.randn(4000)})
            file.finish()
    finally:
        file.abandon()
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert not os.listdir(tmp_path)


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(PlanError, match=r"needs pyarrow: pip install 'manyhands\[parquet\]'"):
        PredictionFile(tmp_path / "out.parquet")


# -- words and places --


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("merge=local_sgd", r"merge=local_sgd is about training and has no effect on a saved mod"),
        ("data=2 shard=2", r"shard=2 divides what training needs and has no effect"),
        ("epochs=3", r"epochs=3 is about training"),
    ],
)
def test_words_about_training_are_refused(run: Path, words: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        mh.evaluate(make, run, words)


def test_a_place_without_weights_and_another_model_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is no run directory; give that of a run"):
        mh.evaluate(make, tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"holds no checkpoint"):
        mh.evaluate(make, tmp_path)
    with pytest.raises(CheckpointError, match=r"the checkpoint is of another model"):
        mh.evaluate(functools.partial(make, model=deep), run)
    with pytest.raises(PlanError, match=r"data='valid', but 'test' or 'train' is needed"):
        mh.evaluate(make, run, data="valid")  # type: ignore[arg-type]


# -- the commands --


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["manyhands", *words])
    with pytest.raises(SystemExit) as end:
        main()
    return 0 if end.value.code is None else int(end.value.code)


def test_commands_take_a_file_or_a_run_with_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", __import__("sys").path[:])
    Path("job.py").write_text(JOB)
    assert call(monkeypatch, "run", "job.py", "epochs=2", "--quiet", "--", "more") == 0
    (run,) = Path("runs").glob("job-*")
    capsys.readouterr()

    def said(*words: str) -> dict[str, Any]:
        assert call(monkeypatch, "evaluate", "--json", *words) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    of_run = said(str(run))
    assert of_run["round"] == 4 and list(of_run["metrics"]) == ["loss", "accuracy", "f1"]
    assert said("job.py", "--", "more") == of_run == said("job.py", "--dir", str(run), "--", "x")
    assert said("job.py")["metrics"] != of_run["metrics"], "without the script's argument"
    assert call(monkeypatch, "evaluate", "job.py", "data=2") == 0
    assert "accuracy" in capsys.readouterr().out
    assert call(monkeypatch, "predict", str(run), "--out", "out.csv") == 0
    assert capsys.readouterr().out == "out.csv  29 rows\n"
    assert call(monkeypatch, "predict", str(run)) == 2
    assert "predict needs a file to write: --out" in capsys.readouterr().err


def test_commands_say_what_is_missing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text(JOB)
    Path("loop.py").write_text("import manyhands as mh\nrun = mh.join()\n")
    for words, says in (
        ([str(run)], "does not say its script; give the file of its task: FILE --dir"),
        (["job.py"], "there is no run of 'job'"),
        ([str(run), "--dir", "other"], "is a run already, and --dir=other names another"),
        (["loop.py", "--dir", str(run)], "loop.py defines no task(), and a loop of one's own"),
        (["job.py", "--dir", str(run), "dat=2"], "unknown plan word 'dat'"),
    ):
        assert call(monkeypatch, "evaluate", *words) == 2
        assert says in capsys.readouterr().err
