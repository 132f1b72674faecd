"""What a rank will need of memory, said before the first step and compared with what it took after the last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from manyhands.assembly.parameters import updates_parts
from manyhands.assembly.rank_context import RankContext, micro_batches
from manyhands.core import Plan, Tensors
from manyhands.data.sources import Source, StreamSource, TensorSource
from manyhands.errors import PlanError
from manyhands.observe.memory_peak import (
    Live,
    Meter,
    available_bytes,
    held_by,
)
from manyhands.parallel.zero.memory_use import held
from manyhands.parallel.zero.sharded_parameters import ShardedParameters
from manyhands.plan import memory_forecast
from manyhands.replica.forward import TaskLoss
from manyhands.replica.parameters import ReplicaParameters
from manyhands.task import Callback, Task

LARGE_BYTES = (
    64 << 20
)  # of parameters from which on a model that no plan splits is forecast too: it costs a second


@dataclass
class MemoryWatch(Callback):
    """A forecast, and the measurement it is compared with."""

    context: RankContext
    setting: memory_forecast.Setting
    forecast: memory_forecast.Forecast
    meter: Meter | None = None

    def measured(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.meter is None else self.meter

    def begin(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        flat: ReplicaParameters,
        state: Tensors,
    ) -> None:
        """From here on rounds are measured."""
        if isinstance(flat, ShardedParameters):
            lies = lambda: [*held(flat, optimizer), *module.buffers(), *state.values()]
            common, sharers = (
                [s.full for s in flat.spans] if flat.common_bytes else [],
                flat.group.size,
            )
        else:
            lies = lambda: [*flat.grads.values(), *held_by(module, optimizer), *state.values()]
            common, sharers = list(flat.values.values()), self.setting.sharers
        self.meter = Meter(self.context.device, lies, common=lambda: common, sharers=sharers)

    def on_end(self, run: Any) -> None:
        if self.meter is not None and (peak := self.meter.peak_bytes) is not None:
            self.context.notice(f"memory of rank 0: {self.forecast.against(peak)}")


def watch(
    context: RankContext,
    plan: Plan,
    model: nn.Module,
    values: Callable[[], Any],
    task: Task,
    stages: memory_forecast.Stages | None = None,
    cuts: memory_forecast.Cuts | None = None,
) -> MemoryWatch | None:
    """Forecast on one rank for all; refuse what does not fit. `values`: one micro-batch; `stages` and `cuts`: the model's, if split."""
    own = sum(p.nbytes for p in model.parameters())
    if context.rank != 0 or plan.compile or (not context.divided and own < LARGE_BYTES):
        return None
    loss = TaskLoss(model, None, task.loss, task.step, plan.precision, context.device)  # type: ignore[arg-type]  # it draws nothing
    count = context.micro_batch(plan.batch or 1)

    def loss_of(module: nn.Module, batch: Any) -> Any:
        with _module(loss, module):
            return loss.forward(batch, count)[0]

    optimizer = task.optimizer(model.parameters())
    study = memory_forecast.Study(model, loss_of, values(), optimizer, Live)
    parted = (
        plan.layout.data
        if updates_parts(context, plan, plan.strategy.replicas_agree, optimizer)
        else 1
    )
    trained = {p.dtype: 0 for p in model.parameters() if p.requires_grad}
    for p in model.parameters():
        trained[p.dtype] += p.numel() if p.requires_grad else 0
    setting = memory_forecast.Setting(
        plan.layout, plan.zero, micro_batches(plan) * plan.accumulate, plan.schedule, plan.recompute,
        overlap=plan.strategy.replicas_agree and plan.layout.data > 1 and plan.layout.pipe == 1, sharers=parted, owners=parted,
        stages=stages, cuts=cuts,
        bucket_bytes=int(plan.bucket_mb * 2**20), other=memory_forecast.rule_bytes(plan.strategy, trained) * own // max(1, own * plan.layout.size),
    )  # fmt: skip
    forecasts = study.forecasts(setting)
    most = max(forecasts, key=lambda f: f.total)
    context.notice(f"memory: {most}")
    available = available_bytes(context.device, context.process.local_size, own)
    said = memory_forecast.refuse(
        most, available, memory_forecast.changes(study, setting, count), context.options.anyway
    )
    if said is not None:
        context.notice(said)
    return MemoryWatch(context, setting, forecasts[0])


def room(context: RankContext, model: nn.Module, task: Task) -> tuple[int, float]:
    """Bytes that a rank has, and how many times the bytes of its parameters it holds, with gradients and the optimizer's state."""
    own = sum(p.nbytes for p in model.parameters())
    state, _, _ = memory_forecast.optimizer_bytes(model, task.optimizer(model.parameters()))
    return available_bytes(context.device, context.process.local_size, own), 2 + sum(
        state.values()
    ) / max(1, own)


@contextmanager
def _module(loss: TaskLoss, module: nn.Module) -> Iterator[None]:
    before, loss.module = loss.module, module
    try:
        yield
    finally:
        loss.module = before


def example(context: RankContext, plan: Plan, train: Source, most: int | None = None) -> Any:
    """One micro-batch, or at most so many samples of it."""
    if isinstance(train, StreamSource) or not train.samples:
        raise PlanError(
            "a model is split by looking at what it does with a batch, but the training data is a stream; give a Dataset"
        )
    count = min(train.samples, most or context.micro_batch(plan.batch or 1))
    return train.fetch(
        torch.arange(count, device=train.device if isinstance(train, TensorSource) else "cpu")
    )
