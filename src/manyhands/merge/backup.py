"""Synchronous SGD with backup workers: a step uses the first k gradients and drops the late ones.

    w <- w - (eta / k) sum of the first k of n gradients taken at w

A gradient taken at an older w never counts. `quorum` is k; where it is not given it is 0.9 n,
rounded up. A step takes as long as the k-th fastest rank of that step, and gradients are never
stale, so the result is that of synchronous SGD on k ranks; with k = n it is `all_reduce` up to the
order of summation. One coordinator tells all ranks which k counted. Ranks claim their batches from
one counter, so the work of a rank that is always late is lost: at most n - k of n batches. The mean
is over samples. The optimizer runs on the server, with the learning rate of the ranks that count.
Each rank clips its gradient by its own norm. Costs one pull and one push of the model a step. In a
plan, `quorum=3` is short for merge=backup merge.quorum=3.

Use it when a few of many ranks are slow, always or in turns, and stale gradients would cost
accuracy. Where slowness depends on the data (long sequences), dropping slow gradients changes what
is learnt.

Paper: Chen et al. 2016, "Revisiting Distributed Synchronous SGD" (arXiv:1604.00981): on about 100
workers faster and more accurate than asynchronous training; 96 and 4 backups was a good split.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from manyhands.core import ServedReplica, Store, Strategy, Tensors
from manyhands.merge.building_blocks.options import need
from manyhands.merge.building_blocks.server_model import pull_all, rows_of


@dataclass(frozen=True)
class Backup(Strategy[ServedReplica, Store]):
    quorum: int | None = None
    link: ClassVar[type] = Store

    def __post_init__(self) -> None:
        if self.quorum is not None:
            need(
                self.quorum >= 1,
                f"quorum={self.quorum}",
                "at least 1 gradient is needed for a step",
            )

    @property
    def shares_steps(self) -> bool:
        return True

    def check(self, size: int) -> None:
        k = self._quorum(size)
        need(
            k <= size,
            f"quorum={k}",
            f"there are {size} ranks, so at most {size} gradients can arrive; "
            f"set merge.quorum={-(-9 * size // 10)}",
        )

    def init(self, replica: ServedReplica) -> Tensors:
        return {}

    def round(self, replica: ServedReplica, store: Store, state: Tensors) -> Tensor:
        store.pull(rows_of(replica), into=replica.params)
        loss = replica.backward()
        store.push(
            rows_of(replica),
            replica.gradient(),
            pending=True,
            weight=replica.own_count,
            lr=replica.lr,
        )
        replica.stepped()
        store.tick(0, quorum=self._quorum(store.size), late="drop")
        return loss

    def consensus(self, replica: ServedReplica, store: Store, state: Tensors) -> Tensors:
        return pull_all(replica, store)

    def _quorum(self, size: int) -> int:
        return -(-9 * size // 10) if self.quorum is None else self.quorum
