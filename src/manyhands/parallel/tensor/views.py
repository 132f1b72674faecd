"""Sharding rules of views: which dimension is sharded after the view, and when no dimension is.

A view takes a run of old dimensions to a run of new ones. Within it the sharded dimension is G
blocks (the dimensions before it, times its groups) of m units, cut over ranks, each unit `after`
elements:

    old  [ before | groups x m | after ]
    new  [ p | groups' x m' | q ]               with p groups' = G,  m' q = m after

The new sharded dimension is the first one for which the slices of m' units of q elements are those
of m units.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import torch

from manyhands.parallel.tensor.sharded_value import (
    SHARDING_RULES,
    ShardedValue,
    norm_dim,
    sharding_rule,
)
from manyhands.parallel.tensor.tensor_axis import starts

_tensor: Any = torch.Tensor
_T = _tensor.T.__get__


def cut_after_view(p: ShardedValue, shape: tuple[int, ...]) -> tuple[int, int, int] | None:
    """(sharded dimension, its length, its groups) after a view of the global tensor as `shape`.

    None: no single dimension is sharded then."""
    return _cut_after_view(p.shape, p.shard_dim, p.groups, p.axis.size, shape)


@lru_cache(maxsize=4096)
def _cut_after_view(
    old: tuple[int, ...], shard_dim: int, num_groups: int, size: int, new: tuple[int, ...]
) -> tuple[int, int, int] | None:
    i = j = 0
    # the smallest runs of old and new dimensions with equal numbers of elements, up to the
    # sharded one
    while True:
        a, b, begin, start = old[i] if i < len(old) else 1, new[j] if j < len(new) else 1, i, j
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                if i >= len(old):
                    return None
                a, i = a * old[i], i + 1
            else:
                if j >= len(new):
                    return None
                b, j = b * new[j], j + 1
        if i > shard_dim:
            break
    j = max(j, start + 1)
    while j < len(new) and new[j] == 1:
        j += 1
    blocks, m, after = (
        prod(old[begin:shard_dim]) * num_groups,
        old[shard_dim] // num_groups,
        prod(old[shard_dim + 1 : i]),
    )
    due = [s * after for s in starts(m, size)]
    before = 1
    for k in range(start, min(j, len(new))):
        q = prod(new[k + 1 : j])
        if blocks % before == 0 and new[k] % (blocks // before) == 0:
            groups = blocks // before
            if [s * q for s in starts(new[k] // groups, size)] == due:
                return k, new[k], groups
        before *= new[k]
    return None


def apply_view(p: ShardedValue, shape: tuple[int, ...], func: Any) -> Any:
    shape = tuple(int(s) for s in shape)
    if -1 in shape:
        known = prod(s for s in shape if s != -1)
        shape = tuple(p.numel() // max(1, known) if s == -1 else s for s in shape)
    if prod(shape) != p.numel() or (found := cut_after_view(p, shape)) is None:
        p.axis.could_not_view(p, shape)
        return NotImplemented
    k, length, groups = found
    local = list(shape)
    local[k] = p.axis.local_length(length, groups)
    try:
        seen = func(p.local, local)
    except RuntimeError:  # a slice may lie in memory as the whole does not
        seen = p.local.reshape(local)
    out = p.like(seen, k, length, groups)
    if p.axis.sequence and len(shape) == 2 and p.ndim == 3 and k == 1 and p.shard_dim == 2:
        out.lead = tuple(p.shape[:2])
    return out


@sharding_rule("view", "reshape")
def view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p, shape = args[0], args[1:] or (kwargs.get("shape") or kwargs.get("size"),)
    if not isinstance(p, ShardedValue):
        return NotImplemented
    if len(shape) == 1 and isinstance(shape[0], torch.dtype):
        return (
            p.like(p.local.view(shape[0]))
            if shape[0].itemsize == p.local.element_size()
            else NotImplemented
        )
    shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    return apply_view(
        p,
        shape,
        torch.reshape if func in (torch.reshape, torch.Tensor.reshape) else torch.Tensor.view,
    )


@sharding_rule("view_as", "reshape_as")
def view_as(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[0], ShardedValue):
        return func(args[0], args[1].local.new_empty((), device="meta").expand(args[1].shape))
    return apply_view(args[0], tuple(args[1].shape), torch.reshape)


@sharding_rule("flatten")
def flatten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p = args[0]
    begin = norm_dim(args[1] if len(args) > 1 else kwargs.get("start_dim", 0), p.ndim)
    end = norm_dim(args[2] if len(args) > 2 else kwargs.get("end_dim", -1), p.ndim)
    shape = p.shape
    return apply_view(
        p, (*shape[:begin], prod(shape[begin : end + 1]), *shape[end + 1 :]), torch.reshape
    )


@sharding_rule("unflatten")
def unflatten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p, dim = args[0], args[1] if len(args) > 1 else kwargs["dim"]
    sizes = tuple(args[2] if len(args) > 2 else kwargs["sizes"])
    dim = norm_dim(dim, p.ndim)
    sizes = tuple(p.shape[dim] // -prod(sizes) if s == -1 else s for s in sizes)
    return apply_view(p, (*p.shape[:dim], *sizes, *p.shape[dim + 1 :]), torch.reshape)


@sharding_rule("transpose", "swapaxes", "swapdims")
def transpose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p = args[0]
    a, b = (norm_dim(d, p.ndim) for d in (*args[1:], *kwargs.values()))
    return p.like(func(p.local, a, b), {a: b, b: a}.get(p.shard_dim, p.shard_dim))


@sharding_rule("permute")
def permute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p, dims = args[0], args[1:] or (kwargs["dims"],)
    dims = tuple(dims[0]) if not isinstance(dims[0], int) else dims
    dims = tuple(norm_dim(d, p.ndim) for d in dims)
    return p.like(p.local.permute(dims), dims.index(p.shard_dim))


@sharding_rule("movedim", "moveaxis")
def movedim(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p = args[0]
    marked = torch.empty([2 if d == p.shard_dim else 1 for d in range(p.ndim)], device="meta")
    return p.like(
        func(p.local, *args[1:], **kwargs), list(func(marked, *args[1:], **kwargs).shape).index(2)
    )


@sharding_rule("t")
def t(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p = args[0]
    return p.like(p.local.t(), 1 - p.shard_dim if p.ndim == 2 else 0)


def _transposed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p = args[0]
    if p.ndim != 2 and func == _T:
        return p.like(p.local.permute(*range(p.ndim - 1, -1, -1)), p.ndim - 1 - p.shard_dim)
    a, b = p.ndim - 1, p.ndim - 2
    return p.like(p.local.transpose(a, b), {a: b, b: a}.get(p.shard_dim, p.shard_dim))


SHARDING_RULES[_T] = SHARDING_RULES[_tensor.mT.__get__] = _transposed


@sharding_rule("unsqueeze")
def unsqueeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p = args[0]
    dim = norm_dim(args[1] if len(args) > 1 else kwargs["dim"], p.ndim + 1)
    return p.like(p.local.unsqueeze(dim), p.shard_dim + (dim <= p.shard_dim))


@sharding_rule("squeeze")
def squeeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p, given = args[0], args[1] if len(args) > 1 else kwargs.get("dim")
    dims = (
        tuple(range(p.ndim))
        if given is None
        else given
        if isinstance(given, tuple | list)
        else (given,)
    )
    # by the global shape: a local size of 1 stays
    gone = [d for d in {norm_dim(d, p.ndim) for d in dims} if p.shape[d] == 1]
    return p.like(
        p.local.squeeze(tuple(gone)) if gone else p.local,
        p.shard_dim - sum(d < p.shard_dim for d in gone),
    )


@sharding_rule("expand")
def expand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p, given = args[0], args[1:]
    sizes = list(given[0]) if len(given) == 1 and not isinstance(given[0], int) else list(given)
    at = p.shard_dim + len(sizes) - p.ndim
    if sizes[at] not in (-1, p.length):
        return NotImplemented
    sizes[at] = -1
    return p.like(p.local.expand(sizes), at)


@sharding_rule("expand_as")
def expand_as(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p, other = args
    return (
        expand(func, (p, *other.shape), kwargs)
        if isinstance(p, ShardedValue)
        else p.expand(other.shape)
    )


@sharding_rule("repeat")
def repeat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p, given = args[0], args[1:]
    times = list(given[0]) if len(given) == 1 and not isinstance(given[0], int) else list(given)
    at = p.shard_dim + len(times) - p.ndim
    if times[at] != 1:
        return NotImplemented
    return p.like(p.local.repeat(times), at)


@sharding_rule("repeat_interleave")
def repeat_interleave(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p, times = args[0], args[1] if len(args) > 1 else kwargs.get("repeats")
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    if dim is None or not isinstance(times, int) or not isinstance(p, ShardedValue):
        return NotImplemented
    dim = norm_dim(dim, p.ndim)
    out = torch.repeat_interleave(p.local, times, dim)
    if dim != p.shard_dim:
        return p.like(out)
    if [s * times for s in starts(p.length // p.groups, p.axis.size)] != list(
        starts(p.length * times // p.groups, p.axis.size)
    ):
        return NotImplemented
    return p.like(out, length=p.length * times)


@sharding_rule("split", "chunk", "tensor_split", "split_with_sizes")
def split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p = args[0]
    how = args[1] if len(args) > 1 else next(v for k, v in kwargs.items() if k != "dim")
    dim = norm_dim(args[2] if len(args) > 2 else kwargs.get("dim", 0), p.ndim)
    if dim != p.shard_dim:
        return tuple(p.like(o) for o in func(p.local, how, dim))
    line = torch.empty(p.length, device="meta")
    sizes = [chunk.numel() for chunk in func(line, how, 0)]
    block = p.length // p.groups
    # a chunk that is not a run of whole blocks would be uneven over ranks
    if any(s % block for s in sizes):
        p.axis.could_not_split(p, len(sizes) if len(set(sizes)) == 1 else 0)
        return NotImplemented
    held = p.axis.local_length(block)
    chunks = torch.split(p.local, [s // block * held for s in sizes], dim)
    return tuple(
        p.like(o, length=s, groups=max(1, s // block)) for o, s in zip(chunks, sizes, strict=True)
    )


@sharding_rule("unbind")
def unbind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p = args[0]
    dim = norm_dim(args[1] if len(args) > 1 else kwargs.get("dim", 0), p.ndim)
    if dim == p.shard_dim:
        return NotImplemented
    return tuple(p.like(o, p.shard_dim - (dim < p.shard_dim)) for o in p.local.unbind(dim))


@sharding_rule("narrow", "select")
def narrow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p, dim = args[0], norm_dim(args[1], args[0].ndim)
    if dim == p.shard_dim or kwargs:
        return NotImplemented
    gone = func in (torch.select, torch.Tensor.select) and dim < p.shard_dim
    return p.like(func(p.local, dim, *args[2:]), p.shard_dim - gone)


@sharding_rule("__getitem__")
def getitem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p, index = args
    if not isinstance(p, ShardedValue):
        return NotImplemented
    index = index if isinstance(index, tuple) else (index,)
    if any(
        not isinstance(i, int | slice | type(None) | type(Ellipsis)) or isinstance(i, bool)
        for i in index
    ):
        return NotImplemented
    if any(i is Ellipsis for i in index):
        at = next(k for k, i in enumerate(index) if i is Ellipsis)
        named = sum(i is not None for i in index) - 1
        index = (*index[:at], *[slice(None)] * (p.ndim - named), *index[at + 1 :])
    old = new = 0
    for k, i in enumerate(index):
        if old > p.shard_dim:
            break
        if i is None:
            new += 1
            continue
        if old == p.shard_dim:
            if not isinstance(i, slice):
                return NotImplemented
            if i.indices(p.length) != (0, p.length, 1):
                return _blocks(p, index, k, new)
        old, new = old + 1, new + (not isinstance(i, int))
    shard_dim = new - 1 if old > p.shard_dim else new + p.shard_dim - old
    return p.like(p.local[index], shard_dim)


def _blocks(p: ShardedValue, index: tuple[Any, ...], at: int, shard_dim: int) -> Any:
    """x[..., :n] of a fused tensor, where that is whole blocks."""
    block = p.length // p.groups
    start, stop, step = index[at].indices(p.length)
    if step != 1 or start % block or stop % block or stop <= start or p.groups == 1:
        return NotImplemented
    held = p.axis.local_length(block)
    local = slice(start // block * held, stop // block * held)
    return p.like(
        p.local[(*index[:at], local, *index[at + 1 :])],
        shard_dim,
        stop - start,
        (stop - start) // block,
    )


@sharding_rule("__setitem__")
def setitem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p, index, value = args
    if not isinstance(p, ShardedValue) or not isinstance(value, int | float | bool):
        return NotImplemented
    item = getitem(torch.Tensor.__getitem__, (p, index), {})
    if item is NotImplemented or item.length != p.length:
        return NotImplemented
    item.local.fill_(value)
    return None
