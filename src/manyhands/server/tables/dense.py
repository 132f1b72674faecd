"""A range of one long vector: a dense table, or one shard's part of it. One thread works on it at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from manyhands.core import Table
from manyhands.errors import NotFinite, StoreError
from manyhands.server.tables import kernels as k
from manyhands.server.tables.table_optimizer import TableOptimizer, check_spec, plain

State = dict[str, np.ndarray]


class DenseTable:
    """The range [start, stop) of a dense table, and what the rule keeps of it: `state` by name, "step" a single number."""

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
        # of a dense table every row is touched by every push, and then lazy adam is adam
        self.optimizer = TableOptimizer(
            replace(table, optimizer="adam") if table.optimizer == "lazy_adam" else table, modules
        )
        self.dtype, self.version = np.dtype(table.dtype), 0
        n = stop - start
        if n % table.dim or start % table.dim:
            raise StoreError(
                f"table {table.name!r}: the range {start} to {stop} cuts rows of {table.dim}; cut between them"
            )
        self.values = np.zeros(n, self.dtype)
        self.state: State = {
            name: np.full(
                n if plane == "full" else n // table.dim,
                self.optimizer.starts.get(name, 0),
                self.dtype,
            )
            for name, plane in self.optimizer.planes.items()
        }
        if self.optimizer.rule.counts:
            self.state["step"] = np.zeros(1, np.int64)
        if values is not None or state:
            self.load(self.values if values is None else values, state or self.state)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + sum(x.nbytes for x in self.state.values())

    def pull(self, out: np.ndarray, start: int | None = None, stop: int | None = None) -> None:
        """Copy [start, stop) (of the whole table; by default all that is here) to `out`."""
        start, stop = self.start if start is None else start, self.stop if stop is None else stop
        if not self.start <= start <= stop <= self.stop:
            raise StoreError(
                f"table {self.spec.name!r}: {start} to {stop} is wanted, {self.start} to {self.stop} is here"
            )
        self._check(out, stop - start, "out")
        out[:] = self.values[start - self.start : stop - self.start]

    def prepare(self, grad: np.ndarray) -> None:
        """Refuse what is not finite."""
        self._check(grad, self.values.size, "gradient")
        if not k.finite(plain(grad)):
            bad = np.flatnonzero(~np.isfinite(grad))
            raise NotFinite(
                f"table {self.spec.name!r}: {bad.size} of {grad.size} numbers of the gradient are not finite (at "
                f"{', '.join(str(self.start + i) for i in bad[:5])}{', ...' if bad.size > 5 else ''}); the table is unchanged: lower the "
                "learning rate or clip gradients, and look for what made them"
            )

    def apply(self, grad: np.ndarray, lr: float | None = None) -> None:
        """Run the rule on what was prepared."""
        self.version += 1
        self.optimizer.step += 1
        if self.optimizer.spread is None:
            self._apply_own(grad, lr)
        else:
            full = [
                self.state[name] for name, plane in self.optimizer.planes.items() if plane == "full"
            ]
            row = [
                self.state[name] for name, plane in self.optimizer.planes.items() if plane == "row"
            ]
            none = np.empty(0, self.dtype)
            a, b, c = (*full, none, none)[0], (*full, none, none)[1], (*row, none)[0]
            p, q = self.optimizer.numbers(lr)
            self.optimizer.spread(self.values, plain(grad), a, b, c, self.spec.dim, p, q)
        if self.optimizer.rule.counts:
            self.state["step"][0] = self.optimizer.step

    def _apply_own(self, grad: np.ndarray, lr: float | None) -> None:
        widths = {
            name: self.spec.dim if plane == "full" else 1
            for name, plane in self.optimizer.planes.items()
        }
        state = {name: self.state[name].copy().reshape(-1, width) for name, width in widths.items()}
        values = self.values.copy()
        try:
            self.optimizer.own.update(
                values.reshape(-1, self.spec.dim),
                grad.reshape(-1, self.spec.dim),
                state,
                self.optimizer.lr(lr),
            )
        except Exception as e:
            raise StoreError(
                f"table {self.spec.name!r}: rule {self.spec.optimizer!r} failed: {type(e).__name__}: {e}; the table is unchanged"
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
        if (
            "begun" in self.state and "begun" not in state
        ):  # as torch has it: a momentum that is given has begun
            state = {**state, "begun": np.ones_like(self.state["begun"])}
        if sorted(state) != sorted(self.state):
            raise StoreError(
                f"table {self.spec.name!r}: state {sorted(state)} was given, rule {self.spec.optimizer!r} keeps {sorted(self.state)}; give those"
            )
        for name, x in state.items():
            if x.size != self.state[name].size:
                raise StoreError(
                    f"table {self.spec.name!r}: state {name!r} has {x.size} numbers, {self.state[name].size} are needed"
                )
        self.values[:] = values
        for name, x in state.items():
            self.state[name][:] = x.reshape(-1)
        if "step" in state and self.optimizer.rule.counts:
            self.optimizer.step = int(self.state["step"][0])

    def _check(self, x: Any, n: int, what: str) -> None:
        if (
            not isinstance(x, np.ndarray)
            or x.dtype != self.dtype
            or x.shape != (n,)
            or not x.flags.c_contiguous
        ):
            given = (
                f"{x.dtype} of shape {x.shape}" if isinstance(x, np.ndarray) else type(x).__name__
            )
            raise StoreError(
                f"table {self.spec.name!r}: {what} is {given}; {self.dtype} of shape ({n},), contiguous, is needed"
            )
