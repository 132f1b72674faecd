"""Step checks: refuse a `run.step(loss)` that would train otherwise than the user's code says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from manyhands.core import Plan
from manyhands.errors import TaskError
from manyhands.replica.checks import reduction_check
from manyhands.replica.objective import Reduction


class StepChecks:
    """Of a prepared run."""

    def __init__(self, schedules: Iterable[LRScheduler] = ()):
        self._schedules = list(schedules)
        self._scheduled = _states(self._schedules)  # where our last step left them
        self._reduction: Reduction | None = None  # of the losses, as the first step said
        self._repeated = False  # whether a second step for one batch was said

    def refuse_scheduled(self) -> None:
        if self._scheduled != _states(self._schedules):
            raise TaskError(
                "the schedule was stepped by the script, and run.step(loss) steps it too; leave "
                "schedule.step() out, or do not give it to run.prepare"
            )

    def stepped(self) -> None:
        """A step is over: from now on schedules are where it has left them."""
        self._scheduled = _states(self._schedules)

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


def _states(schedules: Iterable[LRScheduler]) -> list[tuple[Any, ...]]:
    names = ("last_epoch", "_step_count")
    return [tuple(getattr(schedule, name, None) for name in names) for schedule in schedules]


def checked_name(given: Any, names: Sequence[str], plan: Plan) -> str | None:
    """The optimizer that a step is of; None: all of them, or the only one."""
    if given is None:
        return None
    if not names:
        raise TaskError(
            f"run.step(loss, optimizer={given!r:.40}), but run.prepare was given one optimizer "
            "without a name; leave optimizer= out, or give run.prepare a dict of names"
        )
    if given not in names:
        raise TaskError(
            f"run.step(loss, optimizer={given!r:.40}): the optimizers of run.prepare are "
            f"{', '.join(names)}; one of these names is needed"
        )
    several = f"accumulate={plan.accumulate}" if plan.accumulate > 1 else ""
    several = f"micro={plan.micro}" if (plan.micro or 1) > 1 else several
    if several:
        raise TaskError(
            f"{several} makes one step of several batches, but run.step(loss, optimizer={given!r}) "
            "is one of several steps for a batch, and the next batch would not see what it has "
            f"changed; leave {several.partition('=')[0]}= out, or step all optimizers together by "
            "run.step(loss)"
        )
    return str(given)
