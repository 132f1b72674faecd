"""Sharded value: a global tensor of which every rank of an axis holds a slice of one dimension.

It is not a Tensor, but torch's functions dispatch on it (`__torch_function__`). So a model's own
code runs unchanged on local tensors: `shape`, `size()` and `view(B, T, heads, -1)` are those of
the global tensor. Each function has a sharding rule in `SHARDING_RULES`. A function without one,
or whose rule returns NotImplemented, gets the gathered tensor: the result is right, only slower,
and `axis.gathers` counts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from manyhands.errors import TaskError
from manyhands.parallel.tensor import tensor_axis
from manyhands.parallel.tensor.tensor_axis import TensorAxis

ShardingRule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
SHARDING_RULES: dict[Any, ShardingRule] = {}


class ShardedValue:
    """Sharded value: `local` is this rank's slice of the global tensor.

    The global tensor has `length` elements in dimension `shard_dim`, cut in `groups` blocks."""

    __slots__ = ("axis", "groups", "lead", "length", "local", "shard_dim", "sources")

    def __init__(
        self, local: Tensor, shard_dim: int, length: int, axis: TensorAxis, groups: int = 1
    ):
        self.local, self.shard_dim, self.length = local, shard_dim, length
        self.groups, self.axis = groups, axis
        self.sources: frozenset[str] = frozenset()  # in a dry run: the cut parameters it comes from
        # the leading dimensions that a view has merged into the first one
        self.lead: tuple[int, ...] | None = None

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
        return self.gather()

    def gather(self) -> Tensor:
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
        return gathered(func, args, kwargs)

    # -- of the global tensor --

    @property
    def shape(self) -> torch.Size:
        sizes = list(self.local.shape)
        sizes[self.shard_dim] = self.length
        return torch.Size(sizes)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    @property
    def ndim(self) -> int:
        return self.local.ndim

    def dim(self) -> int:
        return self.local.ndim

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(call(torch.Tensor.unbind, self))

    def __bool__(self) -> bool:
        return bool(self.gather_for("bool"))

    def __float__(self) -> float:
        return float(self.gather_for("float"))

    def __int__(self) -> int:
        return int(self.gather_for("int"))

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        how = f" in {self.groups} groups" if self.groups > 1 else ""
        cut = f"dim {self.shard_dim} cut over {self.axis.size} ranks{how}"
        return f"ShardedValue({list(self.shape)}, {cut}, {self.dtype})"

    def __getattr__(self, name: str) -> Any:
        if name in LOCAL_ATTRIBUTES:
            return getattr(self.local, name)
        method = getattr(torch.Tensor, name, None)
        if method is None or name.startswith("__"):
            raise AttributeError(
                f"'ShardedValue' (a tensor cut over ranks) has no attribute {name!r}"
            )
        if not callable(method):  # an attribute, such as T or data: its rule is that of its getter
            return call(method.__get__, self)
        return lambda *args, **kwargs: call(method, self, *args, **kwargs)


# attributes and methods that return the same for the local tensor as for the global one
LOCAL_ATTRIBUTES = frozenset(
    "dtype device requires_grad is_cuda is_cpu is_meta layout is_sparse is_quantized is_nested "
    "is_mps is_xpu is_xla is_floating_point is_complex is_contiguous element_size itemsize "
    "get_device grad_fn is_leaf is_inference _version new_zeros new_ones new_full new_empty "
    "new_tensor is_mkldnn names".split()
)


class ShardedValueMode(TorchFunctionMode):
    """A function mode that also sees methods and operators of sharded values."""


def call(func: Any, *args: Any, **kwargs: Any) -> Any:
    if torch._C._is_torch_function_mode_enabled() and isinstance(
        _get_current_function_mode(), ShardedValueMode
    ):
        return torch.overrides.handle_torch_function(
            func, [a for a in args if isinstance(a, ShardedValue)], *args, **kwargs
        )
    return ShardedValue.__torch_function__(func, (), args, kwargs)


def gathered(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call `func` with the global tensors."""
    name = getattr(func, "__name__", str(func))
    changed = args[0] if args and is_inplace(name) else kwargs.get("out")
    if isinstance(changed, ShardedValue):
        raise TaskError(
            f"{name} changes in place a tensor that tensor={changed.axis.size} cuts over ranks, "
            "and it has no sharding rule; write the line so that it makes a new tensor, or keep "
            "the module whole: Task(tensor={'its.name': 'replicate'})"
        )

    def full(value: Any) -> Any:
        if isinstance(value, ShardedValue):
            return value.gather_for(name)
        if type(value) in (list, tuple):
            return type(value)(full(v) for v in value)
        return value

    return func(*(full(a) for a in args), **{k: full(v) for k, v in kwargs.items()})


def is_inplace(name: str) -> bool:
    """Whether a torch function of this name changes its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"


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


def _operators() -> None:
    T = torch.Tensor
    direct = dict(
        add=T.add, sub=T.sub, mul=T.mul, truediv=T.div, floordiv=T.floor_divide, matmul=T.matmul,
        mod=T.remainder, pow=T.pow, eq=T.eq, ne=T.ne, lt=T.lt, le=T.le, gt=T.gt, ge=T.ge, neg=T.neg,
        abs=T.abs, invert=T.bitwise_not, iadd=T.add_, isub=T.sub_, imul=T.mul_, itruediv=T.div_,
        radd=T.add, rmul=T.mul, rsub=torch.rsub, getitem=T.__getitem__, setitem=T.__setitem__,
        **{"and": T.bitwise_and, "or": T.bitwise_or, "xor": T.bitwise_xor},
    )  # fmt: skip
    for name, func in direct.items():
        setattr(
            ShardedValue, f"__{name}__", lambda self, *others, func=func: call(func, self, *others)
        )
    reflected = {
        "rpow": torch.pow,
        "rmatmul": torch.matmul,
        "rtruediv": lambda other, self: self.reciprocal() * other,
    }
    for name, func in reflected.items():
        setattr(ShardedValue, f"__{name}__", lambda self, other, func=func: func(other, self))


_operators()
