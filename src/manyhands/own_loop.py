"""A user's own loop: `run.prepare`, `run.step`; the trainer runs beside it as a coroutine.

A merge strategy asks the replica for its next loss. Control then passes to the user's loop, until
it calls `run.step(loss)`. So every strategy works with a loop that somebody else has written.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import greenlet
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
from manyhands.errors import ManyhandsError, PlanError, TaskError
from manyhands.launch import environment
from manyhands.launch.signals import Stop
from manyhands.loop_data import LoopData
from manyhands.observe import curves
from manyhands.plan import words as plan_words
from manyhands.replica import forward, reduction_check, step_guard
from manyhands.replica.module import MicroLoss
from manyhands.replica.objective import Reduction, scalar_loss, whole_count
from manyhands.replica.step_guard import StepGuard, merged_steps
from manyhands.train import Trainer


class Run:
    """A rank's handle on its run: `prepare`, `step`, `log`; also what callbacks are given."""

    def __init__(self, context: RankContext, stop: Stop | None = None):
        self._context, self._stop = context, stop
        self.trainer: Trainer | None = None
        self.rank, self.size = context.process.rank, context.process.size
        self.directory, self.device = context.directory, context.device
        self._loop: Any = None
        self._ended: Result | None = None  # how, where the loop was told to stop
        self._outside: Any = None
        self._micro: MicroLoss | None = None
        self._batch: Batch | None = None
        self._stepped = True  # whether run.step was called for the batch before
        self._reduction: Reduction | None = None  # of the losses, as the first step said
        self._guard: StepGuard | None = None
        self._failed = False  # an exception ended the script
        self._parameters: list[tuple[str, nn.Parameter]] = []  # of the prepared model

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
            lambda *_: self._ask,
            # an own loop may change parameters itself (clamp, average), on every rank
            one_copy=False,
        )
        if self._guard is not None:
            self._guard.prepared = optimizer
        made = assemble(context, plan, spec, self._stop or Stop(), self)
        self.trainer, module = made.trainer, made.module
        self._parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        warn_of_eval_mode(context, model)
        if plan.precision != "fp32":
            module = _Cast(module, plan.precision, context.device)
        return module, optimizer, LoopData(self, made.batches)

    def step(
        self, loss: Tensor, count: int | None = None, *, reduction: Reduction = "mean"
    ) -> None:
        """Backward, exchange, merge, optimizer step, zero_grad.

        `loss` is a mean over the batch, or over `count` tokens, say; with `reduction="sum"` it is a
        sum, and the step is by the sum over all ranks."""
        if self._batch is None:
            raise TaskError(
                "run.step(loss) needs a batch from the data that run.prepare returned; "
                "iterate over that"
            )
        loss = scalar_loss(loss, "run.step was given")
        n = self._batch.count
        if count is not None:
            n = whole_count(count, "run.step was given as the loss's count")
        self._refuse_gradients()
        self._check_reduction(loss, reduction)
        self._stepped = True
        loss = loss / max(1, n) if reduction == "sum" else loss
        # a mean over nothing is 0/0
        self._hand_over(MicroLoss(loss if n else loss.nan_to_num(), n, self._batch.last))

    def _refuse_gradients(self) -> None:
        """A step starts without gradients: those of a backward pass of the user's would be lost, or
        count once a rank."""
        if self._micro is not None and not self._micro.last:
            return  # of the micro-batches before
        found = [name for name, p in self._parameters if p.grad is not None]
        if found:
            raise TaskError(
                f"{found[0]} has a gradient before run.step(loss), which runs backward itself; "
                "leave out loss.backward(), add auxiliary losses to the loss, and clip gradients "
                "by the plan (clip=1.0)"
            )

    def keep_local(self, optimizer: Optimizer) -> None:
        """Allow steps of an optimizer that is not the run's: each rank trains its own copy of what
        it steps (an inner loop, a probe), and nothing merges or saves it."""
        if self._guard is not None:
            self._guard.keep_local(optimizer)

    def _check_reduction(self, loss: Tensor, given: Reduction) -> None:
        if given not in ("mean", "sum"):
            raise TaskError(f"reduction={given!r}, but 'mean' or 'sum' is needed")
        assert self.trainer is not None
        if self._reduction is None:
            self._reduction = given
            set_reduction(self.trainer, given)
            warn = reduction_warning(self._context, self._context.plan)
            text = reduction_check.warning(given, reduction_check.of_graph(loss))
            if warn is not None and text is not None:
                warn(text)
        elif self._reduction != given:
            raise TaskError(
                f"reduction={given!r}, but the steps before had {self._reduction!r}; one run has "
                "one reduction"
            )

    def log(self, **values: float | Tensor) -> None:
        """Record numbers of your own; rank 0's are kept."""
        plain = {k: float(v.detach() if isinstance(v, Tensor) else v) for k, v in values.items()}
        if self.rank == 0:
            round = self.trainer.round if self.trainer else 0
            self._context.recorder.emit(Event(time.time(), 0, round, "log", value=plain))

    def merged(self) -> AbstractContextManager[None]:
        """`with run.merged():` the model holds what all replicas together stand for, to evaluate or
        to save it; every rank must call it. Where a strategy keeps replicas equal, that is what the
        model holds anyway."""
        if self.trainer is None:
            raise TaskError("run.merged() needs a model; call run.prepare(...) first")
        return self.trainer.merged()

    def close(self) -> Result | None:
        """Save and end the run; called by itself when the script ends."""
        if self in _joined:
            _joined.remove(self)
        result = self._ended
        if self.trainer is not None and self._loop is not None and not self._loop.dead:
            if self.trainer.replica.in_block:
                result = self._end_block()
            else:
                self.trainer.limits.end_here()
                with merged_steps():
                    while not self.trainer.finished():
                        self.trainer.step()
                    result = self.trainer.finish()
        self._loop = None
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

    def _end_block(self) -> Result | None:
        """The loop ended in the middle of a block of local steps: merge what they have learnt."""
        assert self.trainer is not None
        self.trainer.limits.end_here()
        self.trainer.replica.closing = True
        self._micro = MicroLoss(None, 0, True)  # a step without samples changes nothing
        self._outside = greenlet.getcurrent()
        ended: Result | None = self._loop.switch()
        return ended

    # control passes between the strategy's round and the user's loop

    def _ask(self) -> MicroLoss:
        self._outside.switch()
        assert self._micro is not None
        return self._micro

    def _claim_step(self) -> None:
        """An asynchronous trainer claims a step before it asks for a loss: run it up to there."""
        if self.trainer is not None and self.trainer.limits.claims is not None:
            self._start_loop()

    def _start_loop(self) -> None:
        assert self.trainer is not None
        self._outside = greenlet.getcurrent()
        if self._loop is None:
            self._loop = greenlet.greenlet(self._train)
            self._loop.switch()  # up to the first question for a loss

    def _train(self) -> Result:
        assert self.trainer is not None
        with merged_steps():
            return self.trainer.loop()

    def _hand_over(self, micro: MicroLoss) -> None:
        self._start_loop()
        self._micro = micro
        result = self._loop.switch()
        if self._loop.dead:  # told to stop, or another asynchronous rank's loop is over
            self._ended = result
            self._end_early()

    def _end_early(self) -> None:
        requested = 0 if self._stop is None else self._stop.requested
        if self.rank == 0:
            print(f"stopped; saved in {self.directory}", file=sys.stderr)
        # the launcher, where there is one, says why, and with which exit code
        launched = self._context.process.started_by == "manyhands"
        raise SystemExit(128 + requested if requested and not launched else 0)


class _Cast(nn.Module):
    """Forward in the plan's precision; outputs in fp32, so that the user's loss is."""

    def __init__(self, module: nn.Module, precision: str, device: torch.device):
        super().__init__()
        self.module, self._precision, self._device = module, precision, device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with forward.autocast(self._precision, self._device):
            out = self.module(*args, **kwargs)
        return out.float() if isinstance(out, Tensor) and out.is_floating_point() else out


def _leave_gradients(set_to_none: bool = True) -> None: ...


# -- runs of this process that are still open --

_joined: list[Run] = []


def opened(context: RankContext, stop: Stop) -> Run:
    """A run that is closed when the script ends."""
    run = Run(context, stop)
    _joined.append(run)
    run._guard = step_guard.install(run.size)
    run._guard.joined = True
    if context.process.started_by != "manyhands":
        atexit.register(_close_at_exit)
    return run


def _close_at_exit() -> None:
    try:
        close_joined()
    except ManyhandsError as e:  # Python would print it and exit with 0
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(2)


def close_joined(draw: bool = True) -> dict[str, Any] | None:
    """Close the run that the script has joined, if any; how it ended."""
    if not _joined:
        return None
    run = _joined.pop()
    failed = getattr(sys, "last_value", None) is not None
    run._failed = failed
    if failed:
        run._loop = None  # other ranks do not wait for a last checkpoint of a script that failed
    result = run.close()
    if result is not None and run.rank == 0 and draw:
        draw_curves(result, run._context.options.quiet)
    return None if result is None else dataclasses.asdict(result)


def draw_curves(result: Result, quiet: bool) -> None:
    """Draw the run's picture; under our launcher, the launcher does."""
    if environment.process_info().started_by == "manyhands":
        return
    try:
        picture = curves.draw(Path(result.directory))
    except Exception as e:  # a picture must never fail a run
        print(f"no picture: {e}", file=sys.stderr)
        return
    if not quiet:
        print(f"{'picture':<12}{picture}")
