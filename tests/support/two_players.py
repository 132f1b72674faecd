"""Tasks with several named optimizers, in float64: a GAN, an actor-critic, two layers apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import manyhands as mh

N = 26  # of batches of 3 x 4: two full steps, then two samples: rank 2 has none
G = torch.Generator().manual_seed(0)
REAL = torch.randn(N, 3, generator=G, dtype=torch.float64) * 0.3 + 1
NOISE = torch.randn(N, 4, generator=G, dtype=torch.float64)
CLASSES = torch.randint(3, (N,), generator=G)


def gan_models(norm: bool = False) -> dict[str, nn.Module]:
    def between() -> list[nn.Module]:
        return [nn.BatchNorm1d(8)] if norm else []

    def first(inputs: int) -> nn.Module:
        return nn.Linear(inputs, 8, bias=not norm)  # BatchNorm takes a bias out again

    torch.manual_seed(5)
    return {
        "g": nn.Sequential(first(4), *between(), nn.Tanh(), nn.Linear(8, 3)).double(),
        "d": nn.Sequential(first(3), *between(), nn.LeakyReLU(), nn.Linear(8, 1)).double(),
    }


def gan_step(models: Any, batch: tuple[Tensor, Tensor]) -> Iterator[tuple[str, Tensor]]:
    real, noise = batch
    fake = models.g(noise)
    yield "d", (softplus(-models.d(real)) + softplus(models.d(fake.detach()))).mean()
    yield "g", softplus(-models.d(fake)).mean()


def gan_optimizers() -> dict[str, Any]:
    return {
        "g": lambda p: torch.optim.Adam(p, 0.02, betas=(0.5, 0.9)),
        "d": lambda p: torch.optim.SGD(p, 0.05, momentum=0.5),
    }


def gan(**given: Any) -> mh.Task:
    known: dict[str, Any] = {
        "model": gan_models(),
        "train": (REAL, NOISE),
        "step": gan_step,
        "optimizer": gan_optimizers(),
        "batch": 4,
        "epochs": 2,
    }
    return mh.Task(**{**known, **given})


class Agent(nn.Module):
    """A policy and a value of what a common body sees."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(3, 8), nn.Linear(8, 3), nn.Linear(8, 1)
        self.double()


def agent_step(model: Any, batch: tuple[Tensor, Tensor]) -> Iterator[tuple[str, Tensor, int]]:
    """One step of the critic or two, by nothing that depends on the samples; then the others."""
    seen, done = batch
    returns = seen.sum(1)
    for _ in range(2):
        value = model.critic(model.body(seen).tanh()).squeeze(-1)
        yield "critic", (value - returns).square().mean(), len(seen)
    advantage = (returns - value).detach()
    kept = done != 0  # only some actions count, on some ranks none
    losses = -model.actor(model.body(seen).tanh()).log_softmax(1)[range(len(done)), done]
    loss = (losses * advantage * kept).sum() / max(1, int(kept.sum()))
    yield "actor", loss, int(kept.sum())
    yield "body", model.body(seen).square().mean(), len(seen)


def agent(**given: Any) -> mh.Task:
    torch.manual_seed(6)
    known: dict[str, Any] = {
        "model": Agent(),
        "train": (REAL, CLASSES),
        "step": agent_step,
        "optimizer": {
            name: lambda p: torch.optim.SGD(p, 0.05, momentum=0.9)
            for name in ("body", "actor", "critic")
        },
        "batch": 4,
        "epochs": 2,
    }
    return mh.Task(**{**known, **given})


def layers(**given: Any) -> mh.Task:
    """A plain loss: both optimizers make every step together."""
    torch.manual_seed(7)
    known: dict[str, Any] = {
        "model": nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double(),
        "train": (REAL, CLASSES),
        "test": (REAL, CLASSES),
        "metrics": {"accuracy": mh.accuracy},
        "loss": nn.functional.cross_entropy,
        "optimizer": {
            "0": lambda p: torch.optim.AdamW(p, 0.01),
            "2": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        },
        "batch": 4,
        "epochs": 2,
    }
    return mh.Task(**{**known, **given})
