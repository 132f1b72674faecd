"""Learning-rate schedules of named optimizers: each counts the steps of its own optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from manyhands.errors import CheckpointError
from manyhands.replica.several_optimizers.named_optimizers import NamedOptimizers


class NamedSchedules(LRScheduler):
    """A schedule by name of its optimizer; an optimizer without one keeps its rate.

    `made`: how many steps of each were made before."""

    def __init__(self, optimizer: NamedOptimizers, named: Mapping[str, LRScheduler], made: int = 0):
        self.optimizer = self._optimizers = optimizer
        self.named = dict(sorted(named.items()))
        self.made = dict.fromkeys(self.named, made)

    def advance(self, due: int | None, most: int | None) -> None:
        """Step each up to `due` steps, by a count that all share; None: by one more, where its
        optimizer has stepped. Never beyond `most`."""
        for name, schedule in self.named.items():
            stepped = self._optimizers.active in (None, name)
            goal = self.made[name] + stepped if due is None else due
            while self.made[name] < (goal if most is None else min(goal, most)):
                schedule.step()
                self.made[name] += 1

    def step(self, value: Any = None) -> None:
        """By the value of an evaluated metric."""
        for schedule in self.named.values():
            schedule.step(value)

    def get_last_lr(self) -> list[Any]:
        return [rate for schedule in self.named.values() for rate in schedule.get_last_lr()]

    def state_dict(self) -> dict[str, Any]:
        named = {name: schedule.state_dict() for name, schedule in self.named.items()}
        return {"last_epoch": dict(self.made), **{f"of {k}": v for k, v in named.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        then = [key.removeprefix("of ") for key in state_dict if key != "last_epoch"]
        if set(then) != set(self.named):
            raise CheckpointError(
                f"the checkpoint has schedules of {', '.join(then)}, the task of "
                f"{', '.join(self.named)}; resume with the same, or start anew without resume"
            )
        self.made = dict(state_dict["last_epoch"])
        for name, schedule in self.named.items():
            schedule.load_state_dict(state_dict[f"of {name}"])
