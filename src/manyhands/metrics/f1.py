"""F1: the harmonic mean of precision and recall, from counts that add up over batches and ranks.

F1 = 2 hits / (predicted + true)           of a class, or of all classes together (micro)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from manyhands.errors import TaskError
from manyhands.metrics.predicted_classes import one_score, predicted_classes

Average = Literal["binary", "macro", "micro"]


class F1:
    """F1 of the classes of the largest outputs. `macro`: the mean over all classes that are
    predicted or true somewhere; `micro`: of all samples together; `binary`: of the second of two
    classes.

    With one output for each sample, `binary` predicts the second class where it is above
    `threshold`: 0.0 for logits, 0.5 for probabilities. Targets equal to `ignore_index` do not
    count. Where nothing is predicted or true, F1 is 0."""

    reductions: ClassVar[Mapping[str, str]] = {"hits": "sum", "predicted": "sum", "true": "sum"}

    def __init__(
        self,
        average: Average = "macro",
        *,
        threshold: float | None = None,
        ignore_index: int | None = None,
    ):
        if average not in ("binary", "macro", "micro"):
            raise TaskError(f"F1({average!r}), but 'binary', 'macro' or 'micro' is needed")
        if threshold is not None and average != "binary":
            raise TaskError(
                f"F1({average!r}, threshold={threshold}): the threshold has no effect, as the "
                "largest output is the class; leave it out, or give 'binary'"
            )
        if ignore_index is not None and average == "binary":
            raise TaskError(
                f"F1('binary', ignore_index={ignore_index}) is for targets 0 and 1 alone; leave "
                "ignore_index out"
            )
        self.average, self.ignore_index = average, ignore_index
        self.threshold = 0.0 if threshold is None else threshold
        self.reset()

    def reset(self) -> None:
        self.hits = self.predicted = self.true = torch.zeros(0, dtype=torch.int64)

    def update(self, outputs: Any, target: Any) -> None:
        if self.average == "binary":
            predicted, true, classes = *self._binary(outputs, target), 2
        else:
            found = predicted_classes(outputs, target, "F1")
            predicted, true, classes = found.predicted, found.true, found.classes
        if self.ignore_index is not None:
            counts = true != self.ignore_index
            predicted, true = predicted[counts], true[counts]
        if len(true) and not (int(true.min()) >= 0 and int(true.max()) < classes):
            wrong = int(true.min()) if int(true.min()) < 0 else int(true.max())
            raise TaskError(
                f"F1 got the target {wrong}, but the model has {classes} outputs, for classes 0 to "
                f"{classes - 1}; give ignore_index={wrong} if it is padding"
            )
        hits, some, all_true = (
            torch.bincount(x, minlength=classes) for x in (true[predicted == true], predicted, true)
        )
        if self.hits.numel():
            hits, some, all_true = hits + self.hits, some + self.predicted, all_true + self.true
        self.hits, self.predicted, self.true = hits, some, all_true

    def _binary(self, outputs: Any, target: Any) -> tuple[Tensor, Tensor]:
        scores, true = one_score(outputs, target, "F1('binary')")
        two = outputs.ndim == 2 and outputs.shape[1] == 2
        return (scores > (0.0 if two else self.threshold)).long(), true.long()

    def compute(self) -> float:
        both, hits = (self.predicted + self.true).double(), self.hits.double()
        if self.average == "binary":
            both, hits = both[1:], hits[1:]
        elif self.average == "micro":
            both, hits = both.sum().view(1), hits.sum().view(1)
        there = both > 0
        return float((2 * hits[there] / both[there]).mean()) if bool(there.any()) else 0.0
