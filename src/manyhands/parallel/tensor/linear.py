"""Sharding rules of layers with weights: linear, embedding, convolution, BatchNorm; and pooling.

column   W cut on its outputs    Y_k = X W_k         X enters (its gradient is summed over ranks);
                                                     Y is sharded
row      W cut on its inputs     Y = sum_k X_k W_k   partial sums are reduced; then the bias is
                                                     added once
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from manyhands.parallel.tensor.elementwise import aligned
from manyhands.parallel.tensor.sharded_value import ShardedValue, is_plain, sharding_rule
from manyhands.parallel.tensor.tensor_axis import (
    collect,
    enter,
    reduce,
    scatter,
    spread,
)


def summed(partial: Tensor, p: ShardedValue) -> Any:
    """The sum of partial sums over ranks: replicated, or sharded over the rows (sequence=true)."""
    axis = p.axis
    if axis.sequence and partial.ndim >= 3 and partial.shape[-2] >= axis.size:
        dim = partial.ndim - 2
        return ShardedValue(spread(partial, axis, dim, 1), dim, partial.shape[dim], axis)
    if axis.sequence and partial.ndim == 2 and p.lead is not None and p.lead[-1] >= axis.size:
        return ShardedValue(
            spread(partial, axis, 0, p.lead[0]), 0, partial.shape[0], axis, p.lead[0]
        )
    return reduce(partial, axis)


def into_columns(x: Any, w: ShardedValue) -> Any:
    """x as a weight that is cut on its outputs needs it: replicated, with its gradient summed."""
    if isinstance(x, ShardedValue):  # sharded rows: sequence parallel
        return collect(x.local, x.axis, x.shard_dim, x.length, x.groups)
    return enter(x, w.axis)


def product(
    x: Any,
    w: Any,
    bias: Any,
    multiply: Callable[[Tensor, Tensor, Any], Tensor],
    outputs: int,
    name: str,
) -> Any:
    """`multiply(x, w, bias)` sums over the last dimension of x and over that of w that is not
    `outputs`, its dimension of outputs."""
    last = x.ndim - 1
    if isinstance(w, ShardedValue) and w.shard_dim == outputs:
        if isinstance(x, ShardedValue) and x.shard_dim == last:
            return NotImplemented
        if isinstance(bias, ShardedValue) and bias.groups != w.groups:
            bias = bias.gather_for(name)
        if is_plain(bias):
            bias = w.like(w.shard_of(bias, 0, name), 0)
        b = bias.local if isinstance(bias, ShardedValue) else None
        return w.like(multiply(into_columns(x, w), w.local, b), last)
    if isinstance(bias, ShardedValue):
        bias = bias.gather_for(name)
    if isinstance(w, ShardedValue):  # row
        if not isinstance(x, ShardedValue):
            x = ShardedValue(scatter(x, w.axis, last, w.groups), last, w.length, w.axis, w.groups)
        if (x.shard_dim, x.groups) != (last, w.groups):
            return NotImplemented
        out = summed(multiply(x.local, w.local, None), x)
        return out if bias is None else out + bias
    if x.shard_dim == last:
        return NotImplemented
    # sharded rows, replicated weight: each rank uses it on its own rows
    return x.like(
        multiply(x.local, enter(w, x.axis), None if bias is None else enter(bias, x.axis))
    )


@sharding_rule("linear")
def linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    return product(given["input"], given["weight"], given.get("bias"), F.linear, 0, "linear")


@sharding_rule("addmm")
def addmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """bias + x w, as Hugging Face's Conv1D writes it."""
    if (
        kwargs
        or len(args) != 3
        or args[0].ndim != 1
        or any(isinstance(a, ShardedValue) and a.ndim != 2 for a in args[1:])
    ):
        return NotImplemented
    return product(
        args[1],
        args[2],
        args[0],
        lambda x, w, b: x @ w if b is None else torch.addmm(b, x, w),
        1,
        "addmm",
    )


@sharding_rule("matmul", "bmm", "mm", "__matmul__")
def matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    a, b = (*args, *kwargs.values())[:2]
    if a.ndim < 2 or b.ndim < 2 or "out" in kwargs:
        return NotImplemented
    p: ShardedValue = a if isinstance(a, ShardedValue) else b
    # counted from the right, as batch dimensions are broadcast
    ndim, back = max(a.ndim, b.ndim), p.ndim - p.shard_dim
    if back > 2:
        return p.like(
            torch.matmul(aligned(a, p, back, "matmul"), aligned(b, p, back, "matmul")), ndim - back
        )
    if isinstance(b, ShardedValue) and b.ndim == 2:
        return product(a, b, None, lambda x, w, _: x @ w, 1, "matmul")
    if isinstance(a, ShardedValue) and isinstance(b, ShardedValue):
        inner = a.shard_dim == a.ndim - 1 and b.shard_dim == b.ndim - 2 and a.groups == b.groups
        return reduce(torch.matmul(a.local, b.local), a.axis) if inner else NotImplemented
    if isinstance(a, ShardedValue) and a.shard_dim == a.ndim - 2:  # rows of a
        return a.like(torch.matmul(a.local, enter(b, a.axis)), ndim - 2)
    if isinstance(b, ShardedValue) and b.shard_dim == b.ndim - 1:  # columns of b
        return b.like(torch.matmul(enter(a, b.axis), b.local), ndim - 1)
    return NotImplemented


@sharding_rule("baddbmm")
def baddbmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    if len(args) != 3 or "out" in kwargs:
        return NotImplemented
    out = torch.matmul(args[1], args[2]) * alpha
    return out if beta == 0 else args[0] * beta + out


@sharding_rule("embedding")
def embedding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = (
        "input",
        "weight",
        "padding_idx",
        "max_norm",
        "norm_type",
        "scale_grad_by_freq",
        "sparse",
    )
    given = dict(zip(names, args, strict=False)) | kwargs
    ids, w, padding = given["input"], given["weight"], given.get("padding_idx")
    if not isinstance(w, ShardedValue):  # sharded ids, replicated table
        if given.get("max_norm") is not None or given.get("scale_grad_by_freq"):
            return NotImplemented
        return ids.like(
            F.embedding(ids.local, enter(w, ids.axis), padding, sparse=given.get("sparse", False))
        )
    if given.get("max_norm") is not None or given.get("scale_grad_by_freq") or w.groups > 1:
        return NotImplemented
    if isinstance(ids, ShardedValue):
        ids = ids.gathered()
    sparse = given.get("sparse", False)
    if w.shard_dim == 1:
        return w.like(F.embedding(ids, w.local, padding, sparse=sparse), ids.ndim)
    if ids.device.type == "cpu" and bool(((ids < 0) | (ids >= w.length)).any()):
        # no rank has its row: it would read as zero
        raise IndexError(f"an id is outside of the table of {w.length} rows")
    start, held = w.axis.local_start(w.length), w.local.shape[0]
    outside = (ids < start) | (ids >= start + held)
    if padding is not None:
        padding = padding % w.length - start
        padding = padding if 0 <= padding < held else None
    out = F.embedding((ids - start).masked_fill(outside, 0), w.local, padding, sparse=sparse)
    return reduce(out.masked_fill(outside.unsqueeze(-1), 0), w.axis)


@sharding_rule("conv1d", "conv2d", "conv3d")
def conv(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = (
        dict(
            zip(
                ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
                args,
                strict=False,
            )
        )
        | kwargs
    )
    x, w, bias = given.pop("input"), given.pop("weight"), given.pop("bias", None)
    if given.get("groups", 1) != 1 or x.ndim != w.ndim:
        return NotImplemented
    if isinstance(w, ShardedValue) and w.shard_dim == 0:
        if isinstance(x, ShardedValue):
            return NotImplemented
        b = w.shard_of(bias, 0, "conv") if is_plain(bias) else None if bias is None else bias.local
        return w.like(func(enter(x, w.axis), w.local, b, **given), 1)
    if isinstance(bias, ShardedValue):
        bias = bias.gather_for("conv")
    if isinstance(w, ShardedValue) and w.shard_dim == 1:
        if not isinstance(x, ShardedValue):
            x = ShardedValue(scatter(x, w.axis, 1, w.groups), 1, w.length, w.axis, w.groups)
        if (x.shard_dim, x.groups) != (1, w.groups):
            return NotImplemented
        out = reduce(func(x.local, w.local, None, **given), w.axis)
        return out if bias is None else out + bias.view(-1, *[1] * (out.ndim - 2))
    return NotImplemented


@sharding_rule("batch_norm")
def batch_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sharded by channel: statistics of a channel need no other channel."""
    names = (
        "input",
        "running_mean",
        "running_var",
        "weight",
        "bias",
        "training",
        "momentum",
        "eps",
    )
    given = dict(zip(names, args, strict=False)) | kwargs
    x, rest = given.pop("input"), [given.pop(n, None) for n in names[1:5]]
    if isinstance(x, ShardedValue) and (x.shard_dim != 1 or is_plain(rest[0])):
        # replicated running statistics are changed in place: every rank must see all channels
        x = x.gather_for("batch_norm")
    if is_plain(rest[0]):
        return func(
            x,
            *(r.gather_for("batch_norm") if isinstance(r, ShardedValue) else r for r in rest),
            **given,
        )
    if not isinstance(x, ShardedValue):
        p = next((r for r in rest if isinstance(r, ShardedValue)), None)
        if p is None:
            return func(x, *rest, **given)
        x = ShardedValue(scatter(x, p.axis, 1, p.groups), 1, p.length, p.axis, p.groups)
    held = [
        r.local
        if isinstance(r, ShardedValue)
        else x.shard_of(r, 0, "batch_norm")
        if is_plain(r)
        else None
        for r in rest
    ]
    return x.like(func(x.local, *held, **given))


POOLS = [f"{kind}_pool{n}d" for kind in ("max", "avg", "adaptive_avg") for n in (1, 2, 3)]


@sharding_rule(*POOLS, "interpolate")
def by_channel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p, name = args[0], func.__name__
    spatial = p.ndim - 2 if name == "interpolate" else int(name[-2])
    return (
        p.like(func(p.local, *args[1:], **kwargs))
        if p.shard_dim < p.ndim - spatial
        else NotImplemented
    )
