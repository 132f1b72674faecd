"""An error of the user's code shows the user's lines, without ours around them; ours stay where the
error is ours.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.cli import main
from manyhands.user_traceback import OURS, trim

X = torch.randn(16, 4)
JOB = """
import torch, manyhands as mh
from torch import nn

class Net(nn.Linear):
    def forward(self, x):
        return super().forward(x.view(3, 77))

def folder():
    raise KeyError("path")

def task():
    if MODE == "task":
        folder()
    return mh.Task(model=Net(4, 2), loss=nn.functional.cross_entropy, batch=4,
                   train=(torch.randn(16, 4), torch.zeros(16, dtype=torch.long)),
                   optimizer=lambda p: torch.optim.SGD(p, lr=0.5))
"""


def broken_loss(outputs: Tensor, target: Tensor) -> Tensor:
    return outputs.no_such_attribute


def broken_data(index: int) -> Any:
    raise OSError("disk gone")


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return broken_data(index)


def shown(folder: Path, **given: Any) -> str:
    plain = {
        "model": nn.Linear(4, 2),
        "train": (X, torch.zeros(16, dtype=torch.long)),
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.5),
        "loss": nn.functional.cross_entropy,
        "batch": 4,
    }
    made = lambda: mh.Task(**{**plain, **given})
    with pytest.raises(Exception) as failed:
        mh.train(made, "device=cpu", directory=folder / "run", quiet=True, argv=False)
    return "".join(traceback.format_exception(failed.value))


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"loss": broken_loss}, "return outputs.no_such_attribute"),
        ({"train": Rows()}, 'raise OSError("disk gone")'),
    ],
)
def test_an_error_of_the_users_shows_the_users_lines_and_no_inner_ones_of_ours(
    tmp_path: Path, given: dict[str, Any], line: str
) -> None:
    said = shown(tmp_path, **given)
    assert said.count(line) == 1 and said.count("Traceback") == 1
    inner = [text for text in said.splitlines() if f'File "{OURS}' in text]
    assert [text for text in inner if "in train" not in text] == []
    assert "_call_impl" not in said


def test_an_error_of_manyhands_itself_keeps_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        mh.api._check(None)
    except AttributeError as e:
        before = traceback.format_exception(e)
        trim(e)
        assert traceback.format_exception(e) == before and OURS in "".join(before)
    else:
        raise AssertionError("a plan of None was taken")


@pytest.mark.parametrize(
    ("mode", "line"), [("task", 'raise KeyError("path")'), ("model", "x.view(3, 77)")]
)
def test_the_command_prints_the_users_lines_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mode: str,
    line: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "job.py").write_text(f"MODE = {mode!r}\n{JOB}")
    for variable, ours in (("", 0), ("full", 1)):
        monkeypatch.setenv("MANYHANDS_TRACEBACK", variable)
        monkeypatch.setattr(sys, "argv", ["manyhands", "run", "job.py", "--quiet"])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr().err
        assert end.value.code == 1
        assert said.count(line) == 1 and said.count("Traceback") == 1, said
        assert (OURS in said) == bool(ours), said
