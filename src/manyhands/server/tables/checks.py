"""Checks of table specs and of the arrays that a table is given."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from manyhands.core import Table
from manyhands.errors import StoreError
from manyhands.server.tables.index_kernels import MAX_COUNT
from manyhands.server.tables.row_kernels import INITS


def check_spec(table: Table) -> None:
    def refuse(given: str, needed: str) -> StoreError:
        return StoreError(f"table {table.name!r}: {given}; {needed}")

    if table.dtype not in ("float32", "float64"):
        raise refuse(f"dtype={table.dtype!r}", "float32 or float64 is needed")
    if not isinstance(table.dim, int) or table.dim < 1:
        raise refuse(f"dim={table.dim!r}", "1 or more is needed")
    if table.init not in INITS:
        raise refuse(f"init={table.init!r}", f"one of {', '.join(INITS)} is needed")
    if not 0 <= table.scale < math.inf:
        raise refuse(f"scale={table.scale!r}", "a finite number, 0 or more, is needed")
    if not 1 <= table.admit_after <= 65535:
        raise refuse(f"admit_after={table.admit_after!r}", "1 to 65535 is needed")
    if not 0 < table.admit_share <= 1:
        raise refuse(f"admit_share={table.admit_share!r}", "more than 0 and at most 1 is needed")
    if table.expire_after is not None and table.expire_after < 1:
        raise refuse(f"expire_after={table.expire_after!r}", "1 or more, or None, is needed")
    if table.expire_count is not None and not 0 <= table.expire_count <= MAX_COUNT:
        raise refuse(
            f"expire_count={table.expire_count!r}",
            f"0 to {MAX_COUNT} is needed: pushes of a row are counted up to that",
        )


def contiguous(x: np.ndarray) -> np.ndarray:
    """`x` itself, or a copy that is contiguous, aligned and writable: kernels are compiled for such
    memory only.
    """
    return x if x.flags.carray else np.array(x, order="C")


def describe(x: Any) -> str:
    return f"{x.dtype} of shape {x.shape}" if isinstance(x, np.ndarray) else type(x).__name__
