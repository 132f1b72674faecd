"""Synchronous SGD: the gradient of the union of all ranks' batches, then the same step everywhere.

    G = (sum_i sum_{j in batch_i} grad l_j) / (sum_i n_i);   w <- w - eta G

Gradient sum and count are reduced and divided once, so uneven shares, down to n_i = 0, weigh what they should.
Buckets start to travel while backward still runs. Use it when the link is fast: every step pays one all-reduce.

An all-reduce is a reduce-scatter and an all-gather. Where replica and link allow it, the optimizer runs between the two:
each rank updates the part it owns, 1/M of the work and of the optimizer's memory, and parameters are gathered instead
of gradients (Xu et al. 2020, arXiv:2004.13336). The result is the same bit for bit.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from manyhands.core import Group, PartialStepReplica, Strategy, Tensors, Work


@dataclass(frozen=True)
class AllReduce(Strategy[PartialStepReplica, Group]):
    link: ClassVar[type] = Group
    replicas_agree: ClassVar[bool] = True

    def init(self, replica: PartialStepReplica) -> Tensors:
        return {}

    def round(self, replica: PartialStepReplica, group: Group, state: Tensors) -> Tensor:
        if group.size == 1:
            loss = replica.backward()
            replica.step()
            return loss
        reduce = group.reduce_scatter if replica.updates_slice else group.all_reduce
        pending: list[Work] = []
        loss = replica.backward(on_ready=lambda grads: pending.append(reduce(grads)))
        pending.append(group.all_reduce({"count": replica.count}))
        for work in pending:
            work.wait()
        if (norm := replica.square_norm()) is not None:
            group.all_reduce({"norm": norm}).wait()
        replica.step()
        if replica.updates_slice:
            group.all_gather(replica.params).wait()
        return loss
