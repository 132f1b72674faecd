"""Sharding rules of losses over a cut vocabulary: ranks exchange a few numbers a row, never logits.

    m = max over ranks;   Z = sum over ranks of sum_j exp(l_j - m)
    loss = ln Z - (l_y - m);   d loss / d l = softmax - onehot

With label smoothing e over V classes:

    loss = (1 - e) (ln Z - (l_y - m)) + e (ln Z - mean_j (l_j - m))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from manyhands.errors import TaskError
from manyhands.parallel.tensor.sharded_value import (
    ShardedValue,
    is_plain,
    norm_dim,
    sharding_rule,
)
from manyhands.parallel.tensor.tensor_axis import TensorAxis, enter, reduce


class _Rows(torch.autograd.Function):
    """The loss of every row; `logits` are (rows, local classes), `target` has class indices."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, axis: TensorAxis, length: int, smoothing: float
    ) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        start, held = axis.local_start(length), logits.shape[1]
        top = wide.amax(1) if held else wide.new_full((len(wide),), -torch.inf)
        axis.all_reduce(top, "max")
        shifted = wide - top.unsqueeze(1)
        own = target - start
        outside = (own < 0) | (own >= held)
        own = own.masked_fill(outside, 0)
        sums = (
            [shifted.gather(1, own.unsqueeze(1)).squeeze(1).masked_fill(outside, 0)]
            if held
            else [torch.zeros_like(top)]
        )
        if smoothing:
            sums.append(shifted.sum(1))
        soft = shifted.exp_()
        sums.append(soft.sum(1))
        summed = axis.all_reduce(torch.stack(sums))  # one all-reduce for all of them
        log_z = summed[-1].log()
        loss = log_z - summed[0]
        if smoothing:
            loss = (1 - smoothing) * loss + smoothing * (log_z - summed[1] / length)
        soft /= summed[-1].unsqueeze(1)
        ctx.save_for_backward(soft, own, outside)
        ctx.smoothing, ctx.length, ctx.dtype = smoothing, length, logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise TaskError(
                "the gradient of a cross_entropy over a vocabulary that is cut over ranks is "
                "differentiated again, which it cannot be; keep the layer of the logits whole: "
                "Task(tensor={'its.name': 'replicate'})"
            )
        soft, own, outside = ctx.saved_tensors
        out = soft - ctx.smoothing / ctx.length if ctx.smoothing else soft.clone()
        if soft.shape[1]:
            out.scatter_add_(
                1,
                own.unsqueeze(1),
                outside.to(out.dtype).sub_(1).mul_(1 - ctx.smoothing).unsqueeze(1),
            )
        return out.mul_(grad.unsqueeze(1)).to(ctx.dtype), None, None, None, None


@sharding_rule("cross_entropy")
def cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = (
        "input",
        "target",
        "weight",
        "size_average",
        "ignore_index",
        "reduce",
        "reduction",
        "label_smoothing",
    )
    given = dict(zip(names, args, strict=False)) | kwargs
    p, target, weight = given["input"], given["target"], given.get("weight")
    smoothing, ignored = given.get("label_smoothing", 0.0), given.get("ignore_index", -100)
    if (
        given.get("size_average") is not None
        or given.get("reduce") is not None
        or not isinstance(p, ShardedValue)
    ):
        return NotImplemented
    classes = min(1, p.ndim - 1)
    if p.shard_dim != classes:
        return _over_rows(p, given)
    if (
        not is_plain(target)
        or target.is_floating_point()
        or isinstance(weight, ShardedValue)
        or (weight is not None and smoothing)
    ):
        return NotImplemented
    if p.groups > 1:
        return NotImplemented
    logits = p.local.movedim(classes, -1)
    flat = target.reshape(-1)
    skipped = flat == ignored
    _within(flat.masked_fill(skipped, 0), p.length)
    rows: Tensor = _Rows.apply(
        logits.reshape(-1, logits.shape[-1]),
        flat.masked_fill(skipped, 0),
        p.axis,
        p.length,
        smoothing,
    )
    if not torch.is_autocast_enabled(p.local.device.type):
        rows = rows.to(p.local.dtype)
    return _mean(rows, flat, skipped, weight, given.get("reduction", "mean"), target)


def _within(ids: Tensor, length: int) -> None:
    """An id outside of all slices would count as zero. On a GPU the check would cost a wait."""
    if ids.device.type == "cpu" and bool(((ids < 0) | (ids >= length)).any()):
        raise IndexError(f"a target is outside of the {length} classes")


def _mean(
    rows: Tensor,
    flat: Tensor,
    skipped: Tensor,
    weight: Tensor | None,
    reduction: str,
    target: Tensor,
) -> Tensor:
    weights = (
        (~skipped).to(rows.dtype)
        if weight is None
        else weight[flat.masked_fill(skipped, 0)].masked_fill(skipped, 0)
    )
    rows = torch.where(skipped, 0, rows * weights)
    if reduction == "none":
        return rows.view(target.shape)
    return rows.sum() if reduction == "sum" else rows.sum() / weights.sum()


def _over_rows(p: ShardedValue, given: dict[str, Any]) -> Any:
    """Rows are sharded and classes are not: each rank computes the losses of its own rows."""
    target, weight, reduction = given["target"], given.get("weight"), given.get("reduction", "mean")
    if (
        isinstance(target, ShardedValue)
        or target.is_floating_point()
        or isinstance(weight, ShardedValue)
        or p.ndim < 2
    ):
        return NotImplemented
    at = p.shard_dim - (p.shard_dim > 1)  # the target has no dimension of classes
    target = p.shard_of(target, at, "cross_entropy")
    rest = {k: v for k, v in given.items() if k in ("ignore_index", "label_smoothing")}
    weight = enter(weight, p.axis) if weight is not None else None
    rows = F.cross_entropy(p.local, target, weight, reduction="none", **rest)
    if reduction == "none":
        return p.like(rows, at)
    total = reduce(rows.sum(), p.axis)
    if reduction == "sum":
        return total
    counted = target != given.get("ignore_index", -100)
    weights = (
        counted.to(rows.dtype)
        if weight is None
        else weight[target.masked_fill(~counted, 0)].masked_fill(~counted, 0)
    )
    return total / p.axis.all_reduce(weights.sum())


@sharding_rule("softmax", "log_softmax")
def softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim")
    if not isinstance(p, ShardedValue) or dim is None:
        return NotImplemented
    if norm_dim(dim, p.ndim) != p.shard_dim:
        return p.like(func(p.local, *args[1:], **kwargs))
    dtype = kwargs.get("dtype", args[-1] if isinstance(args[-1], torch.dtype) else None)
    p = p if dtype is None else p.like(p.local.to(dtype))
    if not p.local.shape[p.shard_dim]:
        return NotImplemented
    top = p.axis.all_reduce(p.local.detach().amax(p.shard_dim, keepdim=True).contiguous(), "max")
    shifted = p.like(p.local - top)
    if func.__name__ == "softmax":
        e = shifted.exp()
        return e / e.sum(p.shard_dim, keepdim=True)
    return shifted - shifted.exp().sum(p.shard_dim, keepdim=True).log()


@sharding_rule("nll_loss")
def nll_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
    given = dict(zip(names, args, strict=False)) | kwargs
    p, target, weight = given["input"], given["target"], given.get("weight")
    if (
        given.get("size_average") is not None
        or given.get("reduce") is not None
        or not is_plain(target)
    ):
        return NotImplemented
    if (
        not isinstance(p, ShardedValue)
        or p.shard_dim != 1
        or p.ndim != 2
        or isinstance(weight, ShardedValue)
        or p.groups > 1
    ):
        return NotImplemented
    skipped = target == given.get("ignore_index", -100)
    _within(target.masked_fill(skipped, 0), p.length)
    own = target.masked_fill(skipped, 0) - p.axis.local_start(p.length)
    outside = (own < 0) | (own >= p.local.shape[1])
    held = (
        p.local.gather(1, own.masked_fill(outside, 0).unsqueeze(1))
        .squeeze(1)
        .masked_fill(outside, 0)
    )
    return _mean(
        -reduce(held, p.axis), target, skipped, weight, given.get("reduction", "mean"), target
    )
