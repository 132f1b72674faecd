"""`ShardedValue`: a value that stands for a whole tensor of which every rank of an axis holds a share of one dimension.

It is not a Tensor, but torch's functions take it and ask it what to do: so a model's own code runs unchanged on shares, with
`shape`, `size()` and `view(B, T, heads, -1)` speaking of the whole. One rule a function, in `RULES`; a function without one, or
whose rule returns NotImplemented, gets the gathered tensor: nothing is ever wrong, only slower, and `axis.gathers` counts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode

from manyhands.errors import TaskError
from manyhands.parallel.tensor import collectives
from manyhands.parallel.tensor.collectives import TensorAxis

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
RULES: dict[Any, Rule] = {}


class ShardedValue:
    """`local` is what this rank holds of the dimension `along`, which is `length` long and cut in `groups` blocks."""

    __slots__ = ("along", "axis", "groups", "lead", "length", "local", "sources")

    def __init__(self, local: Tensor, along: int, length: int, axis: TensorAxis, groups: int = 1):
        self.local, self.along, self.length, self.groups, self.axis = (
            local,
            along,
            length,
            groups,
            axis,
        )
        self.sources: frozenset[str] = (
            frozenset()
        )  # which cut parameters made it: known only while a plan is derived
        self.lead: tuple[int, ...] | None = (
            None  # the leading dimensions that a view has merged into the first one
        )

    def like(
        self,
        local: Tensor,
        along: int | None = None,
        length: int | None = None,
        groups: int | None = None,
    ) -> ShardedValue:
        return ShardedValue(
            local,
            self.along if along is None else along,
            self.length if length is None else length,
            self.axis,
            self.groups if groups is None else groups,
        )

    def whole(self, name: str) -> Tensor:
        """Gathered, because the function `name` needs it so."""
        self.axis.had_to_gather(name, self)
        return self.gather()

    def gather(self) -> Tensor:
        return collectives.gather(self.local, self.axis, self.along, self.length, self.groups)

    def same_cut(self, other: ShardedValue) -> bool:
        return (self.along, self.length, self.groups) == (other.along, other.length, other.groups)

    def scattered(self, plain: Tensor, dim: int, name: str) -> Tensor:
        """The share of a plain tensor that belongs to the local share."""
        self.axis.had_to_scatter(plain, dim, self, name)
        return collectives.scatter(plain, self.axis, dim, self.groups)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not args and "input" in kwargs:
            args, kwargs = (kwargs["input"],), {k: v for k, v in kwargs.items() if k != "input"}
        rule = RULES.get(func)
        if rule is not None and (out := rule(func, args, kwargs)) is not NotImplemented:
            return out
        return gathered(func, args, kwargs)

    # -- what speaks of the whole --

    @property
    def shape(self) -> torch.Size:
        sizes = list(self.local.shape)
        sizes[self.along] = self.length
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
        return bool(self.whole("bool"))

    def __float__(self) -> float:
        return float(self.whole("float"))

    def __int__(self) -> int:
        return int(self.whole("int"))

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        how = f" in {self.groups} groups" if self.groups > 1 else ""
        return f"ShardedValue({list(self.shape)}, dim {self.along} cut over {self.axis.size} ranks{how}, {self.dtype})"

    def __getattr__(self, name: str) -> Any:
        if name in SAME:
            return getattr(self.local, name)
        method = getattr(torch.Tensor, name, None)
        if method is None or name.startswith("__"):
            raise AttributeError(
                f"'ShardedValue' (a tensor cut over ranks) has no attribute {name!r}"
            )
        if not callable(
            method
        ):  # an attribute, such as T or data: its getter is what rules know it by
            return call(method.__get__, self)
        return lambda *args, **kwargs: call(method, self, *args, **kwargs)


# attributes and questions of which the local share has the same answer as the whole
SAME = frozenset(
    "dtype device requires_grad is_cuda is_cpu is_meta layout is_sparse is_quantized is_nested is_mps is_xpu is_xla "
    "is_floating_point is_complex is_contiguous element_size itemsize get_device grad_fn is_leaf is_inference _version "
    "new_zeros new_ones new_full new_empty new_tensor is_mkldnn names".split()
)


def call(func: Any, *args: Any, **kwargs: Any) -> Any:
    if torch._C._is_torch_function_mode_enabled() and getattr(
        _get_current_function_mode(), "watches", False
    ):
        return torch.overrides.handle_torch_function(
            func, [a for a in args if isinstance(a, ShardedValue)], *args, **kwargs
        )
    return ShardedValue.__torch_function__(func, (), args, kwargs)


def gathered(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call `func` with the whole tensors."""
    name = getattr(func, "__name__", str(func))
    changed = args[0] if args and changes(name) else kwargs.get("out")
    if isinstance(changed, ShardedValue):
        raise TaskError(
            f"{name} changes in place a tensor that tensor={changed.axis.size} cuts over ranks, in a way that shares cannot follow; "
            "write the line so that it makes a new tensor, or keep the module whole: Task(tensor={'its.name': 'replicate'})"
        )

    def whole(value: Any) -> Any:
        if isinstance(value, ShardedValue):
            return value.whole(name)
        if type(value) in (list, tuple):
            return type(value)(whole(v) for v in value)
        return value

    return func(*(whole(a) for a in args), **{k: whole(v) for k, v in kwargs.items()})


def changes(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Have the function be the rule of all of torch's functions and methods of these names."""

    def register(made: Rule) -> Rule:
        for name in names:
            found = [getattr(place, name) for place in PLACES if hasattr(place, name)]
            assert found, f"torch has no {name}"
            for func in found:
                RULES[func] = made
        return made

    return register


PLACES = (torch, torch.Tensor, torch.nn.functional, torch.special, torch._C._nn)


def norm_dim(dim: int, ndim: int) -> int:
    return dim + ndim if dim < 0 else dim


def _operators() -> None:
    T = torch.Tensor
    straight = dict(
        add=T.add, sub=T.sub, mul=T.mul, truediv=T.div, floordiv=T.floor_divide, matmul=T.matmul, mod=T.remainder, pow=T.pow,
        eq=T.eq, ne=T.ne, lt=T.lt, le=T.le, gt=T.gt, ge=T.ge, neg=T.neg, abs=T.abs, invert=T.bitwise_not, iadd=T.add_, isub=T.sub_,
        imul=T.mul_, itruediv=T.div_, radd=T.add, rmul=T.mul, rsub=torch.rsub, getitem=T.__getitem__, setitem=T.__setitem__,
        **{"and": T.bitwise_and, "or": T.bitwise_or, "xor": T.bitwise_xor},
    )  # fmt: skip
    for name, func in straight.items():
        setattr(
            ShardedValue, f"__{name}__", lambda self, *others, func=func: call(func, self, *others)
        )
    turned = {
        "rpow": torch.pow,
        "rmatmul": torch.matmul,
        "rtruediv": lambda other, self: self.reciprocal() * other,
    }
    for name, func in turned.items():
        setattr(ShardedValue, f"__{name}__", lambda self, other, func=func: func(other, self))


_operators()
