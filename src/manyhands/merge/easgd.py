"""Elastic averaging SGD: replicas and a centre pull on each other, and replicas stay free to explore.

    every T steps:   e_i = alpha (x_i - c);   x_i <- x_i - e_i;   c <- c + sum_i e_i

`alpha` is beta / M where it is not given; the elastic part is stable for 0 < alpha < 2 / (M + 1). A merge conserves the sum of
all x_i and c, and multiplies the gap between mean x_i and c by 1 - (M + 1) alpha. Costs one all-reduce of the model every T steps
and one vector c. Replicas differ; what is evaluated and saved is the centre. A rank without samples is pulled like any other.

Use it when replicas may differ and a flat, averaged solution is wanted; with momentum in the optimizer this is EAMSGD.

Paper: Zhang, Choromanska and LeCun 2015 (arXiv:1412.6651): faster than Downpour SGD on CIFAR and ImageNet with 4 to 16 GPUs.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from manyhands.core import Cargo, Group, Replica, Strategy, Tensors
from manyhands.merge.parts import Moments, check_block, copies, local_steps, need, settle_moments

BETA = 0.9


@dataclass(frozen=True)
class EASGD(Strategy[Group]):
    period: int = 10
    beta: float = BETA
    alpha: float | None = None
    moments: Moments = "keep"
    link: ClassVar[type] = Group
    sends: ClassVar[Cargo] = "updates"

    def __post_init__(self) -> None:
        check_block(self.period, self.moments)
        need(0 < self.beta < 2, f"beta={self.beta}", "more than 0 and less than 2 is needed; 0.9 is usual")
        if self.alpha is not None:
            need(
                0 < self.alpha < 1,
                f"alpha={self.alpha}",
                "more than 0 and less than 2 / (ranks + 1) is needed; 0.9 / ranks is usual",
            )
            need(self.beta == BETA, f"beta={self.beta}", f"has no effect beside merge.alpha={self.alpha}; leave one of them out")

    def check(self, size: int) -> None:
        alpha, bound = self._alpha(size), 2 / (size + 1)
        given = f"alpha={alpha:g}" if self.alpha is not None else f"beta={self.beta:g}, so alpha = beta / {size} = {alpha:g}"
        need(
            0 < alpha < bound,
            given,
            f"the centre is stable for 0 < alpha < 2 / ({size} + 1) = {bound:g}; set merge.alpha={BETA / size:g}",
        )

    def init(self, replica: Replica) -> Tensors:
        return {f"c/{k}": x for k, x in copies(replica.params).items()}

    def round(self, replica: Replica, link: Group, state: Tensors) -> Tensor:
        loss, samples = local_steps(replica, self.period)
        alpha = self._alpha(link.size)
        e = {k: (x - state[f"c/{k}"]).mul_(alpha) for k, x in replica.params.items()}
        for k, x in replica.params.items():
            x.sub_(e[k])
        link.all_reduce(e).wait()  # the very e that replicas gave away: what they lose the centre gains
        for k in replica.params:
            state[f"c/{k}"].add_(e[k])
        settle_moments(replica, link, self.moments, samples)
        return loss

    def consensus(self, replica: Replica, link: Group, state: Tensors) -> Tensors:
        return {k: state[f"c/{k}"] for k in replica.params}

    def _alpha(self, size: int) -> float:
        return self.beta / size if self.alpha is None else self.alpha
