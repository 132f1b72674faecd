"""Communication hooks of the plan `ddp` of a race: what torch itself has for slow networks.

    compress=fp16, bf16                gradients are cast for the exchange
    compress=powersgd compress.rank=4  PowerSGD with error feedback
    merge=local_sgd merge.period=16    no exchange of gradients: PostLocalSGDOptimizer averages
                                       parameters every 16 steps

All of them work over gloo. Torch advises to begin PowerSGD and local SGD after some hundred plain
steps; a race begins at once, as our own strategies do.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from manyhands.core import Plan
from manyhands.errors import PlanError

MERGES = ("all_reduce", "local_sgd")
COMPRESSIONS = ("none", "fp16", "bf16", "powersgd")
OPTIONS = ("merge", "merge.period", "compress", "compress.rank")
PLAIN_STEPS = 2  # before PowerSGD: DDP makes its buckets anew after the first


def check(words: dict[str, Any]) -> None:
    """Refuse what torch has no hook for."""
    merge, compress = words.get("merge", "all_reduce"), words.get("compress", "none")
    if merge not in MERGES:
        raise PlanError(
            f"merge={merge}: torch's DDP knows {' and '.join(MERGES)} only; leave ddp out for ours"
        )
    if compress not in COMPRESSIONS:
        raise PlanError(
            f"compress={compress}: torch's DDP knows {', '.join(COMPRESSIONS)}; leave ddp out for "
            "ours"
        )
    if merge == "local_sgd" and compress != "none":
        raise PlanError(
            f"merge=local_sgd compress={compress}: torch averages parameters without compression; "
            "give one of them"
        )


class DDPHooks:
    """The hook of one DDP run, and the optimizer that goes with it."""

    def __init__(self, plan: Plan, ddp: DistributedDataParallel, optimizer: Optimizer):
        self.optimizer = optimizer
        self.averages = plan.merge == "local_sgd"
        self._power: powerSGD_hook.PowerSGDState | None = None
        self._share = 1.0  # of the bytes of plain DDP
        if self.averages:
            # no exchange at all: the optimizer averages parameters, over all ranks
            state = PostLocalSGDState(None, None, 0, post_local_gradient_allreduce=False)
            ddp.register_comm_hook(state, post_localSGD_hook)
            self._share = 1 / plan.strategy.period
            averager = PeriodicModelAverager(plan.strategy.period)
            self.optimizer = PostLocalSGDOptimizer(optimizer, averager)
        elif plan.compress == "powersgd":
            rank = plan.codec.rank
            self._power = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=PLAIN_STEPS)
            ddp.register_comm_hook(self._power, powerSGD_hook.powerSGD_hook)
        elif plan.compress != "none":
            hook = getattr(default_hooks, f"{plan.compress}_compress_hook")
            ddp.register_comm_hook(None, hook)
            self._share = 0.5

    def nbytes(self, plain: int) -> int:
        """Bytes that a step sends on average, where plain DDP sends `plain`."""
        if self._power is not None:
            _, before, after = self._power.compression_stats()
            return int(plain * after / before) if before else plain
        return int(plain * self._share)

    def merge(self) -> None:
        """Before an evaluation: the mean of the replicas, where they differ."""
        if self.averages:
            assert dist.group.WORLD is not None
            average_parameters(iter(_parameters(self.optimizer)), dist.group.WORLD)


def _parameters(optimizer: Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]
