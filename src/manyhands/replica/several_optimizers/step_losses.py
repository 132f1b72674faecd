"""Losses of a step that yields: several optimizer steps for one batch, each with a loss of its own.

    for each batch:    run step(model, batch) to its next yield: (name, loss) or (name, loss, count)
                       backward into the parameters of optimizer `name`, merge, step; go on

So the code after a yield sees the parameters after that step. With accumulate= or micro= a batch is
several micro-batches, each with a run of the step; they go side by side from yield to yield.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.data.batches import BatchIterator
from manyhands.errors import TaskError
from manyhands.replica.checks import batch_errors, reduction_check
from manyhands.replica.checks.step_guard import UserCode
from manyhands.replica.forward import autocast
from manyhands.replica.module import MicroLoss
from manyhands.replica.objective import Objective


@dataclass
class _Running:
    """A step that is under way for one micro-batch."""

    step: Generator[Any, None, None]
    values: Any
    count: int  # samples; 0: one is borrowed, and counts nothing


class StepLosses:
    """`SubSteps` of a task: `names` are those of its optimizers."""

    follows = False  # a rank without samples runs the step too, on one that does not count

    def __init__(
        self,
        module: nn.Module,
        batches: BatchIterator,
        objective: Objective,
        names: Collection[str],
        precision: str,
        device: torch.device,
        warn: Callable[[str], None] | None = None,
    ):
        self.module, self.batches, self.objective = module, batches, objective
        self._names, self._precision, self._device = names, precision, device
        self._warn = warn  # of a loss that looks like the other reduction; None: do not look
        self._looked: set[str] = set()
        self._running: list[_Running] = []  # of this batch
        self._empty = 0  # micro-batches of this batch without samples, that borrow none either
        self._first: tuple[str, Tensor, int] | None = None  # of the first micro-batch, not used yet
        self._turn = 0  # how many micro-batches have given their loss of this optimizer step

    def advance(self, begins: bool) -> str | None:
        if begins:
            self._begin()
        self._turn = 0
        self._first = self._run(self._running[0]) if self._running else None
        if self._first is not None:
            return self._first[0]
        if any(self._run(other) is not None for other in self._running[1:]):
            raise TaskError(f"step=(model, batch) yielded another number of losses {_OTHER}")
        return None

    def __call__(self) -> MicroLoss:
        at, self._turn = self._turn, self._turn + 1
        last = self._turn >= len(self._running) + self._empty
        if self._first is None or at >= len(self._running):  # no loss, or no samples
            return MicroLoss(None, 0, last)
        name, loss, count = self._first if at == 0 else self._of_other(self._running[at])
        return MicroLoss(loss, count, last, optimizer=name)

    def _of_other(self, running: _Running) -> tuple[str, Tensor, int]:
        assert self._first is not None
        got = self._run(running)
        if got is None or got[0] != self._first[0]:
            given = "nothing more" if got is None else f"a loss for {got[0]!r}"
            raise TaskError(
                f"step=(model, batch) yielded {given}, but one for {self._first[0]!r} {_OTHER}"
            )
        return got

    def _begin(self) -> None:
        """Take this rank's next batch, all its micro-batches."""
        self._running, self._empty, last = [], 0, False
        while not last:
            batch = self.batches.next()
            last = batch.last
            if batch.values is None:
                self._empty += 1
            else:
                begun = self.objective.begin(self.module, batch.values)
                self._running.append(_Running(begun, batch.values, batch.count))

    def _run(self, running: _Running) -> tuple[str, Tensor, int] | None:
        """Up to the next yield; None: the step is over."""
        with autocast(self._precision, self._device), UserCode():
            try:
                got = next(running.step, self)
            except Exception as e:
                if (why := batch_errors.of_step(e, self.module, running.values)) is not None:
                    raise why from e
                raise
        if got is self:
            return None
        name, loss, count = self.objective.of_yield(got, self._names, running.count)
        if not count:
            loss = loss.nan_to_num()  # 0/0: no samples, or no token that counts
        elif self._warn is not None and name not in self._looked and count > 1:
            self._look(self._warn, name, loss, count)
        low = loss.dtype in (torch.float16, torch.bfloat16)
        return name, loss.float() if low else loss, count

    def _look(self, warn: Callable[[str], None], name: str, loss: Tensor, count: int) -> None:
        self._looked.add(name)
        apparent = reduction_check.of_graph(loss, count)
        text = reduction_check.warning(self.objective.reduction, apparent)
        if text is not None:
            warn(f"{name}: {text}")


_OTHER = (
    "for another micro-batch of the same batch (accumulate=, micro=), and they make one optimizer "
    "step together; let what is yielded not depend on the samples"
)
