"""Stale synchronous parallel (SSP): a rank may be at most s clocks ahead of the slowest one.

    x_i <- w;   g_i = gradient at x_i;   w <- w - eta g_i / M  on the server
    continue when min_j c_j >= c_i - s                       c_i: the clock of rank i

A clock is one step of one rank. `staleness` s alone sets the consistency. 0 is bulk synchronous:
the mean over the samples of all ranks is applied as one update, the same as `all_reduce` up to the
order of summation. inf is asynchronous: no rank ever waits, and ranks claim their steps from one
counter, so that a fast rank computes more of them. In between, a rank reads all updates of clocks
up to c - s - 1, all of its own, and what else has arrived. With s > 0 an update has weight 1/M, so
that one clock of all ranks moves the model as far as one synchronous step; Adam and Adagrad, which
divide by the size of past gradients, cancel that weight: lower the learning rate for them. The
optimizer runs on the server, with the learning rate of the rank that pushes; a rank without
samples pushes nothing. Each rank clips its gradient by its own norm. Costs one pull and one push
of the model a step. In a plan, `staleness=4` is short for merge=stale_sync merge.staleness=4.

Use it when ranks are slow in turns, not always the same one: s clocks absorb that, and gradients
are at most s clocks old. A rank that is always slow delays the others as in synchronous training,
s clocks later, unless s is inf.

Paper: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server": converges faster than synchronous and asynchronous training on topic models, matrix
factorisation and Lasso.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from manyhands.core import ServedReplica, Store, Strategy, Tensors
from manyhands.merge.building_blocks.options import need
from manyhands.merge.building_blocks.server_model import pull_all, rows_of


@dataclass(frozen=True)
class StaleSync(Strategy[ServedReplica, Store]):
    staleness: float = 3
    link: ClassVar[type] = Store

    def __post_init__(self) -> None:
        holds = self.staleness >= 0 and (
            math.isinf(self.staleness) or self.staleness == int(self.staleness)
        )
        need(
            holds,
            f"staleness={self.staleness}",
            "a whole number of clocks is needed: 0 (synchronous), 3, say, or inf (never wait)",
        )

    @property
    def shares_steps(self) -> bool:
        return math.isinf(self.staleness)

    def init(self, replica: ServedReplica) -> Tensors:
        return {}

    def round(self, replica: ServedReplica, store: Store, state: Tensors) -> Tensor:
        store.pull(rows_of(replica), into=replica.params)
        loss = replica.backward()
        if self.staleness == 0:
            store.push(
                rows_of(replica),
                replica.gradient(),
                pending=True,
                weight=replica.own_count,
                lr=replica.lr,
            )
        elif replica.own_count:
            share = replica.gradient()
            for g in share.values():
                g.div_(store.size)
            store.push(rows_of(replica), share, lr=replica.lr)
        replica.stepped()
        store.tick(self.staleness)
        return loss

    def consensus(self, replica: ServedReplica, store: Store, state: Tensors) -> Tensors:
        return pull_all(replica, store)
