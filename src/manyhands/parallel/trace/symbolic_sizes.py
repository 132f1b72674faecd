"""Symbolic sizes: numbers that follow from the sizes of a batch, and guards on those sizes.

symbolic_sizes   the symbols of one traced forward pass, and every condition on them
SizeGuard        whether a later batch satisfies those conditions
Evaluate         a number of the program, computed from the sizes of a batch

sympy and torch's symbolic shapes take half a second to import. Only runs that trace a model need
them, so they are imported where they are used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from manyhands.errors import TaskError
from manyhands.parallel.trace.program import Input, input_leaf
from manyhands.parallel.trace.source_location import caller_line

TRIES = 12  # of sizes that are chosen to violate a guard
LARGEST = 4096  # number in a guard from which sizes are chosen


@dataclass
class SizeGuard:
    """Size guard: raises where the traced program is not what the model does with a batch."""

    shapes: dict[Input, tuple[Any, ...]]
    guards: list[tuple[Any, str]]  # conditions of the model's code, and where it asked
    inside: list[tuple[Any, str]]  # conditions of torch's code inside of nodes
    plain: dict[tuple[int, int], Any]
    _seen: set[Any] = field(default_factory=set)

    def __call__(self, inputs: tuple[Any, ...]) -> None:
        given = {
            at: input_leaf(inputs, at) for at in self.shapes if inputs[at.argument] is not None
        }
        key = tuple((at, tuple(t.shape)) for at, t in given.items())
        if key in self._seen:
            return
        import sympy  # type: ignore[import-untyped]

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
                    f"input {at.argument} of the batch has shape {tuple(tensor.shape)}, but the "
                    f"model was cut into stages for ({said}); "
                    "give batches of one shape, or pad them"
                )
        # The trace has no condition on a size of 1, since torch takes 1 for a constant. Inside of a
        # node torch tests the size again when the node runs; but where it took a size for a number,
        # that number may be in a later node, and is as wrong for 1 as for any other size.
        several = {symbol: max(2, size) for symbol, size in sizes.items()}
        for guard, asked, which in [(*g, sizes) for g in self.guards] + [
            (*g, sizes if _is_number(g[0]) else several) for g in self.inside
        ]:
            if guard.free_symbols <= sizes.keys() and not at_sizes(guard, which):
                shapes = ", ".join(str(tuple(t.shape)) for t in given.values())
                raise TaskError(
                    f"for a batch of shape {shapes} the model does not do what it did when it was "
                    f"cut into stages ({guard} does not hold"
                    f"{asked and ', asked for near ' + asked}); "
                    "give batches of one shape, or pad them"
                )
        self._seen.add(key)


def _is_number(guard: Any) -> bool:
    """Whether the guard says that a size is one number."""
    import sympy

    return (
        isinstance(guard, sympy.Eq)
        and any(a.is_Symbol for a in guard.args)
        and any(a.is_Integer for a in guard.args)
    )


@dataclass(frozen=True)
class Evaluate:
    """A number by its expression, given the sizes in it."""

    expr: Any
    symbols: tuple[Any, ...]

    def __call__(self, sizes: Sequence[int]) -> Any:
        return at_sizes(self.expr, dict(zip(self.symbols, sizes, strict=True)))


def at_sizes(expr: Any, sizes: dict[Any, int]) -> Any:
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    return sympy_interp(PythonReferenceAnalysis, sizes, expr)


def symbolic_sizes() -> Any:
    """Symbols for the sizes of a batch, and the conditions that the trace relies on."""
    return _symbolic_sizes_class()()


@functools.cache
def _symbolic_sizes_class() -> type:
    import sympy
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    class SymbolicSizes(ShapeEnv):
        """Symbols for the sizes of a batch, and the conditions that the trace relies on.

        Conditions of the model's own code must hold for later batches too. torch's conditions
        inside of a node (which kernel, which strides) are tested again when the node runs: here
        they are answered for the example and noted, and they make no symbol a constant."""

        def __init__(self) -> None:
            super().__init__(
                duck_shape=False, allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True
            )
            self.hints: dict[Any, int] = {}  # the sizes of the example
            self.inside = False  # of a node
            # conditions, each with the code that called torch:
            self.here: dict[Any, str] = {}  # in the node that runs
            self.taken: dict[Any, str] = {}  # in the nodes that are written down
            # in calls that returned a number, which the model may use anywhere:
            self.needed: dict[Any, str] = {}

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
                self.here[holds] = caller_line()
            return value

        def settle(self, written: bool) -> None:
            """The call is over; `written`: as a node, so torch will test the conditions again."""
            (self.taken if written else self.needed).update(self.here)
            self.here = {}

    return SymbolicSizes


def other_sizes(
    hints: dict[Any, int], rows: set[Any], left: Callable[[], Iterable[Any]]
) -> Iterator[dict[Any, int]]:
    """Sizes other than the example's: few and many rows, other lengths, then sizes that violate
    each of the guards `left`."""
    import sympy

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
        # m > 1: torch takes a size of 1 for a constant
        near = sorted({m for a in numbers for m in (*_divisors(a), a + 1) if m > 1})
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
    """Whether all guards over these sizes hold."""
    return all(bool(at_sizes(g, sizes)) for g in guards if g.free_symbols <= sizes.keys())


def two_rows(rows: Tensor) -> Tensor:
    """A single row twice, since torch takes a size of 1 for a constant."""
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
