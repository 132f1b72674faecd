"""Shown model: what a run evaluates, saves and leaves, where that is not what it trains.

During the run that is an average of the weights (`EMA`, `SWA`); at its end the best model of all
evaluations, where a callback keeps it. Training goes on from the other weights, which are in the
checkpoints too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from manyhands.callbacks.model_copy import ModelCopy, write
from manyhands.core import Group, LoopReplica
from manyhands.errors import TaskError
from manyhands.task import Callback


class WeightAverage(Callback):
    """Base of callbacks that average the weights: `EMA`, `SWA`."""

    def begin_anew(self) -> None:
        """Forget an earlier run: one object may be given to several, one after the other."""
        raise AssertionError("a beginning is needed")

    @property
    def average(self) -> ModelCopy | None:
        """None: averaging has not begun."""
        raise AssertionError("an average is needed")

    def advance(self, trainer: Any) -> None:
        """Before evaluations and checkpoints, and where an epoch ends; every rank calls it."""

    def on_end(self, run: Any) -> None:
        if run.rank == 0 and self.average is None:
            name = type(self).__name__
            run.trainer.context.notice(
                f"{name} has averaged nothing, as the run ended before its start; its model is the "
                f"one that trained: give {name} an earlier start"
            )


class BestKeeper(Callback):
    """Base of callbacks that keep the best model of all evaluations for the end of the run."""

    def begin_anew(self) -> None:
        """Forget an earlier run: one object may be given to several, one after the other."""
        raise AssertionError("a beginning is needed")

    @property
    def keeps(self) -> bool:
        return True

    @property
    def best(self) -> tuple[ModelCopy, dict[str, float]] | None:
        """The model and its metrics; None: no evaluation yet."""
        raise AssertionError("a model is needed")


class Buffered(Protocol):
    """Whose module has buffers (`assembly.evaluation`)."""

    def named_buffers(self) -> dict[str, Tensor]: ...


class ShownModel:
    """Of one run and its callbacks."""

    def __init__(self, callbacks: Sequence[Callback]):
        averages = [c for c in callbacks if isinstance(c, WeightAverage)]
        keepers = [c for c in callbacks if isinstance(c, BestKeeper) and c.keeps]
        for found, what in ((averages, "evaluated and saved"), (keepers, "restored at the end")):
            if len(found) > 1:
                names = " and ".join(type(c).__name__ for c in found[:2])
                raise TaskError(f"callbacks has {names}, but one model is {what}; give one of them")
        self.average = averages[0] if averages else None
        self._keeper = keepers[0] if keepers else None
        self._best: ModelCopy | None = None

    @property
    def apart(self) -> bool:
        """Whether the run may show another model than it trains."""
        return self.average is not None or self._keeper is not None

    @property
    def copy(self) -> ModelCopy | None:
        """The shown model; None: the one that trains."""
        if self._best is not None:
            return self._best
        return None if self.average is None else self.average.average

    @property
    def is_average(self) -> bool:
        return self._best is None and self.copy is not None

    def advance(self, trainer: Any) -> None:
        """Bring an average up to date, and make it the same on all ranks; every rank calls it."""
        if self.average is not None:
            self.average.advance(trainer)

    def end(self) -> dict[str, float] | None:
        """Show the best model from here on, if one is kept; returns its metrics."""
        if self._keeper is None or self._keeper.best is None:
            return None
        self._best, metrics = self._keeper.best
        return metrics

    def leave(self, replica: LoopReplica, buffered: Buffered, group: Group) -> None:
        """The replica holds the shown model from here on; every rank calls it."""
        copy = self.copy
        if copy is None:
            return
        write(copy.params, replica, group)
        for name, buffer in buffered.named_buffers().items():
            if name in copy.buffers:
                buffer.copy_(copy.buffers[name])
