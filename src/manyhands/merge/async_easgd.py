"""Asynchronous elastic averaging SGD: each rank merges with a centre on the server at its own pace.

    every T steps of rank i:   e = alpha (x_i - c);   x_i <- x_i - e;   c <- c + e  on the server

`alpha` is beta / M where it is not given. What a rank loses the centre gains, so a merge conserves
the sum of all x_i and c; if no other rank merges in between, it multiplies x_i - c by 1 - 2 alpha.
No rank waits: ranks claim their steps from one counter, and a slow rank merges less often.
Optimizer state stays with its rank. Replicas differ; the centre is evaluated and saved. Costs one
pull and one push of the model every T steps; the server only adds.

Use it when ranks differ in speed and the network is too slow for an exchange every step; with
momentum in the optimizer this is EAMSGD.

Paper: Zhang, Choromanska and LeCun 2015 (arXiv:1412.6651): faster than Downpour SGD on CIFAR and
ImageNet with 4 to 16 GPUs.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from manyhands.core import Cargo, Replica, Store, Strategy, Tensors
from manyhands.merge.building_blocks.elastic import BETA, alpha_of, check_alpha, check_stable
from manyhands.merge.building_blocks.local_steps import local_steps
from manyhands.merge.building_blocks.options import check_period
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
        check_period(self.period)
        check_alpha(self.beta, self.alpha)

    @property
    def shares_steps(self) -> bool:
        return True

    def check(self, size: int) -> None:
        check_stable(self.beta, self.alpha, size, "where all ranks merge at once, ")

    def init(self, replica: Replica) -> Tensors:
        return {}

    def round(self, replica: Replica, store: Store, state: Tensors) -> Tensor:
        loss, _ = local_steps(replica, self.period)
        centre, alpha = store.pull(rows_of(replica)), alpha_of(self.beta, self.alpha, store.size)
        e = {k: (x - centre[k]).mul_(alpha) for k, x in replica.params.items()}
        for k, x in replica.params.items():
            x.sub_(e[k])
        # the centre gains exactly the e that x_i lost, even if it has moved since the pull
        store.push(rows_of(replica), e).wait()
        return loss

    def consensus(self, replica: Replica, store: Store, state: Tensors) -> Tensors:
        return pull_all(replica, store)
