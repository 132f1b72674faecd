"""LeNet as every side of the benchmark `recovery` trains it, and the log of finished steps.

Only torch is imported: how long a process takes to start is part of what is measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

BATCH, LR, MOMENTUM = 64, 0.05, 0.9


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)


def data(folder: Path) -> tuple[Tensor, Tensor]:
    """What the benchmark wrote: mapped, so that it costs a new process nothing to load."""
    images, labels = torch.load(folder / "data.pt", mmap=True)
    return images, labels


def batches(folder: Path, rank: int, size: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A rank's batches of an epoch."""
    images, labels = data(folder)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
    for first in range(rank * BATCH, len(labels) - size * BATCH, size * BATCH):
        chosen = order[first : first + BATCH]
        yield images[chosen], labels[chosen]


class StepLog:
    """A file of this process: `time step rank pid` of every step that it finished."""

    def __init__(self, folder: Path):
        path = folder / f"{os.getpid()}.steps"
        self._file = path.open("a", buffering=1)  # a line at once: the process will be killed

    def write(self, step: int, rank: int) -> None:
        self._file.write(f"{time.time():.6f} {step} {rank} {os.getpid()}\n")
