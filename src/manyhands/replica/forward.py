"""Forward pass: from a batch to a mean loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.data.batches import BatchIterator
from manyhands.errors import TaskError
from manyhands.replica.checks import reduction_check
from manyhands.replica.checks.step_guard import UserCode
from manyhands.replica.module import MicroLoss
from manyhands.replica.objective import Objective, pair

PADDING_WITHIN = 1000  # batches in which padding is looked for
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Matrix products in `precision`; parameters, gradients, reductions and losses stay fp32."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])


class TaskLoss:
    """`next_loss` of a task: take this rank's next micro-batch and run the model on it."""

    def __init__(
        self,
        module: nn.Module,
        batches: BatchIterator,
        objective: Objective,
        precision: str,
        device: torch.device,
        warn: Callable[[str], None] | None = None,
    ):
        self.module, self.batches, self.objective = module, batches, objective
        self.precision, self.device = precision, device
        self._warn = warn  # of a loss that looks like the other reduction; None: do not look
        self._seen, self._look_at = 0, 1  # batches, and which of them is looked at next

    def __call__(self) -> MicroLoss:
        batch = self.batches.next()
        if batch.values is None:
            return MicroLoss(None, 0, batch.last)
        loss, count = self.forward(batch.values, batch.count)
        return MicroLoss(loss, count, batch.last)

    def forward(self, values: Any, count: int) -> tuple[Tensor, int]:
        self._seen += count > 1
        with autocast(self.precision, self.device), UserCode():
            if self._warn is not None and count > 1 and self._looks(values):
                loss, count = self._checked(self._warn, values, count)
            else:
                loss, count = self.objective(self.module, values, count)
        if not count:
            # 0/0: no samples (the pass is for the BatchNorm inside), or no token that counts
            loss = loss.nan_to_num()
        return loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss, count

    def _looks(self, values: Any) -> bool:
        """Whether to look at this batch: the 1st, 2nd, 4th, 8th, ..., and those with padding."""
        if self._seen >= self._look_at:
            self._look_at *= 2
            return True
        target = values[-1] if isinstance(values, tuple | list) and values else None
        if self._seen > PADDING_WITHIN or not isinstance(target, Tensor):
            return False
        return not target.is_floating_point() and target.numel() > 0 and bool(target.min() < 0)

    def _checked(self, warn: Callable[[str], None], values: Any, count: int) -> tuple[Tensor, int]:
        """The loss of a batch, and a warning if it looks like the other reduction. On a GPU only
        the first batch is looked at: looking waits for it."""
        plain, apparent = self.objective.loss, []
        self._warn = warn if self.device.type == "cpu" else None

        def judged(outputs: Any, target: Any) -> Tensor:
            assert plain is not None
            loss = plain(outputs, target)
            if isinstance(loss, Tensor) and loss.numel() == 1:
                apparent.append(reduction_check.of_halves(plain, loss, outputs, target))
            return loss

        looking = self.objective if plain is None else replace(self.objective, loss=judged)
        loss, counted = looking(self.module, values, count)
        if plain is None:
            apparent.append(reduction_check.of_graph(loss, counted))
        text = reduction_check.warning(self.objective.reduction, apparent[0] if apparent else None)
        if text is None and counted < count:
            text = reduction_check.FEWER.format(counted=counted, count=count)
        if text is not None:
            self._warn = None  # once
            warn(text)
        return loss, counted


def inputs_of(values: Any, step: Callable[[nn.Module, Any], Any] | None) -> tuple[Any, ...]:
    """The arguments of the model for a batch: positional ones first, then keyword arguments."""
    return _call_of(values, step)[0]


def names_of(values: Any, step: Callable[[nn.Module, Any], Any] | None) -> tuple[str, ...]:
    """The names of the keyword arguments among them."""
    return _call_of(values, step)[1]


def called(module: nn.Module, inputs: Sequence[Any], names: Sequence[str]) -> Any:
    """The output of `module` for the arguments of `inputs_of` and `names_of`."""
    first = len(inputs) - len(names)
    return module(*inputs[:first], **dict(zip(names, inputs[first:], strict=True)))


def _call_of(
    values: Any, step: Callable[[nn.Module, Any], Any] | None
) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    if step is None:
        return pair(values)[:-1], ()
    try:
        step(_Listener(), values)
    except _Called as call:
        return call.inputs, call.names
    raise TaskError(
        "step=(model, batch) did not call the model, so there is nothing to split; "
        "call it with the batch's tensors"
    )


class _Called(Exception):
    def __init__(self, inputs: tuple[Any, ...], names: tuple[str, ...]):
        self.inputs, self.names = inputs, names


class _Listener(nn.Module):
    """Takes the place of the model and raises the arguments of its call."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        raise _Called((*inputs, *named.values()), tuple(named))
