"""Attention on shares of the heads."""

from __future__ import annotations

import types
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from manyhands.parallel.tensor.elementwise import aligned, first
from manyhands.parallel.tensor.sharded_value import ShardedValue, rule


@rule("scaled_dot_product_attention")
def attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = dict(zip(names, args, strict=False)) | kwargs
    q, k, v, mask = (given.pop(n, None) for n in names[:4])
    p = first((q, k, v))
    if p is None or p.ndim - p.along < 3:
        return NotImplemented
    back = p.ndim - p.along  # from the right: a batch dimension, of heads as a rule
    if p.axis.sequence:  # heads that all ranks hold, made of rows that are cut
        k, v = (
            x.gather() if isinstance(x, ShardedValue) and x.ndim - x.along == 2 else x
            for x in (k, v)
        )
    if given.get("enable_gqa") and back == 3:
        if not isinstance(q, ShardedValue):
            return NotImplemented
        # heads of k and v that all ranks hold: each query head gets its own, and each rank takes those of its heads
        times = q.shape[-3] // k.shape[-3]
        k, v = (x.repeat_interleave(times, -3) if isinstance(x, Tensor) else x for x in (k, v))
        if (
            isinstance(k, ShardedValue)
            and isinstance(v, ShardedValue)
            and (k.groups, v.groups, q.groups) == (1, 1, 1)
        ):
            if (
                q.length % q.axis.size
                or k.length % q.axis.size
                or k.length != v.length
                or k.along != q.along
            ):
                return NotImplemented
            return _attend(func, q, k.local, v.local, _masked(mask, q, back), given)
        given["enable_gqa"] = False
    k, v = (aligned(x, p, back, "scaled_dot_product_attention") for x in (k, v))
    q = (
        q
        if isinstance(q, ShardedValue)
        else p.like(aligned(q, p, back, "scaled_dot_product_attention"))
    )
    return _attend(func, q, k, v, _masked(mask, p, back), given)


def _masked(mask: Any, p: ShardedValue, back: int) -> Any:
    return aligned(mask, p, back, "scaled_dot_product_attention")


def _attend(
    func: Any, q: ShardedValue, k: Tensor, v: Tensor, mask: Any, rest: dict[str, Any]
) -> ShardedValue:
    if rest.get("dropout_p", 0.0) > 0:
        with q.axis.apart(q.local.device):
            return q.like(func(q.local, k, v, mask, **rest))
    return q.like(func(q.local, k, v, mask, **rest))


# torch's own text of it, past its question whether somebody else wants to handle the call: every line of it has a rule
opened = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.multi_head_attention_forward.__globals__, "has_torch_function": lambda _: False},
    "multi_head_attention_forward",
    F.multi_head_attention_forward.__defaults__,
)
opened.__kwdefaults__ = F.multi_head_attention_forward.__kwdefaults__


@rule("multi_head_attention_forward")
def multi_head(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p = first((*args, *kwargs.values()))
    assert p is not None
    sequence, p.axis.sequence = (
        p.axis.sequence,
        False,
    )  # inside, the first dimension is the sequence and rows are merged
    try:
        return opened(*args, **kwargs)
    finally:
        p.axis.sequence = sequence
