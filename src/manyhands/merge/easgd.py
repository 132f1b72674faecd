"""Elastic averaging SGD (EASGD): replicas and a centre pull on each other.

    every T steps:   e_i = alpha (x_i - c);   x_i <- x_i - e_i;   c <- c + sum_i e_i

`alpha` is beta / M where it is not given; the elastic part is stable for 0 < alpha < 2 / (M + 1). A
merge conserves the sum of all x_i and c. It multiplies the gap between mean x_i and c by the factor
1 - (M + 1) alpha. Costs one all-reduce of the model every T steps and one vector c. Replicas
differ, so that they can explore; the centre is evaluated and saved. A rank without samples is
pulled like any other.

Use it when replicas may differ and a flat, averaged solution is wanted; with momentum in the
optimizer this is EAMSGD.

Paper: Zhang, Choromanska and LeCun 2015 (arXiv:1412.6651): faster than Downpour SGD on CIFAR and
ImageNet with 4 to 16 GPUs.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from manyhands.core import Cargo, Group, Replica, Strategy, Tensors
from manyhands.merge.building_blocks.elastic import BETA, alpha_of, check_alpha, check_stable
from manyhands.merge.building_blocks.local_steps import copies, local_steps, settle_moments
from manyhands.merge.building_blocks.options import Moments, check_block


@dataclass(frozen=True)
class EASGD(Strategy[Replica, Group]):
    period: int = 10
    beta: float = BETA
    alpha: float | None = None
    moments: Moments = "keep"
    link: ClassVar[type] = Group
    sends: ClassVar[Cargo] = "updates"

    def __post_init__(self) -> None:
        check_block(self.period, self.moments)
        check_alpha(self.beta, self.alpha)

    def check(self, size: int) -> None:
        check_stable(self.beta, self.alpha, size)

    def init(self, replica: Replica) -> Tensors:
        return {f"c/{k}": x for k, x in copies(replica.params).items()}

    def round(self, replica: Replica, group: Group, state: Tensors) -> Tensor:
        loss, samples = local_steps(replica, self.period)
        alpha = alpha_of(self.beta, self.alpha, group.size)
        e = {k: (x - state[f"c/{k}"]).mul_(alpha) for k, x in replica.params.items()}
        for k, x in replica.params.items():
            x.sub_(e[k])
        group.all_reduce(e).wait()  # the centre gains exactly the e that replicas lost
        for k in replica.params:
            state[f"c/{k}"].add_(e[k])
        settle_moments(replica, group, self.moments, samples)
        return loss

    def consensus(self, replica: Replica, group: Group, state: Tensors) -> Tensors:
        return {k: state[f"c/{k}"] for k in replica.params}
