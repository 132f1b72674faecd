"""Shard writer: rows of any source into a folder of row shards, within a few shards of memory."""

from __future__ import annotations

import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.linear.data.blocks import LARGEST_INDEX, RowBlock, check_rows, value_type
from manyhands.linear.data.row_sources import row_blocks
from manyhands.linear.data.shards import RowShards, ShardFile

SHARD_BYTES = 32 << 20


def write_shards(
    source: Any,
    directory: str | os.PathLike[str],
    shard_bytes: int = SHARD_BYTES,
    dtype: Any = np.float64,
    n_features: int | None = None,
    labels: Any = None,
) -> RowShards:
    """Writes the rows of `source` (see row_sources.py) into a new folder.

    `dtype=numpy.float32` halves the values and rounds them. `n_features` is the largest index + 1
    where neither it nor the source says it. A shard has one row at least, else at most
    `shard_bytes`. When writing fails, the folder is removed.
    """
    directory, dtype = Path(directory), value_type(dtype)
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes={shard_bytes} is given; 1 or more is needed")
    if n_features is not None and not 0 < n_features <= LARGEST_INDEX:
        raise ValueError(f"n_features={n_features} is given; 1 to {LARGEST_INDEX} is needed")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(
            f"{directory} exists and is not empty; RowShards.open reads finished row shards. To "
            "write it, name another folder or remove this one"
        )
    blocks = row_blocks(source, labels, n_features, dtype)
    made = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        writer = _Writer(directory, shard_bytes, dtype, n_features)
        for block in blocks:
            writer.add(block)
        return writer.finish()
    except BaseException:
        if made:
            shutil.rmtree(directory, ignore_errors=True)
        else:  # it was empty, and stays
            for file in directory.iterdir():
                file.unlink(missing_ok=True)
        raise


class _Writer:
    def __init__(self, directory: Path, shard_bytes: int, dtype: np.dtype, n_features: int | None):
        self.directory, self.shard_bytes, self.dtype = directory, shard_bytes, dtype
        self.n_features = n_features
        self.columns = 0  # largest index + 1, or what blocks say
        self.shards: list[ShardFile] = []
        self.pieces: list[RowBlock] = []  # of the next shard
        self.nbytes = 8  # of the pieces on disk
        self.rows = 0

    def add(self, block: RowBlock) -> None:
        with np.errstate(over="ignore"):  # found by the check
            values = np.asarray(block.values).astype(self.dtype, copy=False)
        labels = np.asarray(block.labels, np.float64)
        indptr = np.asarray(block.indptr, np.int64)
        block = RowBlock(indptr, block.indices, values, labels, self.rows, block.n_features)
        limit = self.n_features if self.n_features is not None else block.n_features
        check_rows(block, "the rows to write", limit)
        indices = block.indices.astype(np.int32, copy=False)
        block = RowBlock(indptr, indices, values, labels, self.rows)
        self.columns = max(self.columns, limit or int(indices.max(initial=-1)) + 1)
        self.rows += block.rows
        ends = 16 * np.arange(block.rows + 1) + (4 + self.dtype.itemsize) * indptr
        first = 0
        while first < block.rows:
            room = ends[first] + self.shard_bytes - self.nbytes
            last = int(np.searchsorted(ends, room, "right")) - 1
            if last <= first and self.pieces:
                self.flush()
                continue
            last = max(last, first + 1)
            self.pieces.append(block.row_slice(first, last))
            self.nbytes += int(ends[last] - ends[first])
            first = last

    def flush(self) -> None:
        """Writes the pieces as one shard."""
        name = f"shard-{len(self.shards):05d}.bin"
        indptr = np.zeros(sum(piece.rows for piece in self.pieces) + 1, np.int64)
        np.cumsum(np.concatenate([np.diff(piece.indptr) for piece in self.pieces]), out=indptr[1:])
        sections = [indptr]
        sections += [piece.labels for piece in self.pieces]
        sections += [piece.values for piece in self.pieces]
        sections += [piece.indices for piece in self.pieces]
        checksum = 0
        try:
            with open(self.directory / name, "xb", buffering=0) as file:
                for section in sections:
                    view = np.ascontiguousarray(section).view(np.uint8).data
                    checksum = zlib.crc32(view, checksum)
                    while view:
                        view = view[file.write(view) :]
        except OSError as e:
            written = sum(shard.nbytes for shard in self.shards)
            raise OSError(
                e.errno,
                f"row shards could not be written to {self.directory} after "
                f"{written / 1e6:.0f} MB ({e.strerror}); the folder was removed. Free space or "
                "name a folder on another disk",
                str(self.directory / name),
            ) from e
        rows, nonzeros = len(indptr) - 1, int(indptr[-1])
        self.shards.append(ShardFile(name, rows, nonzeros, self.nbytes, checksum))
        self.pieces, self.nbytes = [], 8

    def finish(self) -> RowShards:
        if self.pieces:
            self.flush()
        if not self.shards:
            raise ValueError(f"the source has no rows, so {self.directory} is not written")
        if not self.columns:
            raise ValueError(
                "no row has a value, so the number of columns is not known; pass n_features"
            )
        shards = RowShards(self.directory, self.columns, self.dtype, tuple(self.shards))
        shards.save()
        return shards
