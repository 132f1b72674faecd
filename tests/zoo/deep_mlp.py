"""Eight linear layers: the smallest model that four ranks can have two stages each of."""

from itertools import pairwise

import torch
from torch import nn

import manyhands as mh


def task():
    chance = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    widths = (12, 32, 24, 32, 24, 32, 24, 32, 5)
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.GELU() if b == 24 else nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
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
