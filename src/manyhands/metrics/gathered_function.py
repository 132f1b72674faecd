"""Gathered: a function of the outputs and targets of all ranks, in the order of the test data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from manyhands.errors import TaskError

WORDS: dict[str, Callable[[Tensor], Tensor]] = {
    "argmax": lambda outputs: outputs.argmax(-1),
    "softmax": lambda outputs: outputs.softmax(-1),
    "sigmoid": lambda outputs: outputs.sigmoid(),
}


class Gathered:
    """`function(y_true, y_pred, **options)` over the whole test data, as scikit-learn's metrics
    take them: arrays of all ranks, in the order of the test data.

    `y_pred` says what becomes of the model's outputs: nothing (None), "argmax", "softmax",
    "sigmoid", or a function of them, such as `lambda o: o.softmax(1)[:, 1]`. It is applied before
    anything is sent, so that "argmax" sends one number a sample."""

    reductions: ClassVar[Mapping[str, str]] = {"outputs": "rows", "targets": "rows"}

    def __init__(
        self,
        function: Callable[..., Any],
        y_pred: str | Callable[[Any], Any] | None = None,
        **options: Any,
    ):
        if not callable(function) or isinstance(function, type):
            raise TaskError(
                f"Gathered({function!r}), but a function (y_true, y_pred) is needed, such as "
                "sklearn.metrics.f1_score"
            )
        if not (y_pred is None or y_pred in WORDS or callable(y_pred)):
            raise TaskError(
                f"Gathered(y_pred={y_pred!r}), but one of {', '.join(WORDS)}, or a function of the "
                "outputs, is needed"
            )
        self.function, self.y_pred, self.options = function, y_pred, options
        self.reset()

    def reset(self) -> None:
        self.outputs: list[Tensor] = []
        self.targets: list[Tensor] = []

    def update(self, outputs: Any, target: Any) -> None:
        if self.y_pred is not None:
            choose = WORDS[self.y_pred] if isinstance(self.y_pred, str) else self.y_pred
            outputs = choose(outputs)
        for what, value, kept in (
            ("y_pred", outputs, self.outputs),
            ("y_true", target, self.targets),
        ):
            if isinstance(value, np.ndarray):
                value = torch.from_numpy(value)
            if not isinstance(value, Tensor) or not value.ndim:
                given = "one number" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                raise TaskError(
                    f"Gathered needs a tensor with one row for each sample, but {what} is {given}"
                )
            kept.append(value.detach().cpu())

    def compute(self) -> Any:
        y_true, y_pred = (_array(rows) for rows in (self.targets, self.outputs))
        return self.function(y_true, y_pred, **self.options)


def _array(rows: list[Tensor]) -> Any:
    whole = torch.cat(rows)
    short = whole.dtype in (torch.bfloat16, torch.float16)  # NumPy has no bfloat16
    return (whole.float() if short else whole).numpy()
