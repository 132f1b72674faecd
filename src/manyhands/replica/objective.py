"""Objective: the loss of a batch, by the task's `loss` or `step`, as a mean over a count.

    loss    loss(model(*inputs), target)      the count is the number of samples
    step    step(model, batch)                gives a loss, or a loss and its count (tokens, say)
            or yields them after the name of the optimizer that is to step by them

A task whose loss is a sum (reduction="sum") is divided by the count here and multiplied by the
step's total count in `optimizer_step`, so that N ranks add up what one process would.

What the user's functions return is checked here: a wrong return value must not train something
else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from manyhands.errors import TaskError
from manyhands.replica.checks import batch_errors
from manyhands.task_forms.named_parts import yields

Reduction = Literal["mean", "sum"]
Step = Callable[[nn.Module, Any], Tensor | tuple[Tensor, int]]

YIELD = "yield NAME, loss, or NAME, loss, count"
WANTED = "return the loss, or the loss and the number of samples (or tokens) it is a mean over"


@dataclass(frozen=True)
class Objective:
    """Either `loss` or `step` of a task; `reduction` says what they reduce a batch by."""

    loss: Callable[..., Tensor] | None = None
    step: Step | None = None
    reduction: Reduction = "mean"

    def __call__(self, model: Any, values: Any, count: int) -> tuple[Tensor, int]:
        """Mean loss of a batch of `count` samples, and its count. 0: the sample is borrowed, and
        the batch counts nothing, whatever the task counts."""
        if self.step is None:
            *inputs, target = pair(values)
            return self.of_outputs(outputs_of(model, inputs), target, count), count
        if yields(self.step):
            return self._of_all(model, values, count)
        try:
            given = self.step(model, values)
        except Exception as e:
            if (why := batch_errors.of_step(e, model, values)) is not None:
                raise why from e
            raise
        loss, own = _of_step(given, count or 1)
        return self._mean(loss, own), own if count else 0

    def begin(self, model: Any, values: Any) -> Generator[Any, None, None]:
        """A step that yields, for one batch."""
        assert self.step is not None
        running: Any = self.step(model, values)
        return cast("Generator[Any, None, None]", running)

    def of_yield(self, got: Any, names: Collection[str], count: int) -> tuple[str, Tensor, int]:
        """The name of an optimizer, its mean loss of a batch of `count` samples, and the count."""
        if not isinstance(got, tuple) or len(got) not in (2, 3) or not isinstance(got[0], str):
            raise TaskError(f"step=(model, batch) yielded {_described(got)}; {YIELD}")
        name, loss, *counted = got
        if names and name not in names:
            raise TaskError(
                f"step=(model, batch) yielded a loss for {name!r}, but the optimizers are "
                f"{', '.join(names)}"
            )
        own = count or 1
        if counted:
            own = whole_count(counted[0], f"step=(model, batch) yielded for {name!r} as the count")
        loss = scalar_loss(loss, f"step=(model, batch) yielded for {name!r}")
        return name, self._mean(loss, own), own if count else 0

    def _of_all(self, model: Any, values: Any, count: int) -> tuple[Tensor, int]:
        """The mean over all losses that a step yields for one batch, to evaluate."""
        total, counted = torch.zeros((), dtype=torch.float64), 0
        # a step may take gradients of its own (a gradient penalty)
        with torch.enable_grad():
            for got in self.begin(model, values):
                _, loss, own = self.of_yield(got, (), count)
                total, counted = total.to(loss.device) + loss.detach().double() * own, counted + own
        return total / max(1, counted), counted

    def of_outputs(self, outputs: Any, target: Any, count: int) -> Tensor:
        """Mean loss of the model's outputs, by `loss`."""
        assert self.loss is not None
        try:
            loss = self.loss(outputs, target)
        except Exception as e:
            if (why := batch_errors.of_loss(e, outputs, target)) is not None:
                raise why from e
            raise
        return self._mean(scalar_loss(loss, "loss=(outputs, target) returned"), count)

    def _mean(self, loss: Tensor, count: int) -> Tensor:
        return loss / max(1, count) if self.reduction == "sum" else loss


def outputs_of(model: Any, inputs: Sequence[Any]) -> Any:
    """What the model computes for the inputs of a batch."""
    try:
        return model(*inputs)
    except Exception as e:
        if (why := batch_errors.of_model(e, model, inputs)) is not None:
            raise why from e
        raise


def pair(values: Any) -> tuple[Any, ...]:
    if isinstance(values, tuple) and len(values) >= 2:
        return values
    raise TaskError(
        f"loss=(outputs, target) needs batches (inputs..., target), got {_shape(values)}; "
        "give step=(model, batch) instead"
    )


def whole_count(given: Any, what: str) -> int:
    """`given` as a count of samples, or an error: a second loss must not pass for one.

    0 is a count only as an integer: a batch of padding has no token that counts.
    """
    refused = f"{what} {_described(given)}"
    if isinstance(given, Tensor):
        if given.numel() != 1 or given.requires_grad or given.is_complex():
            raise TaskError(f"{refused}, but a whole number of samples is needed; {WANTED}")
        if given.dtype == torch.bool:
            raise TaskError(f"{refused}, but a whole number of samples is needed; {WANTED}")
        given = given.item()
    if isinstance(given, bool) or not hasattr(given, "__index__"):
        whole = isinstance(given, float) and given.is_integer() and given > 0
        if not whole:
            raise TaskError(f"{refused}, but a whole number of samples is needed; {WANTED}")
    if int(given) < 0:
        raise TaskError(f"{refused}, but at least 1 sample is needed; {WANTED}")
    return int(given)


def _of_step(got: Any, count: int) -> tuple[Tensor, int]:
    if inspect.isgenerator(got):
        raise TaskError(
            "step=(model, batch) returned a generator; give the function that yields itself "
            "(def step(...): ... yield), not one that calls it"
        )
    if isinstance(got, tuple | list):
        if len(got) != 2:
            raise TaskError(f"step=(model, batch) returned {len(got)} values; {WANTED}")
        loss, own = got
        counted = whole_count(own, "step=(model, batch) returned as the loss's count")
        return scalar_loss(loss, "step=(model, batch) returned"), counted
    return scalar_loss(got, "step=(model, batch) returned"), count


def scalar_loss(loss: Any, what: str) -> Tensor:
    if not isinstance(loss, Tensor):
        named = ""
        if isinstance(loss, Mapping):  # as Lightning's training_step may return it
            key = "loss" if "loss" in loss else next(iter(loss), "loss")
            named = f"; return its loss alone, the value of {key!r}"
        elif hasattr(loss, "loss"):
            named = "; return its loss, outputs.loss"
        elif loss is None:
            named = "; end it with return loss"
        raise TaskError(
            f"{what} {_described(loss)}, but a tensor with the loss of the batch is needed{named}"
        )
    if loss.numel() != 1:
        raise TaskError(
            f"the loss has shape {tuple(loss.shape)}, but one number for the batch is needed; "
            "use reduction='mean'"
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise TaskError(
            f"{what} a loss without a gradient: it was detached (.item(), .detach(), "
            "no_grad) or does not depend on a parameter that trains; return the loss tensor itself"
        )
    return loss.reshape(()) if loss.ndim else loss


def _described(given: Any) -> str:
    if isinstance(given, Tensor):
        if given.numel() == 1:
            kind = "a tensor with a gradient" if given.requires_grad else f"a {given.dtype} tensor"
            return f"{kind} ({given.item():g})" if not given.is_complex() else kind
        return f"a tensor of shape {tuple(given.shape)}"
    if isinstance(given, bool | int | float | str):
        return f"{given!r}"
    return "None" if given is None else f"a {type(given).__name__}"


def _shape(values: Any) -> str:
    if isinstance(values, Mapping):
        return f"a dict of {list(values)}"
    return (
        f"a tuple of {len(values)}" if isinstance(values, tuple) else f"a {type(values).__name__}"
    )
