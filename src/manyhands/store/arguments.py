"""Arguments of `mh.Store`: lists, NumPy arrays and tensors to the tensors that stores take."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyhands.core import Table
from manyhands.errors import StoreError
from manyhands.server.tables.gradient_kernels import finite
from manyhands.server.validate import NAMESPACE_END, dtype_of, not_finite

FIELDS = tuple(field.name for field in dataclasses.fields(Table))


def table_of(name: str | Table, values: Any, given: Mapping[str, Any]) -> tuple[Table, Any]:
    """The table that `create` means, and the vector it starts from. What is no field of `Table` is
    an option of its optimizer."""
    if isinstance(name, Table):
        if given:
            raise StoreError(
                f"create(Table(...), {', '.join(given)}=...): give a Table, or a name and keywords"
            )
        table = Table(**{field: getattr(name, field) for field in FIELDS})
    else:
        fields = {key: x for key, x in given.items() if key in FIELDS}
        options = {key: x for key, x in given.items() if key not in FIELDS}
        for key, x in options.items():
            if isinstance(x, bool) or not isinstance(x, int | float | np.number):
                raise StoreError(
                    f"create({name!r}, {key}={x!r}): {key} is no field of Table "
                    f"({', '.join(FIELDS[1:])}), and options of an optimizer are numbers"
                )
        if options:
            fields["options"] = {**fields.get("options", {}), **options}
        if values is not None and "length" not in fields:
            vector = _numbers(name, values, "values")
            fields["length"] = vector.numel()
            if vector.dtype == torch.float64:
                fields.setdefault("dtype", "float64")
        table = Table(name, **fields)
    if not isinstance(table.name, str) or not table.name or NAMESPACE_END in table.name:
        raise StoreError(
            f"a table named {table.name!r}; a text without {NAMESPACE_END} is needed, which "
            "divides namespaces from names"
        )
    if values is None:
        return table, None
    return table, _numbers(table.name, values, "values").to(dtype_of(table)).reshape(-1)


def ids_from(name: str, ids: Any) -> Tensor:
    """int64 of the shape that was given; PS-Lite's unsigned keys keep their 64 bits."""
    if isinstance(ids, Tensor):
        if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
            raise _no_ids(name, f"{ids.dtype} of shape {tuple(ids.shape)}".removeprefix("torch."))
        found = ids.detach().cpu()
        array = found.numpy()
    else:
        try:
            array = np.asarray(ids)
        except (TypeError, ValueError) as e:
            raise _no_ids(name, f"{type(ids).__name__} ({e})") from e
        if array.size == 0 and isinstance(ids, list | tuple):  # which NumPy takes for floats
            array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise _no_ids(name, f"{array.dtype} of shape {array.shape}")
    wide = array.view(np.int64) if array.dtype == np.uint64 else array.astype(np.int64, copy=False)
    return torch.from_numpy(np.ascontiguousarray(wide)).reshape(array.shape)


def updates_from(table: Table, ids: Tensor | None, grads: Any) -> Tensor:
    """Finite numbers of the table's dtype, a row for each id; all of a dense table."""
    found = _numbers(table.name, grads, "gradients")
    if ids is None:
        if found.numel() != table.length:
            raise StoreError(
                f"table {table.name!r}: gradients of shape {tuple(found.shape)}; "
                f"{table.length} numbers are needed, as many as the table has"
            )
        ready = found.to(dtype_of(table)).reshape(-1).contiguous()
    else:
        shape = tuple(ids.shape)
        needed = (*shape, table.dim)
        if tuple(found.shape) != needed and not (table.dim == 1 and tuple(found.shape) == shape):
            raise StoreError(
                f"table {table.name!r}: gradients of shape {tuple(found.shape)} for ids of shape "
                f"{shape}; {needed} is needed: dim={table.dim} numbers for each id"
            )
        ready = found.to(dtype_of(table)).reshape(-1, table.dim).contiguous()
    if not finite(ready.numpy().reshape(-1)):  # here: a store may tell only at the next call
        raise not_finite(
            table.name, None if ids is None else ids.reshape(-1).numpy(), ready.numpy()
        )
    return ready


def _numbers(name: str, x: Any, what: str) -> Tensor:
    if isinstance(x, Tensor):
        found = x.detach().cpu()
        good = not found.dtype.is_complex and found.dtype != torch.bool
    else:
        try:
            array = np.asarray(x)
        except (TypeError, ValueError) as e:
            raise StoreError(f"table {name!r}: {what} are {type(x).__name__} ({e})") from e
        good = array.dtype.kind in "fiu"
        found = torch.from_numpy(np.ascontiguousarray(array)) if good else torch.empty(0)
    if not good:
        kind = str(x.dtype).removeprefix("torch.") if hasattr(x, "dtype") else type(x).__name__
        raise StoreError(
            f"table {name!r}: {what} are {kind}; real numbers are needed: a tensor, a NumPy array "
            "or a list of floats"
        )
    return found


def _no_ids(name: str, given: str) -> StoreError:
    return StoreError(
        f"table {name!r}: ids are {given}; whole numbers are needed: a list of ints, a NumPy array "
        "or a tensor of an integer dtype"
    )
