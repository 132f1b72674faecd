"""Step checks: refuse a `run.step(loss)` that would train otherwise than the user's code says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from manyhands.errors import TaskError
from manyhands.replica.checks import reduction_check
from manyhands.replica.objective import Reduction


class StepChecks:
    """Of a prepared run."""

    def __init__(self, schedule: LRScheduler | None = None):
        self._schedule = schedule
        self._scheduled = _state(schedule)  # where our last step left it
        self._reduction: Reduction | None = None  # of the losses, as the first step said
        self._repeated = False  # whether a second step for one batch was said

    def refuse_scheduled(self) -> None:
        if self._scheduled != _state(self._schedule):
            raise TaskError(
                "the schedule was stepped by the script, and run.step(loss) steps it too; leave "
                "schedule.step() out, or do not give it to run.prepare"
            )

    def stepped(self) -> None:
        """A step is over: from now on the schedule is where it has left it."""
        self._scheduled = _state(self._schedule)

    def refuse_repeated(self, last: bool, warn: Callable[[str], None]) -> None:
        """A second step for one batch: of an unfinished step it would go on for ever."""
        if not last:
            raise TaskError(
                "run.step(loss) was called again for the same batch, but with accumulate= a step "
                "ends only with its last batch; iterate over the data, or leave accumulate= out"
            )
        if not self._repeated:
            self._repeated = True
            warn(
                "run.step(loss) was called again without a new batch from the data (a cycle, one "
                "batch again and again): it trains, but epochs and the position count batches of "
                "the data"
            )

    def check_reduction(
        self,
        loss: Tensor,
        given: Reduction,
        count: int,
        set_reduction: Callable[[Reduction], None],
        warn: Callable[[str], None] | None,
    ) -> None:
        """The first step says what losses do over a batch; the others must do the same."""
        if given not in ("mean", "sum"):
            raise TaskError(f"reduction={given!r}, but 'mean' or 'sum' is needed")
        if self._reduction is None:
            self._reduction = given
            set_reduction(given)
            text = reduction_check.warning(given, reduction_check.of_graph(loss, count))
            if warn is not None and text is not None:
                warn(text)
        elif self._reduction != given:
            raise TaskError(
                f"reduction={given!r}, but the steps before had {self._reduction!r}; one run has "
                "one reduction"
            )


def _state(schedule: LRScheduler | None) -> tuple[Any, ...]:
    return tuple(getattr(schedule, name, None) for name in ("last_epoch", "_step_count"))
