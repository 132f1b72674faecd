"""Table optimizer: a server optimizer with the options of one table, and its count of pushes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from manyhands.core import Table
from manyhands.errors import StoreError
from manyhands.server.tables.optimizers import ServerOptimizer, resolve
from manyhands.server.tables.update_kernels import kernels_of


class TableOptimizer:
    """`update_sparse` and `update_dense` are the kernels; None for a custom optimizer, which has
    `custom.update` instead.
    """

    def __init__(self, table: Table, modules: Sequence[str]):
        self.kind: ServerOptimizer = resolve(table.optimizer, modules)
        self.dtype = np.dtype(table.dtype)
        self.update_sparse: Any = None
        self.update_dense: Any = None
        given = dict(table.options)
        if self.kind.custom is None:
            self.options = self.kind.options(given, table.name)
            self.update_sparse, self.update_dense = kernels_of(self.kind.equation, table.dim)
        else:
            self.options = {"lr": given.pop("lr", self.kind.defaults["lr"])}
            try:
                self.custom = self.kind.custom(**given)
            except TypeError as e:
                raise StoreError(
                    f"table {table.name!r}: optimizer {table.optimizer!r} does not take these "
                    f"options: {e}"
                ) from e
        self.state = self.kind.state_of(self.options)
        self.starts = self.kind.starts(self.options)
        self.step = 0
        self._numbers: tuple[Sequence[float], np.ndarray, np.ndarray] = (), np.empty(0), np.empty(0)

    def lr(self, lr: float | None) -> float:
        """The learning rate of a push: its own, or where it brings none the table's."""
        return float(self.options.get("lr", 0.0) if lr is None else lr)

    def numbers(self, lr: float | None) -> tuple[np.ndarray, np.ndarray]:
        """p and q of the push that is being made (see `update_kernels`)."""
        numbers = self.kind.numbers(self.options, self.lr(lr), self.step)
        # most optimizers use the same numbers until the learning rate changes
        if numbers != self._numbers[0]:
            q = np.array((*numbers, 0.0), np.float64)
            self._numbers = numbers, q.astype(self.dtype), q
        return self._numbers[1:]
