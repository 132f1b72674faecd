"""Synchronous SGD by all-reduce: every rank steps by the gradient of the union of all batches.

    G = (sum_i sum_{j in batch_i} grad l_j) / (sum_i n_i);   w <- w - eta G

The sums of gradients and of samples are reduced, and their quotient is taken once. So uneven
batches, down to n_i = 0, have the right weight. Buckets of the gradient are sent while backward
still runs. Every step costs one all-reduce of the gradient.

An all-reduce is a reduce-scatter and an all-gather. Where replica and group allow it, the optimizer
runs between the two: each rank updates the slice it owns, with 1/M of the work and of the
optimizer's memory, and parameters are gathered instead of gradients. The result is the same bit for
bit.

An optimizer with a line search (`mh.LBFGS`) asks for loss and gradient of one batch at several
parameters. Both are merged each time, so all ranks take the same decisions.

Use it when the network is fast.

Paper: Goyal et al. 2017, "Accurate, Large Minibatch SGD" (arXiv:1706.02677): ResNet-50 on 256 GPUs
in one hour. Li et al. 2020 (arXiv:2006.15704): buckets during backward. Xu et al. 2020
(arXiv:2004.13336): the update sharded over ranks.
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
        if replica.line_search is not None:
            loss = replica.line_search(lambda: _evaluate(replica, group))
        else:
            loss = _merged_gradient(replica, group)
            replica.step()
        if replica.updates_slice:
            group.all_gather(replica.params).wait()
        return loss


def _merged_gradient(replica: PartialStepReplica, group: Group) -> Tensor:
    """Backward and merge; returns the mean loss of this rank's samples."""
    if group.size == 1:
        return replica.backward()
    reduce = group.reduce_scatter if replica.updates_slice else group.all_reduce
    pending: list[Work] = []
    loss = replica.backward(on_ready=lambda grads: pending.append(reduce(grads)))
    pending.append(group.all_reduce({"count": replica.count}))
    for work in pending:
        work.wait()
    if (norm := replica.square_norm()) is not None:
        group.all_reduce({"norm": norm}).wait()
    return loss


def _evaluate(replica: PartialStepReplica, group: Group) -> Tensor:
    """Loss and gradient of all ranks' samples at the present parameters; returns the mean loss."""
    if replica.updates_slice:  # each rank has moved its own slice
        group.all_gather(replica.params).wait()
    total = (_merged_gradient(replica, group).double() * replica.own_count).view(1)
    if group.size > 1:
        group.all_reduce({"loss": total}).wait()
    return total[0] / replica.count[0].clamp(min=1)
