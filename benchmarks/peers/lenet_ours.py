"""The task of the benchmark `recovery`: `manyhands run lenet_ours.py -- FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lenet import BATCH, LR, MOMENTUM, StepLog, data, lenet
from torch import Tensor, nn

import manyhands as mh

FOLDER = Path(sys.argv[1])


class LogSteps(mh.Callback):
    def __init__(self) -> None:
        self.log: StepLog | None = None

    def on_round(self, run: Any, round: int, loss: Tensor) -> None:
        self.log = self.log or StepLog(FOLDER)
        self.log.write(round, run.rank)


def task() -> mh.Task:
    return mh.Task(
        model=lenet,
        loss=nn.functional.cross_entropy,
        train=data(FOLDER),
        batch=BATCH,
        epochs=1e6,
        optimizer=lambda p: torch.optim.SGD(p, lr=LR, momentum=MOMENTUM),
        callbacks=[LogSteps()],
    )
