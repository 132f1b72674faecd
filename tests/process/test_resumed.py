"""Resume after kill -9: k steps, then k more, are 2k steps.

The same bits on as many ranks, the same numbers on another number of ranks.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import manyhands as mh
from manyhands.assembly.rank_context import Options
from manyhands.cli.export import export
from manyhands.entry import work
from manyhands.recover.checkpoint import Checkpoints, load
from support.commands import CLI, command, descendants, wait_until_gone
from support.pooled import start
from support.small_task import saved_weights, small_task

N = 53  # and 2 ranks x 4: seven steps an epoch, the last of five samples
G = torch.Generator().manual_seed(0)
X, Y = torch.randn(N, 6, generator=G), torch.randint(3, (N,), generator=G)

# dropout, BatchNorm, momentum of two kinds, a schedule and user code that draws random numbers
JOB = """
import os, random, threading
from pathlib import Path
import numpy as np, torch, manyhands as mh
from torch import nn

G = torch.Generator().manual_seed(0)
X, Y = torch.randn(53, 6, generator=G), torch.randint(3, (53,), generator=G)

def loss(outputs, target):
    return nn.functional.cross_entropy(outputs, target) * (
        1 + 0.01 * random.random() + 0.01 * np.random.rand())

class Hold(mh.Callback):
    def on_round(self, run, round, loss):
        if round == 1:
            Path(f"{run.rank}.part").write_text(str(os.getpid()))
            os.rename(f"{run.rank}.part", f"{run.rank}.pid")
        if round == 8 and Path("hold").exists():
            threading.Event().wait()  # until somebody kills us

def task():
    model = nn.Sequential(
        nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.4), nn.Linear(32, 3))
    return mh.Task(model=model, loss=loss, train=(X, Y), batch=4,
                   optimizer=lambda p: torch.optim.AdamW(p, lr=0.01),
                   schedule=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 12),
                   callbacks=[Hold()])
"""


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(export(run, run / "model.safetensors"))


def test_a_job_killed_after_a_checkpoint_and_resumed_ends_with_the_same_bits(
    tmp_path: Path,
) -> None:
    (tmp_path / "job.py").write_text(JOB)
    line = [*CLI, "run", "job.py", "data=2", "steps=12", "save=6", "--quiet"]
    with command(tmp_path, [*line, "--dir", "whole"]) as job:
        assert job.end() == 0, job.err
    for file in tmp_path.glob("*.pid"):
        file.unlink()
    (tmp_path / "hold").touch()
    with command(tmp_path, [*line, "--dir", "killed"]) as job:
        pids = job.pids(2)
        checkpoints = Checkpoints(tmp_path / "killed" / "checkpoints")
        job.until(
            lambda: [p.name for p in checkpoints.all()] == ["step-00000006"],
            "checkpoint at round 6",
        )
        for pid in {*pids, *descendants(job.process.pid), job.process.pid}:
            os.kill(pid, signal.SIGKILL)
        job.end()
        wait_until_gone(pids, 5.0)
    (tmp_path / "hold").unlink()
    with command(tmp_path, [*line, "--dir", "killed", "--resume"]) as job:
        assert job.end() == 0, job.err
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert whole.keys() == resumed.keys()
    for name in whole:
        assert torch.equal(whole[name], resumed[name]), name
    a, b = (Checkpoints(tmp_path / name / "checkpoints").latest() for name in ("whole", "killed"))
    assert a is not None and b is not None and a.round == b.round == 12 and a.position == b.position
    for kind in ("optimizer", "rng"):
        ours, theirs = getattr(a, kind), getattr(b, kind)
        assert ours.keys() == theirs.keys() and all(
            torch.equal(ours[k], theirs[k]) for k in ours
        ), kind
    assert any(k.startswith("1/") for k in a.rng), "the generators of every rank"


def task() -> mh.Task:
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3)).double()
    return mh.Task(
        model=model,
        loss=nn.functional.cross_entropy,
        train=(X.double(), Y),
        batch=4,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        schedule=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.02, total_steps=12),
    )


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """Five steps on two ranks, in the middle of an epoch; and what one rank has after twelve steps
    of as many samples.
    """
    folder = tmp_path_factory.mktemp("halves")
    mh.train(task, "data=2 steps=5", directory=folder / "half", quiet=True)
    mh.train(task, "batch=8 steps=12", directory=folder / "alone", quiet=True)
    return folder, weights(folder / "alone")


@pytest.mark.parametrize(
    "words",
    [
        "data=1",
        "data=3",
        *(
            pytest.param(w, marks=pytest.mark.slow)
            for w in ("data=2 link=gloo", "data=3 accumulate=2")
        ),
    ],
)
def test_a_run_goes_on_with_the_same_numbers_on_another_number_of_ranks(
    halves: tuple[Path, dict[str, Tensor]], tmp_path: Path, words: str
) -> None:
    folder, alone = halves
    shutil.copytree(folder / "half", tmp_path / "run")
    result = mh.train(
        task, f"{words} steps=12", directory=tmp_path / "run", resume=True, quiet=True
    )
    assert result.rounds == 12
    for name, value in weights(tmp_path / "run").items():
        torch.testing.assert_close(
            value, alone[name], rtol=1e-11, atol=1e-13, msg=lambda m, name=name: f"{name}: {m}"
        )


def wide() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 2048), nn.ReLU(), nn.Linear(2048, 3)
    )  # each weight lies in several owned blocks


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def test_adam_resumes_over_ranks_that_own_several_slices_of_a_parameter(tmp_path: Path) -> None:
    def make() -> mh.Task:
        return small_task(wide(), optimizer=adamw)

    def runs(words: dict[str, Any], options: Options) -> dict[str, Any]:
        """One after the other in the same two processes."""
        whole, half = (
            dataclasses.replace(options, directory=str(tmp_path / name))
            for name in ("whole", "half")
        )
        work(make, {**words, "steps": 10}, whole)
        work(make, {**words, "steps": 5}, half)
        return work(make, {**words, "steps": 10}, dataclasses.replace(half, resume=True))

    start(runs, "data=2 save=5", Options(quiet=True))
    for key, value in saved_weights(tmp_path / "whole").items():
        assert torch.equal(saved_weights(tmp_path / "half")[key], value), key
    steps = {
        k: float(v)
        for k, v in load(tmp_path / "half/checkpoints/step-00000010").optimizer.items()
        if k.endswith("/step")
    }
    assert set(steps.values()) == {10.0}
