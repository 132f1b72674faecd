"""DiLoCo: many local steps, then one Nesterov step of an outer optimizer on the mean update.

    x_i <- H local steps from theta;   g = theta - sum_i (n_i / n) x_i
    v <- mu v + g;   theta <- theta - lr (g + mu v)

Local optimizer state stays local (`moments=keep`). Costs one all-reduce of the model every H steps
and one vector v. Between blocks replicas hold theta. The paper trains language models for tens of
thousands of steps with H=500, lr=0.7, mu=0.9 and AdamW inside; for long runs set
`period=500 momentum=0.9`. The defaults suit runs of a few thousand steps: some dozens of outer
steps, and momentum that goes about as far as 4 ranks' steps would, lr / (1 - mu) = 3.5.

Use it when a slow network joins the replicas, such as that between two data centres, and the run is
long.

Paper: Douillard et al. 2023 (arXiv:2311.08105): 8 workers on C4 match synchronous training with 500
times less communication.
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


def check_outer(lr: float, momentum: float) -> None:
    need(
        0 < lr < float("inf"),
        f"lr={lr}",
        "an outer learning rate of more than 0 is needed; 0.7 is usual",
    )
    need(
        0 <= momentum < 1,
        f"momentum={momentum}",
        "outer momentum of 0 or more and less than 1 is needed; 0.9 is usual",
    )


@dataclass(frozen=True)
class DiLoCo(Strategy[Replica, Group]):
    period: int = 50
    lr: float = 0.7
    momentum: float = 0.8
    moments: Moments = "keep"
    link: ClassVar[type] = Group
    sends: ClassVar[Cargo] = "updates"

    def __post_init__(self) -> None:
        check_block(self.period, self.moments)
        check_outer(self.lr, self.momentum)

    def init(self, replica: Replica) -> Tensors:
        return {f"v/{k}": torch.zeros_like(x) for k, x in replica.params.items()}

    def round(self, replica: Replica, group: Group, state: Tensors) -> Tensor:
        theta = copies(replica.params)
        loss, samples = local_steps(replica, self.period)
        average_updates(replica, group, theta, samples)
        for k, update in replica.params.items():  # update = -g, so v here is -v of the equation
            v = state[f"v/{k}"]
            v.mul_(self.momentum).add_(update)
            update.add_(v, alpha=self.momentum).mul_(self.lr).add_(theta[k])
        settle_moments(replica, group, self.moments, samples)
        return loss
