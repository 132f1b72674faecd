"""Sharding rules of elementwise functions, reductions, norms, dropout and concatenation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from manyhands.parallel.tensor.sharded_value import (
    ShardedValue,
    is_inplace,
    is_plain,
    norm_dim,
    sharding_rule,
)
from manyhands.parallel.tensor.tensor_axis import enter, reduce

UNARY = (
    "abs absolute neg negative exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal "
    "sigmoid tanh relu relu6 gelu silu elu selu celu leaky_relu mish softplus softsign hardtanh "
    "hardswish hardsigmoid logsigmoid tanhshrink threshold hardshrink softshrink sin cos tan asin "
    "acos atan sinh cosh erf erfc erfinv sign sgn floor ceil round trunc frac isnan isinf isfinite "
    "logical_not bitwise_not nan_to_num clone contiguous detach to type float double half bfloat16 "
    "int long bool type_as cpu cuda zeros_like ones_like full_like empty_like relu_ neg_ exp_ "
    "sqrt_ sigmoid_ tanh_ abs_ zero_ fill_ leaky_relu_ requires_grad_ detach_ digamma lgamma logit "
    "positive alias_copy dequantize __neg__ __pos__ __abs__ __invert__"
).split()
BROADCAST = (
    "add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow rsub "
    "maximum minimum fmax fmin atan2 eq ne lt le gt ge greater less greater_equal less_equal "
    "not_equal logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor where "
    "masked_fill addcmul addcdiv lerp clamp clip clamp_min clamp_max xlogy hypot prelu "
    "float_power add_ sub_ mul_ div_ masked_fill_ addcmul_ addcdiv_ clamp_ clamp_min_ clamp_max_ "
    "pow_ lerp_ copy_ floor_divide_ remainder_ fmod_ "
    "__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ "
    "__rtruediv__ __itruediv__ __div__ __rdiv__ __idiv__ __floordiv__ __rfloordiv__ __ifloordiv__ "
    "__mod__ __rmod__ __imod__ __pow__ __rpow__ __ipow__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ "
    "__and__ __rand__ __iand__ __or__ __ror__ __ior__ __xor__ __rxor__ __ixor__"
).split()


@sharding_rule(
    *(n for n in UNARY if any(hasattr(p, n) for p in (torch, torch.Tensor, torch.nn.functional)))
)
def unary(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p = args[0]
    if "out" in kwargs:
        return NotImplemented
    if not isinstance(p, ShardedValue):
        return func(
            p, *(a.local if isinstance(a, ShardedValue) else a for a in args[1:]), **kwargs
        )  # x.type_as(cut)
    out = func(
        p.local, *(a.local if isinstance(a, ShardedValue) else a for a in args[1:]), **kwargs
    )
    return p if out is p.local and is_inplace(func.__name__) else p.like(out)


@sharding_rule(*(n for n in BROADCAST if n != "prelu"))
def broadcast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p = first_sharded((*args, *kwargs.values()))
    if p is None or "out" in kwargs or (func.__name__ == "where" and len(args) == 1):
        return NotImplemented
    if is_inplace(func.__name__) and (
        not isinstance(args[0], ShardedValue) or args[0].ndim < max(map(_ndim, args))
    ):
        return NotImplemented
    p = args[0] if isinstance(args[0], ShardedValue) else p
    from_right = p.ndim - p.shard_dim
    ndim = max(_ndim(a) for a in (*args, *kwargs.values()))
    local = [aligned(a, p, from_right, func.__name__) for a in args]
    named = {k: aligned(v, p, from_right, func.__name__) for k, v in kwargs.items()}
    out = func(*local, **named)
    return p if out is p.local and is_inplace(func.__name__) else p.like(out, ndim - from_right)


def aligned(value: Any, p: ShardedValue, from_right: int, name: str) -> Any:
    """The local tensor of `value` that is broadcast against that of `p`, whose sharded dimension is
    `from_right` counted from the last."""
    if isinstance(value, ShardedValue):
        if (value.ndim - value.shard_dim, value.length, value.groups) == (
            from_right,
            p.length,
            p.groups,
        ):
            return value.local
        value = value.gather_for(name)
    if not isinstance(value, Tensor):
        return value
    if value.ndim < from_right or value.shape[-from_right] == 1:
        return enter(value, p.axis)
    return p.shard_of(value, value.ndim - from_right, name)


def _ndim(value: Any) -> int:
    return value.ndim if isinstance(value, Tensor) else 0


def first_sharded(args: tuple[Any, ...]) -> ShardedValue | None:
    return next((a for a in args if isinstance(a, ShardedValue)), None)


# -- over dimensions --


@sharding_rule("cumsum", "cumprod", "sort", "topk", "glu")
def over_one_dim(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Functions over one dimension: local where it is not the sharded one."""
    p, name = args[0], func.__name__
    if not isinstance(p, ShardedValue):
        return NotImplemented
    at = 2 if name == "topk" else 1
    dim = args[at] if len(args) > at else kwargs.get("dim", -1)
    if not isinstance(dim, int) or norm_dim(dim, p.ndim) == p.shard_dim or "out" in kwargs:
        return NotImplemented
    out = func(p.local, *args[1:], **kwargs)
    return as_returned(out, [p.like(o) for o in out]) if isinstance(out, tuple) else p.like(out)


@sharding_rule(
    "sum",
    "mean",
    "amax",
    "amin",
    "logsumexp",
    "var",
    "std",
    "prod",
    "any",
    "all",
    "argmax",
    "argmin",
    "norm",
    "nansum",
    "max",
    "min",
)
def reduction(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p, name = args[0], func.__name__
    if not isinstance(p, ShardedValue) or name == "norm" or kwargs.get("axis") is not None:
        return NotImplemented
    given = args[1] if len(args) > 1 else kwargs.get("dim")
    if isinstance(given, Tensor):
        return broadcast(func, args, kwargs)  # torch.max(a, b)
    # unbiased, in one of the old signatures
    if name in ("var", "std") and (isinstance(given, bool) or len(args) > 2):
        return NotImplemented
    dims = (
        [norm_dim(d, p.ndim) for d in (given if isinstance(given, tuple | list) else (given,))]
        if given is not None
        else []
    )
    dims = dims or list(range(p.ndim))
    keep = bool(args[2] if len(args) > 2 else kwargs.get("keepdim", False))
    if p.shard_dim in dims:
        if (
            name == "argmax"
            and dims == [p.shard_dim]
            and p.groups == 1
            and given is not None
            and p.local.shape[p.shard_dim]
        ):
            return _argmax(p, keep)
        if name not in ("sum", "mean"):
            return NotImplemented
        dtype = kwargs.get("dtype")
        total = reduce(torch.sum(p.local, dims, keep, dtype=dtype), p.axis)
        if name == "sum":
            return total
        return total / torch.Size(p.shape[d] for d in dims).numel()
    out = func(p.local, *args[1:], **kwargs)
    left = p.shard_dim if keep else p.shard_dim - sum(d < p.shard_dim for d in dims)
    return (
        as_returned(out, [p.like(o, left) for o in out])
        if isinstance(out, tuple)
        else p.like(out, left)
    )


def as_returned(like: tuple[Any, ...], values: list[ShardedValue]) -> Any:
    """Several values as torch returns them: with names such as .values and .indices."""
    return type(like)(values)


def _argmax(p: ShardedValue, keep: bool) -> Tensor:
    """The first of the largest over all ranks: two small all-reduces instead of a gather."""
    value, at = p.local.detach().max(p.shard_dim, keepdim=keep)
    top = p.axis.all_reduce(value.clone(memory_format=torch.contiguous_format), "max")
    here = (value == top) | value.isnan()
    # counted from the end: the first is the largest
    back = torch.where(here, p.length - 1 - p.axis.local_start(p.length) - at, -1)
    return p.length - 1 - p.axis.all_reduce(back.contiguous(), "max")


@sharding_rule("layer_norm", "rms_norm")
def normalise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p, shape = args[0], args[1] if len(args) > 1 else kwargs["normalized_shape"]
    if not isinstance(p, ShardedValue) or p.shard_dim >= p.ndim - len(shape):
        return NotImplemented
    # a replicated weight that each rank uses on its own rows: its gradient is summed over ranks
    local = [enter(a, p.axis) if is_plain(a) else a for a in args[1:]]
    named = {k: enter(v, p.axis) if is_plain(v) else v for k, v in kwargs.items()}
    if any(isinstance(a, ShardedValue) for a in (*local, *named.values())):
        return NotImplemented
    return p.like(func(p.local, *local, **named))


@sharding_rule(
    "dropout",
    "alpha_dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "rand_like",
    "randn_like",
    "bernoulli",
    "rrelu",
)
def random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p = args[0]
    if not isinstance(p, ShardedValue):
        return NotImplemented
    if func.__name__.endswith("dropout") and not (
        args[2] if len(args) > 2 else kwargs.get("training", True)
    ):
        return p
    if func.__name__ in ("dropout1d", "dropout2d", "dropout3d") and p.shard_dim > 1:
        return NotImplemented  # a channel is dropped as a whole
    with p.axis.own_random(p.local.device):
        return p.like(func(p.local, *args[1:], **kwargs))


@sharding_rule("cat", "concat", "concatenate", "stack")
def joined(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values = args[0] if args else kwargs["tensors"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    p = first_sharded(tuple(values))
    if p is None or kwargs.get("out") is not None:
        return NotImplemented
    stacks = func is torch.stack
    dim = norm_dim(dim, p.ndim + stacks)
    if (not stacks and dim == p.shard_dim) or any(v.ndim != p.ndim for v in values):
        return NotImplemented
    local = [aligned(v, p, p.ndim - p.shard_dim, func.__name__) for v in values]
    return p.like(func(local, dim), p.shard_dim + (stacks and dim <= p.shard_dim))
