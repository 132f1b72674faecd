"""Several ranks on one card: every layout computes what one process computes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ZOO

pytestmark = pytest.mark.gpu

ROWS = """
import torch, manyhands as mh
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.out = mh.Embedding("rows", 8), nn.Linear(8, 1)
    def forward(self, ids):
        return self.out(self.rows(ids).mean(1)).squeeze(1)

def task():
    ids = torch.arange(2048).view(512, 4) % 97
    return mh.Task(model=Model, loss=nn.functional.mse_loss, train=(ids, ids.float().mean(1) / 97),
                   optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch=32)
"""


@pytest.mark.parametrize(
    "words",
    [
        "data=2",
        "data=2 precision=fp32 accumulate=2",
        "tensor=2",
        "pipe=2",
        "shard=2 zero=1",
        "shard=2 zero=2",
        "shard=2 zero=3",
        "data=2 tensor=2 ranks_per_gpu=4",
    ],
)
def test_a_layout_is_equal_to_one_process(words: str) -> None:
    if "ranks_per_gpu" not in words:
        words += " ranks_per_gpu=2"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "manyhands", "verify", str(ZOO / "gpt.py")),
            *(*words.split(), "device=cuda", "--steps", "3"),
        ],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "EQUAL" in done.stdout


def test_a_run_over_a_server_trains_on_one_card(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(ROWS)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "manyhands", "run", str(tmp_path / "rows.py")),
            *("data=2", "servers=1", "device=cuda", "ranks_per_gpu=2", "steps=20"),
            *("--dir", str(tmp_path / "run")),
        ],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20" in done.stdout
