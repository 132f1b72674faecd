"""Saved tables: whether rows of a checkpoint fit a table of the model, with or without state."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from manyhands.core import Table
from manyhands.errors import CheckpointError
from manyhands.server.snapshots.table_reader import Arrays, TableReader
from manyhands.server.tables.dump import VALUES_ONLY

# what rows are made of, and what decides what an id without a row reads as
SAME = ("dim", "dtype", "length")


def check_saved(reader: TableReader, table: Table, drop_state: bool) -> bool:
    """Refuse saved rows that do not fit the table. Returns whether their optimizer state must be
    dropped, as `drop_state` allows where the server optimizer is another one.
    """
    saved = reader.table
    if wrong := [key for key in SAME if saved[key] != getattr(table, key)]:
        then, now = (
            ", ".join(f"{key}={value(key)}" for key in wrong)
            for value in (saved.__getitem__, lambda key: getattr(table, key))
        )
        raise CheckpointError(
            f"the checkpoint has the embedding {table.name!r} with {then}, the model has it with "
            f"{now}; resume with the same, or give it another name"
        )
    if saved["optimizer"] == table.optimizer:
        return False
    if not drop_state:
        raise CheckpointError(
            f"the checkpoint has the embedding {table.name!r} with optimizer="
            f"{saved['optimizer']!r}, the model has it with {table.optimizer!r}; resume with the "
            "same, or add table_state=drop to keep its values and start the optimizer's state anew"
        )
    return True


def without_state(reader: TableReader) -> Iterator[Arrays]:
    """Contents with rows' values only: their optimizer state starts as that of new rows."""
    for content in reader.contents():
        kept = {k: x for k, x in content.items() if not k.startswith("state/")}
        if "version" in kept:  # the new optimizer has made no step
            kept["version"] = np.array([kept["version"][0], 0], np.int64)
        yield {**kept, VALUES_ONLY: np.ones(1, np.int64)}
