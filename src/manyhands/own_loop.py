"""A user's own loop: `run.prepare`, `run.step`; the trainer runs beside it as a coroutine.

A merge strategy asks the replica for its next loss. Control then passes to the user's loop, until
it calls `run.step(loss)`. So every strategy works with a loop that somebody else has written.
"""

from __future__ import annotations

import atexit
import dataclasses
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import greenlet
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from manyhands.assembly.data import loader_batch
from manyhands.assembly.rank_context import RankContext
from manyhands.assembly.spec import TrainingSpec
from manyhands.assembly.trainer import assemble
from manyhands.core import Event
from manyhands.data.batches import Batch, BatchIterator
from manyhands.data.sources import source
from manyhands.errors import PlanError, TaskError
from manyhands.launch import environment
from manyhands.launch.signals import Stop
from manyhands.observe import curves
from manyhands.plan import words as plan_words
from manyhands.replica import forward
from manyhands.replica.module import MicroLoss
from manyhands.train import Result, Trainer


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
        made = assemble(context, plan, spec, self._stop or Stop(), self)
        self.trainer, module = made.trainer, made.module
        if plan.precision != "fp32":
            module = _Cast(module, plan.precision, context.device)
        return module, optimizer, LoopData(self, made.batches)

    def step(self, loss: Tensor, count: int | None = None) -> None:
        """Backward, exchange, merge, optimizer step, zero_grad; `loss` is the batch mean."""
        if self._batch is None:
            raise TaskError(
                "run.step(loss) needs a batch from the data that run.prepare returned; "
                "iterate over that"
            )
        n = self._batch.count if count is None else count
        # a mean over nothing is 0/0
        self._hand_over(MicroLoss(loss if n else loss.nan_to_num(), n, self._batch.last))

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
                while not self.trainer.finished():
                    self.trainer.step()
                result = self.trainer.finish()
        self._loop = None
        self._context.close()
        if self._stop is not None:
            self._stop.__exit__(None, None, None)
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
            self._loop = greenlet.greenlet(self.trainer.loop)
            self._loop.switch()  # up to the first question for a loss

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


class LoopData:
    """This rank's batches, epoch by epoch. Epochs that a resumed run has done are over at once."""

    def __init__(self, run: Run, batches: BatchIterator):
        self._run, self._batches, self._started = run, batches, 0

    def __iter__(self) -> Iterator[Any]:
        asked, epoch = self._started, self._batches.position.epoch
        self._started += 1
        # to the end of this epoch; after a `break`, the rest of it
        while self._batches.position.epoch == epoch <= asked:
            self._run._claim_step()
            batch = self._batches.next()
            self._run._batch = batch
            if batch.values is None:  # no sample left for this rank, but the others wait for it
                self._run._hand_over(MicroLoss(None, 0, batch.last))
            else:
                yield batch.values

    def __len__(self) -> int:
        if self._batches.steps_per_epoch is None:
            raise TypeError("a stream has no length")
        return self._batches.steps_per_epoch


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
    if context.process.started_by != "manyhands":
        atexit.register(close_joined)
    return run


def close_joined() -> dict[str, Any] | None:
    """Close the run that the script has joined, if any; how it ended."""
    if not _joined:
        return None
    run = _joined.pop()
    failed = getattr(sys, "last_value", None) is not None
    if failed:
        run._loop = None  # other ranks do not wait for a last checkpoint of a script that failed
    result = run.close()
    if result is not None and run.rank == 0:
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
