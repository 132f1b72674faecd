"""Task: what the user brings to a run, a model, a loss, data and an optimizer.

A task knows nothing about other processes; the plan says how many there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from manyhands.errors import TaskError

Loss = Callable[..., Tensor]
Step = Callable[[nn.Module, Any], "Tensor | tuple[Tensor, int]"]
Metric = Callable[[Any, Any], Tensor]


class Callback:
    """Callback: override the methods you need; each is called on every rank with its run.

    `on_checkpoint` is called when the snapshot is taken; its folder is written in the background.
    `on_end` is called once, after the last evaluation and snapshot, while groups and servers are
    still connected, also where a signal ended the run. A run that fails calls `on_failure` instead.
    Ranks of one host may share one copy of the parameters: a callback that changes them does so on
    one rank (`run.rank == 0`) only.
    """

    def on_round(self, run: Any, round: int, loss: Tensor) -> None: ...
    def on_epoch(self, run: Any, epoch: int, metrics: Mapping[str, float]) -> None: ...
    def on_checkpoint(self, run: Any, path: str) -> None: ...
    def on_end(self, run: Any) -> None: ...
    def on_failure(self, run: Any, error: BaseException) -> None: ...


@dataclass(frozen=True)
class Task:
    """One training task.

    Give `loss(model(*inputs), target)` for batches (inputs..., target), or `step(model, batch)`
    returning the mean loss, or the mean loss and the number it is a mean over (tokens, say).
    `batch` is what one rank computes at once. `train` and `test` may be a tuple of tensors or
    arrays, a map-style Dataset, an IterableDataset or a DataLoader (its dataset, collate function
    and batch size are used; the order comes from the plan's split).
    """

    model: nn.Module | Callable[[], nn.Module]
    train: Any
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    loss: Loss | None = None
    step: Step | None = None
    test: Any = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    batch: int | None = None
    epochs: float = 1.0
    steps: int | None = None
    schedule: Callable[[Optimizer], LRScheduler] | None = None  # stepped once per optimizer step
    clip: float | None = None
    seed: int = 0
    name: str = ""  # printed at the start of a run: what is trained on what
    callbacks: Sequence[Callback] = ()
    # how tensor= splits modules: name pattern -> column, row, ...
    tensor: Mapping[str, str] = field(default_factory=dict)
    # of a batch: the ids that its mh.Embedding tables will look up, by table name
    ids: Callable[[Any], Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        if (self.loss is None) == (self.step is None):
            given = "both" if self.loss is not None else "neither"
            raise TaskError(
                "Task needs either loss=(outputs, target) -> mean loss or "
                f"step=(model, batch) -> mean loss; got {given}"
            )
        if self.metrics and self.loss is None:
            raise TaskError(
                "metrics compare model(*inputs) with the target, but the task has step= "
                "and no loss=; give loss= instead of step="
            )
        if self.batch is not None and self.batch < 1:
            raise TaskError(
                f"batch={self.batch}, but a batch holds at least 1 sample; set batch=1 or more"
            )
        if self.steps is not None and self.steps < 1:
            raise TaskError(f"steps={self.steps}, but at least 1 step is needed")
        if not (self.epochs > 0 and math.isfinite(self.epochs)):
            raise TaskError(f"epochs={self.epochs}, but a positive number is needed")
        if self.clip is not None and not self.clip > 0:
            raise TaskError(
                f"clip={self.clip}, but a positive norm is needed; leave it out for no clipping"
            )


def accuracy(outputs: Tensor, target: Tensor) -> Tensor:
    """Share of samples (or tokens: any leading dimensions) whose largest output is the target."""
    if (
        outputs.ndim == target.ndim + 1
        and outputs.ndim > 2
        and outputs.shape[2:] == target.shape[1:]
    ):
        # (N, classes, ...), as torch's cross_entropy accepts it
        return (outputs.argmax(1) == target).float().mean()
    return (outputs.argmax(-1) == target).float().mean()


def build_model(task: Task) -> nn.Module:
    model = task.model if isinstance(task.model, nn.Module) else task.model()
    if not isinstance(model, nn.Module):
        raise TaskError(
            f"Task.model gave a {type(model).__name__}, but a torch.nn.Module is needed"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise TaskError(
            f"{type(model).__name__} has no parameter with requires_grad=True: "
            "there is nothing to train"
        )
    return model


def resolve(make: Task | Callable[[], Task], seed: int | None) -> tuple[Task, int]:
    """Build the task with its random seed fixed: every rank starts from the same weights."""
    first = 0 if seed is None else seed
    task = _make(make, first)
    wanted = task.seed if seed is None else seed
    return (task if wanted == first or isinstance(make, Task) else _make(make, wanted)), wanted


def _make(make: Task | Callable[[], Task], seed: int) -> Task:
    torch.manual_seed(seed)
    task = make if isinstance(make, Task) else make()
    if not isinstance(task, Task):
        raise TaskError(f"task() returned a {type(task).__name__}, but a manyhands.Task is needed")
    return task
