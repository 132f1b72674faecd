"""A plain nn.Module with its optimizer, as a replica: forward, backward, step on this rank's share of the data.

    loss_k       mean over the n_k samples of micro-batch k
    grads        sum_k (n_k / N) grad loss_k            N: samples of a full step over all ranks
    count        sum_k n_k
    step         w <- optimizer(w, grads N / count)     both summed over ranks by then, or not: divided once

With full batches N / count is exactly 1 and the division costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim.lr_scheduler import LRScheduler

from manyhands.core import OnReady, Tensors
from manyhands.errors import TaskError
from manyhands.replica.parameters import ReplicaGroup, ReplicaParameters
from manyhands.replica.update import Update, moments


@dataclass
class Micro:
    """The loss of one micro-batch: a mean over `count` samples, or None where this rank has no samples left."""

    loss: Tensor | None
    count: int
    last: bool  # of this rank's share of the step


NextLoss = Callable[[], Micro]
# all passes of a step: calls backward on scaled(loss, count) of every micro-batch; the sum of loss * count, and of counts
Passes = Callable[[Callable[[Tensor, int], Tensor]], tuple[Tensor, int]]


class ModuleReplica:
    """`next_loss` is the only source of work: it draws a batch and runs the forward pass, or asks the user's loop."""

    def __init__(
        self,
        flat: ReplicaParameters,
        update: Update,
        next_loss: NextLoss,
        *,
        nominal: int,
        clip: float | None = None,
        schedule: LRScheduler | None = None,
        scaler: torch.amp.GradScaler | None = None,
        overlap: bool = True,
        left_out: Sequence[nn.Parameter] = (),
        on_unused: Callable[[list[str]], None] = lambda names: None,
        ended: Callable[[], bool] = lambda: False,
        steps_alone: bool = False,
        on_window: Callable[[], None] | None = None,
        schedule_at: Callable[[], int] | None = None,
        scheduled: int = 0,
        passes: Passes | None = None,
        replica_group: ReplicaGroup | None = None,
    ):
        self.flat, self.update, self.next_loss = flat, update, next_loss
        self.optimizer = update.optimizer
        self.nominal, self.clip, self.schedule, self.scaler = nominal, clip, schedule, scaler
        self.overlap, self._left_out = overlap, left_out
        self.on_unused: Callable[[list[str]], None] | None = on_unused
        self.device = flat.count.device
        self.own_count = 0  # samples of this rank in the last window, before merging
        self.in_block = False  # between two steps of a block that a rule takes without its peers
        self._ended = ended  # whether the run is at its end
        self.steps_alone = (
            steps_alone  # by a gradient of its own, so that peers need not overflow where it does
        )
        self._schedule_at, self._scheduled = (
            schedule_at,
            scheduled,
        )  # where ranks share steps: how far the schedule is to be
        self._passes = passes
        # the ranks over which this replica is split; None: this rank holds all of it
        self.replica_group = replica_group or flat.replica_group
        self._on_window = on_window  # when a step's last backward pass is over
        self.closing = False  # what comes is no step of the run any more, it only ends a block
        self._square_norm: Tensor | None = None
        self._bucket_of = {i: b for b, bucket in enumerate(flat.buckets) for i in bucket.views}
        self._on_ready: OnReady | None = None
        self._used = [False] * len(flat.views)  # by this rank, in this window
        self._in_flat = [False] * len(
            flat.views
        )  # the gradient has left the parameter for the flat vector
        self._missing: list[int] = []  # views each bucket still waits for
        self._launched = 0
        self._is_mean = False  # the flat vector holds the mean gradient of this window, clipped
        if scaler is not None:
            scaler.scale(
                torch.zeros((), device=self.device)
            )  # it exists from here on, also where the first round has no samples
        self._hooks = (
            []
            if flat.collects_gradients
            else [
                p.parameter.register_post_accumulate_grad_hook(self._hook(i))
                for i, p in enumerate(flat.views)
            ]
        )

    def close(self) -> None:
        """Let go of the module: a hook that knows this replica and is known to its parameter keeps both alive."""
        for hook in self._hooks:
            hook.remove()
        self.flat.close()

    @property
    def updates_slice(self) -> bool:
        return self.update.part_only

    @property
    def params(self) -> Tensors:
        return self.flat.values

    @property
    def grads(self) -> Tensors:
        self._gather()
        return self.flat.grads

    @property
    def count(self) -> Tensor:
        return self.flat.count

    @property
    def scale(self) -> Tensor:
        share = (
            self.flat.count[0].double() / self.nominal
        )  # float32 would cost float64 gradients half of their digits
        loss_scale = (
            None if self.scaler is None else self.scaler._scale
        )  # a tensor: asking for the number would wait for a GPU
        return share if loss_scale is None else share * loss_scale.to(share.device)

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def moments(self) -> Tensors:
        if self.updates_slice:
            raise ValueError(
                "each rank holds the moments of its own part only; nobody has all of them"
            )
        return moments(self.flat.views, self.optimizer)

    def reset_moments(self) -> None:
        self.optimizer.state.clear()

    def steps(self, most: int) -> Iterator[int]:
        try:
            for i in range(most):
                if i and self._ended():
                    return
                yield i
                self.in_block = True
        finally:
            self.in_block = False

    def load(self, values: Tensors) -> None:
        for k, v in values.items():
            self.params[k].copy_(v)

    def holding(self, values: Tensors | None) -> AbstractContextManager[None]:
        return self.flat.holding(values)

    # -- compute --

    def backward(self, on_ready: OnReady | None = None) -> Tensor:
        self._start_window()
        total, count = (
            self._one_by_one(on_ready) if self._passes is None else self._passes(self._scaled)
        )
        # from here on loss, count and gradient are those of the whole replica
        total, count, used = self.flat.end_window(total, count)
        if used is not None:
            self._used, self._in_flat = used, [True] * len(used)
        self._end_window(count)
        if self._on_window is not None:
            self._on_window()
        if on_ready is not None:
            self._gather()
            for bucket in self.flat.buckets[self._launched :]:
                on_ready({bucket.name: bucket.grad})
        return total / max(count, 1)

    def _one_by_one(self, on_ready: OnReady | None) -> tuple[Tensor, int]:
        total, count, last = torch.zeros((), device=self.device), 0, False
        while not last:
            micro = self.next_loss()
            last = micro.last
            self.flat.before_backward(last)
            if micro.loss is not None:
                self._on_ready = on_ready if last else None
                self._scaled(micro.loss, micro.count).backward()
                self._on_ready = None
                total = total + micro.loss.detach() * micro.count
                count += micro.count
            self.flat.after_backward(micro.loss is not None)
        return total, count

    def _scaled(self, loss: Tensor, count: int) -> Tensor:
        share = count / self.nominal
        scaled = loss if share == 1 else loss * share
        return scaled if self.scaler is None else self.scaler.scale(scaled)

    def square_norm(self) -> Tensor | None:
        if self.clip is None or not self.updates_slice:
            return None
        self._square_norm = self._squared(self._place())
        return self._square_norm

    def _squared(self, grads: list[Tensor]) -> Tensor:
        """The squared norm of gradients of the whole model, as far as ranks of this replica hold them."""
        # float64 also where this rank owns nothing: ranks must bring the same dtype
        squares = [g.square().sum(dtype=torch.float64) for g in grads]
        if self.replica_group is not None:
            squares = [
                square * self.replica_group.weights[i]
                for square, i in zip(squares, self.update.placed, strict=True)
            ]
        total = (
            torch.stack([torch.zeros((), dtype=torch.float64, device=self.device), *squares])
            .sum()
            .view(1)
        )
        if self.replica_group is not None:
            self.replica_group.sum(total)
        return total

    def step(self) -> None:
        if (
            self.own_count == 0 and float(self.flat.count[0]) == 0
        ):  # nobody's samples: momentum alone must not move anything
            if not self.closing:
                self._next_rate()
            return
        grads = self._place()
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
            self.flat.agree_on_overflow(self.scaler, self.optimizer)
        self._normalise(grads)
        if self.scaler is None:
            self.optimizer.step()
        elif not self._scaled_step(self.scaler) and not self.steps_alone:
            return  # else the schedule goes on all the same: learning rates must not drift apart between ranks
        self._next_rate()

    def gradient(self) -> Tensors:
        if not self._is_mean:
            self._gather()
            self._normalise(
                [view.grad for view, used in zip(self.flat.views, self._used, strict=True) if used]
            )
            self._is_mean = True
        return self.flat.grads

    def stepped(self) -> None:
        if self.schedule is not None and (self.own_count or not self.closing):
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # else the schedule warns that nobody made a step
            self._next_rate()

    def _next_rate(self) -> None:
        """One step of the schedule; where ranks share steps, as many as all of them together have made full ones."""
        if self.schedule is None:
            return
        due = self._scheduled + 1 if self._schedule_at is None else self._schedule_at()
        while self._scheduled < due:
            self.schedule.step()
            self._scheduled += 1

    def _scaled_step(self, scaler: torch.amp.GradScaler) -> bool:
        before = scaler.get_scale()
        scaler.step(self.optimizer)
        scaler.update()
        # overflow: where gradients are merged every rank saw the same one, so all of them skip and shrink the scale together
        skipped = scaler.get_scale() < before
        if scaler.get_scale() < 1.0:
            scaler.update(new_scale=1.0)
        return not skipped

    def _normalise(self, grads: list[Tensor]) -> None:
        """Divide by the true count, once; then clip by the norm of the merged gradient."""
        factor: Tensor | float
        if (
            grads and not self._in_flat[0]
        ):  # nobody has asked for the flat gradients: the count is still this rank's own
            factor = self.nominal / max(1, self.own_count)
        elif self.device.type == "cpu":
            factor = self.nominal / max(1.0, float(self.flat.count[0]))
        else:  # stay on the device: reading the count would make the host wait for the GPU
            factor = self.nominal / self.flat.count[0].clamp(min=1.0)
        if self.clip is not None and self.replica_group is not None and self._square_norm is None:
            self._square_norm = self._squared(
                grads
            )  # also where this rank has no gradient: all of the replica take part
        if self.clip is not None and grads:
            norm = (
                get_total_norm(grads)
                if self._square_norm is None
                else self._square_norm[0].sqrt().to(grads[0].dtype)
            )
            bound = (self.clip / (norm * factor + 1e-6)).clamp(max=1.0)
            factor = factor * (float(bound) if self.device.type == "cpu" else bound)
        self._square_norm = (
            None  # also where this rank had no gradient: the next step asks all anew
        )
        if grads and not (isinstance(factor, float) and factor == 1.0):
            torch._foreach_mul_(grads, factor)

    # -- gradients: from the parameters into the flat vector, bucket by bucket while backward runs, and back --

    def _start_window(self) -> None:
        if any(p.requires_grad for p in self._left_out):
            raise TaskError(
                "a parameter that was frozen when training started wants a gradient now; start with requires_grad=True and "
                "give it a learning rate of 0 until it is to move"
            )
        for i, view in enumerate(self.flat.views):
            view.parameter.grad = None
            self._used[i] = self._in_flat[i] = False
        self.flat.start_window(self.overlap)
        self._missing = [len(b.views) for b in self.flat.buckets]
        self._launched = 0
        self._is_mean = False

    def _hook(self, i: int) -> Callable[[Tensor], None]:
        view, bucket = self.flat.views[i], self._bucket_of[i]

        def hook(parameter: Tensor) -> None:
            if self._on_ready is None:
                return
            assert parameter.grad is not None
            if self._in_flat[i]:
                raise TaskError(
                    f"{view.name} got its gradient twice in one backward pass, after the first part was sent; "
                    "use torch.utils.checkpoint with use_reentrant=False"
                )
            view.grad.copy_(parameter.grad)
            parameter.grad = None
            self._used[i] = self._in_flat[i] = True
            self._missing[bucket] -= 1
            while (
                self.overlap
                and self._launched < len(self._missing)
                and self._missing[self._launched] == 0
            ):  # in order on every rank
                ready = self.flat.buckets[self._launched]
                self._launched += 1
                self._on_ready({ready.name: ready.grad})

        return hook

    def _end_window(self, count: int) -> None:
        for i, view in enumerate(self.flat.views):
            self._used[i] = self._used[i] or view.parameter.grad is not None
        self.own_count = count
        self.flat.count[0].fill_(count)
        if all(self._used):
            self.flat.used.fill_(1.0)
        else:
            self.flat.used.copy_(torch.tensor(self._used, dtype=torch.float32))
        if self.on_unused is not None and count:
            if unused := [
                p.name for p, used in zip(self.flat.views, self._used, strict=True) if not used
            ]:
                self.on_unused(unused)
            self.on_unused = None

    def _gather(self) -> None:
        for i, view in enumerate(self.flat.views):
            if not self._in_flat[i]:
                if view.parameter.grad is None:
                    view.grad.zero_()
                else:
                    view.grad.copy_(view.parameter.grad)
                    view.parameter.grad = None
                self._in_flat[i] = True

    def _place(self) -> list[Tensor]:
        """Hand merged gradients back to the parameters; one that no rank used keeps none, as in plain torch."""
        everything_used = all(self._used) or not self._in_flat[0]
        return self.update.place(
            self._used if everything_used else [u > 0 for u in self.flat.used.tolist()],
            self._in_flat[0],
        )
