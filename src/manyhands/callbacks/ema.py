"""Exponential moving average of the weights (EMA), one step at a time.

    w <- decay^k w + (1 - decay^k) x        k steps after the last one; w = x up to step `start`

x is the model that all replicas stand for: with all_reduce that of every step, else the merged one
of every round, which may be several steps. Where merging is what costs (d_psgd, ad_psgd, sgp,
ensemble), it is done once a round more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from manyhands.callbacks.model_copy import ModelCopy, refuse_apart
from manyhands.callbacks.shown_model import WeightAverage
from manyhands.core import Tensors
from manyhands.errors import TaskError


class EMA(WeightAverage):
    """Exponential moving average of the weights, from step `start` on.

    The run is evaluated with the average, and it is the model of checkpoints, `mh.load` and of the
    task after the run; the weights that train are beside it in the checkpoint, for --resume.
    """

    def __init__(self, decay: float = 0.999, start: int = 0):
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 < decay < 1:
            raise TaskError(
                f"EMA: decay={decay!r}, but a number between 0 and 1 is needed: the part of the "
                "average that a step keeps, 0.999"
            )
        if isinstance(start, bool) or not isinstance(start, int) or start < 0:
            raise TaskError(f"EMA: start={start!r}, but a number of steps is needed, 0 or more")
        self.decay, self.start = float(decay), start
        self.begin_anew()

    def begin_anew(self) -> None:
        self._params: Tensors = {}
        self._steps = 0  # of the run, of which the average knows
        self._shown = False

    @property
    def average(self) -> ModelCopy | None:
        return ModelCopy(self._params) if self._shown else None

    def on_start(self, run: Any) -> None:
        refuse_apart(run, "EMA")
        notice_batchnorm(run, "EMA")
        trainer = run.trainer
        if trainer.limits.steps <= self.start:
            raise TaskError(
                f"EMA: start={self.start} would never come, in a run of {trainer.limits.steps:g} "
                "steps; give a step before its end"
            )
        if not self._params:
            self._params = {k: widened(v) for k, v in trainer.model().items()}
            self._steps = trainer.position.steps
        self._params = {k: v.to(trainer.context.device) for k, v in self._params.items()}
        self.advance(trainer)

    def on_round(self, run: Any, round: int, loss: Tensor) -> None:
        trainer = run.trainer
        claims = trainer.limits.claims
        steps = (trainer.position if claims is None else claims.latest).steps
        if steps <= self._steps:
            return
        keep = 0.0
        if steps > self.start:
            keep = self.decay ** (steps - max(self._steps, self.start))
        with torch.no_grad():
            for k, x in trainer.model().items():
                self._params[k].mul_(keep).add_(x, alpha=1 - keep)
        self._steps = steps

    def advance(self, trainer: Any) -> None:
        self._shown = trainer.position.steps > self.start
        if trainer.limits.claims is not None:  # each rank has averaged at steps of its own
            trainer.context.data_group.all_reduce(self._params, op="mean").wait()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "params": self._params}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]
        self._params = {k: widened(v) for k, v in state["params"].items()}


def widened(values: Tensor) -> Tensor:
    """A copy; of half precision in float32, whose steps are small enough for an average."""
    small = values.dtype in (torch.float16, torch.bfloat16)
    return values.detach().to(torch.float32 if small else values.dtype, copy=True)


def notice_batchnorm(run: Any, name: str) -> None:
    """Averaged weights have other statistics than those that BatchNorm keeps while it trains."""
    if run.rank == 0 and any(
        n.endswith("running_mean") for n in run.trainer.evaluator.named_buffers()
    ):
        run.trainer.context.notice(
            f"BatchNorm keeps the running statistics of the weights that train, and {name} "
            "evaluates its average with them; where that is worse, use GroupNorm or LayerNorm, or "
            "compute them anew after the run (torch.optim.swa_utils.update_bn)"
        )
