"""Early stopping: ends the run when a metric has not improved for some evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from manyhands.callbacks.best_model import BestWeights
from manyhands.callbacks.metric_order import MetricOrder
from manyhands.callbacks.model_copy import ModelCopy, refuse_apart
from manyhands.callbacks.shown_model import BestKeeper
from manyhands.errors import TaskError


class EarlyStopping(BestKeeper):
    """Early stopping: `patience` evaluations without an improvement by more than `min_delta` end
    the run, on all ranks after the same one.

    `metric` is "accuracy" where larger is better, "-loss" where smaller is. With `restore_best` the
    run leaves the model of its best evaluation, as `BestModel` does.
    """

    def __init__(
        self,
        metric: str = "-loss",
        patience: int = 3,
        min_delta: float = 0.0,
        restore_best: bool = False,
    ):
        self.order = MetricOrder(metric, "EarlyStopping: metric")
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise TaskError(
                f"EarlyStopping: patience={patience!r}, but a number of evaluations is needed, 1 "
                "or more"
            )
        number = isinstance(min_delta, int | float) and not isinstance(min_delta, bool)
        if not number or not min_delta >= 0:
            raise TaskError(
                f"EarlyStopping: min_delta={min_delta!r}, but 0 or more is needed: by how much a "
                "better value is better"
            )
        self.patience, self.min_delta, self.restore_best = patience, min_delta, restore_best
        self.value, self.waited = -math.inf, 0  # larger is better
        self._kept = BestWeights(self.order)

    def begin_anew(self) -> None:
        self.value, self.waited, self._kept.best = -math.inf, 0, None

    @property
    def keeps(self) -> bool:
        return self.restore_best

    @property
    def best(self) -> tuple[ModelCopy, dict[str, float]] | None:
        return self._kept.best

    def on_start(self, run: Any) -> None:
        self.order.check(run)
        if self.restore_best:
            refuse_apart(run, "EarlyStopping(restore_best=True)")

    def on_evaluate(self, run: Any, metrics: Mapping[str, float]) -> None:
        if self.restore_best:
            self._kept.look(run, metrics)
        value = self.order.value(metrics)
        if self.order.better(value, self.value, self.min_delta):
            self.value, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            times = f"{self.waited} evaluation{'s' * (self.waited != 1)}"
            best = -self.value if self.order.small else self.value
            run.stop(f"{self.order.name} has not improved for {times}; its best was {best:g}")

    def state_dict(self) -> dict[str, Any]:
        value = self.value if math.isfinite(self.value) else None
        mine: dict[str, Any] = {"value": value, "waited": self.waited}
        return mine | ({"kept": self._kept.state_dict()} if self.restore_best else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = -math.inf if state["value"] is None else state["value"]
        self.waited = state["waited"]
        if self.restore_best and "kept" in state:
            self._kept.load_state_dict(state["kept"])
