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
import torch.distributed as dist
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
from manyhands.replica.cast import Cast
from manyhands.replica.checks import reduction_check, step_guard
from manyhands.replica.checks.step_guard import StepGuard, merged_steps
from manyhands.replica.module import MicroLoss
from manyhands.replica.objective import Reduction, scalar_loss, whole_count
from manyhands.train import Trainer

RUN_ATTRIBUTES = ("trainer", "rank", "size", "directory", "device")


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
        self._repeated = False  # whether that was said
        self._reduction: Reduction | None = None  # of the losses, as the first step said
        self._guard: StepGuard | None = None
        self._failed = False  # an exception ended the script
        self._parameters: list[tuple[str, nn.Parameter]] = []  # of the prepared model
        self._schedule: LRScheduler | None = None
        self._scheduled: tuple[Any, ...] = ()  # where our last step left it

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
            lambda *_: self._ask,
            # an own loop may change parameters itself (clamp, average), on every rank
            one_copy=False,
        )
        if self._guard is not None:
            self._guard.prepared = optimizer
        with merged_steps():
            made = assemble(context, plan, spec, self._stop or Stop(), self)
        self.trainer, module = made.trainer, made.module
        self._parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        warn_of_eval_mode(context, model)
        self._schedule, self._scheduled = schedule, _stepped(schedule)
        if plan.precision != "fp32":
            Cast(plan.precision, context.device).over(module)
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
        self._refuse_schedule()
        self._check_reduction(loss, reduction, n)
        self._check_repeated()
        self._stepped = True
        loss = loss / max(1, n) if reduction == "sum" else loss
        # a mean over nothing is 0/0
        self._hand_over(MicroLoss(loss if n else loss.nan_to_num(), n, self._batch.last))
        self._scheduled = _stepped(self._schedule)

    def _refuse_schedule(self) -> None:
        if self._scheduled != _stepped(self._schedule):
            raise TaskError(
                "the schedule was stepped by the script, and run.step(loss) steps it too; leave "
                "schedule.step() out, or do not give it to run.prepare"
            )

    def _check_repeated(self) -> None:
        """A second step for one batch: of an unfinished step it would go on for ever."""
        assert self._batch is not None
        if not self._stepped or self._repeated:
            return
        if not self._batch.last:
            raise TaskError(
                "run.step(loss) was called again for the same batch, but with accumulate= a step "
                "ends only with its last batch; iterate over the data, or leave accumulate= out"
            )
        self._repeated = True
        self._context.warn(
            "run.step(loss) was called again without a new batch from the data (a cycle, one batch "
            "again and again): it trains, but epochs and the position count batches of the data"
        )

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

    def _check_reduction(self, loss: Tensor, given: Reduction, count: int) -> None:
        if given not in ("mean", "sum"):
            raise TaskError(f"reduction={given!r}, but 'mean' or 'sum' is needed")
        assert self.trainer is not None
        if self._reduction is None:
            self._reduction = given
            set_reduction(self.trainer, given)
            warn = reduction_warning(self._context, self._context.plan)
            text = reduction_check.warning(given, reduction_check.of_graph(loss, count))
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

    def sum(self, value: float | Tensor) -> Tensor:
        """The sum of a number, or of a tensor, over all ranks; every rank must call it."""
        if self.trainer is not None and self.trainer.limits.claims is not None:
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

    def close(self) -> Result | None:
        """Save and end the run; called by itself when the script ends."""
        if self in _joined:
            _joined.remove(self)
        result = self._ended
        if self._micro is not None and not self._micro.last and not self._failed:
            self._context.warn(
                "the loop ended in the middle of a step (accumulate=): its last batches are not "
                "part of the model"
            )
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


def _stepped(schedule: LRScheduler | None) -> tuple[Any, ...]:
    return tuple(getattr(schedule, name, None) for name in ("last_epoch", "_step_count"))


def _leave_gradients(set_to_none: bool = True) -> None: ...


# -- runs of this process that are still open --

_joined: list[Run] = []
joined_runs = _joined  # for `entry`, which notes at which round one of them failed


def opened(context: RankContext, stop: Stop) -> Run:
    """A run that is closed when the script ends."""
    run = Run(context, stop)
    _joined.append(run)
    run._guard = step_guard.install(run.size)
    run._guard.joined = True
    if run.size > 1 and not dist.is_initialized() and "is_initialized()" in script_text():
        context.warn(
            "torch.distributed has no default process group in this run, so that code under "
            "`if dist.is_initialized():` is left out; use run.rank, run.size and run.sum(value)"
        )
    if context.process.started_by != "manyhands":
        atexit.register(_close_at_exit)
    return run


def script_text() -> str:
    """The text of the script that runs; "": there is none, as in a notebook."""
    try:
        return Path(sys.argv[0]).read_text(errors="replace")
    except (OSError, IndexError, ValueError):
        return ""


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
