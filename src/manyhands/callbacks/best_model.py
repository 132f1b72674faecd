"""Best model: the run leaves the model of its best evaluation, not the last one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from manyhands.callbacks.metric_order import MetricOrder
from manyhands.callbacks.model_copy import ModelCopy, refuse_apart
from manyhands.callbacks.shown_model import BestKeeper


class BestWeights:
    """The model of the best evaluation so far, in memory, on every rank."""

    def __init__(self, order: MetricOrder):
        self.order = order
        self.best: tuple[ModelCopy, dict[str, float]] | None = None

    def look(self, run: Any, metrics: Mapping[str, float]) -> None:
        """After an evaluation; every rank calls it, with the same metrics."""
        before = -math.inf if self.best is None else self.order.value(self.best[1])
        if not self.order.better(self.order.value(metrics), before):
            return
        trainer = run.trainer
        shown = trainer.shown.copy
        params = trainer.model() if shown is None else shown.params
        buffers = trainer.evaluator.named_buffers()
        copy = ModelCopy(
            {k: v.detach().clone() for k, v in params.items()},
            {k: v.detach().clone() for k, v in buffers.items()},
        )
        self.best = copy, dict(metrics)

    def state_dict(self) -> dict[str, Any]:
        if self.best is None:
            return {}
        copy, metrics = self.best
        return {"metrics": metrics, "params": copy.params, "buffers": copy.buffers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            copy = ModelCopy(state["params"], state.get("buffers", {}))
            self.best = copy, state["metrics"]


class BestModel(BestKeeper):
    """Best model: at its end the run leaves the model of its best evaluation.

    It is what the last checkpoint, `mh.load` and the task's model hold, with the metrics of that
    evaluation. `metric` is "accuracy" where larger is better, "-loss" where smaller is.
    """

    def __init__(self, metric: str = "-loss"):
        self._kept = BestWeights(MetricOrder(metric, "BestModel: metric"))

    def begin_anew(self) -> None:
        self._kept.best = None

    @property
    def best(self) -> tuple[ModelCopy, dict[str, float]] | None:
        return self._kept.best

    def on_start(self, run: Any) -> None:
        self._kept.order.check(run)
        refuse_apart(run, "BestModel")

    def on_evaluate(self, run: Any, metrics: Mapping[str, float]) -> None:
        self._kept.look(run, metrics)

    def state_dict(self) -> dict[str, Any]:
        return self._kept.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kept.load_state_dict(state)
