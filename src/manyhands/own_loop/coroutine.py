"""Trainer coroutine: the training loop and the user's loop take turns in one thread.

    merge strategy    asks its replica for the next loss      -> the user's loop goes on
    user's loop       run.step(loss)                          -> the strategy goes on with it

So every strategy works with a loop that somebody else has written.
"""

from __future__ import annotations

from typing import Any

import greenlet

from manyhands.core import Result
from manyhands.replica.checks.step_guard import merged_steps
from manyhands.replica.module import MicroLoss
from manyhands.train import Trainer


class TrainerCoroutine:
    """`ask` is the replica's `next_loss`; `hand_over` answers it from the user's loop."""

    def __init__(self) -> None:
        self.trainer: Trainer | None = None  # made after this: its replica asks here
        self.micro: MicroLoss | None = None  # handed over last
        self._loop: Any = None
        self._outside: Any = None

    def ask(self) -> MicroLoss:
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
            self._start()

    def hand_over(self, micro: MicroLoss) -> Result | None:
        """Answer the trainer, and run it up to its next question. The result: it has ended, as it
        was told to stop, or another asynchronous rank's loop is over."""
        self._start()
        self.micro = micro
        result: Result | None = self._loop.switch()
        return result if self._loop.dead else None

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

    def _start(self) -> None:
        self._outside = greenlet.getcurrent()
        if self._loop is None:
            self._loop = greenlet.greenlet(self._train)
            self._loop.switch()  # up to the first question for a loss

    def _train(self) -> Result:
        assert self.trainer is not None
        with merged_steps():
            return self.trainer.loop()
