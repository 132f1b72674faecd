"""AUC: area under the ROC curve, exactly, from the scores of all samples of all ranks.

    AUC = (sum of the ranks of true samples - P (P + 1) / 2) / (P N)

of P true and N other samples in the order of their scores; equal scores share the mean of their
ranks (Mann-Whitney).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from manyhands.errors import TaskError
from manyhands.metrics.predicted_classes import needs_tensors, one_score, wide


class AUC:
    """Area under the ROC curve of two classes. One output for each sample is the score of the
    second class; of two, the score is the second less the first.

    Every rank gathers one number and one flag a sample. NaN where all samples are of one class."""

    reductions: ClassVar[Mapping[str, str]] = {"scores": "cat", "true": "cat"}

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.scores: list[Tensor] = []
        self.true: list[Tensor] = []

    def update(self, outputs: Any, target: Any) -> None:
        needs_tensors(outputs, target, "AUC")
        if outputs.ndim > 1 and outputs.shape[-1] > 2:
            raise TaskError(
                f"AUC is for two classes, but the outputs have shape {tuple(outputs.shape)}; give "
                "mh.metrics.Gathered(roc_auc_score, y_pred='softmax', multi_class='ovr')"
            )
        scores, true = one_score(outputs, target, "AUC")
        self.scores.append(scores.detach())
        self.true.append(true)

    def compute(self) -> float:
        if not self.scores:
            return float("nan")
        scores, true = wide(torch.cat(self.scores)), torch.cat(self.true)
        true = true.to(scores.device)
        if bool(scores.isnan().any()):
            return float("nan")
        _, place, ties = torch.unique(scores, return_inverse=True, return_counts=True)
        last = ties.cumsum(0).double()
        ranks = (last - (ties.double() - 1) / 2)[place]  # equal scores share the mean of theirs
        positives = true.sum().double()
        others = len(true) - positives
        area = (ranks[true].sum() - positives * (positives + 1) / 2) / (positives * others)
        return float(area)
