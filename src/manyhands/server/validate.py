"""Validates arguments of Store calls (ids, rows, dtypes, shapes) and converts them to arrays."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from manyhands.core import Rows, Table, Tensors
from manyhands.errors import NotFinite, StoreError

NAMESPACE_END = "::"  # between a namespace and the name of a table, as servers know it


def check_namespace(namespace: str) -> None:
    if namespace and not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", namespace):
        raise StoreError(
            f"namespace {namespace!r}; up to 100 letters, digits and . _ - are needed, such as "
            "team-a"
        )


def unknown_table(name: str, tables: Iterable[str]) -> StoreError:
    return StoreError(
        f"table {name!r} is unknown; the store has {', '.join(map(repr, tables)) or 'none'}; "
        "create it first"
    )


def unequal_tables(rows: Rows, updates: Tensors) -> StoreError:
    return StoreError(
        f"rows name the tables {sorted(rows)}, but updates name {sorted(updates)}; "
        "give both the same"
    )


def dtype_of(table: Table) -> torch.dtype:
    return torch.float32 if table.dtype == "float32" else torch.float64


def _given(x: object) -> str:
    if not isinstance(x, Tensor):
        return type(x).__name__
    contiguous = "" if x.is_contiguous() else ", not contiguous"
    dtype = str(x.dtype).removeprefix("torch.")
    return f"{dtype} of shape {tuple(x.shape)} on {x.device}{contiguous}"


def no_ids(table: Table, ids: Tensor | None) -> None:
    if ids is not None:
        raise StoreError(
            f"table {table.name!r} is dense and is pulled and pushed as a whole; "
            "give None in place of ids"
        )


def empty_updates(table: Table, ids: Tensor | None) -> Tensor:
    """Memory for the updates of these rows."""
    shape = (table.length,) if table.length is not None else (ids_of(table, ids).size, table.dim)
    return torch.empty(shape, dtype=dtype_of(table))


def ids_of(table: Table, ids: Tensor | None) -> np.ndarray:
    if (
        not isinstance(ids, Tensor)
        or ids.dtype != torch.int64
        or ids.ndim != 1
        or ids.device.type != "cpu"
    ):
        raise StoreError(
            f"table {table.name!r}: ids are {_given(ids)}; int64 of one axis on the CPU is needed"
        )
    return ids.detach().contiguous().numpy()


def vector_of(table: Table, x: Tensor, what: str) -> Tensor:
    """Any shape with the right number of elements, as one vector over the same memory."""
    good = (
        isinstance(x, Tensor)
        and x.dtype == dtype_of(table)
        and x.numel() == table.length
        and x.device.type == "cpu"
    )
    if not good or not x.is_contiguous():
        raise StoreError(
            f"table {table.name!r}: {what}: {_given(x)}; "
            f"{table.length} contiguous {table.dtype} numbers on the CPU are needed"
        )
    return x.detach().view(-1)


def block_of(table: Table, n: int, x: Tensor, what: str) -> Tensor:
    """One row of `dim` numbers for each of `n` ids."""
    good = (
        isinstance(x, Tensor)
        and x.dtype == dtype_of(table)
        and tuple(x.shape) == (n, table.dim)
        and x.device.type == "cpu"
    )
    if not good or not x.is_contiguous():
        raise StoreError(
            f"table {table.name!r}: {what}: {_given(x)}; "
            f"contiguous {table.dtype} of shape {(n, table.dim)} on the CPU is needed"
        )
    return x.detach()


def not_finite(name: str, ids: np.ndarray | None, updates: np.ndarray) -> NotFinite:
    bad = ~np.isfinite(updates if ids is None else updates.reshape(ids.size, -1).sum(1))
    which = np.flatnonzero(bad) if ids is None else ids[bad]
    what = "elements" if ids is None else "ids"
    shown = ", ".join(map(str, which[:5].tolist())) + (", ..." if which.size > 5 else "")
    return NotFinite(
        f"table {name!r}: updates of {which.size} {what} are not finite ({what} {shown}); "
        "nothing was changed: lower the learning rate or clip gradients, and look for their cause"
    )
