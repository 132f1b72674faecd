"""Consensus ADMM: every rank solves its own problem, tied to a common z by a multiplier.

    min sum_i f_i(x_i) + lam/2 |z|^2   with x_i = z         f_i: mean loss on the data of rank i
    x_i <- argmin f_i(x) + y_i'(x - z) + rho/2 |x - z|^2    by `period` optimizer steps, from z
    z   <- sum_i (rho x_i + y_i) / (lam + M rho);   y_i <- y_i + rho (x_i - z)

The multipliers correct the drift of local steps: the fixed point is the optimum over all data,
however different the ranks' data; sum_i y_i = lam z after every round. rho doubles or halves, by a
factor of `span` at most, where primal residual |x_i - z| and dual residual rho |z - z_old| are more
than a factor of `ratio` apart; the state keeps both. Once x_i - z and z - z_old are both below
`tolerance` |z| the run has converged: z stays, and the remaining rounds only measure the loss. A
rank without samples in a block abstains and keeps its y_i. Costs one all-reduce of the model a
block and one vector y_i. Between blocks replicas hold z.

Use it when ranks hold different data that must not move, or for convex problems; rho about the
curvature of the mean loss.

Paper: Boyd et al. 2011 (Foundations and Trends in Machine Learning 3): converges for any rho on
convex problems.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manyhands.core import Cargo, GradientReplica, Group, Strategy, Tensors
from manyhands.merge.building_blocks.local_steps import copies, local_steps, settle_moments
from manyhands.merge.building_blocks.options import Moments, check_block, need


@dataclass(frozen=True)
class ADMM(Strategy[GradientReplica, Group]):
    period: int = 16
    rho: float = 0.1
    lam: float = 0.0
    ratio: float = 10.0
    span: float = 8.0
    tolerance: float = 0.0
    moments: Moments = "keep"
    link: ClassVar[type] = Group
    sends: ClassVar[Cargo] = "updates"

    def __post_init__(self) -> None:
        inf = float("inf")
        check_block(self.period, self.moments)
        need(
            0 < self.rho < inf,
            f"rho={self.rho}",
            "a penalty of more than 0 is needed, about the curvature of the loss",
        )
        need(
            0 <= self.lam < inf, f"lam={self.lam}", "a ridge penalty of 0 (none) or more is needed"
        )
        need(
            self.ratio > 1,
            f"ratio={self.ratio}",
            "more than 1 is needed: the ratio of residuals at which rho changes; inf: never",
        )
        need(
            1 <= self.span < inf,
            f"span={self.span}",
            "1 (rho stays) or more is needed: the factor by which rho may change",
        )
        need(
            0 <= self.tolerance < 1,
            f"tolerance={self.tolerance}",
            "0 (never stop early) or more and less than 1 is needed",
        )

    def init(self, replica: GradientReplica) -> Tensors:
        numbers = {"rho": self.rho, "primal": float("inf"), "dual": float("inf"), "norm": 0.0}
        state = {
            k: torch.tensor(v, dtype=torch.float64, device=replica.count.device)
            for k, v in numbers.items()
        }
        return state | {f"y/{k}": torch.zeros_like(x) for k, x in replica.params.items()}

    def round(self, replica: GradientReplica, group: Group, state: Tensors) -> Tensor:
        if self.tolerance and self._converged(state):
            return self._measure(replica)
        rho, z = state["rho"], copies(replica.params)
        y = {k: state[f"y/{k}"] for k in z}

        def pull() -> None:
            for k, g in replica.grads.items():
                g.add_(torch.sub(replica.params[k], z[k]).mul_(rho).add_(y[k]).mul_(replica.scale))

        loss, samples = local_steps(replica, self.period, before_step=pull)
        active = torch.full(
            (1,), float(samples > 0), dtype=torch.float64, device=replica.count.device
        )
        move = {k: x - z[k] for k, x in replica.params.items()}
        # without lam multipliers sum to 0: they need not be sent, nor be rounded by compression
        if self.lam:
            for k in move:
                move[k].add_(y[k] / rho)
        works = group.all_reduce({"active": active}), group.all_reduce(move)
        for work in works:
            work.wait()
        n = active.clamp(min=1.0)[0]
        # squared norms of x_i - z, z - z_old and z
        norms = torch.zeros(3, dtype=torch.float64, device=replica.count.device)
        for k, x in replica.params.items():
            new = move[k].div_(n).add_(z[k]).mul_(n * rho / (self.lam + n * rho))
            apart = x.sub_(new) if samples else x.zero_()
            y[k].add_(rho * apart)
            norms += torch.stack([v.double().square().sum() for v in (apart, z[k].sub_(new), new)])
            x.copy_(new)
        # the maximum makes the dual residual equal to the bit on all ranks
        works = (
            group.all_reduce({"primal": norms[:1]}),
            group.all_reduce({"dual": norms[1:]}, op="max"),
        )
        for work in works:
            work.wait()
        self._adapt(state, norms, n)
        settle_moments(replica, group, self.moments, samples)
        return loss

    def _adapt(self, state: Tensors, squares: Tensor, n: Tensor) -> None:
        """Store the residuals over all ranks, and move rho so that they come closer.

        The multipliers are not scaled by rho, so they need no change.
        """
        rho, primal, dual = state["rho"], state["primal"], state["dual"]
        primal.copy_(squares[0].sqrt())
        dual.copy_(rho * (n * squares[1]).sqrt())
        state["norm"].copy_((n * squares[2]).sqrt())
        rho.mul_(
            1.0
            + (primal > self.ratio * dual).double()
            - 0.5 * (dual > self.ratio * primal).double()
        )
        rho.clamp_(self.rho / self.span, self.rho * self.span)

    def _converged(self, state: Tensors) -> bool:
        bound = self.tolerance * state["norm"]
        return bool((state["primal"] <= bound) & (state["dual"] <= state["rho"] * bound))

    def _measure(self, replica: GradientReplica) -> Tensor:
        """Mean loss of a block at z, without steps."""
        total, samples = torch.zeros((), device=replica.count.device), 0
        for _ in replica.steps(self.period):
            total = total + replica.backward() * replica.own_count
            samples += replica.own_count
        return total / max(samples, 1)
