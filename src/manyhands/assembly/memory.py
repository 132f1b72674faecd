"""Memory of a rank: the forecast before the first step, and the peak it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from manyhands.assembly.rank_context import RankContext, micro_batches
from manyhands.assembly.strategies import updates_slices
from manyhands.core import Plan, Tensors
from manyhands.data.sources import Source, StreamSource
from manyhands.errors import PlanError
from manyhands.observe.memory_peak import (
    LiveStorages,
    Meter,
    available_bytes,
    held_by,
)
from manyhands.parallel.zero.memory_use import held
from manyhands.parallel.zero.sharded_parameters import ShardedParameters
from manyhands.plan import memory_fit, memory_forecast, memory_timeline, static_memory
from manyhands.replica.deferred.unmade import is_unmade
from manyhands.replica.forward import TaskLoss
from manyhands.replica.objective import Objective
from manyhands.replica.parameters import ReplicaParameters
from manyhands.task import Callback, Task

# a model that no plan splits is forecast too from so many bytes of parameters on: it costs a second
LARGE_BYTES = 64 << 20


@dataclass
class MemoryWatch(Callback):
    """A memory forecast, and the measured peak it is compared with at the end of the run."""

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
            common = [s.full for s in flat.spans] if flat.common_bytes else []
            sharers = flat.group.size
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
    stages: memory_timeline.Stages | None = None,
    cuts: memory_timeline.Cuts | None = None,
) -> MemoryWatch | None:
    """Forecast memory on rank 0 for all ranks; refuse a plan that does not fit. `values`: one
    micro-batch; `stages` and `cuts`: how the model is split, where it is."""
    own = sum(p.nbytes for p in model.parameters())
    if context.rank != 0 or plan.compile or (not context.splits_model and own < LARGE_BYTES):
        return None
    if not callable(task.optimizer):
        context.notice("memory: not forecast, as the forecast knows one optimizer, not several")
        return None
    no_batches: Any = None  # the forecast brings its own
    objective = Objective(task.loss, task.step, task.reduction)
    loss = TaskLoss(model, no_batches, objective, plan.precision, context.device)
    count = context.micro_batch(plan.batch or 1)

    def loss_of(module: nn.Module, batch: Any) -> Any:
        with _module(loss, module):
            return loss.forward(batch, count)[0]

    optimizer = task.optimizer(model.parameters())
    study = memory_forecast.Study(model, loss_of, values(), optimizer, LiveStorages)
    setting = _setting(context, plan, model, optimizer, stages, cuts)
    forecasts = study.forecasts(setting)
    most = max(forecasts, key=lambda f: f.total)
    context.notice(f"memory: {most}")
    available = available_bytes(context.device, _sharing(context), _made_bytes(model))
    changes = memory_fit.changes(study, setting, count)
    warning = memory_fit.refuse(most, available, changes, context.options.anyway)
    if warning is not None:
        context.notice(warning)
    return MemoryWatch(context, setting, forecasts[0])


def _setting(
    context: RankContext,
    plan: Plan,
    model: nn.Module,
    optimizer: Optimizer,
    stages: memory_timeline.Stages | None,
    cuts: memory_timeline.Cuts | None,
) -> memory_forecast.Setting:
    """Of the plan, what memory depends on."""
    layout, agree = plan.layout, plan.strategy.replicas_agree
    parted = layout.data if updates_slices(context, plan, agree, optimizer) else 1
    trained = {p.dtype: 0 for p in model.parameters() if p.requires_grad}
    for p in model.parameters():
        trained[p.dtype] += p.numel() if p.requires_grad else 0
    own = sum(p.nbytes for p in model.parameters())
    of_strategy = static_memory.strategy_bytes(plan.strategy, trained)
    return memory_forecast.Setting(
        layout,
        plan.zero,
        micro_batches(plan) * plan.accumulate,
        plan.schedule,
        plan.recompute,
        overlap=agree and layout.data > 1 and layout.pipe == 1,
        sharers=layout.data if plan.strategy.shares_parameters else parted,
        owners=parted,
        stages=stages,
        cuts=cuts,
        bucket_bytes=int(plan.bucket_mb * 2**20),
        other=of_strategy * own // max(1, own * layout.size),
    )


def room(context: RankContext, model: nn.Module, task: Task) -> tuple[int, float]:
    """Bytes that a rank has; and the ratio of parameters, gradients and optimizer state together to
    parameters alone."""
    own = sum(p.nbytes for p in model.parameters())
    assert callable(task.optimizer)  # several optimizers are not split over ranks
    state, _, _ = static_memory.optimizer_bytes(model, task.optimizer(model.parameters()))
    available = available_bytes(context.device, _sharing(context), _made_bytes(model))
    return available, 2 + sum(state.values()) / max(1, own)


def _made_bytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters() if not is_unmade(p))


def _sharing(context: RankContext) -> int:
    """Ranks that share the memory of this rank's device."""
    local = context.process.local_size
    return local if context.device.type == "cpu" else min(local, context.plan.ranks_per_gpu)


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
            "splitting a model needs one example batch in advance, but the training data is a "
            "stream; give a Dataset"
        )
    return train.fetch(train.first(most or context.micro_batch(plan.batch or 1)))
