"""Trainer coroutine: the training loop and the user's loop take turns in one thread.

    merge strategy    asks its replica for the next loss      -> the user's loop goes on
    user's loop       run.step(loss)                          -> the strategy goes on with it

So every strategy works with a loop that somebody else has written. An optimizer with a line search
asks for a loss several times a step; `run.step(closure)` gives it what computes one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import greenlet
from torch import Tensor, nn

from manyhands.core import Result
from manyhands.replica.checks.step_guard import merged_steps
from manyhands.replica.module import MicroLoss
from manyhands.train import Trainer


class TrainerCoroutine:
    """`ask` is the replica's `next_loss`; `hand_over` answers it from the user's loop."""

    def __init__(self) -> None:
        self.trainer: Trainer | None = None  # made after this: its replica asks here
        self.micro: MicroLoss | None = None  # handed over last
        self.closure: Callable[[], MicroLoss] | None = None  # of the present step, in its place
        self._loop: Any = None
        self._outside: Any = None

    def ask(self) -> MicroLoss:
        if self.closure is not None:
            return self.closure()
        self._outside.switch()
        assert self.micro is not None
        return self.micro

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

    def hand_over(self, micro: MicroLoss) -> Result | None:
        """Answer the trainer, and run it up to its next question. The result: it has ended, as it
        was told to stop, or another asynchronous rank's loop is over."""
        self.start()
        self.micro = micro
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
        return self.hand_over(MicroLoss(None, 0, last))

    def _go_on(self) -> Result | None:
        result: Result | None = self._loop.switch()
        return result if self._loop.dead else None

    def next_closure(self) -> None:
        self.closure = None
        self._outside.switch()

    @property
    def running(self) -> bool:
        return self._loop is not None and not self._loop.dead

    def abandon(self) -> None:
        """Of a script that failed: other ranks do not wait for a last checkpoint of it."""
        self._loop = None

    def end(self) -> Result | None:
        """The user's loop is over: save and end. None: nothing has begun, or it has ended."""
        result: Result | None = None
        if self.running:
            assert self.trainer is not None
            self.trainer.limits.end_here()
            if self.trainer.replica.in_block:
                # among the local steps of a strategy: merge what they have learnt
                self.trainer.replica.closing = True
                self.micro = MicroLoss(None, 0, True)  # a step without samples changes nothing
                self._outside = greenlet.getcurrent()
                result = self._loop.switch()
            else:
                with merged_steps():
                    while not self.trainer.finished():
                        self.trainer.step()
                    result = self.trainer.finish()
        self._loop = None
        return result

    def start_with(self, gradients: list[tuple[nn.Parameter, Tensor]]) -> None:
        """Start where nothing has begun, and put back gradients of the user's: every step begins by
        clearing them."""
        if gradients and self._loop is None:
            self.start()
            for parameter, gradient in gradients:
                parameter.grad = gradient

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
