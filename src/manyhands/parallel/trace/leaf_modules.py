"""Leaf modules: which modules a traced forward pass treats as one node, and which are alike."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from manyhands.replica.recompute import CONTAINERS

PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    range,
    torch.dtype,
    torch.layout,
    torch.memory_format,
    enum.Enum,
)


def blocks(model: nn.Module, cut: Sequence[str] = ()) -> set[str]:
    """Large leaves: the members of a ModuleList or Sequential, and modules without children."""
    return set(_leaves(model, "", set(cut), coarse=True))


def smallest(model: nn.Module, cut: Sequence[str] = ()) -> set[str]:
    """Small leaves: modules without children, and torch's own."""
    return set(_leaves(model, "", set(cut), coarse=False))


def _leaves(module: nn.Module, path: str, named: set[str], coarse: bool) -> Iterator[str]:
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        opened = any(n.startswith(below + ".") for n in named)
        own = type(child).__module__.startswith("torch.nn.")
        whole = not isinstance(child, CONTAINERS) and (
            next(child.children(), None) is None
            or own
            or (coarse and isinstance(module, CONTAINERS))
        )
        if not opened and (
            (below in named and not isinstance(child, (nn.ModuleList, nn.ModuleDict))) or whole
        ):
            yield below
        else:
            yield from _leaves(child, below, named, coarse)


def alike(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A key that is equal for leaf calls that return the same shapes.

    It compares repr, plain attributes (but for the layer's number), parameters and arguments.
    """
    plain = [
        (
            name,
            type(m),
            tuple(
                (k, repr(v))
                for k, v in vars(m).items()
                if isinstance(v, (*PLAIN, tuple)) and k != "layer_idx"
            ),
        )
        for name, m in module.named_modules()
    ]
    held = [
        (name, t.shape, t.dtype)
        for name, t in (*module.named_parameters(), *module.named_buffers())
    ]
    flat, spec = pytree.tree_flatten((args, kwargs))
    given = [
        (str(t.shape), t.dtype, t.device, t.requires_grad) if isinstance(t, Tensor) else repr(t)
        for t in flat
    ]
    return repr((type(module).__mro__[1], repr(module), plain, held, given, spec))


def put_before(
    modules: Sequence[nn.Module], called: Callable[..., Any]
) -> Iterator[tuple[nn.Module, type]]:
    """Give each module a subclass of its class whose calls go to `called`.

    Yields each module with its original class, to restore it.
    """
    done = set()
    for module in modules:
        if id(module) in done:
            continue
        done.add(id(module))
        cls = type(module)

        def call(self: nn.Module, *args: Any, _cls: Any = cls, **kwargs: Any) -> Any:
            return called(self, _cls, args, kwargs)

        module.__class__ = type(
            cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__}
        )
        yield module, cls


def is_random(name: str) -> bool:
    return any(
        word in name
        for word in (
            "rand",
            "normal",
            "bernoulli",
            "multinomial",
            "poisson",
            "dropout",
            "uniform",
            "empty",
        )
    )


def has_constants(value: Any) -> bool:
    return any(isinstance(v, (Tensor, torch.Generator)) for v in pytree.tree_leaves(value))
