"""Sharding rules of attributes, gradient hooks and memory of a tensor.

An attribute that is the same for the slice as for the whole is read from the slice. A hook on a
gradient is put on the slice, and gets a sharded value. Memory (`data_ptr`, `numpy`) is refused: it
would be that of a copy, and what is written there would be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from manyhands.parallel.tensor.sharded_value import SHARDING_RULES, ShardedValue, sharding_rule

ATTRIBUTES = (
    "is_cuda is_cpu is_meta layout is_sparse is_sparse_csr is_quantized is_nested is_mps is_xpu "
    "is_xla is_leaf is_mkldnn itemsize output_nr _version retains_grad"
).split()
METHODS = (
    "is_floating_point is_complex is_contiguous is_signed element_size get_device is_inference "
    "new_zeros new_ones new_full new_empty new_tensor is_conj is_neg"
).split()
MEMORY = (
    "data_ptr numpy __array__ untyped_storage storage _typed_storage storage_type __dlpack__ "
    "share_memory_ set_ resize_ as_strided register_post_accumulate_grad_hook __reduce_ex__"
).split()


def on_local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same for the local tensor as for the global one."""
    local = (a.local if isinstance(a, ShardedValue) else a for a in args)
    return func(*local, **kwargs)


_tensor: Any = torch.Tensor
SHARDING_RULES.update({getattr(_tensor, name).__get__: on_local for name in ATTRIBUTES})
sharding_rule(*METHODS)(on_local)


def _gradient(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad = args[0].local.grad
    return None if grad is None else args[0].like(grad)


SHARDING_RULES[_tensor.data.__get__] = lambda func, args, kwargs: args[0].like(args[0].local.data)
SHARDING_RULES[_tensor.grad.__get__] = _gradient
SHARDING_RULES[_tensor.nbytes.__get__] = lambda func, args, kwargs: (
    args[0].numel() * args[0].local.itemsize
)


@sharding_rule("retain_grad")
def retain_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    args[0].local.retain_grad()


@sharding_rule("register_hook")
def register_hook(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p: ShardedValue = args[0]
    hook: Callable[[Any], Any] = args[1] if len(args) > 1 else kwargs["hook"]

    def on_slice(grad: Any) -> Any:
        got = hook(p.like(grad))
        if isinstance(got, ShardedValue):
            return got.local
        return p.axis.shard(got, p.shard_dim, p.groups) if isinstance(got, torch.Tensor) else got

    return p.local.register_hook(on_slice)


def gradients(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.autograd.grad: the gradient of a sharded value is sharded as it is."""
    given = dict(zip(("outputs", "inputs", "grad_outputs"), args, strict=False)) | kwargs
    inputs = given.pop("inputs")
    inputs = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    local = [v.local if isinstance(v, ShardedValue) else v for v in inputs]
    rest = {k: _whole(v) for k, v in given.items()}
    outputs = rest.pop("outputs")
    seeds = rest.pop("grad_outputs", None)
    found = torch.autograd.grad(outputs, local, seeds, *args[3:], **rest)
    return tuple(
        v.like(g) if isinstance(v, ShardedValue) and g is not None else g
        for v, g in zip(inputs, found, strict=True)
    )


def _whole(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_whole(v) for v in value]
    return value.gathered() if isinstance(value, ShardedValue) else value


SHARDING_RULES[torch.autograd.grad] = gradients


def memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p: ShardedValue = next(a for a in args if isinstance(a, ShardedValue))
    p.axis.needs_memory(func.__name__, p)
    return func(*(a.gathered() if isinstance(a, ShardedValue) else a for a in args), **kwargs)


sharding_rule(*MEMORY)(memory)
