"""Pairwise gossip (after AD-PSGD): in every round each rank averages with one random partner.

    g_i = gradient at x_i;   (i, j) partners:  x_i, x_j <- (x_i + x_j) / 2;   x_i <- x_i - eta g_i

x_i is sent while g_i is computed, so on a fast enough network the exchange costs no time: N values
a round for each rank. Averaging conserves x_i + x_j, so the mean of all replicas moves by the mean
of their gradients alone. All ranks draw the same pairs from `seed` and the number of the round, so
both partners of a pair know of it and no deadlock can arise; of an odd number of ranks one has no
partner in that round. There is no barrier: a slow rank delays its partner of this round, and other
ranks only later. In the paper a rank that is ready interrupts a passive partner at any time; here
partners exchange in known rounds, so all ranks take the same number of steps and a run repeats bit
for bit. `period` steps are taken between two exchanges. Optimizer state stays local
(`moments=keep`), is averaged too (average), or is dropped (reset). The mean of all replicas is
evaluated and saved.

Use it when ranks are slow in turns, or when the network is slow and shared: it is the cheapest
exchange that still mixes all ranks. The distance from the mean about halves every round, whatever
the number of ranks.

Paper: Lian et al. 2018, "Asynchronous Decentralized Parallel Stochastic Gradient Descent"
(arXiv:1710.06952): ResNet-50 on up to 128 P100, epochs 4 to 8 times faster than synchronous SGD on
a shared network.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manyhands.core import Cargo, Group, Replica, Strategy, Tensors
from manyhands.merge.building_blocks import gossip
from manyhands.merge.building_blocks.local_steps import local_steps
from manyhands.merge.building_blocks.options import Moments, check_block, need
from manyhands.merge.building_blocks.topology import Turn


@dataclass(frozen=True)
class ADPSGD(Strategy[Replica, Group]):
    period: int = 1
    moments: Moments = "keep"
    seed: int = 0
    link: ClassVar[type] = Group
    sends: ClassVar[Cargo] = "parameters"
    swaps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_block(self.period, self.moments)
        need(self.seed >= 0, f"seed={self.seed}", "0 or more is needed")

    def init(self, replica: Replica) -> Tensors:
        return {"round": torch.zeros((), dtype=torch.int64)}

    def round(self, replica: Replica, group: Group, state: Tensors) -> Tensor:
        partner = partners(self.seed, int(state["round"]), group.size)[group.rank]
        state["round"] += 1
        turn = (
            Turn(1.0, (), ()) if partner == group.rank else Turn(0.5, (partner,), ((partner, 0.5),))
        )
        mix = gossip.exchange(replica, group, turn, self.moments)
        loss, _ = local_steps(replica, self.period, before_step=mix)
        return loss

    def consensus(self, replica: Replica, group: Group, state: Tensors) -> Tensors | None:
        return gossip.mean_of_all(replica, group)


def partners(seed: int, round: int, size: int) -> list[int]:
    """Every rank's partner in this round: a random matching, equal on all ranks.

    A rank without a partner is its own.
    """
    draw = torch.Generator(device="cpu").manual_seed((seed * 1_000_003 + round) % 2**63)
    order = torch.randperm(size, generator=draw, device="cpu").tolist()
    found = list(range(size))
    for a, b in zip(order[::2], order[1::2], strict=False):
        found[a], found[b] = b, a
    return found
