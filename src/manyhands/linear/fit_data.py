"""Fit data: rows, labels and weights of a fit, in this process or shared with other ranks.

Ranks of one host map the same memory, so there is one copy of the data however many there are. The
memory is an anonymous file of the process that calls `fit`: it goes when that process does.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from manyhands.linear.data.shards import RowShards
from manyhands.linear.passes.columns import Columns
from manyhands.linear.passes.rows import Array, BlockSource, InMemory, Rows
from manyhands.linear.shard_source import OnDisk
from manyhands.linear.spec import InColumns
from manyhands.split.data import rank_range


@dataclass
class FitData:
    """All rows: in memory by row or by column, or shards in a folder."""

    source: Rows | Columns | RowShards
    y: Array  # labels as numbers, of all rows
    c: Array  # weights of all rows

    @property
    def columns(self) -> int:
        if isinstance(self.source, Rows):
            return self.source.columns
        return self.source.count if isinstance(self.source, Columns) else self.source.n_features

    @property
    def nonzeros(self) -> int:
        if isinstance(self.source, Rows):
            return self.source.nonzeros
        if isinstance(self.source, Columns):
            return int(self.source.indptr[-1])
        return self.source.n_nonzeros

    @property
    def in_memory(self) -> bool:
        return not isinstance(self.source, RowShards)

    def part(self, rank: int, size: int, by_column: bool) -> tuple[BlockSource, Array, Array]:
        """Rows, labels and weights of one rank; all rows where columns are split."""
        source = self.source
        if isinstance(source, Columns):
            if by_column or size == 1:
                return InColumns(source), self.y, self.c
            source = next(InColumns(source).blocks())
        if isinstance(source, RowShards):
            on_disk = OnDisk(source, rank, size)
            own = slice(on_disk.first, on_disk.first + on_disk.count)
            return on_disk, self.y[own], self.c[own]
        if by_column or size == 1:
            return InMemory(source), self.y, self.c
        mine = rank_range(source.count, rank, size)
        own = slice(mine.start, mine.stop)
        return InMemory(_slice(source, own)), self.y[own], self.c[own]


def _slice(rows: Rows, own: slice) -> Rows:
    start, end = rows.indptr[own.start], rows.indptr[own.stop]
    dense = None if rows.dense is None else rows.dense[own]
    return Rows(
        rows.indptr[own.start : own.stop + 1] - start,
        rows.indices[start:end],
        rows.values[start:end],
        rows.columns,
        0,
        dense,
    )


@dataclass(frozen=True)
class SharedFitData:
    """The same as paths of mapped arrays, which another process of this host opens."""

    kind: str
    columns: int
    arrays: dict[str, tuple[str, str, tuple[int, ...]]] = field(default_factory=dict)

    def open(self) -> FitData:
        found = {
            # copy on write: as if read-only, but of the type that the loops were compiled for
            name: np.memmap(path, dtype, "c", shape=shape) if shape[0] else np.empty(shape, dtype)
            for name, (path, dtype, shape) in self.arrays.items()
        }
        y, c = np.asarray(found["y"]), np.asarray(found["c"])
        if self.kind == "shards":
            return FitData(RowShards.open(self.arrays["shards"][0]), y, c)
        a, b, v = (np.asarray(found[k]) for k in ("indptr", "indices", "values"))
        if self.kind == "columns":
            return FitData(Columns(a, b, v, len(c)), y, c)
        dense = v.reshape(-1, self.columns) if self.kind == "dense" else None
        return FitData(Rows(a, b, v, self.columns, 0, dense), y, c)


@contextlib.contextmanager
def shared(data: FitData) -> Iterator[SharedFitData]:
    """Put the arrays where other processes of this host can map them, for the time of the block."""
    source = data.source
    arrays: dict[str, Any] = {"y": data.y, "c": data.c}
    kind = "rows"
    if isinstance(source, Rows):
        kind = "rows" if source.dense is None else "dense"
        arrays |= {"indptr": source.indptr, "indices": source.indices, "values": source.values}
    elif isinstance(source, Columns):
        kind = "columns"
        arrays |= {"indptr": source.indptr, "indices": source.indices, "values": source.values}
    with contextlib.ExitStack() as stack:
        paths = {name: _written(array, stack) for name, array in arrays.items()}
        if isinstance(source, RowShards):
            kind, paths["shards"] = "shards", (str(source.directory.resolve()), "u1", (0,))
        yield SharedFitData(kind, data.columns, paths)


def _written(array: Array, stack: contextlib.ExitStack) -> tuple[str, str, tuple[int, ...]]:
    array = np.ascontiguousarray(array)
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("manyhands-linear")
        stack.callback(os.close, handle)
        path = f"/proc/{os.getpid()}/fd/{handle}"
    else:
        handle, path = tempfile.mkstemp(prefix="manyhands-linear-")
        stack.callback(os.unlink, path)
        stack.callback(os.close, handle)
    with open(handle, "wb", closefd=False) as file:
        file.write(array.reshape(-1).view(np.uint8).data if array.size else b"")
    return path, array.dtype.str, array.shape
