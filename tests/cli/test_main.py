"""Commands inside this process: one message and one exit code for every mistake; export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import manyhands as mh
from manyhands.cli import main

JOB = """
import torch, manyhands as mh
from torch import nn

X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))

def task():
    data = (X, (X.sum(1) > 0).long())
    return mh.Task(model=nn.Linear(4, 2), loss=nn.functional.cross_entropy, train=data, test=data,
                   batch=5, metrics={"accuracy": mh.accuracy},
                   optimizer=lambda p: torch.optim.SGD(p, lr=0.5))
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", __import__("sys").path[:])
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["manyhands", *words])
    with pytest.raises(SystemExit) as end:
        main()
    return 0 if end.value.code is None else int(end.value.code)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["run", "job.py", "dat=2"], 2, "PlanError: unknown plan word 'dat'; did you mean data?"),
        (["run", "job.py", "data=0"], 2, "PlanError: data=0, but at least 1 rank is needed"),
        (["run", "job.py", "data=-1"], 2, "PlanError: data=-1"),
        (["run", "job.py", "--resume"], 2, "CheckpointError: there is no run of 'job' to resume"),
        (["run", "none.py"], 2, "none.py"),
        (["rnu", "job.py"], 2, "rnu"),
        (["export", "."], 2, "holds no checkpoint"),
        (["verify", "job.py", "dta=2"], 2, "did you mean data?"),
    ],
)
def test_a_mistake_is_one_message_without_a_stack_and_a_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    says: str,
) -> None:
    assert call(monkeypatch, *words) == code
    said = capsys.readouterr()
    assert says in said.err and "Traceback" not in said.out + said.err


def test_run_resume_and_export(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "run", "job.py", "epochs=3", "best=accuracy", "keep=9") == 0
    (run,) = (here / "runs").iterdir()
    said = capsys.readouterr().out
    assert "merge=" not in said and "epochs=3" in said and f"runs/{run.name}" in said, (
        "the resolved plan is printed"
    )
    assert (run / "plan.toml").exists() and (run / "curves.png").exists()
    assert call(monkeypatch, "run", "job.py", "epochs=5", "--resume") == 0
    assert (
        "resumed at round 12" in capsys.readouterr().out
        and len(list((here / "runs").iterdir())) == 1
    )
    assert call(monkeypatch, "export", str(run)) == 0
    saved = load_file("model.safetensors")
    assert set(saved) == {"weight", "bias"}
    assert all(
        torch.equal(saved[k], v) for k, v in mh.load(run, nn.Linear(4, 2)).state_dict().items()
    )
    assert call(monkeypatch, "export", str(run), "deep/best.safetensors", "--best", "accuracy") == 0
    assert (here / "deep" / "best.safetensors").exists()
    assert call(monkeypatch, "export", str(run), "x.safetensors", "--best", "f1") == 2
    assert "knows the metric 'f1'" in capsys.readouterr().err


def test_the_plan_of_a_run_is_a_plan_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        call(monkeypatch, "run", "job.py", "steps=3", "batch=7", "--dir", "first", "--quiet") == 0
    )
    assert call(monkeypatch, "run", "job.py", "first/plan.toml", "--dir", "second", "--quiet") == 0
    assert (here / "first" / "plan.toml").read_text() == (here / "second" / "plan.toml").read_text()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_directory_that_cannot_be_the_runs_is_one_message_on_any_number_of_ranks(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], ranks: int
) -> None:
    (here / "plan.toml").write_text("epochs = 1\n")
    refused = {
        ".": "is not a run directory but holds plan.toml, which a run would write over",
        "job.py/run": "cannot be made or written (Not a directory)",
    }
    for folder, says in list(refused.items())[: 3 - ranks]:  # a start of two ranks takes seconds
        words = ["run", "job.py", "plan.toml", f"data={ranks}", "--dir", folder]
        assert call(monkeypatch, *words) != 0
        said = capfd.readouterr()
        assert says in said.err and "Traceback" not in said.out + said.err
    assert (here / "plan.toml").read_text() == "epochs = 1\n"
