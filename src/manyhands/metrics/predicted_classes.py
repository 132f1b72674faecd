"""Predicted classes: of each sample, or token, the largest output and the true class."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.errors import TaskError


@dataclass(frozen=True)
class PredictedClasses:
    """Predicted and true class of every sample, on one axis."""

    predicted: Tensor
    true: Tensor
    classes: int


def predicted_classes(outputs: Tensor, target: Tensor, who: str) -> PredictedClasses:
    """By the largest of the outputs of each sample: (samples, classes), (..., classes) or, as
    torch's cross_entropy takes it, (samples, classes, ...)."""
    needs_tensors(outputs, target, who)
    if outputs.ndim < 2 or outputs.shape[-1] == 1:
        raise TaskError(
            f"{who} compares the largest output with the target, but the outputs have shape "
            f"{tuple(outputs.shape)}, one for each sample; give F1('binary') or a metric of your "
            "own"
        )
    if target.ndim == outputs.ndim and target.shape[-1] == 1:
        target = target.squeeze(-1)
    if target.shape != outputs.shape[:-1]:
        if outputs.ndim > 2 and target.shape == outputs.shape[:1] + outputs.shape[2:]:
            outputs = outputs.movedim(1, -1)
        else:
            raise TaskError(
                f"{who} got outputs of shape {tuple(outputs.shape)} and a target of shape "
                f"{tuple(target.shape)}; one class for each sample is needed, "
                f"{tuple(outputs.shape[:-1])}"
            )
    return PredictedClasses(
        outputs.argmax(-1).reshape(-1), target.reshape(-1).long(), outputs.shape[-1]
    )


def needs_tensors(outputs: object, target: object, who: str) -> None:
    for what, value in (("outputs", outputs), ("target", target)):
        if not isinstance(value, Tensor):
            raise TaskError(
                f"{who} needs tensors, but the {what} are a {type(value).__name__}; say which part "
                "counts by Task(predict=lambda model, batch: (outputs, target))"
            )


def one_score(outputs: Tensor, target: Tensor, who: str) -> tuple[Tensor, Tensor]:
    """A score for the second of two classes and whether it is the true one, of every sample: of two
    outputs the second less the first."""
    needs_tensors(outputs, target, who)
    target = target.reshape(-1)
    if outputs.ndim == 2 and outputs.shape[1] == 2:
        scores = wide(outputs[:, 1]) - wide(outputs[:, 0])
    else:
        scores = outputs.reshape(-1)
    if len(scores) != len(target):
        raise TaskError(
            f"{who} got outputs of shape {tuple(outputs.shape)} for {len(target)} targets; one or "
            "two outputs for each sample are needed"
        )
    if bool(((target != 0) & (target != 1)).any()):
        raise TaskError(
            f"{who} is for two classes, but the target holds other numbers than 0 and 1"
        )
    return scores, target == 1


def wide(values: Tensor) -> Tensor:
    """In float64; on the CPU where the device has none."""
    return (values.cpu() if values.device.type == "mps" else values).to(torch.float64)
