"""Elastic runs whose model says how often each sample was seen, and their processes."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyhands.observe.events import read
from support.commands import CLI, Command
from support.small_task import saved_weights

BATCH = 4
SAMPLES = 240  # whole steps of every number of ranks
# each sample moves its own number of the model, so that the model says how often each was seen;
# `enough` ends the run at the end of an epoch
COUNTING = f"""
import os, time
from pathlib import Path
import torch, manyhands as mh
from torch import nn

class Seen(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = nn.Parameter(torch.zeros({SAMPLES}, dtype=torch.float64))
    def forward(self, x):
        time.sleep(0.002)
        return self.seen[x[:, 0].long()]

class Mark(mh.Callback):
    def on_round(self, run, round, loss):
        name = Path(f"{{run.rank}}-{{os.getpid()}}.started")
        if not name.exists():
            name.touch()

def enough(out, y):
    return torch.full((len(out),), float(Path("enough").exists()))

def task():
    x = torch.arange({SAMPLES}, dtype=torch.float64)[:, None]
    return mh.Task(model=Seen, loss=lambda out, y: out.mean(), train=(x, x), test=(x, x),
                   optimizer=lambda p: torch.optim.SGD(p, lr=1.0), batch={BATCH}, epochs=10**6,
                   metrics={{"enough": enough}}, callbacks=[Mark()])
"""

# a model that can be split in every way, and steps that depend on all that went before
LEARNING = """
import os, time
from pathlib import Path
import torch, manyhands as mh
from torch import nn
from torch.nn.functional import cross_entropy

class Mark(mh.Callback):
    def on_round(self, run, round, loss):
        time.sleep(0.004)
        name = Path(f"{run.rank}-{os.getpid()}.started")
        if round >= 150 and not name.exists():
            name.touch()

def task():
    torch.manual_seed(1)
    x = torch.randn(240, 8)
    layers = [m for _ in range(3) for m in (nn.Linear(8, 8), nn.Tanh())]
    return mh.Task(model=nn.Sequential(*layers, nn.Linear(8, 4)), loss=cross_entropy,
                   train=(x, torch.randint(0, 4, (240,))), batch=4, epochs=10**6,
                   optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
                   callbacks=[Mark()])
"""


def processes(job: Command, rank: int | str) -> list[int]:
    """The processes that have computed as this rank, the newest last."""
    found = sorted(job.folder.glob(f"{rank}-*.started"), key=lambda f: f.stat().st_mtime_ns)
    return [int(f.stem.partition("-")[2]) for f in found]


def everyone(job: Command) -> set[int]:
    return set(processes(job, "*"))


def living(job: Command) -> set[int]:
    return {p for p in everyone(job) if Path(f"/proc/{p}").exists()}


def kill(job: Command, rank: int) -> int:
    """Kill the process that computes as this rank now; its number."""
    (pid,) = [p for p in processes(job, rank) if p in living(job)][-1:]
    os.kill(pid, signal.SIGKILL)
    return pid


def counting(folder: Path, words: str, script: str = COUNTING) -> list[str]:
    return launch(folder, f"{words} until=enough:1", script)


def launch(folder: Path, words: str, script: str) -> list[str]:
    folder.mkdir(exist_ok=True)
    (folder / "task.py").write_text(script)
    return [*CLI, "run", "task.py", *words.split(), "device=cpu", "--dir", "run"]


def seen(folder: Path, batch: int = BATCH) -> tuple[Tensor, float]:
    """How often each sample was seen, and the epochs that the run says it has done. `batch`: over
    how many samples a step takes the mean."""
    weights = -saved_weights(folder / "run")["seen"] * batch
    told: list[Any] = [e.value for e in read(folder / "run") if e.name == "evaluate"]
    return weights, max(value["epoch"] for value in told)


def counts_alike(weights: Tensor, each: float) -> None:
    """Every sample as often as every other."""
    assert torch.allclose(weights, torch.full_like(weights, each), rtol=1e-9), (
        weights.min(),
        weights.max(),
        each,
    )


def regroupings(folder: Path) -> list[tuple[int, int, str]]:
    """(replicas, round, text) of each `regroup` event, in order."""
    found = []
    for event in read(folder / "run"):
        if event.name == "regroup":
            text = str(event.value)
            data, match = re.search(r"data=(\d+)", text), re.search(r"from round (\d+) on", text)
            assert match is not None, text
            found.append((1 if data is None else int(data[1]), int(match[1]), text))
    return found
