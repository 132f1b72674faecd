"""Run: a rank's handle on its run, for a loop of the user's own and for callbacks."""

from __future__ import annotations

import dataclasses
import sys
import time
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from manyhands.assembly.data import loader_batch
from manyhands.assembly.rank_context import (
    RankContext,
    reduction_warning,
    warn_of_eval_mode,
)
from manyhands.assembly.replica_setup import set_reduction
from manyhands.assembly.spec import TrainingSpec
from manyhands.assembly.trainer import assemble
from manyhands.core import Event, Result
from manyhands.data.batches import Batch
from manyhands.data.sources import source
from manyhands.errors import PlanError, TaskError
from manyhands.launch.signals import Stop
from manyhands.own_loop.coroutine import TrainerCoroutine
from manyhands.own_loop.loop_data import LoopData
from manyhands.own_loop.step_checks import StepChecks
from manyhands.plan import words as plan_words
from manyhands.replica.cast import Cast
from manyhands.replica.checks import step_guard
from manyhands.replica.checks.step_guard import StepGuard, merged_steps
from manyhands.replica.module import MicroLoss
from manyhands.replica.objective import Reduction, scalar_loss, whole_count
from manyhands.train import Trainer

RUN_ATTRIBUTES = ("trainer", "rank", "size", "directory", "device")

joined_runs: list[Run] = []  # of this process that are still open


class Run:
    """A rank's handle on its run: `prepare`, `step`, `log`; also what callbacks are given."""

    def __init__(
        self, context: RankContext, stop: Stop | None = None, guard: StepGuard | None = None
    ):
        self._context, self._stop, self._guard = context, stop, guard
        self.trainer: Trainer | None = None
        self.rank, self.size = context.process.rank, context.process.size
        self.directory, self.device = context.directory, context.device
        self._coroutine = TrainerCoroutine()
        self._ended: Result | None = None  # how, where the loop was told to stop
        self._batch: Batch | None = None
        self._stepped = True  # whether run.step was called for the batch before
        self._failed = False  # an exception ended the script
        self._checks = StepChecks([])

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse what other trainers' users write on theirs: run.should_stop = True."""
        if not (name.startswith("_") or name in RUN_ATTRIBUTES):
            raise TaskError(
                f"run.{name} = ... has no effect; limit a run with steps=, epochs= or until=, and "
                "keep values of your own in an object of your own"
            )
        super().__setattr__(name, value)

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        dataset: Any,
        *,
        batch: int | None = None,
        schedule: LRScheduler | None = None,
    ) -> tuple[nn.Module, Optimizer, LoopData]:
        """Make model, optimizer and data part of the run; use what it returns as before."""
        if self.trainer is not None:
            raise TaskError("prepare was called before; one run trains one model")
        context = self._context
        if context.splits_model:
            axes = plan_words.describe(context.plan).split(" merge=")[0]
            raise PlanError(
                f"{axes} splits the model over ranks, for which manyhands must run it; give it as "
                "a task() with its loss, or use data= alone in a loop of your own"
            )
        plan = dataclasses.replace(
            context.plan,
            batch=context.plan.batch or batch or loader_batch(dataset),
            seed=context.plan.seed or 0,
        )
        # run.step starts every step without gradients; zero_grad between two micro-batches of a
        # step would lose the first
        optimizer.zero_grad = _leave_gradients  # type: ignore[method-assign]
        spec = TrainingSpec(
            model.to(context.device),
            lambda _: optimizer,
            None if schedule is None else lambda _: schedule,
            source(dataset, context.device, "the training data", context.plan.loaders),
            lambda *_: self._coroutine.ask,
            # an own loop may change parameters itself (clamp, average), on every rank
            one_copy=False,
        )
        if self._guard is not None:
            self._guard.prepared = optimizer
        with merged_steps():
            made = assemble(context, plan, spec, self._stop or Stop(), self)
        self.trainer, module = made.trainer, made.module
        self._coroutine.trainer = made.trainer
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._checks = StepChecks(trained, schedule)
        warn_of_eval_mode(context, model)
        if plan.precision != "fp32":
            Cast(plan.precision, context.device).over(module)
        return module, optimizer, LoopData(self, made.batches)

    def step(
        self, loss: Tensor, count: int | None = None, *, reduction: Reduction = "mean"
    ) -> None:
        """Backward, exchange, merge, optimizer step, zero_grad.

        `loss` is a mean over the batch, or over `count` tokens, say; with `reduction="sum"` it is a
        sum, and the step is by the sum over all ranks."""
        batch, checks = self._batch, self._checks
        if batch is None:
            raise TaskError(
                "run.step(loss) needs a batch from the data that run.prepare returned; "
                "iterate over that"
            )
        loss = scalar_loss(loss, "run.step was given")
        n = batch.count
        if count is not None:
            n = whole_count(count, "run.step was given as the loss's count")
        if not self._coroutine.in_step:  # else they are of the micro-batches before
            checks.refuse_gradients()
        checks.refuse_scheduled()
        self._check_reduction(loss, reduction, n)
        if self._stepped:
            checks.refuse_repeated(batch.last, self._context.warn)
        self._stepped = True
        loss = loss / max(1, n) if reduction == "sum" else loss
        # a mean over nothing is 0/0
        self._hand_over(MicroLoss(loss if n else loss.nan_to_num(), n, batch.last))
        checks.stepped()

    def _check_reduction(self, loss: Tensor, given: Reduction, count: int) -> None:
        assert self.trainer is not None
        trainer, context = self.trainer, self._context
        self._checks.check_reduction(
            loss,
            given,
            count,
            lambda reduction: set_reduction(trainer, reduction),
            reduction_warning(context, context.plan),
        )

    def keep_local(self, optimizer: Optimizer) -> None:
        """Allow steps of an optimizer that is not the run's: each rank trains its own copy of what
        it steps (an inner loop, a probe), and nothing merges or saves it."""
        if self._guard is not None:
            self._guard.keep_local(optimizer)

    def log(self, **values: float | Tensor) -> None:
        """Record numbers of your own; rank 0's are kept."""
        plain = {k: float(v.detach() if isinstance(v, Tensor) else v) for k, v in values.items()}
        if self.rank == 0:
            round = self.trainer.round if self.trainer else 0
            self._context.recorder.emit(Event(time.time(), 0, round, "log", value=plain))

    def sum(self, value: float | Tensor) -> Tensor:
        """The sum of a number, or of a tensor, over all ranks; every rank must call it."""
        if self.trainer is not None and self._coroutine.claims_steps:
            raise TaskError(
                f"run.sum waits for all ranks, but under {self.trainer.active.word}="
                f"{self.trainer.active.name} each "
                "goes on at its own pace; use run.log(...), or metrics of a task()"
            )
        found = torch.as_tensor(value).detach().to(self.device, copy=True)
        found = found.double() if found.ndim == 0 and found.is_floating_point() else found
        self._context.group.all_reduce({"sum": found.view(-1)}, op="sum").wait()
        return found

    def merged(self) -> AbstractContextManager[None]:
        """`with run.merged():` the model holds what all replicas together stand for, to evaluate or
        to save it; every rank must call it. Where a strategy keeps replicas equal, that is what the
        model holds anyway."""
        if self.trainer is None:
            raise TaskError("run.merged() needs a model; call run.prepare(...) first")
        return self.trainer.merged()

    def _abandon(self) -> None:
        """The script has failed: `close` neither trains nor saves any more."""
        self._failed = True
        self._coroutine.abandon()

    def close(self) -> Result | None:
        """Save and end the run; called by itself when the script ends."""
        if self in joined_runs:
            joined_runs.remove(self)
        if self._coroutine.in_step and not self._failed:
            self._context.warn(
                "the loop ended in the middle of a step (accumulate=): its last batches are not "
                "part of the model"
            )
        result = self._coroutine.end() or self._ended
        step_guard.remove()
        never = self.trainer is not None and result is None and self.trainer.round == 0
        self._context.close()
        if self._stop is not None:
            self._stop.__exit__(None, None, None)
        if never and not self._failed:
            raise TaskError(
                "the run has trained nothing: run.step(loss) was never called; call it for every "
                "batch of the data that run.prepare returned"
            )
        return result

    def _hand_over(self, micro: MicroLoss) -> None:
        ended = self._coroutine.hand_over(micro)
        if ended is not None:
            self._ended = ended
            self._end_early()

    def _end_early(self) -> None:
        requested = 0 if self._stop is None else self._stop.requested
        if self.rank == 0:
            print(f"stopped; saved in {self.directory}", file=sys.stderr)
        # the launcher, where there is one, says why, and with which exit code
        launched = self._context.process.started_by == "manyhands"
        raise SystemExit(128 + requested if requested and not launched else 0)


def _leave_gradients(set_to_none: bool = True) -> None: ...
