"""A replica whose step is captured once as CUDA graphs and then replayed: one launch instead of hundreds.

    graph 1   gather batch -> forward -> backward           graph 2   normalise -> optimizer

Small models are bound by the host that launches kernels, not by the GPU; a replay has no such host. The first rounds
run eagerly (they warm up libraries and create optimizer state, and are ordinary training steps); a batch of another
size runs eagerly too. What cannot be captured is said once and runs eagerly for good. The data must live on the
device, so that a batch is a gather by an index that the host writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from manyhands.core import OnReady, Tensors
from manyhands.data.batches import IndexedBatches
from manyhands.data.sources import TensorSource
from manyhands.replica.forward import TaskLoss
from manyhands.replica.module import ModuleReplica

WARM_ROUNDS = 3


class CapturedReplica:
    """Wraps a `ModuleReplica` that is alone on its data axis; everything not captured goes through to it."""

    def __init__(
        self,
        inner: ModuleReplica,
        loss: TaskLoss,
        batches: IndexedBatches,
        notice: Callable[[str], None],
    ):
        self.inner, self._loss, self._batches, self._notice = inner, loss, batches, notice
        self._source = batches.source
        assert isinstance(self._source, TensorSource)
        self._eager_rounds = 0
        self._given_up = False
        self._replayed = False
        self._size = 0
        self._forward: torch.cuda.CUDAGraph | None = None
        self._update: torch.cuda.CUDAGraph | None = None
        self._frozen = self._hyper_parameters()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def params(self) -> Tensors:
        return self.inner.params

    @property
    def grads(self) -> Tensors:
        return self.inner.grads

    @property
    def count(self) -> Tensor:
        return self.inner.count

    @property
    def updates_slice(self) -> bool:
        return False

    def load(self, values: Tensors) -> None:
        self.inner.load(values)

    def square_norm(self) -> Tensor | None:
        return self.inner.square_norm()

    def backward(self, on_ready: OnReady | None = None) -> Tensor:
        count, last = self._batches.peek()
        fits = on_ready is None and last and not self._given_up and count == (self._size or count)
        if fits and self._forward is None and self._eager_rounds >= WARM_ROUNDS:
            fits = self._capture(self._record_forward, "forward and backward")
        if not fits or self._forward is None:
            self._replayed = False
            self._eager_rounds += 1
            return self.inner.backward(on_ready)
        self._index.copy_(self._batches.next_indices())
        self._forward.replay()
        for view, grad in zip(self.inner.flat.views, self._grads, strict=True):
            view.parameter.grad = grad
        self._replayed = True
        self.inner.own_count = self._count
        return self._static_loss.clone()  # the next replay writes over it

    def _hyper_parameters(self) -> list[Any]:
        """What the update's graph freezes: everything but the learning rate, which a tensor carries in."""
        frozen: list[Any] = []
        for group in self.inner.optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True
            if not isinstance(group["lr"], Tensor):
                group["lr"] = torch.tensor(float(group["lr"]), device=self.inner.device)
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
            self._frozen, self._update = (
                now,
                None,
            )  # a schedule that moves momentum, say: record anew
        if self._replayed and self._update is None:
            self._capture(self._record_update, "the optimizer step")
        if not self._replayed or self._update is None:
            self.inner.step()
            return
        self._update.replay()
        if self.inner.schedule is not None:
            self.inner.schedule.step()

    # -- recording: nothing runs, the work is only noted down --

    def _record_forward(self, graph: torch.cuda.CUDAGraph) -> None:
        inner = self.inner
        self._size, _ = self._batches.peek()
        self._index = torch.zeros(self._size, dtype=torch.long, device=inner.device)
        inner._start_window()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            loss, count = self._loss.forward(self._source.fetch(self._index), self._size)
            share = count / inner.nominal
            (loss if share == 1 else loss * share).backward()
            self._static_loss = loss.detach()
        self._grads = [p.parameter.grad for p in inner.flat.views]
        inner._end_window(count)
        self._count = count
        self._forward = graph

    def _record_update(self, graph: torch.cuda.CUDAGraph) -> None:
        inner = self.inner
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            inner._normalise(inner._place())
            inner.optimizer.step()
        self._update = graph

    def _capture(self, record: Callable[[torch.cuda.CUDAGraph], None], what: str) -> bool:
        rng = torch.cuda.get_rng_state(self.inner.device)
        try:
            record(torch.cuda.CUDAGraph())
            return True
        except Exception as e:
            self._given_up, self._forward, self._update = True, None, None
            torch.cuda.synchronize()
            torch.cuda.set_rng_state(rng, self.inner.device)
            reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
            self._notice(
                f"{what} cannot be captured as a CUDA graph ({reason}); running eagerly (capture=off silences this)"
            )
            return False
