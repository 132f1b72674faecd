"""Stochastic weight averaging (SWA): the mean of the weights at the ends of epochs.

    w <- w + (x - w) / n        after epochs start, start + every, ...

x is the model that all replicas stand for.
"""

from __future__ import annotations

from typing import Any

import torch

from manyhands.callbacks.ema import notice_batchnorm, widened
from manyhands.callbacks.model_copy import ModelCopy, refuse_apart
from manyhands.callbacks.shown_model import WeightAverage
from manyhands.core import Tensors
from manyhands.errors import TaskError


class SWA(WeightAverage):
    """Stochastic weight averaging: the mean of the weights after every `every`-th epoch, the first
    after epoch `start`.

    From then on the run is evaluated with the average, and it is the model of checkpoints,
    `mh.load` and of the task after the run. BatchNorm's statistics are not computed anew.
    """

    def __init__(self, start: int, every: int = 1):
        for name, value in (("start", start), ("every", every)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise TaskError(
                    f"SWA: {name}={value!r}, but a number of epochs is needed, 1 or more"
                )
        self.start, self.every = start, every
        self.begin_anew()

    def begin_anew(self) -> None:
        self._params: Tensors = {}
        self._averaged = 0  # models behind the average
        self._epochs = 0  # of which the average knows

    @property
    def average(self) -> ModelCopy | None:
        return ModelCopy(self._params) if self._averaged else None

    def on_start(self, run: Any) -> None:
        refuse_apart(run, "SWA")
        notice_batchnorm(run, "SWA")
        device = run.trainer.context.device
        self._params = {k: v.to(device) for k, v in self._params.items()}
        limits = run.trainer.limits
        if limits.epochs < self.start:
            raise TaskError(
                f"SWA: start={self.start} would never come, in a run of {limits.epochs:g} epochs; "
                f"give an epoch that the run ends"
            )

    def advance(self, trainer: Any) -> None:
        before, self._epochs = self._epochs, trainer.position.epoch
        due = (e for e in range(before + 1, self._epochs + 1) if e >= self.start)
        if not any((epoch - self.start) % self.every == 0 for epoch in due):
            return
        self._averaged += 1
        with torch.no_grad():
            for k, x in trainer.model().items():
                if k not in self._params:
                    self._params[k] = widened(x)
                else:
                    self._params[k].lerp_(x.to(self._params[k].dtype), 1 / self._averaged)

    def state_dict(self) -> dict[str, Any]:
        return {"averaged": self._averaged, "epochs": self._epochs, "params": self._params}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._averaged, self._epochs = state["averaged"], state["epochs"]
        self._params = {k: widened(v) for k, v in state["params"].items()} if self._averaged else {}
