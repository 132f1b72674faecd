"""A plain nn.Module with its optimizer, as a replica: forward, backward, step on this rank's share of the data.

    loss_k       mean over the n_k samples of micro-batch k
    grads        sum_k (n_k / N) grad loss_k            N: samples of a full step over all ranks
    count        sum_k n_k
    step         w <- optimizer(w, grads N / count)     both summed over ranks by then, or not: divided once

With full batches N / count is exactly 1 and the division costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from manyhands.compute.flat import FlatParameters
from manyhands.core import OnReady, Rows, Tensors

FUSED_ON_CPU = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
FUSED_ON_CUDA = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


@dataclass
class Micro:
    """The loss of one micro-batch: a mean over `count` samples, or None where this rank has no samples left."""

    loss: Tensor | None
    count: int
    last: bool  # of this rank's share of the step


NextLoss = Callable[[], Micro]


class ModuleReplica:
    """`next_loss` is the only source of work: it draws a batch and runs the forward pass, or asks the user's loop."""

    def __init__(
        self,
        flat: FlatParameters,
        optimizer: Optimizer,
        next_loss: NextLoss,
        *,
        nominal: int,
        clip: float | None = None,
        schedule: LRScheduler | None = None,
        scaler: torch.amp.GradScaler | None = None,
        on_unused: Callable[[list[str]], None] = lambda names: None,
    ):
        self.flat, self.optimizer, self.next_loss = flat, optimizer, next_loss
        self.nominal, self.clip, self.schedule, self.scaler = nominal, clip, schedule, scaler
        self.on_unused: Callable[[list[str]], None] | None = on_unused
        self.device = flat.tail.device
        self.own_count = 0  # samples of this rank in the last window, before merging
        self.norm: Tensor | None = None  # of the last step's gradient, where it was clipped
        self._bucket_of = {i: b for b, bucket in enumerate(flat.buckets) for i in bucket.pieces}
        self._on_ready: OnReady | None = None
        self._used = [False] * len(flat.pieces)  # by this rank, in this window
        self._in_flat = [False] * len(flat.pieces)  # the gradient has left the parameter for the flat vector
        self._missing: list[int] = []  # pieces each bucket still waits for
        self._launched = 0
        for i, piece in enumerate(flat.pieces):
            piece.parameter.register_post_accumulate_grad_hook(self._hook(i))
        fuse(optimizer, self.device)

    @property
    def params(self) -> Tensors:
        return self.flat.values

    @property
    def grads(self) -> Tensors:
        self._gather()
        return self.flat.grads

    @property
    def count(self) -> Tensor:
        return self.flat.count

    def rows(self) -> Rows:
        return dict.fromkeys(self.params)

    def load(self, values: Tensors) -> None:
        for k, v in values.items():
            self.params[k].copy_(v)

    # -- compute --

    def backward(self, on_ready: OnReady | None = None) -> Tensor:
        self._start_window()
        total, count, last = torch.zeros((), device=self.device), 0, False
        while not last:
            micro = self.next_loss()
            last = micro.last
            if micro.loss is not None:
                self._on_ready = on_ready if last else None
                share = micro.count / self.nominal
                scaled = micro.loss if share == 1 else micro.loss * share
                (scaled if self.scaler is None else self.scaler.scale(scaled)).backward()
                self._on_ready = None
                total = total + micro.loss.detach() * micro.count
                count += micro.count
        self._end_window(count)
        if on_ready is not None:
            self._gather()
            for bucket in self.flat.buckets[self._launched : -1]:
                on_ready({bucket.name: bucket.grad})
            final = {b.name: b.grad for b in self.flat.buckets[-1:]}
            on_ready({**final, "tail": self.flat.tail})
        return total / max(count, 1)

    def step(self) -> None:
        grads = self._place()
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        self._normalise(grads)
        if self.scaler is None:
            self.optimizer.step()
        elif not self._scaled_step(self.scaler):
            return
        if self.schedule is not None:
            self.schedule.step()

    def _scaled_step(self, scaler: torch.amp.GradScaler) -> bool:
        before = scaler.get_scale()
        scaler.step(self.optimizer)
        scaler.update()
        # overflow: every rank saw the same summed gradient, so all of them skip and shrink the scale together
        skipped = scaler.get_scale() < before
        if scaler.get_scale() < 1.0:
            scaler.update(new_scale=1.0)
        return not skipped

    def _normalise(self, grads: list[Tensor]) -> None:
        """Divide by the true count, once; then clip by the norm of the merged gradient."""
        factor: Tensor | float
        if grads and not self._in_flat[0]:  # nobody has asked for the flat gradients: the count is still this rank's own
            factor = self.nominal / max(1, self.own_count)
        elif self.device.type == "cpu":
            factor = self.nominal / max(1.0, float(self.flat.count))
        else:  # stay on the device: reading the count would make the host wait for the GPU
            factor = self.nominal / self.flat.count.clamp(min=1.0)
        if self.clip is not None and grads:
            self.norm = get_total_norm(grads) * factor
            bound = (self.clip / (self.norm + 1e-6)).clamp(max=1.0)
            factor = factor * (float(bound) if self.device.type == "cpu" else bound)
        if grads and not (isinstance(factor, float) and factor == 1.0):
            torch._foreach_mul_(grads, factor)

    # -- gradients: from the parameters into the flat vector, bucket by bucket while backward runs, and back --

    def _start_window(self) -> None:
        for i, piece in enumerate(self.flat.pieces):
            piece.parameter.grad = None
            self._used[i] = self._in_flat[i] = False
        self._missing = [len(b.pieces) for b in self.flat.buckets]
        self._launched = 0

    def _hook(self, i: int) -> Callable[[Tensor], None]:
        piece, bucket = self.flat.pieces[i], self._bucket_of[i]

        def hook(parameter: Tensor) -> None:
            if self._on_ready is None:
                return
            piece.grad.copy_(parameter.grad)
            parameter.grad = None
            self._used[i] = self._in_flat[i] = True
            self._missing[bucket] -= 1
            # in order on every rank; the last bucket waits for the tail, which is known when backward is over
            while self._launched < len(self._missing) - 1 and self._missing[self._launched] == 0:
                ready = self.flat.buckets[self._launched]
                self._launched += 1
                self._on_ready({ready.name: ready.grad})

        return hook

    def _end_window(self, count: int) -> None:
        for i, piece in enumerate(self.flat.pieces):
            self._used[i] = self._used[i] or piece.parameter.grad is not None
        self.own_count = count
        self.flat.count.fill_(count)
        if all(self._used):
            self.flat.used.fill_(1.0)
        else:
            self.flat.used.copy_(torch.tensor(self._used, dtype=torch.float32))
        if self.on_unused is not None and count:
            if unused := [p.name for p, used in zip(self.flat.pieces, self._used, strict=True) if not used]:
                self.on_unused(unused)
            self.on_unused = None

    def _gather(self) -> None:
        for i, piece in enumerate(self.flat.pieces):
            if not self._in_flat[i]:
                if piece.parameter.grad is None:
                    piece.grad.zero_()
                else:
                    piece.grad.copy_(piece.parameter.grad)
                    piece.parameter.grad = None
                self._in_flat[i] = True

    def _place(self) -> list[Tensor]:
        """Hand merged gradients back to the parameters; one that no rank used keeps none, as in plain torch."""
        used_somewhere = self._used if all(self._used) or not self._in_flat[0] else [u > 0 for u in self.flat.used.tolist()]
        grads = []
        for i, piece in enumerate(self.flat.pieces):
            if self._in_flat[i] and used_somewhere[i]:
                piece.parameter.grad = piece.grad
            if piece.parameter.grad is not None:
                grads.append(piece.parameter.grad)
        return grads


def fuse(optimizer: Optimizer, device: torch.device) -> None:
    """One kernel over all parameters instead of several per parameter, where torch has one and nobody chose."""
    kinds = FUSED_ON_CPU if device.type == "cpu" else FUSED_ON_CUDA
    if type(optimizer) not in kinds or any(not p.is_floating_point() for g in optimizer.param_groups for p in g["params"]):
        return
    for group in optimizer.param_groups:
        if group.get("fused") is None and group.get("foreach") is None and not group.get("differentiable"):
            group["fused"] = True
