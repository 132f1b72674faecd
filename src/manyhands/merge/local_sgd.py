"""Local SGD and post-local SGD: merge every H steps; until a chosen step, merge every step.

    x_i <- H local steps from w;   w <- sum_i (n_i / n) x_i      H = 1 before `post`, then `period`

`post` is a number of steps, or `lr` for the first decay of the learning rate; with 0 long blocks
start at once. Costs an all-reduce of the model every H steps, instead of one of the gradient every
step. With H=1 and SGD, with or without momentum, it is synchronous SGD. `moments` says what becomes
of optimizer state (momentum, Adam's averages): each replica keeps its own (keep), all take the
average (average), or it is dropped (reset).

Use it when a step is short compared with an all-reduce; with `post=lr` when large batches reach a
worse model than small ones did.

Paper: Stich 2019 (arXiv:1805.09767): rounds of communication may shrink by up to the square root of
the number of steps at the same rate. Lin et al. 2020 (arXiv:1808.07217): post-local SGD closes the
generalisation gap of large batches.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

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
class LocalSGD(Strategy[Replica, Group]):
    period: int = 8
    post: int | Literal["lr"] = 0
    moments: Moments = "keep"
    link: ClassVar[type] = Group
    sends: ClassVar[Cargo] = "updates"

    def __post_init__(self) -> None:
        check_block(self.period, self.moments)
        holds = self.post == "lr" or (isinstance(self.post, int) and self.post >= 0)
        need(
            holds,
            f"post={self.post}",
            "a number of steps, 0 or more, or lr (from the first decay of the learning rate on) "
            "is needed",
        )

    def init(self, replica: Replica) -> Tensors:
        # on the host, which decides the length of a block
        return {
            "steps": torch.zeros((), dtype=torch.int64),
            "peak": torch.zeros((), dtype=torch.float64),
            "decayed": torch.tensor(False),
        }

    def round(self, replica: Replica, group: Group, state: Tensors) -> Tensor:
        w = copies(replica.params)
        period = self._steps(replica, state)
        loss, samples = local_steps(replica, period)
        state["steps"] += period
        average_updates(replica, group, w, samples)
        for k, x in replica.params.items():
            x.add_(w[k])
        settle_moments(replica, group, self.moments, samples)
        return loss

    def _steps(self, replica: Replica, state: Tensors) -> int:
        """Local steps before the next merge."""
        if self.post == "lr":
            lr = replica.lr
            state["decayed"] |= lr < state["peak"]  # for good, even if the rate rises again
            state["peak"].clamp_(min=lr)  # so that a warm-up is no decay
            return self.period if state["decayed"] else 1
        return self.period if state["steps"] >= self.post else 1
