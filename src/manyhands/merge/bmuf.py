"""Blockwise model-update filtering (BMUF): model averaging with momentum over blocks.

    x_i <- H local steps from W + eta D (Nesterov) or from W (classic)
    G = sum_i (n_i / n) x_i - start;   D <- eta D + zeta G;   W <- W + D

Averaging M models moves about as far as one of them did. Block momentum makes up for it: eta is
1 - 1/M where it is not given, so that zeta / (1 - eta) = M. Costs one all-reduce of the model a
block and one vector D. Between blocks replicas hold W, so W is evaluated and saved, never the
look-ahead W + eta D. Local momentum is dropped after each block (`moments=reset`), because block
momentum replaces it; it may also be kept or averaged.

Use it when model averaging loses accuracy with many workers or long blocks.

Paper: Chen and Huo 2016 (ICASSP): almost linear speed-up on 16 GPUs (LSTM) and 64 GPUs (DNN), 1860
hours of speech, without loss of accuracy.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manyhands.core import Cargo, Group, Replica, Strategy, Tensors
from manyhands.merge.building_blocks.local_steps import (
    average_updates,
    copies,
    local_steps,
    settle_moments,
)
from manyhands.merge.building_blocks.options import Moments, check_block, need


@dataclass(frozen=True)
class BMUF(Strategy[Replica, Group]):
    period: int = 16
    eta: float | None = None
    zeta: float = 1.0
    nesterov: bool = True
    moments: Moments = "reset"
    link: ClassVar[type] = Group
    sends: ClassVar[Cargo] = "updates"

    def __post_init__(self) -> None:
        check_block(self.period, self.moments)
        need(
            self.eta is None or 0 <= self.eta < 1,
            f"eta={self.eta}",
            "block momentum of 0 or more and less than 1 is needed",
        )
        need(
            0 < self.zeta < float("inf"),
            f"zeta={self.zeta}",
            "a block learning rate of more than 0 is needed; 1 is usual",
        )

    def init(self, replica: Replica) -> Tensors:
        return {f"D/{k}": torch.zeros_like(x) for k, x in replica.params.items()}

    def round(self, replica: Replica, group: Group, state: Tensors) -> Tensor:
        eta = 1 - 1 / group.size if self.eta is None else self.eta
        W = copies(replica.params)
        if self.nesterov:
            for k, x in replica.params.items():
                x.add_(state[f"D/{k}"], alpha=eta)
        start = copies(replica.params) if self.nesterov else W
        loss, samples = local_steps(replica, self.period)
        average_updates(replica, group, start, samples)
        for k, G in replica.params.items():
            D = state[f"D/{k}"]
            D.mul_(eta).add_(G, alpha=self.zeta)
            torch.add(W[k], D, out=G)
        settle_moments(replica, group, self.moments, samples)
        return loss
