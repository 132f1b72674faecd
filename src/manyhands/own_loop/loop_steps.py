"""Loop steps: several optimizer steps for one batch of a user's own loop.

    run.step(loss, optimizer="d")    the batch's next step is one of "d"
    run.step(loss)                   ... of all optimizers together
    the loop asks for a batch        the batch before has no further step

So the trainer learns from what the loop does which optimizer steps next, as it learns from a task's
step by what it yields. Where the script draws its own batches, every step is a batch of its own.
"""

from __future__ import annotations

from torch import nn

from manyhands.own_loop.coroutine import TrainerCoroutine
from manyhands.replica.module import MicroLoss


class LoopSteps:
    """`SubSteps` of a loop of the user's own; `parameters` are those that the run trains."""

    def __init__(self, coroutine: TrainerCoroutine, parameters: list[nn.Parameter], drawn: bool):
        self._coroutine, self._parameters, self._drawn = coroutine, parameters, drawn
        self.follows = False
        self._first: MicroLoss | None = None  # handed over with the answer, not used yet

    def advance(self, begins: bool) -> str | None:
        if begins:
            self.follows = False
        elif self.follows or self._drawn:
            self._first = MicroLoss(None, 0, True)  # where the others have a further step
            return None
        self._clear()  # of the step before: the loop may call backward itself
        coroutine = self._coroutine
        coroutine.within_batch = not begins
        coroutine.wait()
        coroutine.within_batch = False
        self._first = coroutine.micro
        if self._first is None:
            return None
        self.follows = coroutine.follows
        return None if self.follows else self._first.optimizer or ""

    def __call__(self) -> MicroLoss:
        micro, self._first = self._first, None
        if micro is None:
            self._coroutine.wait()
            micro = self._coroutine.micro
            assert micro is not None
        if micro.has_gradients:
            self._clear()  # those of other optimizers
        self._coroutine.put_back()
        return micro

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
