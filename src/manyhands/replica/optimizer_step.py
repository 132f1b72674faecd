"""Optimizer step of a replica: divide the gradient sum, clip, step, move the schedule.

    G <- grads N / count                       N: samples of a full step; count: of this one
    G <- grads N                               where the task's loss is a sum over samples
    G <- G min(1, clip / |G|)
    w <- optimizer(w, G);   then one step of the learning-rate schedule

With full batches N / count is exactly 1 and the division costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim.lr_scheduler import LRScheduler

from manyhands.replica.objective import Reduction
from manyhands.replica.parameters import ReplicaGroup, ReplicaParameters
from manyhands.replica.several_optimizers.named_schedules import NamedSchedules
from manyhands.replica.update import Update


class OptimizerStep:
    """The optimizer with gradient clipping, loss scaling and schedule.

    `steps_alone`: this rank steps by its own gradient, so that it may overflow where others do not.
    `schedule_at`, where ranks share steps: how many steps of the schedule are due now; `scheduled`:
    how many were made before; `schedule_most`: how many it has, where it was told.
    """

    def __init__(
        self,
        flat: ReplicaParameters,
        update: Update,
        nominal: int,
        clip: float | None,
        schedule: LRScheduler | None,
        scaler: torch.amp.GradScaler | None,
        steps_alone: bool,
        schedule_at: Callable[[], int] | None,
        scheduled: int,
        schedule_most: int | None,
        replica_group: ReplicaGroup | None,
        reduction: Reduction = "mean",
    ):
        self.flat, self.update, self.optimizer = flat, update, update.optimizer
        self.nominal, self.clip, self.schedule, self.scaler = nominal, clip, schedule, scaler
        self._steps_alone = steps_alone
        self._schedule_at, self._scheduled = schedule_at, scheduled
        self._schedule_most = schedule_most
        self.apart = False  # named optimizers step one by one, several for one batch
        self.before_step: Callable[[], None] | None = None  # with merged, clipped gradients
        self.replica_group, self.reduction = replica_group, reduction
        self._on_cpu = flat.count.device.type == "cpu"
        self._square_norm: Tensor | None = None  # of the whole gradient, for this step's clipping
        if scaler is not None:
            # makes its scale tensor, which must be there even if the first round has no samples
            scaler.scale(torch.zeros((), device=flat.count.device))

    def __call__(self, grads: list[Tensor], own_count: int | None) -> None:
        """One step by `grads`, which hold a sum; see `normalise` for `own_count`."""
        if self.scaler is None:
            self.normalise(grads, own_count)
            if self.before_step is not None:
                self.before_step()
            self.optimizer.step()
        else:
            self.scaler.unscale_(self.optimizer)
            self.flat.agree_on_overflow(self.scaler, self.optimizer)
            self.normalise(grads, own_count)
            if self.before_step is not None:
                self.before_step()
            # a rank that steps alone moves its schedule after an overflow too: learning rates must
            # not differ between ranks
            if not self._scaled_step(self.scaler) and not self._steps_alone:
                return
        self.next_rate()

    def next_rate(self) -> None:
        """One step of the schedule; where ranks share steps, all full steps that they have made."""
        if self.schedule is None:
            return
        if isinstance(self.schedule, NamedSchedules):
            if self._schedule_at is None:
                self.schedule.advance(None, self._schedule_most)
            elif not self.apart:
                self.end_batch()
            return
        due = self._scheduled + 1 if self._schedule_at is None else self._schedule_at()
        if self._schedule_most is not None:
            due = min(due, self._schedule_most)
        while self._scheduled < due:
            self.schedule.step()
            self._scheduled += 1

    def end_batch(self) -> None:
        """What all schedules of named optimizers count alike (epochs) goes on between batches."""
        if isinstance(self.schedule, NamedSchedules) and self._schedule_at is not None:
            self.schedule.advance(self._schedule_at(), self._schedule_most)

    def _scaled_step(self, scaler: torch.amp.GradScaler) -> bool:
        before = scaler.get_scale()
        scaler.step(self.optimizer)
        scaler.update()
        # overflow: every rank has the same merged gradient, so all skip the step and lower the
        # scale together
        skipped = scaler.get_scale() < before
        if scaler.get_scale() < 1.0:
            scaler.update(new_scale=1.0)
        return not skipped

    def normalise(self, grads: list[Tensor], own_count: int | None) -> None:
        """Divide a mean's gradient by the number of samples, once; then clip by its norm.

        `own_count`: this rank's samples, where the gradient was not merged; else `count` is read.
        """
        factor: Tensor | float
        if self.reduction == "sum":
            factor = float(self.nominal)
        elif own_count is not None:
            factor = self.nominal / max(1, own_count)
        elif self._on_cpu:
            factor = self.nominal / max(1.0, float(self.flat.count[0]))
        else:  # stay on the device: reading the count would make the host wait for the GPU
            factor = self.nominal / self.flat.count[0].clamp(min=1.0)
        if self.clip is not None and self.replica_group is not None and self._square_norm is None:
            # even if this rank has no gradient: all ranks of the replica take part in the sum
            self._square_norm = self._squared(grads)
        if self.clip is not None and grads:
            norm = (
                get_total_norm(grads)
                if self._square_norm is None
                else self._square_norm[0].sqrt().to(grads[0].dtype)
            )
            bound = (self.clip / (norm * factor + 1e-6)).clamp(max=1.0)
            factor = factor * (float(bound) if self._on_cpu else bound)
        self._square_norm = None  # even without a gradient here: the next step sums a new one
        if grads and not (isinstance(factor, float) and factor == 1.0):
            torch._foreach_mul_(grads, factor)

    def square_norm(self, grads: list[Tensor]) -> Tensor:
        """Squared norm of this rank's slice; the caller sums it over ranks before the step."""
        self._square_norm = self._squared(grads)
        return self._square_norm

    def _squared(self, grads: list[Tensor]) -> Tensor:
        """Squared norm of the gradients that the ranks of this replica hold."""
        # float64 also where this rank owns nothing: all ranks must sum the same dtype
        squares = [g.square().sum(dtype=torch.float64) for g in grads]
        if self.replica_group is not None:
            weights = self.replica_group.weights
            squares = [
                square * weights[i] for square, i in zip(squares, self.update.placed, strict=True)
            ]
        zero = torch.zeros((), dtype=torch.float64, device=self.flat.count.device)
        total = torch.stack([zero, *squares]).sum().view(1)
        if self.replica_group is not None:
            self.replica_group.sum(total)
        return total
