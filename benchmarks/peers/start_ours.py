"""A tiny task that notes when its first training step has ended: of `benchmarks/start.py`, ours."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import manyhands as mh


class FirstStep(mh.Callback):
    def on_round(self, run: Any, round: int, loss: Any) -> None:
        if round == 1:
            Path(f"first-{run.rank}").write_text(repr(time.time()))


def task() -> mh.Task:
    x = torch.randn(65536, 16)
    return mh.Task(
        model=nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)),
        loss=nn.functional.cross_entropy,
        train=(x, (x.sum(1) > 0).long()),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, fused=True),
        batch=64,
        epochs=1e6,
        callbacks=[FirstStep()],
    )
