"""Content of whole tables: joined from the dumps of shards, and sliced for shards to load."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from manyhands.core import Table, Tensors
from manyhands.errors import StoreError
from manyhands.server.validate import vector_of

Arrays = dict[str, np.ndarray]
COMMON = ("version", "time_base")  # of the whole table, not of its rows


def first_values(table: Table, values: Tensor | None, state: Tensors | None) -> Tensor | None:
    """The vector that a new dense table starts from, checked."""
    if table.length is None and (values is not None or state):
        raise StoreError(
            f"table {table.name!r} is sparse, so its rows are made by their first push; "
            "use restore() to give it rows"
        )
    return None if values is None else vector_of(table, values, "values")


def slice_of(table: Table, x: Tensor, span: tuple[int, int]) -> np.ndarray:
    """The slice of a dense table's values or optimizer state that one shard holds. State is as long
    as the table, or has one number for each row of `dim`, or one number in all."""
    array, length = np.ascontiguousarray(x.detach().cpu().numpy()).reshape(-1), table.length or 0
    if array.dtype == np.int64:
        return array.copy()
    if array.size == length:
        return array[span[0] : span[1]].copy()
    if array.size * table.dim == length:
        return array[span[0] // table.dim : span[1] // table.dim].copy()
    return array.copy()


def join(table: Table, shards: list[Arrays]) -> Tensors:
    """One content from the dumps of all shards: sparse rows in the order of their ids, so that it
    does not depend on the number of shards."""
    for content in shards:
        content.pop("marks", None)
    first = shards[0]
    if table.length is None:
        order = np.argsort(np.concatenate([c["ids"] for c in shards]), kind="stable")
        joined = {
            key: np.concatenate([c[key] for c in shards])[order]
            for key in first
            if key != "version"
        }
    else:  # counts are int64 and the same on all shards
        joined = {
            key: x.copy() if x.dtype == np.int64 else np.concatenate([c[key] for c in shards])
            for key, x in first.items()
        }
    joined["version"] = first["version"].copy()
    return {key: torch.from_numpy(np.ascontiguousarray(x)) for key, x in joined.items()}


def rows_of(content: Mapping[str, np.ndarray], which: np.ndarray) -> Arrays:
    """Some rows of a sparse table's content, by their numbers or a mask."""
    return {k: x if k in COMMON else np.ascontiguousarray(x[which]) for k, x in content.items()}


def arrays_of(table: Table, content: Tensors) -> Arrays:
    """What `restore` was given, checked, as arrays."""
    if "values" not in content or (table.length is None and "ids" not in content):
        raise StoreError(
            f"table {table.name!r}: restore needs values, and ids of a sparse table; "
            f"given: {sorted(content)}"
        )
    return {key: np.ascontiguousarray(x.detach().cpu().numpy()) for key, x in content.items()}
