"""Asynchronous elastic averaging: each rank explores with its own optimizer, and now and then pulls at a centre that pulls back.

    every T steps of rank i, whenever it gets there:   e = alpha (x_i - c);   x_i <- x_i - e;   c <- c + e  on the server

`alpha` is beta / M where it is not given. What a rank gives away is what the centre gains, so a merge conserves the sum of all x_i
and c, and where nobody comes between, multiplies x_i - c by 1 - 2 alpha. Nobody waits: ranks draw their steps from one counter,
and a slow one meets the centre less often. Optimizer state stays with its rank. Replicas differ; what is evaluated and saved
is the centre. Costs one pull and one push of the model every T steps; the server only adds.

Use it when ranks differ in speed and a network is too slow to be asked every step; with momentum in the optimizer this is EAMSGD.

Paper: Zhang, Choromanska and LeCun 2015 (arXiv:1412.6651): faster than Downpour SGD on CIFAR and ImageNet with 4 to 16 GPUs.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from manyhands.core import Cargo, Replica, Store, Strategy, Tensors
from manyhands.merge.building_blocks.elastic import BETA, alpha_of, check_alpha, check_stable
from manyhands.merge.building_blocks.local_steps import local_steps
from manyhands.merge.building_blocks.options import need
from manyhands.merge.building_blocks.server_model import pull_all, rows_of


@dataclass(frozen=True)
class AsyncEASGD(Strategy[Replica, Store]):
    period: int = 10
    beta: float = BETA
    alpha: float | None = None
    link: ClassVar[type] = Store
    sends: ClassVar[Cargo] = "updates"
    on_server: ClassVar[Literal["optimizer", "sum"]] = "sum"

    def __post_init__(self) -> None:
        need(
            self.period >= 1,
            f"period={self.period}",
            "at least 1 local step is needed between two merges",
        )
        check_alpha(self.beta, self.alpha)

    @property
    def shares_steps(self) -> bool:
        return True

    def check(self, size: int) -> None:
        check_stable(self.beta, self.alpha, size, "where all ranks come at once, ")

    def init(self, replica: Replica) -> Tensors:
        return {}

    def round(self, replica: Replica, store: Store, state: Tensors) -> Tensor:
        loss, _ = local_steps(replica, self.period)
        centre, alpha = store.pull(rows_of(replica)), alpha_of(self.beta, self.alpha, store.size)
        e = {k: (x - centre[k]).mul_(alpha) for k, x in replica.params.items()}
        for k, x in replica.params.items():
            x.sub_(e[k])
        store.push(
            rows_of(replica), e
        ).wait()  # the very e that it gave away, also where the centre has moved since
        return loss

    def consensus(self, replica: Replica, store: Store, state: Tensors) -> Tensors:
        return pull_all(replica, store)
