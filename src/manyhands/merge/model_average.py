"""Model averaging: replicas train alone for a block of steps, then all continue from their mean.

    x_i <- H local steps from w;   w <- sum_i (n_i / n) x_i      n_i: samples of the block on rank i

A block costs one all-reduce of the model, instead of one of the gradient a step, so 1/H of the
bytes are sent. Each model has the weight of the samples it saw; a rank without any takes part with
weight 0. Between blocks all replicas hold w. `moments` says what becomes of optimizer state
(momentum, Adam's averages): each replica keeps its own (keep), all take the average (average), or
it is dropped (reset).

Use it when the network is slow and all ranks have similar data: the longer the block, the further
replicas drift apart.

Paper: McMahan et al. 2017 (FedAvg, arXiv:1602.05629): 10 to 100 times fewer rounds of communication
than synchronous SGD.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from manyhands.core import Cargo, Group, Replica, Strategy, Tensors
from manyhands.merge.building_blocks.local_steps import (
    average_updates,
    copies,
    local_steps,
    settle_moments,
)
from manyhands.merge.building_blocks.options import Moments, check_block


@dataclass(frozen=True)
class ModelAverage(Strategy[Replica, Group]):
    period: int = 32
    moments: Moments = "keep"
    link: ClassVar[type] = Group
    sends: ClassVar[Cargo] = "updates"

    def __post_init__(self) -> None:
        check_block(self.period, self.moments)

    def init(self, replica: Replica) -> Tensors:
        return {}

    def round(self, replica: Replica, group: Group, state: Tensors) -> Tensor:
        w = copies(replica.params)
        loss, samples = local_steps(replica, self.period)
        average_updates(replica, group, w, samples)
        for k, x in replica.params.items():
            x.add_(w[k])
        settle_moments(replica, group, self.moments, samples)
        return loss
