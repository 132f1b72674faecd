"""A small classification task with eight features, and the weights that a run of it saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import manyhands as mh
from manyhands.recover.checkpoint import Checkpoints


def small_data(samples: int = 96, width: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(samples, width, generator=generator), torch.randint(
        0, 3, (samples,), generator=generator
    )


def small_task(model: Any = None, **given: Any) -> mh.Task:
    given.setdefault("optimizer", lambda p: torch.optim.SGD(p, lr=0.1))
    given.setdefault("train", small_data())
    return mh.Task(model=model or nn.Linear(8, 3), loss=cross_entropy, batch=16, **given)


def saved_weights(folder: Path) -> dict[str, Tensor]:
    saved = Checkpoints(folder / "checkpoints").latest()
    assert saved is not None
    return saved.params
