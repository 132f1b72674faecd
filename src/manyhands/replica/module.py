"""Module replica: a plain nn.Module with its optimizer, on this rank's part of the data.

    loss_k    mean over the n_k samples of micro-batch k
    grads     sum_k (n_k / N) grad loss_k          N: samples of a full step over all ranks
    count     sum_k n_k
    step      w <- optimizer(w, grads N / count)   after the strategy has summed both, if it does

Where the task's loss is a sum, `objective` gives its mean, and the step is by grads N.

`gradient_window` collects the gradients, `optimizer_step` divides once by the count and steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from manyhands.core import LineSearch, OnReady, Tensors
from manyhands.replica.gradient_window import GradientWindow
from manyhands.replica.objective import Reduction
from manyhands.replica.optimizer_step import OptimizerStep
from manyhands.replica.parameters import ReplicaGroup, ReplicaParameters
from manyhands.replica.several_optimizers.named_losses import NamedLosses
from manyhands.replica.several_optimizers.named_optimizers import NamedOptimizers
from manyhands.replica.update import Update, moments


@dataclass
class MicroLoss:
    """Loss of one micro-batch: a mean over `count` samples; None where this rank has none left."""

    loss: Tensor | None
    count: int
    last: bool  # the last micro-batch of this rank in the step
    has_gradients: bool = False  # its backward pass is done: they are with the parameters
    over: int = 1  # ... and those of a loss so many times as large
    optimizer: str | None = None  # the one that steps by it, where they are named; None: all

    def of_sum(self) -> MicroLoss:
        """This one, whose loss is a sum over its samples, as a mean."""
        assert self.loss is not None
        most = max(1, self.count)
        return replace(self, loss=self.loss / most, over=self.over * most)


NextLoss = Callable[[], MicroLoss]


@runtime_checkable
class SubSteps(Protocol):
    """A `NextLoss` that gives several losses for one batch, each for an optimizer step
    (`replica.several_optimizers`)."""

    follows: bool  # this rank has no samples in this batch, and makes the steps that others make

    def __call__(self) -> MicroLoss: ...
    def advance(self, begins: bool) -> str | None:
        """Run the user's code up to its next loss, with the parameters as they are now: the name of
        the optimizer that steps by it, "" for all of them; None: the batch has no further one, or
        this rank `follows`.
        `begins`: of the next batch, else of this one."""
        ...


# The optimizer that all ranks step next, by this rank's own and whether it follows others; None:
# their batch has no further step. Raises where another rank is to step another one.
Agree = Callable[[str | None, bool], str | None]
# Runs all micro-batches of a step: calls backward on scaled(loss, count) of each, and returns the
# sum of loss * count and the sum of counts.
RunMicroBatches = Callable[[Callable[[Tensor, int], Tensor]], tuple[Tensor, int]]


class BlockEnd(Protocol):
    """Ends a block of local steps early, after the same number of steps on all ranks
    (`launch.stopping.block_stop`)."""

    def begin(self, most: int) -> None: ...
    def ends(self, done: int) -> bool: ...
    def over(self, done: int) -> None: ...


class ModuleReplica:
    """Forward, backward and step of a module; fulfils all replica protocols but `Student`.

    `next_loss` is the only source of work: it takes the next batch and runs the forward pass, or
    asks the user's own loop. A pipeline gives `run_micro_batches` instead.
    """

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
        frozen: Sequence[nn.Parameter] = (),
        on_first: Callable[[list[str], int], None] = lambda unused, views: None,
        ended: Callable[[], bool] = lambda: False,
        block_end: BlockEnd | None = None,
        steps_alone: bool = False,
        on_window: Callable[[ModuleReplica], None] | None = None,
        schedule_at: Callable[[], int] | None = None,
        scheduled: int = 0,
        schedule_most: int | None = None,
        run_micro_batches: RunMicroBatches | None = None,
        replica_group: ReplicaGroup | None = None,
        reduction: Reduction = "mean",
        sub_steps: SubSteps | None = None,
        agree: Agree = lambda name, follows: name,
    ):
        self.flat, self.update, self.next_loss = flat, update, next_loss
        self.optimizer, self.device = update.optimizer, flat.count.device
        self.nominal, self.schedule, self.scaler = nominal, schedule, scaler
        # the ranks over which this replica is split; None: this rank holds all of it
        self.replica_group = replica_group or flat.replica_group
        self.window = GradientWindow(flat, overlap, frozen, on_first)
        self.optimizer_step = OptimizerStep(
            flat,
            update,
            nominal,
            clip,
            schedule,
            scaler,
            steps_alone,
            schedule_at,
            scheduled,
            schedule_most,
            self.replica_group,
            reduction,
        )
        self.own_count = 0  # samples of this rank in the last window, before merging
        self.in_block = False  # between two local steps of a strategy
        self._sub_steps, self._agree = sub_steps, agree  # None: one optimizer step for a batch
        self._next: str | None = None  # the optimizer of the next one; None: the batch is over
        self._alone = False  # in a block, whose steps exchange nothing
        self.losses = NamedLosses(() if sub_steps is None else self._named.named)
        self.optimizer_step.apart = sub_steps is not None
        self.closing = False  # further steps only end a block; they are no steps of the run
        self._ended = ended  # whether the run is at its end
        self._block_end = block_end  # None: blocks end early only there
        self.run_micro_batches = run_micro_batches
        self._on_window = on_window  # called after a step's last backward pass
        # of an optimizer that evaluates a batch several times (`replica.lbfgs`)
        self.line_search: LineSearch | None = None

    def close(self) -> None:
        """Remove all hooks from the module."""
        self.window.close()

    @property
    def updates_slice(self) -> bool:
        return self.update.slice_only

    @property
    def in_common(self) -> bool:
        return self.flat.in_common

    @property
    def params(self) -> Tensors:
        self.flat.take_back()
        return self.flat.values

    @property
    def grads(self) -> Tensors:
        self.window.gather()
        return self.window.grads

    @property
    def count(self) -> Tensor:
        return self.flat.count

    @property
    def scale(self) -> Tensor:
        # float32 would cost float64 gradients half of their digits
        share = self.flat.count[0].double() / self.nominal
        # a tensor: reading the number would make the host wait for the GPU
        loss_scale = None if self.scaler is None else self.scaler._scale
        return share if loss_scale is None else share * loss_scale.to(share.device)

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0].get("lr", math.nan))

    @property
    def moments(self) -> Tensors:
        if self.updates_slice:
            raise ValueError(
                "each rank holds the optimizer state of the slice it updates; no rank has all of it"
            )
        return moments(self.flat.views, self.optimizer)

    def reset_moments(self) -> None:
        self.optimizer.state.clear()

    def steps(self, most: int) -> Iterator[int]:
        done, early = 0, self._block_end
        if early is not None:
            early.begin(most)
        self._alone = True
        try:
            while done < most:
                if done and (self._ended() or (early is not None and early.ends(done))):
                    return
                yield done
                self.in_block = True
                while not self.batch_over():  # all its optimizer steps are one step of the block
                    yield done
                done += 1
        finally:
            self.in_block = self._alone = False
            if early is not None:
                early.over(done)

    def batch_over(self) -> bool:
        if self._sub_steps is None:
            return True
        for i in self.window.views if self._next is not None else ():
            # Another rank may have written the values of its part of them, which torch does not
            # see. A graph of before the step must be refused on N ranks, as it is on one.
            torch.autograd.graph.increment_version(self.flat.views[i].parameter)
        if self._next is not None:
            self._advance(self._sub_steps, begins=False)
        if self._next is None:
            self.optimizer_step.end_batch()
        return self._next is None

    def _advance(self, sub_steps: SubSteps, begins: bool) -> None:
        self._next = sub_steps.advance(begins)
        if not self._alone:
            self._next = self._agree(self._next, sub_steps.follows)

    def _begin_step(self, sub_steps: SubSteps) -> None:
        """Restrict this step to the optimizer that the user's code has named."""
        if self._next is None:
            self._advance(sub_steps, begins=True)
        self._named.active = self._next or None
        self.window.choose(self._named.active)

    @property
    def _named(self) -> NamedOptimizers:
        assert isinstance(self.optimizer, NamedOptimizers)
        return self.optimizer

    def load(self, values: Tensors) -> None:
        for k, v in values.items():
            self.params[k].copy_(v)

    def holding(self, values: Tensors | None) -> AbstractContextManager[None]:
        return self.flat.holding(values)

    def backward(self, on_ready: OnReady | None = None) -> Tensor:
        self.window.start()
        if self._sub_steps is not None:
            self._begin_step(self._sub_steps)
        if self.run_micro_batches is None:
            total, count = self._one_by_one(on_ready)
        else:
            total, count = self.run_micro_batches(self._scaled)
        # from here on loss, count and gradient are those of the whole replica
        total, count, used = self.flat.end_window(total, count)
        self.own_count = count
        self.window.end(count, used)
        if self._on_window is not None:
            self._on_window(self)
        if on_ready is not None:
            self.window.launch_rest(on_ready)
        loss = total / max(count, 1)
        self.losses.add(self._next, loss, count)
        return loss

    def _one_by_one(self, on_ready: OnReady | None) -> tuple[Tensor, int]:
        total, count, last = torch.zeros((), device=self.device), 0, False
        while not last:
            micro = self.next_loss()
            last = micro.last
            if not micro.has_gradients:
                self.window.check_untouched()
            self.flat.before_backward(last)
            if micro.loss is not None:
                if micro.has_gradients:
                    self._weigh_gradients(micro.count / micro.over)
                else:
                    self.window.on_ready = on_ready if last else None
                    self.window.backward(self._scaled(micro.loss, micro.count))
                    self.window.on_ready = None
                total = total + micro.loss.detach() * micro.count
                count += micro.count
            self.flat.after_backward(micro.loss is not None)
            if not last:
                self.window.left()
        return total, count

    def _weigh_gradients(self, count: float) -> None:
        """Of a mean over `count` samples, which the user's backward pass has left."""
        share = count / self.nominal
        if share != 1:
            views = self.flat.views
            grads = [v.parameter.grad for v in views if v.parameter.grad is not None]
            torch._foreach_mul_(grads, share)

    def _scaled(self, loss: Tensor, count: int) -> Tensor:
        share = count / self.nominal
        scaled = loss if share == 1 else loss * share
        return scaled if self.scaler is None else self.scaler.scale(scaled)

    def square_norm(self) -> Tensor | None:
        if self.optimizer_step.clip is None or not self.updates_slice:
            return None
        return self.optimizer_step.square_norm(self.window.place(self.update))

    def step(self) -> None:
        if self.own_count == 0 and float(self.flat.count[0]) == 0:
            # no rank had samples: momentum alone must not move anything
            if not self.closing:
                self.optimizer_step.next_rate()
            return
        grads = self.window.place(self.update)
        self.optimizer_step(grads, self.unmerged_count())

    def unmerged_count(self) -> int | None:
        """This rank's samples, if nobody read the flat gradients: `count` cannot be merged then."""
        return None if self.window.merged else self.own_count

    def gradient(self) -> Tensors:
        if not self.window.is_mean:
            self.window.gather()
            used = zip(self.flat.views, self.window.used, strict=True)
            self.optimizer_step.normalise([view.grad for view, is_used in used if is_used], None)
            self.window.is_mean = True
        return self.flat.grads

    def stepped(self) -> None:
        if self.schedule is not None and (self.own_count or not self.closing):
            # else the schedule warns that the optimizer made no step
            self.optimizer._opt_called = True  # type: ignore[attr-defined]
            self.optimizer_step.next_rate()
