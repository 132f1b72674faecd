"""Sharding rules of attention: each rank computes its heads."""

from __future__ import annotations

import types
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from manyhands.parallel.tensor.elementwise import aligned, first_sharded
from manyhands.parallel.tensor.sharded_value import ShardedValue, sharding_rule


@sharding_rule("scaled_dot_product_attention")
def attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = dict(zip(names, args, strict=False)) | kwargs
    q, k, v, mask = (given.pop(n, None) for n in names[:4])
    p = first_sharded((q, k, v))
    if p is None or p.ndim - p.shard_dim < 3:
        return NotImplemented
    back = p.ndim - p.shard_dim  # from the right: a batch dimension, usually that of heads
    if p.axis.sequence:  # heads that all ranks hold, computed from sharded rows
        k, v = (
            x.gathered() if isinstance(x, ShardedValue) and x.ndim - x.shard_dim == 2 else x
            for x in (k, v)
        )
    if given.get("enable_gqa") and back == 3:
        if not isinstance(q, ShardedValue):
            return NotImplemented
        if _same_heads(q, k, v):
            return _attend(func, q, k.local, v.local, _masked(mask, q, back), given)
        # Heads of k and v that all ranks hold: each query head gets its own copy, and each rank
        # takes those of its heads.
        name = "scaled_dot_product_attention"
        k, v = (x.gather_for(name) if isinstance(x, ShardedValue) else x for x in (k, v))
        times = q.shape[-3] // k.shape[-3]
        k, v = (x.repeat_interleave(times, -3) for x in (k, v))
        given["enable_gqa"] = False
    k, v = (aligned(x, p, back, "scaled_dot_product_attention") for x in (k, v))
    q = (
        q
        if isinstance(q, ShardedValue)
        else p.like(aligned(q, p, back, "scaled_dot_product_attention"))
    )
    return _attend(func, q, k, v, _masked(mask, p, back), given)


def _same_heads(q: ShardedValue, k: Any, v: Any) -> bool:
    """Whether each rank has the heads of k and v that belong to its heads of q."""
    return all(
        isinstance(x, ShardedValue)
        and (x.groups, x.ndim - x.shard_dim, x.length % q.axis.size) == (1, 3, 0)
        for x in (q, k, v)
    )


def _masked(mask: Any, p: ShardedValue, back: int) -> Any:
    return aligned(mask, p, back, "scaled_dot_product_attention")


def _attend(
    func: Any, q: ShardedValue, k: Tensor, v: Tensor, mask: Any, rest: dict[str, Any]
) -> ShardedValue:
    if rest.get("dropout_p", 0.0) > 0:
        with q.axis.own_random(q.local.device):
            return q.like(func(q.local, k, v, mask, **rest))
    return q.like(func(q.local, k, v, mask, **rest))


# torch's own code of it, without its dispatch to __torch_function__: every line of it has a rule
inlined_multi_head = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.multi_head_attention_forward.__globals__, "has_torch_function": lambda _: False},
    "multi_head_attention_forward",
    F.multi_head_attention_forward.__defaults__,
)
inlined_multi_head.__kwdefaults__ = F.multi_head_attention_forward.__kwdefaults__


@sharding_rule("multi_head_attention_forward")
def multi_head(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p = first_sharded((*args, *kwargs.values()))
    assert p is not None
    # inside, the first dimension is the sequence and rows are merged
    sequence, p.axis.sequence = p.axis.sequence, False
    try:
        return inlined_multi_head(*args, **kwargs)
    finally:
        p.axis.sequence = sequence
