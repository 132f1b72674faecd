"""Named models and optimizers of a task or an own loop: checks of how they are given."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn

from manyhands.errors import TaskError

Made = TypeVar("Made", bound=Callable[..., Any])


def yields(step: Callable[..., Any] | None) -> bool:
    """Whether a step is a generator function: several losses and optimizer steps for one batch."""
    plain = step.func if isinstance(step, functools.partial) else step
    called = getattr(type(plain), "__call__", None)  # noqa: B004
    return inspect.isgeneratorfunction(plain) or inspect.isgeneratorfunction(called)


def check_named(model: Any, optimizer: Any, step: Any) -> None:
    """Refuse what could not be meant: names without functions, a yield without names."""
    if isinstance(model, Mapping):
        _check_models(model, optimizer)
    if not isinstance(optimizer, Mapping):
        if yields(step):
            raise TaskError(
                "step=(model, batch) yields, and each loss that it yields is for a named "
                'optimizer, but the task has one without a name; give optimizer={"g": lambda p: '
                'torch.optim.Adam(p), "d": ...}, or return one loss'
            )
        return
    if not optimizer:
        raise TaskError("optimizer={} is empty: nothing would be trained; name one or more")
    for name, make in optimizer.items():
        check_name(name, "optimizer")
        if not callable(make):
            raise TaskError(
                f"optimizer={{{name!r}: ...}} is a {type(make).__name__}, but a function of the "
                "parameters is needed, which every rank calls: "
                f"{{{name!r}: lambda p: torch.optim.SGD(p, lr=0.1)}}"
            )


def only(given: Made | Mapping[str, Made]) -> Made:
    """The one optimizer of a task for torch's own DistributedDataParallel, which knows no names."""
    if isinstance(given, Mapping):
        raise TaskError(
            f"ddp steps one optimizer, but the task names several ({', '.join(given)}); leave ddp "
            "out of the race"
        )
    return given


def check_schedules(schedule: Mapping[Any, Any], optimizer: Any) -> None:
    names = list(optimizer) if isinstance(optimizer, Mapping) else []
    for name, make in schedule.items():
        if name not in names:
            known = f"they are {', '.join(names)}" if names else "the optimizer has no name"
            raise TaskError(
                f"schedule={{{name!r}: ...}} is for an optimizer that there is not: {known}"
            )
        if not callable(make):
            raise TaskError(
                f"schedule={{{name!r}: ...}} is a {type(make).__name__}, but a function of the "
                "optimizer is needed: lambda o: torch.optim.lr_scheduler.StepLR(o, 100)"
            )


def _check_models(models: Mapping[Any, Any], optimizer: Any) -> None:
    if not models:
        raise TaskError("model={} is empty: there is nothing to train; name one model or more")
    if not isinstance(optimizer, Mapping):
        names = ", ".join(map(repr, models))
        raise TaskError(
            f"the models are named ({names}), but there is one optimizer without a name; give "
            f"optimizer={{{next(iter(models))!r}: lambda p: torch.optim.Adam(p), ...}}"
        )
    check_names_of_models(models, "model")
    for name, model in models.items():
        if not isinstance(model, nn.Module) and not callable(model):
            raise TaskError(
                f"model={{{name!r}: ...}} is a {type(model).__name__}, but a torch.nn.Module, or a "
                "function that makes one, is needed"
            )


def check_names_of_models(models: Mapping[Any, Any], what: str) -> None:
    for name in models:
        check_name(name, what)
        if "." in name or hasattr(nn.ModuleDict, name):
            raise TaskError(
                f"{what}={{{name!r}: ...}}: this cannot be the name of a model, as models.{name} "
                "would be something else; choose another"
            )


def check_name(name: Any, what: str) -> None:
    if not isinstance(name, str) or not name:
        raise TaskError(f"{what}={{{name!r}: ...}}: a name is needed, as a string")


def made_model(model: Any) -> Any:
    """The model that a task gives, or whose function it gives."""
    if isinstance(model, Mapping):
        return module_dict(model)
    return model if isinstance(model, nn.Module) else model()


def module_dict(models: Mapping[str, Any]) -> nn.ModuleDict:
    """The models of a dict as one module; functions make theirs."""
    made = {k: m if isinstance(m, nn.Module) else m() for k, m in models.items()}
    for name, model in made.items():
        if not isinstance(model, nn.Module):
            raise TaskError(
                f"Task.model[{name!r}] gave a {type(model).__name__}, but a torch.nn.Module is "
                "needed"
            )
    return nn.ModuleDict(made)
