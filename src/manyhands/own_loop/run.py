"""Run: a rank's handle on its run, for a loop of the user's own and for callbacks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from manyhands.assembly.rank_context import RankContext, reduction_warning
from manyhands.assembly.replica_setup import set_reduction
from manyhands.core import Event, Result, Tensors
from manyhands.data.batches import Batch
from manyhands.errors import TaskError
from manyhands.launch.signals import Stop
from manyhands.own_loop.coroutine import TrainerCoroutine
from manyhands.own_loop.drawn_steps import DrawnSteps
from manyhands.own_loop.given_loss import GivenLoss
from manyhands.own_loop.loop_data import LoopData
from manyhands.own_loop.loop_parts import LoopParts, loop_parts, refuse_more
from manyhands.own_loop.preparation import Prepared, prepared
from manyhands.own_loop.step_checks import StepChecks, checked_name
from manyhands.replica.checks import step_guard
from manyhands.replica.checks.step_guard import StepGuard
from manyhands.replica.lbfgs.lbfgs import LBFGS
from manyhands.replica.module import MicroLoss
from manyhands.replica.objective import Reduction, whole_count
from manyhands.split.data import rank_range
from manyhands.train import Trainer

Models = TypeVar("Models", bound=nn.Module | Mapping[str, nn.Module])
Optimizers = TypeVar("Optimizers", bound=Optimizer | Mapping[str, Optimizer])
Schedules = LRScheduler | Mapping[str, LRScheduler]

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
        self._drawn: DrawnSteps | None = None  # where the script draws its own batches
        self._stepped = True  # whether run.step was called for the batch before
        self._failed = False  # an exception ended the script
        self._checks = StepChecks()
        self._given: GivenLoss | None = None  # of a prepared run
        self._searches = False  # the optimizer evaluates a batch several times
        self._names: list[str] = []  # of the optimizers, where they are named

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse what other trainers' users write on theirs: run.should_stop = True."""
        if not (name.startswith("_") or name in RUN_ATTRIBUTES):
            raise TaskError(
                f"run.{name} = ... has no effect; end a run with run.stop(), or steps=, epochs= or "
                "until=, and keep values of your own in an object of your own"
            )
        super().__setattr__(name, value)

    @overload
    def prepare(
        self,
        model: Models,
        optimizer: Optimizers,
        dataset: None = None,
        *,
        schedule: Schedules | None = None,
    ) -> tuple[Models, Optimizers]: ...
    @overload
    def prepare(
        self,
        model: Models,
        optimizer: Optimizers,
        dataset: Any,
        *,
        batch: int | None = None,
        schedule: Schedules | None = None,
    ) -> tuple[Models, Optimizers, LoopData]: ...
    def prepare(
        self,
        model: Any,
        optimizer: Any,
        dataset: Any = None,
        *more: Any,
        batch: int | None = None,
        schedule: Schedules | None = None,
    ) -> tuple[Any, ...]:
        """Make model, optimizer and data part of the run; use what it returns as before.

        Several models and optimizers are dicts of names. Without data the script draws its own
        batches: each `run.step` is one of this rank's, and from here on every rank draws random
        numbers of its own."""
        if self.trainer is not None:
            raise TaskError("prepare was called before; one run trains one model")
        refuse_more(more)
        parts = loop_parts(model, optimizer, schedule)
        context, stop = self._context, self._stop or Stop()
        found = prepared(context, self._coroutine, parts, dataset, batch, stop, self)
        self._begin(found, parts)
        batches, models = found.made.batches, parts.in_shape(found.made.module)
        if dataset is not None:
            return models, optimizer, LoopData(self, batches, dataset, found.plan.batch)
        self._drawn = DrawnSteps(context, batches, self._coroutine)
        return models, optimizer

    def _begin(self, found: Prepared, parts: LoopParts) -> None:
        self.trainer, trained = found.made.trainer, found.parameters
        optimizer, self._names, plan = parts.optimizer, parts.names, found.plan
        if self._guard is not None:
            self._guard.prepared = optimizer
            self._guard.parameters = [p for _, p in trained]
        self._checks = StepChecks(parts.schedules.values())
        self._searches = isinstance(optimizer, LBFGS)
        notice = self._context.notice
        self._given = GivenLoss(trained, parts.owner, plan, found.has_rows, notice)

    def step(
        self,
        loss: Tensor | Callable[[], Any] | None = None,
        count: int | None = None,
        *,
        reduction: Reduction = "mean",
        optimizer: str | None = None,
    ) -> None:
        """Backward, exchange, merge, optimizer step, zero_grad.

        `loss` is a mean over the batch, or over `count` tokens, say; with `reduction="sum"` it is a
        sum, and the step is by the sum over all ranks. A batch that the script draws itself counts
        1. Without a loss, the gradients that are there are those of this rank's mean loss: the
        script has called backward. A function is a closure, as for torch.optim.LBFGS. `optimizer`:
        the one whose parameters get a gradient and step, of several; else all of them."""
        if self._ended is not None:
            self._end_early()
        given, batch = self._given, self._batch
        name = checked_name(optimizer, self._names, self._context.plan)
        if given is None or (batch is None and self._drawn is None):
            over = " (this batch is of an iteration that is over)" if self.round else ""
            raise TaskError(
                "run.step(loss) needs a batch from the data that run.prepare returned; iterate "
                f"over that{over}"
            )
        n = 1 if batch is None else batch.count
        if count is not None:
            n = whole_count(count, "run.step was given as the loss's count")
            n = n if batch is None or batch.count else 0  # a sample that is not this rank's
        self._checks.refuse_scheduled()
        if self._searches:
            self._search(given, loss, n, reduction)
        else:
            if callable(loss) and not isinstance(loss, Tensor):
                micro = given.of_closure(loss, n, name)  # one evaluation is a step
            else:
                micro = given.read(loss, n, self._coroutine.in_step, name)
            micro = self._reduced(micro, reduction)
            kept = given.gradients(name) if micro.has_gradients else []
            micro.last = self._begin_batch()
            if self._drawn is not None and loss is not None:
                self._drawn.look_at(micro.loss)
            self._went_on(self._coroutine.hand_over(micro, kept))
        self._checks.stepped()

    def _search(self, given: GivenLoss, closure: Any, n: int, reduction: Reduction) -> None:
        """A step with a line search, which evaluates the closure at several parameters."""
        nothing = closure is None and n == 0
        if not nothing and (isinstance(closure, Tensor) or not callable(closure)):
            raise TaskError(
                "LBFGS evaluates a batch several times a step: give run.step a function that "
                "computes the loss and returns it, run.step(closure), as to torch.optim.LBFGS"
            )
        self._begin_batch()

        def evaluate() -> MicroLoss:
            if nothing:
                return MicroLoss(None, 0, True)
            return self._reduced(given.of_closure(closure, n), reduction)

        self._went_on(self._coroutine.hand_over_closure(evaluate))

    def _take_part(self, last: bool) -> None:
        """This rank has no samples of a batch, but the others wait for it."""
        self._went_on(self._coroutine.take_part(last, self._searches))
        self._checks.stepped()

    def _has_gradients(self) -> bool:
        """Whether the script has called backward itself, for a step that is still to come."""
        return self._given is not None and bool(self._given.gradients())

    def _end_batch(self) -> None:
        """The loop goes on to another batch: the one before has no further step."""
        if self._names:
            self._went_on(self._coroutine.end_batch())
            self._batch = None

    def _begin_batch(self) -> bool:
        """Whether this batch is the last one of its step."""
        if self._drawn is not None:
            return self._drawn.next().last
        assert self._batch is not None
        if self._stepped and not (self._names and self._batch.last):
            self._checks.refuse_repeated(self._batch.last, self._context.warn)
        self._stepped = True
        return self._batch.last

    def _reduced(self, micro: MicroLoss, given: Reduction) -> MicroLoss:
        """`micro` as a mean; of a sum, the run multiplies steps by their count."""
        trainer, context = self.trainer, self._context
        assert trainer is not None
        if micro.loss is None:
            return micro
        self._checks.check_reduction(
            micro.loss,
            given,
            micro.count,
            lambda reduction: set_reduction(trainer, reduction),
            reduction_warning(context, context.plan),
        )
        return micro.of_sum() if given == "sum" else micro

    @property
    def round(self) -> int:
        """Rounds of the merge strategy that are done, also before a resume."""
        return 0 if self.trainer is None else self.trainer.round

    @property
    def steps(self) -> int:
        """Steps of the run that are done, also before a resume: where a loop goes on from. Where
        ranks are asynchronous, up to the one that this rank has claimed last."""
        if self.trainer is None:
            return 0
        if (claims := self.trainer.limits.claims) is not None:
            return claims.latest.steps
        pending = not self._stepped and self._batch is not None and self._batch.last
        return self.trainer.position.steps - pending

    def part(self, values: Any, dim: int = 0) -> Any:
        """This rank's part of a tensor, an array or a list: the parts of all ranks are contiguous,
        near-equal and the whole together."""
        mine = rank_range(len(values) if dim == 0 else values.shape[dim], self.rank, self.size)
        cut = slice(mine.start, mine.stop)
        return values[(*[slice(None)] * dim, cut)] if dim else values[cut]

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
            if self.trainer is not None:  # a round may be several steps
                plain.setdefault("step", float(self.trainer.position.steps))
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
        with self._waiting("run.sum"):
            self._context.group.all_reduce({"sum": found.view(-1)}, op="sum").wait()
        return found

    def stop(self, reason: str = "") -> None:
        """End the run, after the same round on all ranks, with its last evaluation and checkpoint;
        any rank may call it, or all."""
        if self.trainer is None:
            raise TaskError("run.stop() ends a run under way; call run.prepare(...) first")
        self.trainer.stop.ask(str(reason))

    def gradients(self) -> Tensors:
        """Merged gradients by parameter name, in a callback's `on_gradient(run)`."""
        hook = None if self.trainer is None else self.trainer.gradient_hook
        if hook is None:
            raise TaskError(
                "run.gradients() has merged gradients within a callback's on_gradient(run), and "
                "nowhere else"
            )
        return hook.gradients()

    def merged(self) -> AbstractContextManager[None]:
        """`with run.merged():` the model holds what all replicas together stand for, to evaluate or
        to save it; every rank must call it. Where a strategy keeps replicas equal, that is what the
        model holds anyway."""
        if self.trainer is None:
            raise TaskError("run.merged() needs a model; call run.prepare(...) first")
        return self._merged(self.trainer)

    @contextmanager
    def _merged(self, trainer: Trainer) -> Iterator[None]:
        with ExitStack() as held:
            with self._waiting("run.merged"):
                held.enter_context(trainer.merged())
            yield

    def _waiting(self, call: str) -> AbstractContextManager[None]:
        ends = None if self._drawn is None else self._drawn.ends
        return nullcontext() if ends is None else ends.waiting(call)

    def _abandon(self) -> None:
        """The script has failed: `close` neither trains nor saves any more."""
        self._failed = True
        self._coroutine.abandon()

    def close(self) -> Result | None:
        """Save and end the run; called by itself when the script ends."""
        if self in joined_runs:
            joined_runs.remove(self)
        if self._drawn is not None and self._ended is None and not self._failed:
            self._ended = self._drawn.follow(self._searches)
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

    def _went_on(self, ended: Result | None) -> None:
        """The trainer has gone on, or `ended`: it was told to."""
        if ended is not None:
            self._ended = ended
            if ended.stop_reason is None:  # else the loop ends where it asks for the next batch
                self._end_early()

    @property
    def stopped(self) -> bool:
        """Whether the run has ended before the loop: the data gives no more batches."""
        return self._ended is not None

    def _end_early(self) -> None:
        requested = 0 if self._stop is None else self._stop.requested
        if self.rank == 0:
            print(f"stopped; saved in {self.directory}", file=sys.stderr)
        # the launcher, where there is one, says why, and with which exit code
        launched = self._context.process.started_by == "manyhands"
        raise SystemExit(128 + requested if requested and not launched else 0)
