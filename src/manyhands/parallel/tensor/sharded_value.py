"""Sharded value: a global tensor of which every rank of an axis holds a slice of one dimension.

It is a `torch.Tensor` without memory of its own, so libraries take it for what it stands for:
`isinstance`, `torch.is_tensor` and einops do. torch's functions dispatch on it
(`__torch_function__`). So a model's own code runs unchanged on local tensors: `shape`, `size()` and
`view(B, T, heads, -1)` are those of the global tensor. Each function has a sharding rule in
`SHARDING_RULES`. A function without one, or whose rule returns NotImplemented, gets the gathered
tensor: the result is right, only slower, and `axis.gathers` counts it.

What passes by `__torch_function__`, code in C++ for example, arrives at `__torch_dispatch__` and is
refused: it would see a tensor without memory and without a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from manyhands.errors import TaskError
from manyhands.parallel.tensor import tensor_axis
from manyhands.parallel.tensor.tensor_axis import TensorAxis

ShardingRule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
SHARDING_RULES: dict[Any, ShardingRule] = {}


class ShardedValue(Tensor):
    """Sharded value: `local` is this rank's slice of the global tensor.

    The global tensor has `length` elements in dimension `shard_dim`, cut in `groups` blocks."""

    local: Tensor
    shard_dim: int
    length: int
    groups: int
    axis: TensorAxis
    _sizes: torch.Size  # of the global tensor
    # in a dry run: the cut parameters it comes from
    sources: frozenset[str] = frozenset()
    # the leading dimensions that a view has merged into the first one
    lead: tuple[int, ...] | None = None

    @staticmethod
    def __new__(
        cls, local: Tensor, shard_dim: int, length: int, axis: TensorAxis, groups: int = 1
    ) -> ShardedValue:
        sizes = list(local.shape)
        sizes[shard_dim] = length
        made = Tensor._make_wrapper_subclass(cls, sizes, dtype=local.dtype, device=local.device)
        made.local, made.shard_dim, made.length = local, shard_dim, length
        made.groups, made.axis, made._sizes = groups, axis, torch.Size(sizes)
        return made

    def like(
        self,
        local: Tensor,
        shard_dim: int | None = None,
        length: int | None = None,
        groups: int | None = None,
    ) -> ShardedValue:
        return ShardedValue(
            local,
            self.shard_dim if shard_dim is None else shard_dim,
            self.length if length is None else length,
            self.axis,
            self.groups if groups is None else groups,
        )

    def gather_for(self, name: str) -> Tensor:
        """The global tensor, because the function `name` has no rule for a sharded value."""
        self.axis.had_to_gather(name, self)
        return self.gathered()

    def gathered(self) -> Tensor:
        return tensor_axis.gather(self.local, self.axis, self.shard_dim, self.length, self.groups)

    def shard_of(self, plain: Tensor, dim: int, name: str) -> Tensor:
        """This rank's slice, along `dim`, of a replicated tensor that is used with this one."""
        self.axis.had_to_scatter(plain, dim, self, name)
        return tensor_axis.scatter(plain, self.axis, dim, self.groups)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not args and "input" in kwargs:
            args, kwargs = (kwargs["input"],), {k: v for k, v in kwargs.items() if k != "input"}
        rule = SHARDING_RULES.get(func)
        if rule is not None and (out := rule(func, args, kwargs)) is not NotImplemented:
            return out
        return call_gathered(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = next(v for v in (*args, *(kwargs or {}).values()) if isinstance(v, ShardedValue))
        given.axis.undispatched(str(func), given)

    # -- of the global tensor: read often, and without a dispatch --

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self._sizes

    def size(self, dim: int | None = None) -> Any:
        return self._sizes if dim is None else self._sizes[dim]

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self._sizes)

    def dim(self) -> int:
        return len(self._sizes)

    ndimension = dim

    def numel(self) -> int:
        return self._sizes.numel()

    nelement = numel

    def __len__(self) -> int:
        return self._sizes[0]

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.local.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.local.device

    @property
    def requires_grad(self) -> bool:
        return self.local.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.local.requires_grad_(value)

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        return self.local.grad_fn

    __hash__ = object.__hash__

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        how = f" in {self.groups} groups" if self.groups > 1 else ""
        cut = f"dim {self.shard_dim} cut over {self.axis.size} ranks{how}"
        return f"ShardedValue({list(self.shape)}, {cut}, {self.dtype})"


def is_plain(value: Any) -> bool:
    """Whether it is a tensor that every rank holds as a whole."""
    return isinstance(value, Tensor) and not isinstance(value, ShardedValue)


def call_gathered(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call `func` with the global tensors."""
    name = getattr(func, "__name__", str(func))
    changed = args[0] if args and is_inplace(name) else kwargs.get("out")
    if isinstance(changed, ShardedValue):
        raise TaskError(
            f"{name} changes in place a tensor that tensor={changed.axis.size} cuts over ranks"
            f"{changed.axis.where()}, and it has no sharding rule; write the line so that it makes "
            f"a new tensor, or {changed.axis.remedy()}"
        )

    def full(value: Any) -> Any:
        if isinstance(value, ShardedValue):
            return value.gather_for(name)
        if type(value) in (list, tuple):
            return type(value)(full(v) for v in value)
        if type(value) is dict:
            return {k: full(v) for k, v in value.items()}
        return value

    return func(*(full(a) for a in args), **{k: full(v) for k, v in kwargs.items()})


# assignments to attributes (x.data = y) among them
IN_PLACE = frozenset(
    "__setitem__ __set__ __delete__ __iadd__ __isub__ __imul__ __itruediv__ __idiv__ "
    "__ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__ __ilshift__ __irshift__".split()
)


def is_inplace(name: str) -> bool:
    """Whether a torch function of this name changes its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name in IN_PLACE


def sharding_rule(*names: str) -> Callable[[ShardingRule], ShardingRule]:
    """Register a sharding rule for all of torch's functions and methods of these names."""

    def register(made: ShardingRule) -> ShardingRule:
        for name in names:
            found = [getattr(space, name) for space in NAMESPACES if hasattr(space, name)]
            assert found, f"torch has no {name}"
            for func in found:
                SHARDING_RULES[func] = made
        return made

    return register


NAMESPACES = (torch, torch.Tensor, torch.nn.functional, torch.special, torch._C._nn)


def norm_dim(dim: int, ndim: int) -> int:
    return dim + ndim if dim < 0 else dim
