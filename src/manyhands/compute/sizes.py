"""Numbers that follow from the sizes of a batch, and whether a batch has sizes for which a recorded forward pass is the right one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from manyhands.compute.traced import Input, leaf
from manyhands.errors import TaskError


@dataclass
class Check:
    """Would a batch of these sizes take the way through the model that was written down?"""

    shapes: dict[Input, tuple[Any, ...]]
    guards: list[tuple[Any, str]]  # what must hold, and the code that asked for it
    plain: dict[tuple[int, int], Any]
    _seen: set[Any] = field(default_factory=set)

    def __call__(self, inputs: tuple[Any, ...]) -> None:
        given = {at: leaf(inputs, at) for at in self.shapes if inputs[at.argument] is not None}
        key = tuple((at, tuple(t.shape)) for at, t in given.items())
        if key in self._seen:
            return
        sizes: dict[Any, int] = {}
        for at, tensor in given.items():
            shape = self.shapes[at]
            fits = len(shape) == tensor.ndim
            for want, size in zip(shape, tensor.shape, strict=False):
                fits = fits and (isinstance(want, sympy.Symbol) or int(want) == size)
                if isinstance(want, sympy.Symbol):
                    sizes[want] = size
            if not fits:
                said = ", ".join("any" if isinstance(s, sympy.Symbol) else str(s) for s in shape)
                raise TaskError(
                    f"input {at.argument} of the batch has shape {tuple(tensor.shape)}, but the model was cut into stages for ({said}); "
                    "give batches of one shape, or pad them"
                )
        for guard, asked in self.guards:
            if guard.free_symbols <= sizes.keys() and not at_sizes(guard, sizes):
                shapes = ", ".join(str(tuple(t.shape)) for t in given.values())
                raise TaskError(
                    f"for a batch of shape {shapes} the model does not do what it did when it was cut into stages "
                    f"({guard} does not hold{asked and ', asked for near ' + asked}); give batches of one shape, or pad them"
                )
        self._seen.add(key)


@dataclass(frozen=True)
class Evaluate:
    """A number by its expression, given the sizes in it."""

    expr: Any
    symbols: tuple[Any, ...]

    def __call__(self, sizes: Sequence[int]) -> Any:
        return at_sizes(self.expr, dict(zip(self.symbols, sizes, strict=True)))


def at_sizes(expr: Any, sizes: dict[Any, int]) -> Any:
    return sympy_interp(PythonReferenceAnalysis, sizes, expr)


def with_values(tensor: Tensor, sizes: dict[Any, int]) -> Tensor:
    """A tensor with some values in it, for these sizes."""
    shape = [int(at_sizes(s.node.expr, sizes)) if isinstance(s, torch.SymInt) else s for s in tensor.shape]
    return (torch.randn if tensor.is_floating_point() else torch.zeros)(shape, dtype=tensor.dtype, device=tensor.device)
