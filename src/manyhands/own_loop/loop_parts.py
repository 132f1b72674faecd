"""Loop parts: models, optimizers and schedules that `run.prepare` is given, one or dicts of them.

    {"g": ..., "d": ...}    one nn.ModuleDict, one composite optimizer, schedules by name

What is returned has the shape of what was given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from manyhands.errors import TaskError
from manyhands.replica.several_optimizers.named_optimizers import (
    NamedOptimizers,
    combined,
    named,
    owners,
)
from manyhands.task_forms.named_parts import check_name, check_names_of_models

DDP_LINES = (
    "the model is wrapped in DistributedDataParallel, which exchanges gradients itself; give "
    "run.prepare the plain model, and leave out the lines of DDP: init_process_group, "
    "DistributedDataParallel(model), DistributedSampler, no_sync, destroy_process_group"
)


@dataclass
class LoopParts:
    """What a run trains, as one of each."""

    model: nn.Module
    optimizer: Optimizer  # a composite, where several are named
    schedules: dict[str, LRScheduler]  # by name of the optimizer; "": of the only one
    owner: dict[int, str]  # by id of each parameter, the name of its optimizer
    models: Any  # as they were given

    @property
    def names(self) -> list[str]:
        """Of the optimizers; none where there is one without a name."""
        return [name for name in named(self.optimizer) if name]

    def computing(self, module: nn.Module) -> list[nn.Module]:
        """The models that the loop calls, of `module`, which computes for `model`."""
        if isinstance(self.models, Mapping):
            assert isinstance(module, nn.ModuleDict)
            return list(module.values())
        return [module]

    def in_shape(self, module: nn.Module) -> Any:
        """`module`, in the shape in which the models were given."""
        if isinstance(self.models, Mapping):
            assert isinstance(module, nn.ModuleDict)
            return {name: module[name] for name in self.models}
        return module


def loop_parts(models: Any, optimizers: Any, schedule: Any) -> LoopParts:
    model = _one_model(models)
    if not isinstance(optimizers, Mapping):
        if not isinstance(optimizers, Optimizer):
            raise TaskError(_wrong(optimizers, "optimizer", "a torch.optim.Optimizer"))
        optimizer = optimizers
    else:
        if not optimizers:
            raise TaskError("run.prepare was given no optimizer ({}); name one or more")
        for name, given in optimizers.items():
            check_name(name, "optimizers")
            if not isinstance(given, Optimizer):
                raise TaskError(_wrong(given, f"optimizer {name!r}", "a torch.optim.Optimizer"))
        optimizer = combined(model, optimizers)
    # now: ranks may update slices of the parameters later
    owner = owners(optimizer)
    return LoopParts(model, optimizer, _schedules(schedule, optimizer), owner, models)


def _one_model(models: Any) -> nn.Module:
    if isinstance(models, Mapping):
        if not models:
            raise TaskError("run.prepare was given no model ({}); name one or more")
        check_names_of_models(models, "models")
    for name, model in models.items() if isinstance(models, Mapping) else [("", models)]:
        if isinstance(model, DistributedDataParallel):
            raise TaskError(DDP_LINES)
        if not isinstance(model, nn.Module):
            raise TaskError(
                _wrong(model, f"model {name!r}" if name else "model", "a torch.nn.Module")
            )
    return nn.ModuleDict(models) if isinstance(models, Mapping) else models


def _wrong(given: Any, what: str, needed: str) -> str:
    is_class = isinstance(given, type)
    kind = f"the class {given.__name__}" if is_class else f"a {type(given).__name__}"
    do = "the order is run.prepare(model, optimizer, data)"
    if isinstance(given, list | tuple):
        do = "several are named, {'g': ..., 'd': ...}, and run.step(loss, optimizer='d') steps one"
    elif callable(given):
        do = f"call it first: in a loop of your own {what} is the object itself"
    return f"run.prepare was given {kind} as {what}, but {needed} is needed; {do}"


def _schedules(schedule: Any, optimizer: Optimizer) -> dict[str, LRScheduler]:
    if schedule is None:
        return {}
    by_name, several = named(optimizer), isinstance(optimizer, NamedOptimizers)
    if several and not isinstance(schedule, Mapping):
        raise TaskError(
            f"run.prepare was given one schedule and several optimizers ({', '.join(by_name)}); "
            f"say whose it is: schedule={{{next(iter(by_name))!r}: ...}}"
        )
    if isinstance(schedule, Mapping) and not several:
        raise TaskError(
            "run.prepare was given schedules by name and one optimizer without a name; give the "
            "schedule itself: schedule=StepLR(optimizer, 100)"
        )
    found = dict(schedule) if isinstance(schedule, Mapping) else {"": schedule}
    for name, given in found.items():
        if name not in by_name:
            raise TaskError(
                f"schedule={{{name!r}: ...}} is for an optimizer that there is not: they are "
                f"{', '.join(by_name)}"
            )
        _check_schedule(given, by_name[name], f" for {name!r}" if name else "")
    return found


def _check_schedule(schedule: Any, optimizer: Optimizer, whose: str) -> None:
    kind = type(schedule).__name__
    if not isinstance(schedule, LRScheduler):
        raise TaskError(
            f"run.prepare was given a {kind} as schedule{whose}, but one of "
            "torch.optim.lr_scheduler is needed, made of its optimizer: StepLR(optimizer, 100)"
        )
    if getattr(schedule, "optimizer", optimizer) is not optimizer:
        raise TaskError(
            f"the {kind} that run.prepare was given{whose} moves the learning rate of another "
            "optimizer; make it of the one that is given"
        )


def refuse_more(more: tuple[Any, ...]) -> None:
    """What other trainers' prepare takes beside model, optimizer and data: `more` must be empty."""
    if more:
        kinds = ", ".join(type(x).__name__ for x in more)
        raise TaskError(
            f"run.prepare was given {kinds} beside model, optimizer and data; give a scheduler as "
            "schedule=scheduler, and leave data that is not trained on (a test set) as it is: "
            "model, optimizer and data come back"
        )
