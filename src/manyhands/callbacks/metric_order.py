"""Metric order: whether a value of a metric is better than another ("accuracy", "-loss")."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from manyhands.errors import TaskError
from manyhands.metrics.usual_direction import doubt


@dataclass(frozen=True)
class MetricOrder:
    """`accuracy`: larger is better; `-loss`, with a minus: smaller is."""

    text: str
    given: str  # the callback and its argument, for errors

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.name:
            raise TaskError(
                f"{self.given}={self.text!r}, but the name of a metric is needed: 'accuracy', or "
                "'-loss', with a minus, where smaller is better"
            )
        if self.text == "loss":
            raise TaskError(
                f"{self.given}='loss' asks for a large loss; write '-loss', with a minus, for a "
                "small one"
            )

    @property
    def name(self) -> str:
        return self.text.removeprefix("-")

    @property
    def small(self) -> bool:
        return self.text.startswith("-")

    def check(self, run: Any) -> None:
        """Refuse a metric that no evaluation will have; warn of one that grows where it gets
        worse."""
        known = run.trainer.evaluator.metric_names
        if not known:
            raise TaskError(
                f"{self.given}={self.text!r}: there is nothing to evaluate, as the task has no "
                "test data; give test="
            )
        if self.name not in known and self.name.partition("/")[0] not in known[1:]:
            self._refuse(known)
        if said := doubt(f"{self.given}={self.text!r}", self.name, self.small):
            run.trainer.context.warn(said)

    def _refuse(self, known: Iterable[str]) -> None:
        raise TaskError(
            f"{self.given}={self.text!r}: no such metric; the task has {', '.join(known)}"
        )

    def value(self, metrics: Mapping[str, float]) -> float:
        """Larger is better, whatever the metric."""
        if self.name not in metrics:  # an object gives a value for each of its parts
            self._refuse(metrics)
        value = metrics[self.name]
        return -value if self.small else value

    def better(self, value: float, than: float, by: float = 0.0) -> bool:
        """NaN is never better."""
        return value > than + by if math.isfinite(than) else value > than
