"""Numbers that follow from the sizes of a batch, and whether a batch has sizes for which a recorded forward pass is the right one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from manyhands.errors import TaskError
from manyhands.parallel.trace.isolation import line
from manyhands.parallel.trace.program import Input, leaf


@dataclass
class SizeGuard:
    """Would a batch of these sizes take the way through the model that was written down?"""

    shapes: dict[Input, tuple[Any, ...]]
    guards: list[tuple[Any, str]]  # what must hold, and the code that asked for it
    inside: list[tuple[Any, str]]  # the same, asked by torch inside of steps
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
        # no question about a size of 1 is in what was written down, since torch takes that for a constant; inside of a step it asks anew
        several = {symbol: max(2, size) for symbol, size in sizes.items()}
        for guard, asked, which in [(*g, sizes) for g in self.guards] + [
            (*g, several) for g in self.inside
        ]:
            if guard.free_symbols <= sizes.keys() and not at_sizes(guard, which):
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
    shape = [
        int(at_sizes(s.node.expr, sizes)) if isinstance(s, torch.SymInt) else s
        for s in tensor.shape
    ]
    return (torch.randn if tensor.is_floating_point() else torch.zeros)(
        shape, dtype=tensor.dtype, device=tensor.device
    )


class Sizes(ShapeEnv):
    """Symbols for the sizes of a batch. What the model's own code asks of them must hold for later batches too. What torch asks
    inside of a step (which kernel, which strides) it asks again when the step runs: that is answered for the example, is noted, and
    makes no symbol a constant."""

    def __init__(self) -> None:
        super().__init__(
            duck_shape=False, allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True
        )
        self.hints: dict[Any, int] = {}  # the sizes of the example
        self.inside = False  # of a step
        self.here: dict[
            Any, str
        ] = {}  # what was taken to hold in the step that runs, and the code that called it
        self.taken: dict[Any, str] = {}  # in the steps that are written down
        self.needed: dict[
            Any, str
        ] = {}  # in questions that were answered with a number: it may be anywhere since

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            not self.inside
            or not orig_expr.free_symbols
            or not orig_expr.free_symbols <= self.hints.keys()
        ):
            return super().evaluate_expr(orig_expr, *args, **kwargs)
        if (static := self._maybe_evaluate_static(orig_expr)) is not None:
            return static
        value = sympy.sympify(at_sizes(orig_expr, self.hints))
        holds = (
            sympy.Eq(orig_expr, value)
            if not isinstance(value, sympy.logic.boolalg.BooleanAtom)
            else orig_expr
        )
        holds = sympy.Not(orig_expr) if value == sympy.false else holds
        if holds not in self.here and holds not in self.needed:
            self.here[holds] = line()
        return value

    def settle(self, written: bool) -> None:
        """The step is done."""
        (self.taken if written else self.needed).update(self.here)
        self.here = {}


TRIES = 12  # of sizes that are chosen so that a question is answered otherwise
LARGEST = 4096  # number in a question from which sizes are chosen


def others(
    hints: dict[Any, int], rows: set[Any], left: Callable[[], Iterable[Any]]
) -> Iterator[dict[Any, int]]:
    """Sizes other than the example's: of its rows, small and large, of the rest, then such that each of `left` does not hold."""
    n = min((hints[s] for s in rows), default=0)
    with_rows = lambda m: {s: m if s in rows and size == n else size for s, size in hints.items()}
    tried = [with_rows(m) for m in (2 * n + 3, 97, 3, 2)]
    tried += [
        {s: size if s in rows else max(2, size + more) for s, size in hints.items()}
        for more in (-1, 1)
    ]
    yield from tried
    for _ in range(TRIES):
        numbers = {int(a) for g in left() for a in g.atoms(sympy.Integer) if 0 < a <= LARGEST}
        near = sorted(
            {m for a in numbers for m in (*_divisors(a), a + 1) if m > 1}
        )  # torch takes a size of 1 for a constant
        choices = [with_rows(m) for m in near] + [
            {**hints, s: m} for s in hints if s not in rows for m in near
        ]
        sizes = next(
            (c for g in left() for c in choices if c not in tried and not hold([g], c)), None
        )
        if sizes is None:
            return
        tried.append(sizes)
        yield sizes


def _divisors(n: int) -> list[int]:
    return [m for m in range(1, n + 1) if n % m == 0]


def hold(guards: Any, sizes: dict[Any, int]) -> bool:
    return all(bool(at_sizes(g, sizes)) for g in guards if g.free_symbols <= sizes.keys())


def several(rows: Tensor) -> Tensor:
    """One row is taken twice, since torch takes a size of 1 for a constant."""
    if not rows.ndim or rows.shape[0] != 1:
        return rows
    return (
        rows.expand(2, *rows.shape[1:])
        if rows.device.type == "meta"
        else rows.repeat(2, *[1] * (rows.ndim - 1))
    )


def resized(
    example: tuple[Any, ...], shapes: dict[Input, tuple[Any, ...]], sizes: dict[Any, int]
) -> tuple[Any, ...]:
    """The example with other sizes in place of the symbols in its shapes."""
    made = []
    for i, value in enumerate(example):
        flat, spec = pytree.tree_flatten(value)
        for j, item in enumerate(flat):
            if (shape := shapes.get(Input(i, j))) is not None:
                flat[j] = item.new_zeros([sizes.get(s, s) for s in shape])
        made.append(pytree.tree_unflatten(flat, spec))
    return tuple(made)


def without_values(few: Tensor, many: Tensor, batch: Any) -> Tensor:
    """What stands for a tensor of which two are known: for the size `batch`, and for one row more."""
    base = batch.node.hint if isinstance(batch, torch.SymInt) else batch
    sizes = [
        a if a == b else a + (b - a) * (batch - base)
        for a, b in zip(few.shape, many.shape, strict=True)
    ]
    made = torch.empty(sizes, dtype=few.dtype, device=few.device)
    return made.requires_grad_().clone() if few.is_floating_point() else made
