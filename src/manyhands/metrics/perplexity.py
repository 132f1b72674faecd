"""Perplexity: exp of the mean negative log likelihood of all tokens of all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.nn.functional import cross_entropy

from manyhands.errors import TaskError
from manyhands.metrics.predicted_classes import needs_tensors, wide

NONE = -(1 << 40)  # no class


class Perplexity:
    """Perplexity of logits (..., classes) and targets (...), or of (samples, classes, ...) as
    torch's cross_entropy takes them. Targets equal to `ignore_index` (padding) do not count, and
    each other token counts once, however batches and ranks share them."""

    reductions: ClassVar[Mapping[str, str]] = {"likelihood": "sum", "tokens": "sum"}

    def __init__(self, ignore_index: int = -100):
        if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
            raise TaskError(f"Perplexity({ignore_index!r}), but a class is needed: ignore_index=0")
        self.ignore_index = ignore_index
        self.reset()

    def reset(self) -> None:
        self.likelihood = 0.0  # negative, its logarithm, summed over tokens
        self.tokens = 0

    def update(self, outputs: Any, target: Any) -> None:
        needs_tensors(outputs, target, "Perplexity")
        by_channel = outputs.ndim > 2 and target.shape == outputs.shape[:1] + outputs.shape[2:]
        if by_channel and target.shape != outputs.shape[:-1]:
            outputs = outputs.movedim(1, -1)
        if outputs.ndim < 2 or target.shape != outputs.shape[:-1]:
            raise TaskError(
                f"Perplexity got outputs of shape {tuple(outputs.shape)} and a target of shape "
                f"{tuple(target.shape)}; logits of all classes for each target are needed"
            )
        classes, flat = outputs.shape[-1], target.reshape(-1).long()
        counts = flat != self.ignore_index
        logits, flat = outputs.reshape(-1, classes)[counts], flat[counts]
        if len(flat):
            wide_enough = logits if logits.dtype == torch.float64 else logits.float()
            # all that is left counts: a class that does not exist is an error
            lost = cross_entropy(wide_enough, flat, reduction="none", ignore_index=NONE)
            self.likelihood += float(wide(lost).sum())
            self.tokens += len(flat)

    def compute(self) -> float:
        if not self.tokens:
            return math.nan
        mean = self.likelihood / self.tokens
        return math.exp(mean) if mean < 700 else math.inf
