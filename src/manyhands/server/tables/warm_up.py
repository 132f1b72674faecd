"""Warm-up: compile the kernels of tables, or load them from the cache, before the first request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from manyhands.core import Table
from manyhands.server.snapshots.copy_on_write import TableCut
from manyhands.server.tables.dense import DenseTable
from manyhands.server.tables.optimizers import SERVER_OPTIMIZERS
from manyhands.server.tables.sparse import SparseTable


def warm_up(dtype: str = "float32", optimizers: Sequence[str] = tuple(SERVER_OPTIMIZERS)) -> None:
    """Run everything that tables of these optimizers run, once."""
    ids = np.arange(2)
    for optimizer in optimizers:
        for dim in (1, 2):  # rows of one number have kernels of their own
            spec = Table(
                "warm up",
                dim,
                optimizer=optimizer,
                dtype=dtype,  # type: ignore[arg-type]
                admit_after=2,
                expire_count=1,
            )
            table, out = SparseTable(spec), np.zeros((2, dim), dtype)
            table.pull(ids, out)
            table.push(ids, out)
        cut = TableCut(table)
        cut.begin()
        table.push(ids, out)
        cut.next_piece()
        cut.end()
        table.load(*table.items(0))
        table.expire()
        table.storage.grow_index()
        dense = DenseTable(replace(spec, length=4), 0, 4)
        dense.push(out.reshape(-1))
