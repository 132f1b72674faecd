"""Task: what the user brings to a run, a model, a loss, data and an optimizer.

A task knows nothing about other processes; the plan says how many there are.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from manyhands.errors import TaskError
from manyhands.task_forms.named_parts import check_named, check_schedules, made_model, module_dict

Loss = Callable[..., Tensor]
Step = Callable[[Any, Any], Any]  # (model, batch) -> loss, or (loss, count); or yields
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
MakeSchedule = Callable[..., LRScheduler]
Predict = Callable[[nn.Module, Any], tuple[Any, Any]]
RUN_NUMBERS = {"loss", "train_loss", "samples_per_s", "epoch", "step", "noise"}
# a mean over the samples of a batch; or an object with update(outputs, target), compute(), reset()
Metric = Callable[[Any, Any], Any] | Any


class Callback:
    """Callback: override the methods you need; each is called on every rank with its run.

    `on_start` comes before the first round, also of a resumed run; `on_gradient` after gradients
    are merged and clipped, before the optimizer's step: `run.gradients()` has them by name.
    `on_evaluate` is called after every evaluation, `on_epoch` at the end of every epoch.
    `on_checkpoint` is called when the snapshot is taken; its folder is written in the background.
    `on_end` is called once, after the last evaluation and snapshot, while groups and servers are
    still connected, also where a signal ended the run. A run that fails calls `on_failure` instead.
    Ranks of one host may share one copy of the parameters: a callback that changes them does so on
    one rank (`run.rank == 0`) only. `run.stop(reason)` ends the run, at one round on all ranks.
    `state_dict` (plain values and tensors of rank 0) is in every checkpoint, for --resume.
    """

    def on_start(self, run: Any) -> None: ...
    def on_epoch_start(self, run: Any, epoch: int) -> None: ...
    def on_gradient(self, run: Any) -> None: ...
    def on_round(self, run: Any, round: int, loss: Tensor) -> None: ...
    def on_evaluate(self, run: Any, metrics: Mapping[str, float]) -> None: ...
    def on_epoch(self, run: Any, epoch: int, metrics: Mapping[str, float]) -> None: ...
    def on_checkpoint(self, run: Any, path: str) -> None: ...
    def on_end(self, run: Any) -> None: ...
    def on_failure(self, run: Any, error: BaseException) -> None: ...
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Task:
    """One training task.

    Give `loss(model(*inputs), target)` for batches (inputs..., target), or `step(model, batch)`
    returning the mean loss, or the mean loss and the number it is a mean over (tokens, say). With
    `reduction="sum"` they return a sum over the batch, and a step is by the sum over all ranks.
    `batch` is what one rank computes at once. `train` and `test` may be a tuple of tensors or
    arrays, a map-style Dataset, an IterableDataset or a DataLoader (its dataset, collate function
    and batch size are used; the order comes from the plan's split).

    `model` is a module, or a function that makes one. Give a function where the model is large:
    under `tensor=`, `pipe=` and `shard=` a rank then makes only the parameters that it keeps.

    Several models are a dict name -> module, of which `step` is given an nn.ModuleDict. Several
    optimizers are a dict too; a name is that of the model, or of the part of one model, whose
    parameters it steps. They step together, or apart, where `step` is a generator that yields
    (name, loss) or (name, loss, count): one optimizer step each, in this order.
    """

    model: nn.Module | Callable[[], nn.Module] | Mapping[str, nn.Module | Callable[[], nn.Module]]
    train: Any
    optimizer: MakeOptimizer | Mapping[str, MakeOptimizer]
    loss: Loss | None = None
    step: Step | None = None
    reduction: Literal["mean", "sum"] = "mean"  # what loss= or step= do over a batch
    test: Any = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    # (outputs, target) of a batch: what metrics compare where step= is given
    predict: Predict | None = None
    batch: int | None = None
    epochs: float | None = None  # how long to train: 1.0 where steps is not given either
    steps: int | None = None
    # (optimizer), or (optimizer, total_steps): the optimizer steps of the whole run; where
    # optimizers are named, one for each of them, or a dict name -> function
    schedule: MakeSchedule | Mapping[str, MakeSchedule] | None = None
    # when it is stepped: after each "step" or "epoch", or by the value of an evaluated metric
    schedule_by: str = "step"
    clip: float | None = None
    seed: int = 0
    name: str = ""  # printed at the start of a run: what is trained on what
    callbacks: Sequence[Callback] = ()
    # how tensor= splits modules: name pattern -> column, row, ...
    tensor: Mapping[str, str] = field(default_factory=dict)
    # of a batch: the ids that its mh.Embedding tables will look up, by table name
    ids: Callable[[Any], Mapping[str, Any]] | None = None
    # weights to start from: a file, a run directory, a state dict, mh.Weights; --resume comes first
    init: Any = None

    def __post_init__(self) -> None:
        self._check_functions()
        self._check_metrics()
        check_callbacks(self.callbacks)
        self._check_numbers()

    def _check_functions(self) -> None:
        if (self.loss is None) == (self.step is None):
            given = "both" if self.loss is not None else "neither"
            raise TaskError(
                "Task needs either loss=(outputs, target) -> mean loss or "
                f"step=(model, batch) -> mean loss; got {given}"
            )
        if isinstance(self.loss, type):
            raise TaskError(
                f"loss is the class {self.loss.__name__}; a function is needed: give an instance, "
                f"{self.loss.__name__}()"
            )
        for name, function in (("loss", self.loss), ("step", self.step)):
            if function is not None and not callable(function):
                raise TaskError(
                    f"{name} is {function!r:.40}, but a function is needed: "
                    "loss=torch.nn.functional.cross_entropy, or step=lambda model, batch: ..."
                )
        check_named(self.model, self.optimizer, self.step)
        if isinstance(self.model, Mapping) and all(map(_is_module, self.model.values())):
            object.__setattr__(self, "model", module_dict(self.model))
        if not callable(self.optimizer) and not isinstance(self.optimizer, Mapping):
            raise TaskError(
                f"optimizer is a {type(self.optimizer).__name__}, but a function of the parameters "
                "is needed, which every rank calls: optimizer=lambda p: torch.optim.SGD(p, lr=0.1)"
            )
        if isinstance(self.schedule, Mapping):
            check_schedules(self.schedule, self.optimizer)
        elif self.schedule is not None and not callable(self.schedule):
            raise TaskError(
                f"schedule is a {type(self.schedule).__name__}, but a function of the optimizer is "
                "needed: schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 100)"
            )
        if not isinstance(self.schedule_by, str):
            raise TaskError(
                f"schedule_by={self.schedule_by!r}, but 'step', 'epoch' or the name of a metric is "
                "needed"
            )
        if self.schedule is None and self.schedule_by != "step":
            raise TaskError(
                f"schedule_by={self.schedule_by!r} has no effect without schedule=; give both"
            )
        if self.reduction not in ("mean", "sum"):
            raise TaskError(
                f"reduction={self.reduction!r}, but what loss= or step= do over a batch is needed: "
                "'mean' or 'sum'"
            )

    def _check_metrics(self) -> None:
        if not isinstance(self.metrics, Mapping):
            raise TaskError(
                f"metrics is a {type(self.metrics).__name__}, but a dict name -> function is "
                'needed: metrics={"accuracy": mh.accuracy}'
            )
        for name, metric in self.metrics.items():
            if isinstance(metric, type):
                raise TaskError(
                    f"metrics has {name!r}: the class {metric.__name__}; a function or an object "
                    f"is needed: give an instance, {metric.__name__}(...)"
                )
            accumulates = all(hasattr(metric, part) for part in ("update", "compute", "reset"))
            if not isinstance(name, str) or not (callable(metric) or accumulates):
                raise TaskError(
                    f"metrics has {name!r}: {metric!r}, but a name and a function of (outputs, "
                    "target), or an object with update, compute and reset, are needed: "
                    'metrics={"accuracy": mh.accuracy}'
                )
        if self.predict is not None and not callable(self.predict):
            raise TaskError(
                f"predict is a {type(self.predict).__name__}, but a function (model, batch) -> "
                "(outputs, target) is needed"
            )
        if self.metrics and self.loss is None and self.predict is None:
            raise TaskError(
                "metrics compare outputs with the target, and step= does not say what they are; "
                'give predict=lambda model, batch: (model(batch["x"]), batch["y"])'
            )
        for name in self.metrics:
            if not name or name.startswith("-"):
                raise TaskError(
                    f"a metric is called {name!r}, but a minus says that smaller is better, and a "
                    "name is needed; give it another name"
                )
        if taken := RUN_NUMBERS & set(self.metrics):
            raise TaskError(
                f"a metric is called {min(taken)!r}, which is a number of every run; "
                "give it another name"
            )

    def _check_numbers(self) -> None:
        for name in ("epochs", "batch", "steps", "clip"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
                raise TaskError(f"{name}={value!r}, but a number is needed")
        for name in ("batch", "steps"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value == int(value)):
                raise TaskError(f"{name}={value}, but a whole number is needed")
        if isinstance(self.seed, bool) or not isinstance(self.seed, Integral):
            raise TaskError(f"seed={self.seed!r}, but a whole number is needed: seed=0")
        if self.batch is not None and self.batch < 1:
            raise TaskError(
                f"batch={self.batch}, but a batch holds at least 1 sample; set batch=1 or more"
            )
        if self.steps is not None and self.steps < 1:
            raise TaskError(f"steps={self.steps}, but at least 1 step is needed")
        if self.epochs is not None and not (self.epochs > 0 and math.isfinite(self.epochs)):
            raise TaskError(f"epochs={self.epochs}, but a positive number is needed")
        if self.epochs is not None and self.steps is not None:
            raise TaskError(
                f"epochs={self.epochs} and steps={self.steps} both say when to stop; give one of "
                "them"
            )
        if self.clip is not None and not self.clip > 0:
            raise TaskError(
                f"clip={self.clip}, but a positive norm is needed; leave it out for no clipping"
            )


def check_callbacks(callbacks: Any) -> None:
    """Refuse callbacks that would never be called."""
    if not isinstance(callbacks, Sequence):
        raise TaskError(
            f"callbacks is a {_named(callbacks)}, but a list of mh.Callbacks is needed: "
            f"callbacks=[{_made(callbacks)}]"
        )
    known = {name for name in vars(Callback) if name.startswith("on_")}
    for callback in callbacks:
        if not isinstance(callback, Callback):
            do = f"; give an instance, {_made(callback)}" if isinstance(callback, type) else ""
            raise TaskError(
                f"a callback is {callback!r}, but an object of a subclass of mh.Callback is needed"
                f"{do}"
            )
        unknown = {name for name in dir(callback) if name.startswith("on_")} - known
        if unknown:
            raise TaskError(
                f"{type(callback).__name__}.{min(unknown)} would never be called; "
                f"known: {', '.join(sorted(known))}"
            )


def _named(given: Any) -> str:
    return given.__name__ if isinstance(given, type) else type(given).__name__


def _made(given: Any) -> str:
    """How an object of the given class, or of that of the given object, is made."""
    return f"{_named(given)}()" if isinstance(given, type | Callback) else "..."


def accuracy(outputs: Tensor, target: Tensor) -> Tensor:
    """Share of samples (or tokens: any leading dimensions) whose largest output is the target.

    A target may be a class, also in a last dimension of 1, or as many probabilities (or a one-hot
    vector) as there are outputs."""
    if outputs.shape[-1:] == (1,) or outputs.ndim < 2:
        raise TaskError(
            f"mh.accuracy compares the largest output with the target, but the outputs have shape "
            f"{tuple(outputs.shape)}, one for each sample; give a metric of your own: "
            "lambda o, t: ((o > 0) == (t > 0.5)).float().mean()"
        )
    classes = target
    if target.shape == outputs.shape:
        classes = (target if target.is_floating_point() else target.long()).argmax(-1)
    elif target.ndim == outputs.ndim and target.shape[-1] == 1:
        classes = target.squeeze(-1)
    if outputs.ndim > 2 and classes.shape == outputs.shape[:1] + outputs.shape[2:]:
        # (N, classes, ...), as torch's cross_entropy accepts it
        return (outputs.argmax(1) == classes).float().mean()
    if classes.shape != outputs.shape[:-1]:
        raise TaskError(
            f"mh.accuracy got outputs of shape {tuple(outputs.shape)} and a target of shape "
            f"{tuple(target.shape)}; one class for each sample is needed, "
            f"{tuple(outputs.shape[:-1])}, or a target of the outputs' shape"
        )
    return (outputs.argmax(-1) == classes).float().mean()


def build_model(task: Task) -> nn.Module:
    with one_thread():
        model = made_model(task.model)
    if not isinstance(model, nn.Module):
        raise TaskError(
            f"Task.model gave a {type(model).__name__}, but a torch.nn.Module is needed"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise TaskError(
            f"{type(model).__name__} has no parameter with requires_grad=True: "
            "there is nothing to train"
        )
    _check_values(model)
    return model


def _is_module(model: Any) -> bool:
    return isinstance(model, nn.Module)


def _check_values(model: nn.Module) -> None:
    """Refuse parameters and buffers without values."""
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(value):
            raise TaskError(
                f"{name} of {type(model).__name__} has no shape yet, as it is lazy; every rank "
                "needs its first values: run one batch through the model in task(), or give the "
                "layer its number of inputs"
            )
        if value.is_meta:
            raise TaskError(
                f"{name} of {type(model).__name__} is on the meta device, without values; build "
                "the model on the CPU"
            )


def resolve(make: Task | Callable[[], Task], seed: int | None) -> tuple[Task, int]:
    """Build the task with its random seed fixed: every rank starts from the same weights."""
    first = 0 if seed is None else seed
    task = _make(make, first)
    wanted = int(task.seed) if seed is None else seed
    return (task if wanted == first or isinstance(make, Task) else _make(make, wanted)), wanted


def seed_alike(seed: int) -> None:
    """The same random numbers on every rank: for data that a task draws, and its first weights."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _make(make: Task | Callable[[], Task], seed: int) -> Task:
    check_function(make)
    seed_alike(seed)
    with one_thread():
        task = make if isinstance(make, Task) else make()
    if not isinstance(task, Task):
        do = "; end it with return mh.Task(...)" if task is None else ""
        raise TaskError(
            f"task() returned a {type(task).__name__}, but a manyhands.Task is needed{do}"
        )
    return task


def check_function(make: Any) -> None:
    """Refuse what is neither a task nor a function that makes one."""
    if isinstance(make, Task):
        return
    if isinstance(make, nn.Module) or not callable(make):
        raise TaskError(
            f"the task is a {type(make).__name__}, but a manyhands.Task, or a function that "
            "returns one, is needed: def task(): return mh.Task(model=..., loss=..., train=...)"
        )
    try:
        needed = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # of a function in C
        return
    for p in needed:
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise TaskError(
                f"task() is called without arguments, but needs {p.name!r}; give it a default, or "
                "functools.partial"
            )


@contextmanager
def one_thread() -> Iterator[None]:
    """Models are built by one thread: the bits of a QR decomposition (`init.orthogonal_`) depend on
    the number of threads, and N ranks, which have fewer each, start from what one process starts
    from."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        if torch.get_num_threads() == 1:  # else the task has chosen its number itself
            torch.set_num_threads(before)
