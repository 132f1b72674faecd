"""Schedule of a DDP run: told the steps of the run, and stepped by step, epoch or metric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from manyhands.assembly.learning_rate.schedule_setup import made_schedule, takes_total
from manyhands.assembly.learning_rate.total_steps import steps_of_run
from manyhands.core import Plan, Position
from manyhands.data.batches import BatchIterator, IndexedBatches
from manyhands.errors import TaskError
from manyhands.task import Task
from manyhands.task_forms.named_parts import only


class DDPSchedule:
    def __init__(self, task: Task, plan: Plan, optimizer: Optimizer, batches: BatchIterator):
        self._schedule: Any = None
        self._by, self._epoch = task.schedule_by, 0
        if task.schedule is None:
            return
        make, total = only(task.schedule), None
        if takes_total(make):
            split = batches.split if isinstance(batches, IndexedBatches) else None
            total = steps_of_run(plan, split, Position())
        self._schedule = made_schedule(make, optimizer, total)
        if isinstance(self._schedule, ReduceLROnPlateau) and self._by == "step":
            self._by = "loss"
        if self._by not in ("step", "epoch") and task.test is None:
            raise TaskError(
                f"a schedule by the evaluated {self._by}, but the task has no test data; give test="
            )

    def stepped(self, at: Position) -> None:
        """After an optimizer step."""
        if self._schedule is None or self._by not in ("step", "epoch"):
            return
        if self._by == "step" or at.epoch > self._epoch:
            self._schedule.step()
        self._epoch = at.epoch

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        if self._schedule is not None and self._by not in ("step", "epoch"):
            self._schedule.step(metrics[self._by])
