"""Replicas of small networks that can leave units out, for the random split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.core import Group, Position, Tensors
from manyhands.data.batches import Batch, IndexedBatches
from manyhands.data.sources import TensorSource
from manyhands.exchange.inproc import World
from manyhands.exchange.observed import ObservedGroup
from manyhands.replica.flat import FlatParameters
from manyhands.replica.forward import TaskLoss
from manyhands.replica.module import ModuleReplica
from manyhands.replica.objective import Objective
from manyhands.replica.thinned import ThinnedReplica, thinned
from manyhands.replica.update import WholeUpdate
from manyhands.split.data import SPLITS, DataSplit

CPU = torch.device("cpu")
BATCH, CLASSES, FEATURES = 20, 4, 10
Make = Callable[[Any], Optimizer]


def momentum(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.8, weight_decay=0.01)


def adam(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 40), nn.ReLU(), nn.Linear(40, 32), nn.Tanh(), nn.Linear(32, CLASSES)
    ).double()


def blobs(n: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Classes that no plane separates: each is two clouds, opposite of each other."""
    g = torch.Generator().manual_seed(7)
    centres = 1.5 * torch.randn(CLASSES, FEATURES, generator=g, dtype=torch.float64)
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=g)
    side = torch.randint(2, (n, 1), generator=g) * 2 - 1
    return side * centres[y] + torch.randn(n, FEATURES, generator=g, dtype=torch.float64), y


@dataclass
class Worker:
    model: nn.Module
    flat: FlatParameters
    replica: ThinnedReplica
    walk: Any

    def by_name(self, values: Tensors | None = None) -> Tensors:
        """Parameters, or what else stands in such vectors, by name."""
        vectors = self.flat.values if values is None else values
        return {
            p.name: torch.as_strided(
                vectors[p.vector], p.value.shape, p.value.stride(), p.start
            ).clone()
            for p in self.flat.views
        }


def worker(
    rank: int = 0,
    size: int = 1,
    make: Make = momentum,
    net: Callable[[], nn.Module] = mlp,
    given: tuple[Tensor, Tensor] | None = None,
    counts: Callable[[int], int] | None = None,
    batch: int = BATCH,
) -> Worker:
    """`counts`: how many of its samples this rank keeps in each step, where it is not all."""
    given = given or blobs(400)
    source, model, samples = TensorSource(given, CPU), net(), len(given[0])
    flat = FlatParameters(model, lambda n, dtype: torch.zeros(n, dtype=dtype), 2**20)
    split = DataSplit(samples, batch * size, batch, rank, size)
    walk = IndexedBatches(
        source, lambda epoch: SPLITS["shuffled"](samples, 0, epoch), split, Position()
    )
    if counts is not None:
        whole, keeps = walk.next, counts

        def some() -> Batch:
            step = walk.position.steps
            got, n = whole(), keeps(step)
            return Batch(tuple(v[:n] for v in got.values) if n else None, n, got.last)

        walk.next = some  # type: ignore[method-assign]
    task = TaskLoss(model, walk, Objective(nn.functional.cross_entropy), "fp32", CPU)
    plain = ModuleReplica(
        flat, WholeUpdate(flat, model, make(model.parameters())), task, nominal=batch * size
    )
    replica = thinned(plain, model, task, source)
    return Worker(model, flat, replica, walk)


@dataclass
class Trained:
    worker: Worker
    state: Tensors
    link: ObservedGroup
    losses: list[Tensor]

    @property
    def params(self) -> Tensors:
        return self.worker.by_name()

    @property
    def moments(self) -> Tensors:
        return {k: v.clone() for k, v in self.worker.replica.moments.items()}


def train(
    rule: Any,
    size: int,
    rounds: int,
    *,
    after_round: Callable[[Worker, Group, Tensors], None] | None = None,
    uneven: Callable[[int, int], int] | None = None,
    **options: Any,
) -> list[Trained]:
    rule.check(size)

    def main(group: Group) -> Trained:
        link = ObservedGroup(group, lambda event: None)
        counts = None if uneven is None else lambda step: uneven(group.rank, step)
        w = worker(group.rank, size, counts=counts, **options)
        state = rule.init(w.replica)
        losses = []
        for _ in range(rounds):
            losses.append(rule.round(w.replica, link, state))
            if after_round is not None:
                after_round(w, link, state)
        return Trained(w, state, link, losses)

    return World(size).run(main)


def accuracy(model: nn.Module, given: tuple[Tensor, Tensor] | None = None) -> float:
    x, y = given or blobs(2000, seed=9)
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())
