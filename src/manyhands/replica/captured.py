"""Captured replica: a step recorded once as CUDA graphs and then replayed with one launch.

    graph 1   gather batch -> forward -> backward           graph 2   normalise -> optimizer

Small models are limited by the host, which launches hundreds of kernels a step; a replay needs one
launch. The first rounds run eagerly: they are ordinary training steps, warm up libraries and create
optimizer state. A batch of another size runs eagerly too. If something cannot be captured, a notice
says so once and all steps run eagerly. The data must be on the device, so that a batch is a gather
by an index that the host writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from manyhands.core import OnReady
from manyhands.data.batches import IndexedBatches
from manyhands.data.sources import TensorSource
from manyhands.replica.forward import TaskLoss
from manyhands.replica.module import ModuleReplica
from manyhands.replica.wrapper import ReplicaWrapper

WARM_ROUNDS = 3


class CapturedReplica(ReplicaWrapper):
    """Wraps a `ModuleReplica` that is alone on its data axis."""

    def __init__(
        self,
        inner: ModuleReplica,
        loss: TaskLoss,
        batches: IndexedBatches,
        notice: Callable[[str], None],
    ):
        super().__init__(inner)
        self._loss, self._batches, self._notice = loss, batches, notice
        self._source = batches.source
        assert isinstance(self._source, TensorSource)
        self._eager_rounds = 0
        self._given_up = False
        self._replayed = False
        self._size = 0
        self._forward: torch.cuda.CUDAGraph | None = None
        self._update: torch.cuda.CUDAGraph | None = None
        self._frozen = self._hyper_parameters()

    @property
    def updates_slice(self) -> bool:
        return False

    def backward(self, on_ready: OnReady | None = None) -> Tensor:
        self.flat.take_back()  # the graphs read the flat vectors
        count, last = self._batches.peek()
        fits = (
            on_ready is None and last and not self._given_up and 0 < count == (self._size or count)
        )
        if fits and self._forward is None and self._eager_rounds >= WARM_ROUNDS:
            fits = self._capture(self._record_forward, "forward and backward")
        if not fits or self._forward is None:
            self._replayed = False
            self._eager_rounds += 1
            return self.inner.backward(on_ready)
        self._index.copy_(self._batches.next_indices())
        self._forward.replay()
        for view, grad in zip(self.flat.views, self._grads, strict=True):
            view.parameter.grad = grad
        self._replayed = True
        self.module_replica.own_count = self._count
        return self._static_loss.clone()  # the next replay writes over it

    def _hyper_parameters(self) -> list[Any]:
        """What the update's graph holds fixed: all but the learning rate, which is a tensor."""
        frozen: list[Any] = []
        for group in self.module_replica.optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True
            if not isinstance(group["lr"], Tensor):
                group["lr"] = torch.tensor(float(group["lr"]), device=self.module_replica.device)
            frozen.append(
                {
                    k: id(v) if isinstance(v, Tensor) else v
                    for k, v in group.items()
                    if k != "params"
                }
            )
        return frozen

    def step(self) -> None:
        if self._update is not None and (now := self._hyper_parameters()) != self._frozen:
            # a schedule moved momentum, for example: record again
            self._frozen, self._update = now, None
        if self._replayed and self._update is None:
            self._capture(self._record_update, "the optimizer step")
        if not self._replayed or self._update is None:
            self.inner.step()
            return
        self._update.replay()
        self.module_replica.optimizer_step.next_rate()

    # -- recording: nothing is computed, kernels are only recorded --

    def _record_forward(self, graph: torch.cuda.CUDAGraph) -> None:
        inner = self.module_replica
        self._size, _ = self._batches.peek()
        self._index = torch.zeros(self._size, dtype=torch.long, device=inner.device)
        inner.window.start()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            loss, count = self._loss.forward(self._source.fetch(self._index), self._size)
            share = count / inner.nominal
            (loss if share == 1 else loss * share).backward()
            self._static_loss = loss.detach()
        self._grads = [p.parameter.grad for p in inner.flat.views]
        inner.own_count = count
        inner.window.end(count)
        self._count = count
        self._forward = graph

    def _record_update(self, graph: torch.cuda.CUDAGraph) -> None:
        inner = self.module_replica
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            grads = inner.window.place(inner.update)
            inner.optimizer_step.normalise(grads, inner.unmerged_count())
            inner.optimizer.step()
        self._update = graph

    def _capture(self, record: Callable[[torch.cuda.CUDAGraph], None], what: str) -> bool:
        rng = torch.cuda.get_rng_state(self.module_replica.device)
        try:
            record(torch.cuda.CUDAGraph())
            return True
        except Exception as e:
            self._given_up, self._forward, self._update = True, None, None
            torch.cuda.synchronize()
            torch.cuda.set_rng_state(rng, self.module_replica.device)
            reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
            self._notice(
                f"{what} cannot be captured as a CUDA graph ({reason}); "
                "running eagerly (capture=off silences this)"
            )
            return False
