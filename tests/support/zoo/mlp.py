"""Four linear layers: the smallest model that can be cut in every way."""

import torch
from torch import nn

import manyhands as mh


def task():
    chance = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(12, 32),
        nn.ReLU(),
        nn.Linear(32, 24),
        nn.GELU(),
        nn.Linear(24, 32),
        nn.ReLU(),
        nn.Linear(32, 5),
    )
    x, y = torch.randn(96, 12, generator=chance), torch.randint(5, (96,), generator=chance)
    return mh.Task(
        model=model,
        loss=nn.functional.cross_entropy,
        train=(x, y),
        test=(x[:40], y[:40]),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        batch=16,
        metrics={"accuracy": mh.accuracy},
    )
