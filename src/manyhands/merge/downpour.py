"""Downpour SGD: asynchronous SGD. Every rank pulls the model and pushes gradients without waiting.

    every n_fetch steps   x_i <- w
    every step            g = gradient at x_i;   a <- a + g;   x_i <- x_i - eta g
    every n_push steps    w <- optimizer(w, a)  on the server;   a <- 0

With one rank and n_push = n_fetch = 1 it is the plain optimizer, bit for bit. The task's optimizer
runs on the server, with the learning rate of the rank that pushes. Steps that a rank takes between
two fetches are plain gradient steps, as in the paper; the next fetch overwrites them. A push is the
sum of n_push gradients, each a mean over one rank's batch, and is a step of its own: M ranks make M
steps where synchronous training makes one, so the learning rate is that of one rank's batch. Ranks
claim their batches from one counter: a fast rank computes more of them. The staleness of a gradient
is the number of updates since its rank fetched, M - 1 where all ranks are equally fast. `adapt`
divides the learning rate of a push by that number, where it is more than 1. Momentum over stale
gradients acts like more momentum than was set: lower it with many ranks. Costs a pull every n_fetch
and a push every n_push steps.

Use it when some ranks are always slower and the model tolerates stale gradients: sparse models and
Adagrad do. n_push and n_fetch above 1 are for slow networks.

Paper: Dean et al. 2012, "Large Scale Distributed Deep Networks": networks 30 times larger than
before, with Adagrad on the server. Zhang et al. 2016 (arXiv:1511.05950): with staleness-aware rates
close to linear speed-up on CIFAR-10 and ImageNet.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manyhands.core import ServedReplica, Store, Strategy, Tensors
from manyhands.merge.building_blocks.local_steps import copies
from manyhands.merge.building_blocks.options import need
from manyhands.merge.building_blocks.server_model import pull_all, rows_of


@dataclass(frozen=True)
class Downpour(Strategy[ServedReplica, Store]):
    n_push: int = 1
    n_fetch: int = 1
    adapt: bool = False
    link: ClassVar[type] = Store

    def __post_init__(self) -> None:
        need(
            self.n_push >= 1,
            f"n_push={self.n_push}",
            "at least 1 step is needed between two pushes",
        )
        need(
            self.n_fetch >= 1,
            f"n_fetch={self.n_fetch}",
            "at least 1 step is needed between two fetches",
        )

    @property
    def shares_steps(self) -> bool:
        return True

    def batch_fraction(self, size: int) -> float:
        return 1.0

    def init(self, replica: ServedReplica) -> Tensors:
        return {"steps": torch.zeros((), dtype=torch.int64)}  # on the host, which reads it

    def round(self, replica: ServedReplica, store: Store, state: Tensors) -> Tensor:
        total, samples = torch.zeros((), device=replica.count.device), 0
        accrued: Tensors = {}
        rate = replica.lr
        for _ in replica.steps(self.n_push):
            if state["steps"] % self.n_fetch == 0:
                store.pull(rows_of(replica), into=replica.params)
            state["steps"] += 1
            loss = replica.backward()
            if replica.own_count:
                rate, g = replica.lr, replica.gradient()
                accrued = _sum(accrued, g) if self.n_push > 1 else g
                if self.n_fetch > 1:
                    for k, x in replica.params.items():
                        x.sub_(g[k], alpha=rate)
            total, samples = total + loss * replica.own_count, samples + replica.own_count
            replica.stepped()
        if accrued:
            store.push(rows_of(replica), accrued, lr=rate, adapt=self.adapt).wait()
        return total / max(samples, 1)

    def consensus(self, replica: ServedReplica, store: Store, state: Tensors) -> Tensors:
        return pull_all(replica, store)


def _sum(accrued: Tensors, g: Tensors) -> Tensors:
    if not accrued:
        return copies(g)
    for k, a in accrued.items():
        a.add_(g[k])
    return accrued
