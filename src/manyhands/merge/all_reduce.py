"""Synchronous SGD: the gradient of the union of all ranks' batches, then the same step everywhere.

    G = (sum_i sum_{j in batch_i} grad l_j) / (sum_i n_i);   w <- w - eta G

Gradient sum and count are reduced and divided once, so uneven shares, down to n_i = 0, weigh what they should.
Buckets start to travel while backward still runs. Use it when the link is fast: every step pays one all-reduce.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from manyhands.core import Group, Replica, Tensors, Work


@dataclass(frozen=True)
class AllReduce:
    link: ClassVar[type] = Group

    def init(self, replica: Replica) -> Tensors:
        return {}

    def round(self, replica: Replica, link: Group, state: Tensors) -> Tensor:
        pending: list[Work] = []

        def send(part: Tensors) -> None:
            pending.append(link.all_reduce(part, op="sum"))

        loss = replica.backward(on_ready=send if link.size > 1 else None)
        for work in pending:
            work.wait()
        replica.step()
        return loss
