"""An error of the user's code on two ranks: its lines once, without ours, and the exit code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from manyhands.user_traceback import OURS
from support.commands import CLI, run

JOB = """
import torch, manyhands as mh
from torch import nn

def rate():
    raise KeyError("rate")

def task():
    return mh.Task(model=nn.Linear(4, 2), loss=nn.functional.cross_entropy, batch=4,
                   train=(torch.randn(16, 4), torch.zeros(16, dtype=torch.long)),
                   optimizer=lambda p: torch.optim.SGD(p, lr=rate()))

if __name__ == "__main__":
    mh.train(task)
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "job.py"]


@pytest.mark.parametrize(
    "command",
    [
        [*CLI, "run", "job.py", "data=2"],
        pytest.param([sys.executable, "job.py", "data=2"], marks=pytest.mark.slow),
        pytest.param(TORCHRUN, marks=pytest.mark.slow),
    ],
    ids=["manyhands run", "python", "torchrun"],
)
def test_an_error_on_all_ranks_is_the_users_lines(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "job.py").write_text(JOB)
    job = run(tmp_path, command)
    said = job.out + job.err
    ranks = 2 if command is TORCHRUN else 1  # torchrun shows what each of its processes says
    assert job.process.returncode == 1
    assert said.count('raise KeyError("rate")') == ranks, said
    inner = [line for line in said.splitlines() if OURS in line and "in train" not in line]
    assert inner == []
