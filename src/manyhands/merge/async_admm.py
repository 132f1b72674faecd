"""Asynchronous consensus ADMM: z is updated as soon as a quorum of ranks has reported.

    min sum_i f_i(x_i)   with x_i = z                     f_i: mean loss over what rank i draws
    x_i <- argmin f_i(x) + y_i'(x - z_i) + rho/2 |x - z_i|^2      by `period` steps, from z_i
    y_i <- y_i + rho (x_i - z_i)                          z_i: the z that rank i pulled last
    z   <- mean over ALL ranks of their latest x_i + y_i / rho    on the server

The server makes a new z when `quorum` ranks have reported since the last one and no rank has been
left out `delay` times. Only ranks that have reported get the new z and continue. With a local
problem solved to the end, y_i = -grad f_i(x_i) after every report. `quorum` is half of the ranks,
rounded up, where it is not given; all of them with delay=1 is the synchronous method, with the
multiplier moved before z, not after it as in `admm`. The server keeps z as a sum: a rank pushes the
change of its own (x_i + y_i / rho) / M, so the server needs one vector, whatever the number of
ranks. A rank without samples stays at z. Ranks claim their steps from one counter. Costs one pull
and one push of the model a block, and two vectors on each rank. z is evaluated and saved.

Use it when the problem is convex and some ranks are slow, always or in turns; rho about the
curvature of the mean loss.

Paper: Zhang and Kwok 2014, "Asynchronous Distributed ADMM for Consensus Optimization": converges
for any schedule that obeys quorum S and delay tau, at a rate O(M tau / (T S)).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from manyhands.core import Cargo, GradientReplica, Store, Strategy, Tensors
from manyhands.merge.building_blocks.local_steps import copies, local_steps
from manyhands.merge.building_blocks.options import check_period, need
from manyhands.merge.building_blocks.server_model import pull_all, rows_of


@dataclass(frozen=True)
class AsyncADMM(Strategy[GradientReplica, Store]):
    period: int = 16
    rho: float = 0.1
    quorum: int | None = None
    delay: int = 10
    link: ClassVar[type] = Store
    sends: ClassVar[Cargo] = "updates"
    on_server: ClassVar[Literal["optimizer", "sum"]] = "sum"

    def __post_init__(self) -> None:
        check_period(self.period)
        need(
            0 < self.rho < float("inf"),
            f"rho={self.rho}",
            "a penalty of more than 0 is needed, about the curvature of the loss",
        )
        need(
            self.delay >= 1,
            f"delay={self.delay}",
            "1 (no rank is left out) or more is needed: "
            "after how many merges all must wait for a rank",
        )
        if self.quorum is not None:
            need(
                self.quorum >= 1, f"quorum={self.quorum}", "at least 1 report is needed for a merge"
            )

    @property
    def shares_steps(self) -> bool:
        return True

    def check(self, size: int) -> None:
        k = self._quorum(size)
        need(
            k <= size,
            f"quorum={k}",
            f"there are {size} ranks, so at most {size} can report; "
            f"set merge.quorum={-(-size // 2)}",
        )

    def init(self, replica: GradientReplica) -> Tensors:
        zero = {f"y/{k}": torch.zeros_like(x) for k, x in replica.params.items()}
        # z starts as the mean of these, the initial model
        return zero | {f"report/{k}": x for k, x in copies(replica.params).items()}

    def round(self, replica: GradientReplica, store: Store, state: Tensors) -> Tensor:
        z = store.pull(rows_of(replica))
        for k, x in replica.params.items():
            x.copy_(z[k])
        y = {k: state[f"y/{k}"] for k in z}

        def pull() -> None:
            for k, g in replica.grads.items():
                g.add_(
                    torch.sub(replica.params[k], z[k]).mul_(self.rho).add_(y[k]).mul_(replica.scale)
                )

        loss, _ = local_steps(replica, self.period, before_step=pull)
        change: Tensors = {}
        for k, x in replica.params.items():
            y[k].add_(x - z[k], alpha=self.rho)
            report = x + y[k] / self.rho
            change[k] = (report - state[f"report/{k}"]).div_(store.size)
            state[f"report/{k}"].copy_(report)
        store.push(rows_of(replica), change, pending=True)
        store.tick(0, quorum=self._quorum(store.size), late="keep", delay=self.delay)
        return loss

    def consensus(self, replica: GradientReplica, store: Store, state: Tensors) -> Tensors:
        return pull_all(replica, store)

    def _quorum(self, size: int) -> int:
        return -(-size // 2) if self.quorum is None else self.quorum
