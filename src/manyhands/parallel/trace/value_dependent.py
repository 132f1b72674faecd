"""Leaf modules that depend on values: which shapes they return, seen by running them on numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree

from manyhands.parallel.trace.isolation import real_state
from manyhands.parallel.trace.symbolic_sizes import at_sizes


def run_with_values(
    module: nn.Module,
    cls: Any,
    args: Any,
    kwargs: Any,
    hints: dict[Any, int],
    batch: set[Any],
    real: dict[int, Tensor],
) -> Any:
    """What a leaf module returns that cannot run on tensors without values.

    It runs twice on some values: for the example's sizes (`hints`), and with one row more in the
    sizes `batch`. How the shapes differ says how they follow from the batch size."""
    runs = []
    with (
        unset_fake_temporarily(),
        torch.no_grad(),
        torch.random.fork_rng(),
        real_state(module, real),
    ):
        for more in (0, 1):
            sizes = {expr: size + more * (expr in batch) for expr, size in hints.items()}
            given = pytree.tree_map_only(Tensor, partial(_with_values, sizes=sizes), (args, kwargs))
            runs.append(pytree.tree_flatten(cls.__call__(module, *given[0], **given[1])))
    (few, spec), (many, _) = runs
    rows = next(
        size
        for t in pytree.tree_leaves((args, kwargs))
        if isinstance(t, Tensor)
        for size in t.shape[:1]
    )
    made = [
        _without_values(a, b, rows) if isinstance(a, Tensor) else a
        for a, b in zip(few, many, strict=True)
    ]
    return pytree.tree_unflatten(made, spec)


def _with_values(tensor: Tensor, sizes: dict[Any, int]) -> Tensor:
    """A tensor with some values in it, for these sizes."""
    shape = [
        int(at_sizes(s.node.expr, sizes)) if isinstance(s, torch.SymInt) else s
        for s in tensor.shape
    ]
    return (torch.randn if tensor.is_floating_point() else torch.zeros)(
        shape, dtype=tensor.dtype, device=tensor.device
    )


def _without_values(few: Tensor, many: Tensor, rows: Any) -> Tensor:
    """A tensor without values, whose shape is that of `few` for `rows`, of `many` for one more."""
    base = rows.node.hint if isinstance(rows, torch.SymInt) else rows
    sizes = [
        a if a == b else a + (b - a) * (rows - base)
        for a, b in zip(few.shape, many.shape, strict=True)
    ]
    made = torch.empty(sizes, dtype=few.dtype, device=few.device)
    return made.requires_grad_().clone() if few.is_floating_point() else made
