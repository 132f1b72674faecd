"""Distillation: a replica that also learns from the mean class probabilities of other models.

    o = mean_k softmax f_k(x)
    loss = mean over samples of   a CE(y, f) + (1 - a) KL(o || f)   for a share of them
                                  CE(y, f)                          for the rest

The teachers run without gradient and without dropout. BatchNorm normalises by the batch, as in
training, and its running buffers keep their values. Batches are shuffled, so the share is simply
the first rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from manyhands.core import Tensors
from manyhands.errors import TaskError
from manyhands.replica import forward
from manyhands.replica.flat import FlatParameters
from manyhands.replica.module import MicroLoss, ModuleReplica
from manyhands.replica.objective import pair
from manyhands.replica.wrapper import ReplicaWrapper

# (teachers, weight of the labels, share) -> the next loss
DistilledLoss = Callable[[Sequence[Tensors], float, float], MicroLoss]


def check(next_loss: object) -> None:
    """Raise TaskError, before training, where no class probabilities are known."""
    if not isinstance(next_loss, forward.TaskLoss) or next_loss.objective.step is not None:
        given = (
            "the task has step="
            if isinstance(next_loss, forward.TaskLoss)
            else "this is a loop of its own"
        )
        raise TaskError(
            f"merge=ensemble averages the class probabilities of model(*inputs), but {given}, so "
            "only a loss is known; give Task(loss=..., train=(inputs..., labels)), or choose "
            "another merge="
        )


def student(replica: ModuleReplica, next_loss: object) -> StudentReplica:
    """`replica`, whose losses are `next_loss`, able to learn from other models."""
    check(next_loss)
    assert isinstance(next_loss, forward.TaskLoss)
    # plans that split a model refuse merge=ensemble, so the parameters are whole
    flat = cast(FlatParameters, replica.flat)
    return StudentReplica(replica, DistillationLoss(flat, next_loss))


class StudentReplica(ReplicaWrapper):
    """Adds `distil` to a replica."""

    def __init__(self, inner: ModuleReplica, distilled_loss: DistilledLoss):
        super().__init__(inner)
        self._distilled_loss = distilled_loss

    def distil(self, teachers: Sequence[Tensors], weight: float, share: float) -> Tensor:
        """`backward` of the next batch under the distillation loss."""
        inner = self.module_replica
        own = inner.next_loss
        inner.next_loss = lambda: self._distilled_loss(teachers, weight, share)
        try:
            return inner.backward()
        finally:
            inner.next_loss = own


class DistillationLoss:
    """The next batch of a task under the loss in this file's docstring."""

    def __init__(self, flat: FlatParameters, task: forward.TaskLoss):
        self.flat, self.task = flat, task

    def __call__(self, teachers: Sequence[Tensors], weight: float, share: float) -> MicroLoss:
        batch = self.task.batches.next()
        if batch.values is None:
            return MicroLoss(None, 0, batch.last)
        *inputs, target = pair(batch.values)
        mean_probabilities = self.mean_probabilities(teachers, inputs)
        objective = self.task.objective
        with forward.autocast(self.task.precision, self.task.device):
            outputs = self.task.module(*inputs)
            rows = len(outputs)
            taught = min(rows, round(share * rows))
            nothing = torch.zeros((), device=outputs.device)
            hard = (
                objective.of_outputs(outputs[:taught], target[:taught], taught)
                if taught
                else nothing
            )
            left = rows - taught
            rest = (
                objective.of_outputs(outputs[taught:], target[taught:], left) if left else nothing
            )
        soft = nn.functional.kl_div(
            _wide(outputs[:taught]).log_softmax(1), mean_probabilities[:taught], reduction="none"
        )
        soft = soft.sum(1).mean() if taught else nothing
        total = (taught * (weight * hard + (1 - weight) * soft) + (rows - taught) * rest) / rows
        return MicroLoss(total if batch.count else total.nan_to_num(), batch.count, batch.last)

    @torch.no_grad()
    def mean_probabilities(self, teachers: Sequence[Tensors], inputs: Sequence[Any]) -> Tensor:
        """The mean of the teachers' class probabilities."""
        module, total = self.task.module, torch.zeros(())
        with _as_teacher(module), forward.autocast(self.task.precision, self.task.device):
            for values in teachers:
                with self.flat.holding(values):
                    outputs = module(*inputs)
                _check_logits(outputs)
                total = total.to(outputs.device) + _wide(outputs).softmax(1) / len(teachers)
        return total


def _check_logits(outputs: Any) -> None:
    if isinstance(outputs, Tensor) and outputs.ndim >= 2 and outputs.is_floating_point():
        return
    given = f"a {type(outputs).__name__}"
    if isinstance(outputs, Tensor):
        given = f"{tuple(outputs.shape)}"
    raise TaskError(
        f"merge=ensemble averages class probabilities, but the model gives {given}; needed: "
        "logits (samples, classes); choose another merge="
    )


@contextlib.contextmanager
def _as_teacher(module: nn.Module) -> Iterator[None]:
    modes = {m: m.training for m in module.modules()}
    norms = [m for m in modes if isinstance(m, _BatchNorm)]
    buffers = [(b, b.clone()) for m in norms for b in m._buffers.values() if b is not None]
    module.eval()
    for norm in norms:
        norm.training = modes[norm]
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training
        for buffer, before in buffers:
            buffer.copy_(before)


def _wide(outputs: Tensor) -> Tensor:
    return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs
