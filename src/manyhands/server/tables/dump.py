"""Dump and restore of a table: its content as named arrays.

ids, meta       of a sparse table: its rows' ids; push count and version of the last push
values          rows, or the vector of a dense table
state/NAME      optimizer state, and what delay compensation keeps
version         pushes applied, and the optimizer's step
erased          instead of rows, where increments are restored: ids whose rows are gone
time_base       where versions of rows are counted from (see `row_storage`)
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from manyhands.errors import StoreError
from manyhands.server.tables.dense import DenseTable
from manyhands.server.tables.sparse import SparseTable

STATE = "state/"


def state_in(content: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The state of a table's content, by its own names."""
    return {k.removeprefix(STATE): x for k, x in content.items() if k.startswith(STATE)}


def dump_table(
    table: SparseTable | DenseTable,
    more_state: Mapping[str, np.ndarray],
    slot: int | None,
    slots: int,
) -> dict[str, np.ndarray]:
    """Copies of a table's content, or of one slot of a sparse table."""
    found: dict[str, np.ndarray] = {}
    if isinstance(table, SparseTable):
        found["ids"], found["values"], state, found["meta"] = table.items(slot, slots)
    else:
        found["values"], state = table.dump()
    found |= {f"{STATE}{name}": x for name, x in (*state.items(), *more_state.items())}
    return found | {"version": np.array([table.version, table.optimizer.step], np.int64)}


def restore_table(
    table: SparseTable | DenseTable,
    content: Mapping[str, np.ndarray],
    state: Mapping[str, np.ndarray],
) -> None:
    if isinstance(table, SparseTable) and "time_base" in content and not table.rows:
        table.storage.time_base = int(content["time_base"][0])
    try:
        if isinstance(table, SparseTable) and "erased" in content:
            table.erase(np.ascontiguousarray(content["erased"]))
        elif isinstance(table, SparseTable):
            table.load(content["ids"], content["values"], state, content.get("meta"))
        else:
            table.load(content["values"], state)
    except KeyError as e:
        raise StoreError(
            f"table {table.spec.name!r}: {e} is missing in the content to restore, which has "
            f"{sorted(content)}"
        ) from e
    if "version" in content:
        table.version, table.optimizer.step = map(int, content["version"])
