"""Replicas over small models, alone or merged by all-reduce."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.core import Group
from manyhands.exchange.inproc import World
from manyhands.exchange.observed import ObservedGroup
from manyhands.merge.all_reduce import AllReduce
from manyhands.replica.flat import FlatParameters
from manyhands.replica.module import MicroLoss, ModuleReplica
from manyhands.replica.update import WholeUpdate

Micros = Sequence[
    Tensor
]  # the rows of each micro-batch of a rank in one step; no rows: nothing to do
Sgd = Callable[[Any], Optimizer]


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


class Mlp(nn.Module):
    """Small, in float64, with a target made from its input: a loss needs rows only."""

    def __init__(self, inputs: int = 5, hidden: int = 7) -> None:
        super().__init__()
        self.first, self.middle, self.last = (
            nn.Linear(inputs, hidden),
            nn.Linear(hidden, hidden),
            nn.Linear(hidden, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).tanh()).tanh()).squeeze(-1)


def mlp(dtype: torch.dtype = torch.float64) -> Mlp:
    torch.manual_seed(1)
    return Mlp().to(dtype)


def squared(model: nn.Module, rows: Tensor) -> Tensor:
    return (model(rows) - rows.sum(1).sin()).square().mean()


def rows(n: int, inputs: int = 5, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        n, inputs, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def memory(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(numel, dtype=dtype)


def replica(
    model: nn.Module,
    steps: Sequence[Micros],
    *,
    nominal: int,
    optimizer: Sgd = sgd,
    loss: Callable[[nn.Module, Tensor], Tensor | tuple[Tensor, int]] = squared,
    bucket_bytes: int = 2**20,
    schedule: Callable[[Optimizer], Any] | None = None,
    **options: Any,
) -> ModuleReplica:
    """A replica that takes `steps` one after the other, each a list of micro-batches; `loss` may
    give its own count.
    """
    todo = [(micro, i == len(step) - 1) for step in steps for i, micro in enumerate(step)]

    def next_loss() -> MicroLoss:
        batch, last = todo.pop(0)
        if not len(batch):
            return MicroLoss(None, 0, last)
        got = loss(model, batch)
        value, count = got if isinstance(got, tuple) else (got, len(batch))
        return MicroLoss(value, count, last)

    flat = FlatParameters(model, memory, bucket_bytes)
    made = optimizer(model.parameters())
    more = {} if schedule is None else {"schedule": schedule(made)}
    return ModuleReplica(
        flat, WholeUpdate(flat, model, made), next_loss, nominal=nominal, **more, **options
    )


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def train_together(
    steps: Sequence[Sequence[Micros]], make: Callable[[], nn.Module] = mlp, **options: Any
) -> tuple[list[dict[str, Tensor]], list[ObservedGroup]]:
    """`steps[s][r]` are the micro-batches of rank r in step s; every rank's weights afterwards, and
    its link.
    """
    size = len(steps[0])
    models = [make() for _ in range(size)]
    nominal = options.pop("nominal", None) or max(
        sum(len(m) for rank in step for m in rank) for step in steps
    )

    def main(group: Group) -> ObservedGroup:
        link = ObservedGroup(group, lambda event: None)
        mine = replica(
            models[group.rank], [step[group.rank] for step in steps], nominal=nominal, **options
        )
        rule = AllReduce()
        state = rule.init(mine)
        for _ in steps:
            rule.round(mine, link, state)
        return link

    links = World(size).run(main)
    return [weights(m) for m in models], links


def train_alone(
    steps: Sequence[Tensor], make: Callable[[], nn.Module] = mlp, **options: Any
) -> dict[str, Tensor]:
    """One process on the union batches."""
    return train_together([[[batch]] for batch in steps], make, **options)[0][0]
