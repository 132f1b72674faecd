"""Stored rows: files and shards on disk as what a fit reads.

    a folder of row shards                        as it is, out of core
    libsvm or parquet files of up to 1 GiB        into memory
    larger ones                                   converted once to row shards in a folder beside
                                                  them, `big.libsvm.shards`, then out of core

One shard is in memory while the next is read. The folder says which files it was made of, and is
written anew where they have changed.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.linear.data.blocks import concatenate
from manyhands.linear.data.libsvm import COMPRESSED, find_files, read_libsvm
from manyhands.linear.data.parquet import parquet_files
from manyhands.linear.data.row_sources import row_blocks
from manyhands.linear.data.shard_writer import write_shards
from manyhands.linear.data.shards import MANIFEST, RowShards
from manyhands.linear.passes.rows import Array, Rows
from manyhands.observe.events import say
from manyhands.observe.text import size

IN_MEMORY_BYTES = 1 << 30  # of text, or of parquet's columns before compression
COMPRESSION = 8  # how many times larger a compressed libsvm file is taken to be
SOURCE = "source.json"  # in a folder of shards: the files it was made of
PARQUET_MARK = b"PAR1"


class OnDisk:
    """This rank's shards; `count` rows in all."""

    def __init__(self, shards: RowShards, rank: int = 0, size: int = 1):
        self.shards, self.rank, self.size = shards, rank, size
        rows = shards.row_range(rank, size)
        self.first, self.count, self.columns = rows.start, len(rows), shards.n_features
        self.nonzeros = sum(shards.shards[n].nonzeros for n in shards.assigned(rank, size))

    def blocks(self) -> Iterator[Rows]:
        for block in self.shards.blocks(self.rank, self.size):
            yield Rows(
                block.indptr, block.indices, block.values, self.columns, block.start - self.first
            )


def stored_rows(given: str | os.PathLike[str] | RowShards) -> tuple[Rows | RowShards, Array]:
    """The rows of a file, of a folder or of shards, and the labels that stand beside them."""
    if not isinstance(given, RowShards) and (Path(given) / MANIFEST).exists():
        given = RowShards.open(given)
    if isinstance(given, RowShards):
        return given, given.labels()
    files, parquet = _files(given)
    if _uncompressed_bytes(files, parquet) > IN_MEMORY_BYTES:
        shards = _converted(Path(given), files)
        return shards, shards.labels()
    if parquet:
        block = concatenate(row_blocks(given), np.float64, None)
    else:
        block = read_libsvm(given)
    columns = int(block.n_features or (block.indices.max(initial=-1) + 1))
    return Rows(block.indptr, block.indices, block.values, columns), block.labels


def _files(given: str | os.PathLike[str]) -> tuple[list[Path], bool]:
    """The files that are meant, and whether they are parquet."""
    if Path(given).is_dir():
        return parquet_files(given), True
    files = find_files(given)
    with open(files[0], "rb") as file:
        return files, file.read(len(PARQUET_MARK)) == PARQUET_MARK


def _uncompressed_bytes(files: list[Path], parquet: bool) -> int:
    if parquet:
        return sum(_parquet_bytes(file) for file in files)
    total = 0
    for path in files:
        with open(path, "rb") as file:
            head = file.read(8)
        times = COMPRESSION if head.startswith(tuple(COMPRESSED)) else 1
        total += times * path.stat().st_size
    return total


def _parquet_bytes(path: Path) -> int:
    import pyarrow.parquet

    found = pyarrow.parquet.read_metadata(path)
    return sum(found.row_group(i).total_byte_size for i in range(found.num_row_groups))


# -- conversion --


def _converted(given: Path, files: list[Path]) -> RowShards:
    """The shards beside the files; written where they are not there, or of older files."""
    folder = given.parent / f"{given.name.replace('*', '_').replace('?', '_')}.shards"
    made_of = [
        [str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files
    ]
    if _source_of(folder) == made_of:
        return RowShards.open(folder)
    nbytes = sum(file.stat().st_size for file in files)
    say(f"{given} ({size(nbytes)}) is converted to row shards in {folder}, once")
    try:
        partial = given.parent / f".{folder.name}-{secrets.token_hex(4)}"
        partial.mkdir()
    except OSError as e:
        raise OSError(
            e.errno,
            f"{given} ({size(nbytes)}) is too large to be read into memory, and row shards cannot "
            f"be written beside it ({e.strerror}); call write_shards({str(given)!r}, FOLDER) of "
            "manyhands.linear.data, and fit on FOLDER",
        ) from e
    try:
        write_shards(str(given), partial)
        _give_back_memory()
        (partial / SOURCE).write_text(json.dumps(made_of))
        return _put_in_place(partial, folder, made_of)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _give_back_memory() -> None:
    """What pyarrow keeps for its next column, once all are read."""
    if (arrow := sys.modules.get("pyarrow")) is not None:
        arrow.default_memory_pool().release_unused()


def _file_id(file: Path) -> list[Any]:
    found = file.stat()
    return [str(file.resolve()), found.st_size, found.st_mtime_ns]


def _put_in_place(partial: Path, folder: Path, made_of: list[Any]) -> RowShards:
    """Another process may have written the same meanwhile."""
    if _source_of(folder) != made_of:
        if folder.exists() and _source_of(folder) is None:
            raise FileExistsError(
                f"{folder} exists and holds no row shards of this conversion; remove it, or fit on "
                "a folder that write_shards wrote"
            )
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    return RowShards.open(folder)


def _source_of(folder: Path) -> list[Any] | None:
    """The files that a folder of shards was made of; None: it says nothing."""
    try:
        found: list[Any] = json.loads((folder / SOURCE).read_text())
        return found if (folder / MANIFEST).exists() else []
    except (OSError, ValueError):
        return None
