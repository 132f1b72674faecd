"""Trainer coroutine: the training loop and the user's loop take turns in one thread.

    merge strategy    asks its replica for the next loss      -> the user's loop goes on
    user's loop       run.step(loss)                          -> the strategy goes on with it

So every strategy works with a loop that somebody else has written. An optimizer with a line search
asks for a loss several times a step; `run.step(closure)` gives it what computes one. Where several
optimizers are named, the trainer asks for a batch's next step, or learns that it has none
(`loop_steps`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import greenlet
from torch import Tensor, nn

from manyhands.core import Result
from manyhands.replica.checks.step_guard import merged_steps
from manyhands.replica.module import MicroLoss
from manyhands.train import Trainer

Gradients = Iterable[tuple[nn.Parameter, Tensor]]


class TrainerCoroutine:
    """`ask` is the replica's `next_loss`; `hand_over` answers it from the user's loop."""

    def __init__(self) -> None:
        self.trainer: Trainer | None = None  # made after this: its replica asks here
        self.micro: MicroLoss | None = None  # handed over last; None: the batch is over
        self.follows = False  # this rank has no samples of the batch, and does what others do
        self.closure: Callable[[], MicroLoss] | None = None  # of the present step, in its place
        self.within_batch = False  # the trainer asks whether the batch has a further step
        self._gradients: Gradients = ()  # of `micro`, by a backward pass of the user's
        self._loop: Any = None
        self._outside: Any = None

    def ask(self) -> MicroLoss:
        if self.closure is not None:
            return self.closure()
        self.wait()
        assert self.micro is not None
        self.put_back()
        return self.micro

    def wait(self) -> None:
        """In the trainer: the user's loop goes on until it hands something over."""
        self._outside.switch()

    def put_back(self) -> None:
        """Every step begins by clearing gradients: put back those that were handed over."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients = ()

    @property
    def claims_steps(self) -> bool:
        """Whether ranks are asynchronous, each claiming its steps."""
        return self.trainer is not None and self.trainer.limits.claims is not None

    @property
    def in_step(self) -> bool:
        """Whether a step has begun that takes more micro-batches."""
        return self.micro is not None and not self.micro.last

    def claim_step(self) -> None:
        """An asynchronous trainer claims a step before it asks for a loss: run it up to there."""
        if self.claims_steps:
            self.start()

    def hand_over(
        self, micro: MicroLoss | None, gradients: Gradients = (), *, follows: bool = False
    ) -> Result | None:
        """Answer the trainer, and run it up to its next question. The result: it has ended, as it
        was told to stop, or another asynchronous rank's loop is over."""
        self.start()
        self.micro, self._gradients, self.follows = micro, gradients, follows
        return self._go_on()

    def hand_over_closure(self, closure: Callable[[], MicroLoss]) -> Result | None:
        """The same with what computes the loss, at the parameters as they are at each call."""
        self.start()
        self.closure = closure
        return self._go_on()

    def take_part(self, last: bool, searches: bool) -> Result | None:
        """The same where this rank has no samples, but other ranks wait for it. `last`: of the
        micro-batches of a step; `searches`: the optimizer evaluates a batch several times."""
        if searches:
            return self.hand_over_closure(lambda: MicroLoss(None, 0, True))
        return self.hand_over(MicroLoss(None, 0, last), follows=True)

    def end_batch(self) -> Result | None:
        """Where the trainer asks for a further step of the batch, tell it that there is none."""
        return self.hand_over(None) if self.running and self.within_batch else None

    def _go_on(self) -> Result | None:
        result: Result | None = self._loop.switch()
        return result if self._loop.dead else None

    def next_closure(self) -> None:
        self.closure = None
        self.wait()

    @property
    def running(self) -> bool:
        return self._loop is not None and not self._loop.dead

    def abandon(self) -> None:
        """Of a script that failed: other ranks do not wait for a last checkpoint of it."""
        self._loop = None

    def end(self) -> Result | None:
        """The user's loop is over: save and end. None: nothing has begun, or it has ended."""
        result = self.end_batch()
        if self.running:
            assert self.trainer is not None
            self.trainer.limits.end_here()
            if self.trainer.replica.in_block:
                # among the local steps of a strategy: merge what they have learnt
                self.trainer.replica.closing = True
                # a step without samples changes nothing
                self.micro, self.follows = MicroLoss(None, 0, True), True
                self._outside = greenlet.getcurrent()
                result = self._loop.switch()
            else:
                with merged_steps():
                    while not self.trainer.finished():
                        self.trainer.step()
                    result = self.trainer.finish()
        self._loop = None
        return result

    def start(self) -> None:
        """Run the trainer up to its first question, where it has not begun."""
        self._outside = greenlet.getcurrent()
        if self._loop is None:
            self._loop = greenlet.greenlet(self._train)
            self._loop.switch()  # up to the first question for a loss

    def _train(self) -> Result:
        assert self.trainer is not None
        with merged_steps():
            return self.trainer.loop()


class ClosureBatches:
    """In place of the batches of a line search: a step is what a closure of the user's computes, at
    every call on the same batch."""

    total = 1

    def __init__(self, coroutine: TrainerCoroutine):
        self._coroutine = coroutine

    def peek(self) -> tuple[int, bool]:
        """A step begins: the user's loop goes on, until it hands a closure over."""
        self._coroutine.next_closure()
        return 1, True

    def rewind(self) -> None: ...
    def pass_over(self) -> None: ...
