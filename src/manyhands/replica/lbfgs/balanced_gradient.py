"""Balanced gradient: ranks claim the micro-batches of a step one by one, each at its own pace.

    grads_i = sum over the shards k that rank i finished first of  (n_k / N) grad loss_k

Each shard counts once, on whichever rank; the sum over ranks is the gradient of the whole batch.
When all shards are claimed, an idle rank computes a copy of the oldest that is not finished
(`data.shard_claims`). The rank whose result comes second drops it; it also gives up in the middle,
before the next layer, as soon as it sees that the other one is through.

Random numbers belong to a shard, not to a rank: whoever computes it seeds them by run, step and
shard, and puts its own ones back.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from manyhands.core import Position
from manyhands.replica import state
from manyhands.replica.forward import TaskLoss

LOOK_EVERY_S = 0.002  # how often a rank asks whether another one has finished its shard


class Claims(Protocol):
    """Which shards this rank computes (`data.shard_claims.ShardClaims`)."""

    def begin(self, shards: int) -> None: ...
    def claim(self) -> int | None: ...
    def finish(self, shard: int) -> bool: ...
    def finished(self, shard: int) -> bool: ...


class Shards(Protocol):
    """The shards of a step (`data.batches.IndexedBatches`)."""

    @property
    def position(self) -> Position: ...
    @property
    def micros(self) -> int: ...
    def micro(self, k: int) -> tuple[Any, int]: ...
    def pass_over(self) -> None: ...


class BalancedGradient:
    """All forward and backward passes of a rank in one evaluation of the batch."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        loss: TaskLoss,
        batches: Shards,
        claims: Claims,
        seed: int,
    ):
        self._parameters, self._loss, self._batches = parameters, loss, batches
        self._claims, self._seed, self._drew = claims, seed, False
        self.counted: list[int] = []  # shards of this rank that count, in the last evaluation

    def drew(self) -> bool:
        """Whether a shard has drawn random numbers since this was asked last."""
        drew, self._drew = self._drew, False
        return drew

    def __call__(self, scaled: Callable[[Tensor, int], Tensor]) -> tuple[Tensor, int]:
        """The sum of loss * count and of counts; the gradients are at the parameters."""
        batches, claims, device = self._batches, self._claims, self._loss.device
        shards, self.counted = batches.micros, []
        batches.pass_over()  # all of them, by somebody
        claims.begin(shards)
        sums: list[Tensor | None] = [None] * len(self._parameters)
        total, count = torch.zeros((), device=device), 0
        own = state.rng_state(device)
        with self._giving_up() as at_work:
            while (shard := claims.claim()) is not None:
                try:
                    at_work(shard)
                    loss, samples = self._compute(shard, scaled)
                except _FinishedElsewhere:
                    continue
                finally:
                    at_work(None)
                if not claims.finish(shard):
                    continue
                self.counted.append(shard)
                total, count = total + loss * samples, count + samples
                for i, p in enumerate(self._parameters):
                    sums[i] = _added(sums[i], p.grad)
        state.load_rng(own, device)
        for p, grad in zip(self._parameters, sums, strict=True):
            p.grad = grad
        return total, count

    def _compute(self, shard: int, scaled: Callable[[Tensor, int], Tensor]) -> tuple[Tensor, int]:
        device = self._loss.device
        for p in self._parameters:
            p.grad = None
        state.seed_everything(self._seed + self._batches.position.steps, shard)
        before = None if self._drew else _positions(device)
        loss, count = self._loss.forward(*self._batches.micro(shard))
        scaled(loss, count).backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # else the host claims faster than the GPU computes
        self._drew = before is None or before != _positions(device)
        return loss.detach(), count

    @contextmanager
    def _giving_up(self) -> Iterator[Callable[[int | None], None]]:
        """Inside, the pass over the shard that was named last ends where another rank has finished
        it."""
        shard: int | None = None
        due = 0.0

        def at_work(on: int | None) -> None:
            nonlocal shard, due
            shard, due = on, time.perf_counter() + LOOK_EVERY_S

        def look(*_: Any) -> None:
            nonlocal due
            if shard is None or time.perf_counter() < due:
                return
            due = time.perf_counter() + LOOK_EVERY_S
            if self._claims.finished(shard):
                raise _FinishedElsewhere

        hooks = [m.register_forward_pre_hook(look) for m in self._loss.module.modules()]
        hooks += [p.register_post_accumulate_grad_hook(look) for p in self._parameters]
        try:
            yield at_work
        finally:
            for hook in hooks:
                hook.remove()


def _positions(device: torch.device) -> tuple[Any, ...]:
    """How far the random generators are since they were seeded; `state.rng_state` takes longer than
    a small shard may."""
    _, _, pos, has_gauss, _ = np.random.get_state(legacy=True)
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.empty(0)
    bits = (torch.get_rng_state().numpy().tobytes(), on_gpu.numpy().tobytes())
    return (random.getstate(), pos, has_gauss, *bits)


class _FinishedElsewhere(Exception):
    """Another rank has finished the shard that this one computes."""


def _added(sum: Tensor | None, grad: Tensor | None) -> Tensor | None:
    if sum is None or grad is None:
        return grad if sum is None else sum
    return sum.add_(grad)
