"""Synchronized BatchNorm: statistics over the union of all ranks' batches, with unequal counts.

Forward, with m_i, M_i, n_i mean, sum of squares about it and count of rank i, and s the running
mean, the same on all ranks:

    n, A, B = sum over ranks of  (n_i, n_i (m_i - s), M_i + n_i (m_i - s)^2)
    mean = s + A / n;   var = B / n - (A / n)^2

in float64, a few numbers a channel.

Backward needs the global sums of dy and of dy * xhat; one all-reduce each way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from manyhands.errors import TaskError
from manyhands.parallel.tensor.sharding_rules import ShardedValue

Reduce = Callable[[Tensor], None]  # sum over ranks, in place
Counts = Callable[[], bool]


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        shift: Tensor,
        eps: float,
        reduce: Reduce,
        counts: bool,
    ) -> Any:
        wide = torch.promote_types(x.dtype, torch.float32)
        dims = [d for d in range(x.ndim) if d != 1]
        shape = [1, -1] + [1] * (x.ndim - 2)
        c, count = x.shape[1], x.numel() / max(1, x.shape[1])
        here = x.to(wide).sum(dims) / max(1.0, count)
        # squares about this rank's own mean: about another point float32 loses the variance of data
        # far from it
        spread = (x.to(wide) - here.view(shape)).square().sum(dims).double()
        away = here.double() - shift.double()
        local = torch.cat([count * away, spread + count * away.square(), away.new_tensor([count])])
        # a borrowed sample: this rank only takes part in the all-reduce
        local = local if counts else torch.zeros_like(local)
        reduce(local)
        # n is read from the device only where it may be 1; then it is read on all ranks
        if count <= 1 and float(local[-1]) == 1:
            raise TaskError(
                f"BatchNorm got 1 sample of shape {tuple(x.shape[1:])} over all ranks: 1 value a "
                "channel, but a mean and a variance need 2 or more; choose batch= so that no "
                "batch or micro-batch has a single sample, or fewer parts (micro=)"
            )
        away = local[:c] / local[-1]
        mean, n = (shift.double() + away).to(wide), local[-1].to(wide)
        var = (local[c : 2 * c] / local[-1] - away.square()).clamp(min=0).to(wide)
        inverse = (var + eps).rsqrt()
        xhat = (x.to(wide) - mean.view(shape)) * inverse.view(shape)
        out = xhat if weight is None else xhat * weight.to(wide).view(shape)
        out = out if bias is None else out + bias.to(wide).view(shape)
        ctx.save_for_backward(xhat, inverse, weight, n)
        ctx.counts = counts
        ctx.reduce, ctx.dims, ctx.shape = reduce, dims, shape
        ctx.dtype, ctx.has_bias = x.dtype, bias is not None
        return out.to(x.dtype), mean, var, n

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *_: Any) -> Any:
        xhat, inverse, weight, n = ctx.saved_tensors
        dout = dout.to(xhat.dtype)
        c = xhat.shape[1]
        local = torch.cat([dout.sum(ctx.dims), (dout * xhat).sum(ctx.dims)])
        # local sums: the gradient is merged with all others later
        dbias, dweight = local[:c].clone(), local[c:].clone()
        ctx.reduce(local)
        mean_d, mean_dx = (local[:c] / n).view(ctx.shape), (local[c:] / n).view(ctx.shape)
        scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
        dx = (dout - mean_d - xhat * mean_dx) * scale.view(ctx.shape)
        if not ctx.counts:
            dx = torch.zeros_like(dx)  # the mean does not depend on a borrowed sample
        return (
            dx.to(ctx.dtype),
            None if weight is None else dweight,
            dbias if ctx.has_bias else None,
            None,
            None,
            None,
            None,
        )


class SyncBatchNorm(_BatchNorm):
    """Synchronized BatchNorm, with the parameters and buffers of the one it replaces.

    So names in checkpoints stay the same."""

    def __init__(self, inner: _BatchNorm, reduce: Reduce, counts: Counts = lambda: True):
        nn.Module.__init__(self)
        self.__dict__.update(
            {
                k: v
                for k, v in inner.__dict__.items()
                if k not in ("_parameters", "_buffers", "_modules")
            }
        )
        self._parameters, self._buffers = inner._parameters, inner._buffers
        self._reduce, self._counts, self._check = reduce, counts, inner._check_input_dim

    def _check_input_dim(self, input: Tensor) -> None:
        self._check(input)

    def forward(self, input: Any) -> Any:
        if not isinstance(input, ShardedValue):
            return self._normalised(input)
        held = next(
            (
                v
                for v in (self._parameters["weight"], self._buffers["running_mean"])
                if v is not None
            ),
            None,
        )
        # the slices of input and statistics have the same channels
        if input.shard_dim == 1 and (held is None or len(held) == input.local.shape[1]):
            return input.like(self._normalised(input.local))
        return self._normalised(input.gather_for("batch_norm"))

    def _normalised(self, input: Tensor) -> Tensor:
        # the local tensors: where they are cut, attributes read as sharded values
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        running_mean, running_var = self._buffers["running_mean"], self._buffers["running_var"]
        batches = self._buffers["num_batches_tracked"]
        self._check_input_dim(input)
        if not self.training:
            own = running_mean is None and running_var is None
            return nn.functional.batch_norm(
                input, running_mean, running_var, weight, bias, own, 0.0, self.eps
            )
        shift = running_mean if running_mean is not None else input.new_zeros(input.shape[1])
        out, mean, var, n = _Normalise.apply(
            input, weight, bias, shift.detach().clone(), self.eps, self._reduce, self._counts()
        )
        if (
            self.track_running_stats
            and running_mean is not None
            and running_var is not None
            and batches is not None
        ):
            with torch.no_grad():
                batches.add_(1)
                momentum = self.momentum if self.momentum is not None else 1.0 / float(batches)
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
                running_var.lerp_(
                    (var * (n / (n - 1).clamp(min=1))).to(running_var.dtype), momentum
                )
        return out


def has_batchnorm(module: nn.Module) -> bool:
    return any(isinstance(m, _BatchNorm) for m in module.modules())


def synchronise(module: nn.Module, reduce: Reduce, counts: Counts = lambda: True) -> nn.Module:
    """Replace every BatchNorm by one over the union of all ranks' batches.

    `counts`: whether this rank's batch is part of the union."""
    made: dict[int, nn.Module] = {}  # a module with several names stays one

    def replaced(old: nn.Module) -> nn.Module:
        if isinstance(old, _BatchNorm):
            return made.setdefault(id(old), SyncBatchNorm(old, reduce, counts))
        for name, child in old._modules.items():
            if child is not None and (new := replaced(child)) is not child:
                setattr(old, name, new)
        return old

    return replaced(module)


def running_buffers(module: nn.Module) -> list[Tensor]:
    return [
        b
        for m in module.modules()
        if isinstance(m, _BatchNorm)
        for b in m._buffers.values()
        if b is not None and b.is_floating_point()
    ]
