"""Dense table: one long vector, or the range of it that one shard stores. Not thread-safe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from manyhands.core import Table
from manyhands.errors import NotFinite, StoreError
from manyhands.server.tables.checks import check_spec, contiguous, describe
from manyhands.server.tables.gradient_kernels import finite
from manyhands.server.tables.table_optimizer import TableOptimizer

State = dict[str, np.ndarray]


class DenseTable:
    """The range [start, stop) of a dense table. `state` is its optimizer state by name; "step" is a
    single number.
    """

    def __init__(
        self,
        table: Table,
        start: int,
        stop: int,
        values: np.ndarray | None = None,
        state: Mapping[str, np.ndarray] | None = None,
        *,
        modules: Sequence[str] = (),
    ):
        check_spec(table)
        self.spec, self.start, self.stop = table, start, stop
        # every push touches every row of a dense table, and then lazy adam is adam
        self.optimizer = TableOptimizer(
            replace(table, optimizer="adam") if table.optimizer == "lazy_adam" else table, modules
        )
        self.dtype, self.version = np.dtype(table.dtype), 0
        n = stop - start
        if n % table.dim or start % table.dim:
            raise StoreError(
                f"table {table.name!r}: the range {start} to {stop} cuts rows of {table.dim}; "
                "cut between them"
            )
        self.values = np.zeros(n, self.dtype)
        first = self.optimizer.starts
        self.state: State = {
            name: np.full(n if x == "full" else n // table.dim, first.get(name, 0), self.dtype)
            for name, x in self.optimizer.state.items()
        }
        if self.optimizer.kind.counts_pushes:
            self.state["step"] = np.zeros(1, np.int64)
        if values is not None or state:
            self.load(self.values if values is None else values, state or self.state)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + sum(x.nbytes for x in self.state.values())

    def pull(self, out: np.ndarray, start: int | None = None, stop: int | None = None) -> None:
        """Copy [start, stop) of the whole table to `out`; by default this range."""
        start, stop = self.start if start is None else start, self.stop if stop is None else stop
        if not self.start <= start <= stop <= self.stop:
            raise StoreError(
                f"table {self.spec.name!r}: {start} to {stop} was asked for, "
                f"{self.start} to {self.stop} is stored here"
            )
        self._check(out, stop - start, "out")
        out[:] = self.values[start - self.start : stop - self.start]

    def prepare(self, grad: np.ndarray) -> None:
        """Refuse a gradient that is not finite."""
        self._check(grad, self.values.size, "gradient")
        if not finite(contiguous(grad)):
            bad = np.flatnonzero(~np.isfinite(grad))
            some = ", ".join(str(self.start + i) for i in bad[:5]) + ", ..." * (bad.size > 5)
            raise NotFinite(
                f"table {self.spec.name!r}: {bad.size} of {grad.size} numbers of the gradient are "
                f"not finite (at {some}); the table is unchanged: lower the learning rate or clip "
                "gradients, and look for what made them"
            )

    def apply(self, grad: np.ndarray, lr: float | None = None) -> None:
        """Run the optimizer on a gradient that was prepared."""
        self.version += 1
        self.optimizer.step += 1
        if self.optimizer.update_dense is None:
            self._apply_custom(grad, lr)
        else:
            kept = self.optimizer.state.items()
            full = [self.state[name] for name, extent in kept if extent == "full"]
            row = [self.state[name] for name, extent in kept if extent == "row"]
            none = np.empty(0, self.dtype)
            a, b, c = (*full, none, none)[0], (*full, none, none)[1], (*row, none)[0]
            p, q = self.optimizer.numbers(lr)
            dim = self.spec.dim
            self.optimizer.update_dense(self.values, contiguous(grad), a, b, c, dim, p, q)
        if self.optimizer.kind.counts_pushes:
            self.state["step"][0] = self.optimizer.step

    def _apply_custom(self, grad: np.ndarray, lr: float | None) -> None:
        dim, values = self.spec.dim, self.values.copy()
        state = {
            name: self.state[name].copy().reshape(-1, dim if extent == "full" else 1)
            for name, extent in self.optimizer.state.items()
        }
        w, g = values.reshape(-1, dim), grad.reshape(-1, dim)
        try:
            self.optimizer.custom.update(w, g, state, self.optimizer.lr(lr))
        except Exception as e:
            raise StoreError(
                f"table {self.spec.name!r}: optimizer {self.spec.optimizer!r} failed: "
                f"{type(e).__name__}: {e}; the table is unchanged"
            ) from e
        self.values[:] = values
        for name, x in state.items():
            self.state[name][:] = x.reshape(-1)

    def push(self, grad: np.ndarray, lr: float | None = None) -> None:
        self.prepare(grad)
        self.apply(grad, lr)

    def dump(self) -> tuple[np.ndarray, State]:
        return self.values.copy(), {name: x.copy() for name, x in self.state.items()}

    def load(self, values: np.ndarray, state: Mapping[str, np.ndarray]) -> None:
        self._check(values, self.values.size, "values")
        # as in torch: a momentum buffer that is given has begun
        if "begun" in self.state and "begun" not in state:
            state = {**state, "begun": np.ones_like(self.state["begun"])}
        if sorted(state) != sorted(self.state):
            raise StoreError(
                f"table {self.spec.name!r}: state {sorted(state)} was given, optimizer "
                f"{self.spec.optimizer!r} keeps {sorted(self.state)}; give those"
            )
        for name, x in state.items():
            if x.size != self.state[name].size:
                raise StoreError(
                    f"table {self.spec.name!r}: state {name!r} has {x.size} numbers, "
                    f"{self.state[name].size} are needed"
                )
        self.values[:] = values
        for name, x in state.items():
            self.state[name][:] = x.reshape(-1)
        if "step" in state and self.optimizer.kind.counts_pushes:
            self.optimizer.step = int(self.state["step"][0])

    def _check(self, x: Any, n: int, what: str) -> None:
        if (
            not isinstance(x, np.ndarray)
            or x.dtype != self.dtype
            or x.shape != (n,)
            or not x.flags.c_contiguous
        ):
            raise StoreError(
                f"table {self.spec.name!r}: {what} is {describe(x)}; "
                f"{self.dtype} of shape ({n},), contiguous, is needed"
            )
