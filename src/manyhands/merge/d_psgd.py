"""Decentralised parallel SGD (D-PSGD): every rank averages with its neighbours in a graph.

    cta:  x_i <- sum_j W_ij x_j - eta g_i(x_i)         combine, then adapt: g_i at the unmixed x_i
    atc:  x_i <- sum_j W_ij (x_j - eta g_j(x_j))       adapt, then combine

W is doubly stochastic over `graph`: ring, torus, exponential, one_peer (exponential, one neighbour
a round), star, complete, or edges such as 0-1,1-2,2-3 with Metropolis weights. The mean of all
replicas moves by the mean of their gradients, and their distance from it shrinks by the spectral
gap of W every round. A round costs each rank its degree times N values (one_peer: N), and it waits
for its neighbours only. With cta the parameters are sent while the gradient is computed; atc mixes
newer values and with the complete graph is synchronous SGD. `period` steps are taken between two
exchanges. Optimizer state stays local (`moments=keep`), is mixed like the parameters (average), or
is dropped after each exchange (reset). Every rank has the same weight, whatever its samples. The
mean of all replicas is evaluated and saved.

Use it when latency or one slow connection makes an all-reduce expensive: no rank exchanges with
more than a few others. Data that differ between ranks hurt more the smaller the gap: take
exponential or one_peer rather than a long ring.

Paper: Lian et al. 2017, "Can Decentralized Algorithms Outperform Centralized Algorithms?"
(arXiv:1705.09056): up to 10 times faster than centralised SGD on slow networks, up to 112 GPUs.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from manyhands.core import Cargo, Group, Replica, Strategy, Tensors
from manyhands.merge.building_blocks import gossip, topology
from manyhands.merge.building_blocks.local_steps import local_steps
from manyhands.merge.building_blocks.options import Moments, check_block


@dataclass(frozen=True)
class DPSGD(Strategy[Replica, Group]):
    graph: str = "ring"
    order: Literal["cta", "atc"] = "cta"
    period: int = 1
    moments: Moments = "keep"
    link: ClassVar[type] = Group
    sends: ClassVar[Cargo] = "parameters"
    swaps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_block(self.period, self.moments)

    def check(self, size: int) -> None:
        topology.check(self.graph, size)

    def init(self, replica: Replica) -> Tensors:
        return {"round": torch.zeros((), dtype=torch.int64)}

    def round(self, replica: Replica, group: Group, state: Tensors) -> Tensor:
        turns = topology.turns(self.graph, group.size, group.rank)
        turn = turns[int(state["round"]) % len(turns)]
        state["round"] += 1
        if self.order == "cta":
            mix = gossip.exchange(replica, group, turn, self.moments)
            loss, _ = local_steps(replica, self.period, before_step=mix)
        else:
            loss, _ = local_steps(replica, self.period)
            gossip.exchange(replica, group, turn, self.moments)()
        return loss

    def consensus(self, replica: Replica, group: Group, state: Tensors) -> Tensors | None:
        return gossip.mean_of_all(replica, group)
