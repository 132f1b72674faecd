"""Training spec: what one rank trains, from a whole task or from a user's own loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from manyhands.assembly.memory import MemoryWatch
from manyhands.assembly.model_parallel import ModelPart
from manyhands.data.batches import BatchIterator
from manyhands.data.sources import Source
from manyhands.replica.lbfgs.line_search_step import RewoundBatches
from manyhands.replica.module import NextLoss
from manyhands.task import Callback, MakeSchedule, Task


@dataclass
class TrainingSpec:
    """Model, optimizer, data and losses, and how the model is split over ranks."""

    model: nn.Module
    make_optimizer: Callable[[Any], Optimizer]
    # by name, where the optimizers are named
    make_schedule: MakeSchedule | Mapping[str, MakeSchedule] | None
    train: Source
    make_loss: Callable[[nn.Module, BatchIterator], NextLoss]
    task: Task | None = None  # None: the user's own loop computes losses and evaluates
    test: Source | None = None
    ids: Callable[[Any], Mapping[str, Any]] | None = None
    callbacks: tuple[Callback, ...] = ()
    schedule_by: str = "step"
    one_copy: bool = True  # the ranks of a host may share one copy of the parameters
    part: ModelPart | None = None  # of a model that is split over ranks
    whole_update: bool = False  # every rank keeps all of the optimizer's state
    # a loop's code runs for every batch on every rank: where it has no samples, on one of others
    all_shown: bool = False
    closures: RewoundBatches | None = None  # of a loop that hands over what computes a loss
    watch: MemoryWatch | None = None  # memory forecast, and the peak it is compared with
