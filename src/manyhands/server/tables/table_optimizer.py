"""What both kinds of tables ask of their spec: a rule with its options, and a check that all of it can be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from manyhands.core import Table
from manyhands.errors import StoreError
from manyhands.server.tables import kernels as k
from manyhands.server.tables.optimizers import KERNELS, ServerOptimizer, resolve


class TableOptimizer:
    """A rule with the options of one table: what both kinds of tables ask for."""

    def __init__(self, table: Table, modules: Sequence[str]):
        self.rule: ServerOptimizer = resolve(table.optimizer, modules)
        self.dtype = np.dtype(table.dtype)
        given = dict(table.options)
        if self.rule.user is None:
            self.options = self.rule.options(given, table.name)
        else:
            self.options = {"lr": given.pop("lr", self.rule.defaults["lr"])}
            try:
                self.own = self.rule.user(**given)
            except TypeError as e:
                raise StoreError(
                    f"table {table.name!r}: rule {table.optimizer!r} does not take these options: {e}"
                ) from e
        self.planes = self.rule.planes(self.options)
        self.starts = self.rule.starts(self.options)
        self.step = 0
        self._numbers: tuple[Sequence[float], np.ndarray, np.ndarray] = (), np.empty(0), np.empty(0)
        none: tuple[Any, Any] = (None, None)
        self.scatter, self.spread = KERNELS[self.rule.kind] if self.rule.user is None else none

    def lr(self, lr: float | None) -> float:
        return float(self.options.get("lr", 0.0) if lr is None else lr)

    def numbers(self, lr: float | None) -> tuple[np.ndarray, np.ndarray]:
        """p and q of the push that is being made."""
        numbers = self.rule.numbers(self.options, self.lr(lr), self.step)
        if (
            numbers != self._numbers[0]
        ):  # most rules use the same ones until the learning rate changes
            q = np.array((*numbers, 0.0), np.float64)
            self._numbers = numbers, q.astype(self.dtype), q
        return self._numbers[1:]


def check_spec(table: Table) -> None:
    def refuse(given: str, needed: str) -> StoreError:
        return StoreError(f"table {table.name!r}: {given}; {needed}")

    if table.dtype not in ("float32", "float64"):
        raise refuse(f"dtype={table.dtype!r}", "float32 or float64 is needed")
    if not isinstance(table.dim, int) or table.dim < 1:
        raise refuse(f"dim={table.dim!r}", "1 or more is needed")
    if table.init not in k.INITS:
        raise refuse(f"init={table.init!r}", f"one of {', '.join(k.INITS)} is needed")
    if not 0 <= table.scale < math.inf:
        raise refuse(f"scale={table.scale!r}", "a finite number, 0 or more, is needed")
    if not 1 <= table.admit_after <= 65535:
        raise refuse(f"admit_after={table.admit_after!r}", "1 to 65535 is needed")
    if not 0 < table.admit_share <= 1:
        raise refuse(f"admit_share={table.admit_share!r}", "more than 0 and at most 1 is needed")
    if table.expire_after is not None and table.expire_after < 1:
        raise refuse(f"expire_after={table.expire_after!r}", "1 or more, or None, is needed")
    if table.expire_count is not None and not 0 <= table.expire_count <= k.MOST_COUNTED:
        raise refuse(
            f"expire_count={table.expire_count!r}",
            f"0 to {k.MOST_COUNTED} is needed: pushes of a row are counted up to that",
        )


def plain(x: np.ndarray) -> np.ndarray:
    """Itself, or a copy: kernels are compiled once, for memory that is contiguous, aligned and can be written to."""
    return x if x.flags.carray else np.array(x, order="C")
