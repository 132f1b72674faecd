"""Pulls and updates of one table on one shard, and the checks that both fit the table."""

from __future__ import annotations

from dataclasses import asdict
from typing import NamedTuple

import numpy as np

from manyhands.core import Table
from manyhands.errors import StoreError
from manyhands.server.protocol.messages import PushMessage
from manyhands.server.tables.dense import DenseTable
from manyhands.server.tables.gradient_kernels import finite
from manyhands.server.tables.sparse import SparseTable
from manyhands.server.validate import not_finite


class TablePull(NamedTuple):
    """What to read of one table."""

    table: str
    ids: np.ndarray | None = None  # None: this shard's part of a dense table


class TableUpdate(NamedTuple):
    """What one push brings for one table."""

    table: str
    ids: np.ndarray | None
    updates: np.ndarray  # scratch: a push may change it


def check_options(push: PushMessage) -> None:
    """Refuse options of a push that contradict each other or are out of range."""
    if push.lr is not None and not 0 <= push.lr < float("inf"):
        raise StoreError(f"lr={push.lr} of a push; a finite number, 0 or more, is needed")
    if push.pending and (push.adapt or push.compensate is not None):
        raise StoreError(
            "pending with adapt or compensate: a pending push is applied together with others; "
            "leave one of them out"
        )
    if push.weight is not None and not (push.pending and 0 <= push.weight < float("inf")):
        raise StoreError(
            f"weight={push.weight}{'' if push.pending else ' without pending'}; "
            "a finite number, 0 or more, of a pending push is needed"
        )
    if push.decay is not None and (push.compensate is None or not 0 <= push.decay < 1):
        raise StoreError(f"decay={push.decay}; it belongs to compensate, and lies in [0, 1)")


def check_fits(
    table: SparseTable | DenseTable, ids: np.ndarray | None, values: np.ndarray, what: str
) -> None:
    """Refuse ids, and rows or updates, that are not of this table's kind, dtype and shape."""
    name = table.spec.name
    if isinstance(table, SparseTable):
        if ids is None:
            raise StoreError(f"table {name!r} is sparse and needs ids; given: none")
        if ids.dtype != np.int64 or ids.ndim != 1:
            raise StoreError(
                f"table {name!r}: ids are {ids.dtype} of shape {ids.shape}; "
                "int64 of one axis is needed"
            )
        shape: tuple[int, ...] = (ids.size, table.dim)
    else:
        if ids is not None:
            raise StoreError(
                f"table {name!r} is dense: it is pulled and pushed as a whole, without ids"
            )
        shape = (table.values.size,)
    if values.dtype != table.dtype or values.shape != shape:
        raise StoreError(
            f"table {name!r} {what} {values.dtype} of shape {values.shape}; "
            f"{table.dtype} of shape {shape} is needed"
        )


def check_same(old: SparseTable | DenseTable, table: Table, span: tuple[int, int] | None) -> None:
    """Refuse to create a table that exists with another spec."""
    there, new = asdict(old.spec), asdict(table)
    if changed := [key for key in there if there[key] != new[key]]:
        needed, given = (
            ", ".join(f"{key}={spec[key]!r}" for key in changed) for spec in (there, new)
        )
        raise StoreError(
            f"table {table.name!r} is there with {needed}; given: {given}; "
            "create it with the same, or choose another name"
        )
    if isinstance(old, DenseTable) and span is not None and span != (old.start, old.stop):
        raise StoreError(
            f"table {table.name!r}: the range {span} was given, but {(old.start, old.stop)} of it "
            "is stored here"
        )


def prepare_rows(table: SparseTable, ids: np.ndarray, updates: np.ndarray) -> None:
    """Sum repeated ids; refuse what is not finite, by id."""
    try:
        table.prepare(ids, updates)
    except StoreError as e:
        good = finite(updates.reshape(-1))
        raise (e if good else not_finite(table.spec.name, ids, updates)) from e
