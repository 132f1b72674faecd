"""Metric order: whether a value of a metric is better than another ("accuracy", "-loss")."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from manyhands.errors import TaskError


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

    def check(self, known: Sequence[str]) -> None:
        """Refuse a metric that no evaluation will have."""
        if not known:
            raise TaskError(
                f"{self.given}={self.text!r}: there is nothing to evaluate, as the task has no "
                "test data; give test="
            )
        if self.name not in known and self.name.partition("/")[0] not in known[1:]:
            self._refuse(known)

    def _refuse(self, known: Iterable[str]) -> None:
        raise TaskError(
            f"{self.given}={self.text!r}: no such metric; the task has {', '.join(known)}"
        )

    def value(self, metrics: Mapping[str, float]) -> float:
        """Larger is better, whatever the metric."""
        if self.name not in metrics:  # an object gives a value for each of its parts
            self._refuse(metrics)
        value = metrics[self.name]
        return -value if self.text.startswith("-") else value

    def better(self, value: float, than: float, by: float = 0.0) -> bool:
        """NaN is never better."""
        return value > than + by if math.isfinite(than) else value > than
