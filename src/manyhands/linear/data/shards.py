"""Row shards: a folder of binary files with sparse rows, read one after the other, out of core.

    manifest.json      columns, dtype, and for each shard: rows, non-zeros, bytes, checksum
    shard-00000.bin    indptr int64[rows + 1], labels float64[rows], values[nnz], indices int32[nnz]

    shards = write_shards("big.libsvm", "big.shards")
    for block in shards.blocks(rank, size):     # while one is computed on, the next is read
        ...

Shards are read by explicit reads into at most three buffers, not mapped: pages of a mapped file
count as resident memory until the kernel takes them back. The manifest is written last, so a folder
without one is the rest of an interrupted write.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.linear.data.blocks import DTYPES, RowBlock

MANIFEST = "manifest.json"
FORMAT = "manyhands row shards 1"
BUFFERS = 3  # the caller's, the one handed over next, and the one being read


@dataclass(frozen=True)
class ShardFile:
    """One shard: its file, its size, and the CRC-32 of its bytes."""

    file: str
    rows: int
    nonzeros: int
    nbytes: int
    crc32: int

    def needed_nbytes(self, dtype: np.dtype) -> int:
        return 8 * (2 * self.rows + 1) + self.nonzeros * (4 + dtype.itemsize)


@dataclass(frozen=True)
class RowShards:
    """Sparse rows in a folder of shards; made by `write_shards` or `RowShards.open`."""

    directory: Path
    n_features: int
    dtype: np.dtype
    shards: tuple[ShardFile, ...]
    _verified: set[int] = field(default_factory=set, repr=False, compare=False)

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> RowShards:
        """Reads the manifest and compares the files' sizes with it."""
        directory = Path(directory)
        shards = cls(directory, *_read_manifest(directory))
        for shard in shards.shards:
            path = directory / shard.file
            if not path.exists():
                raise _damaged(directory, f"{shard.file} is missing")
            if path.stat().st_size != shard.nbytes:
                raise _damaged(
                    directory,
                    f"{shard.file} has {path.stat().st_size} bytes, its manifest says "
                    f"{shard.nbytes}",
                )
        return shards

    def save(self) -> None:
        """Writes the manifest, which makes the folder complete."""
        content = {
            "format": FORMAT,
            "byte_order": sys.byteorder,
            "dtype": self.dtype.name,
            "n_rows": self.n_rows,
            "n_features": self.n_features,
            "n_nonzeros": self.n_nonzeros,
            "shards": [asdict(shard) for shard in self.shards],
        }
        partial = self.directory / f"{MANIFEST}.partial"
        with open(partial, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self.directory / MANIFEST)

    @property
    def n_rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def n_nonzeros(self) -> int:
        return sum(shard.nonzeros for shard in self.shards)

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    # -- who reads what --

    def assigned(self, rank: int = 0, size: int = 1) -> range:
        """Numbers of the shards of `rank`: consecutive ones, about equal in non-zeros."""
        if not 0 <= rank < size:
            raise ValueError(f"rank={rank} of size={size} is given; 0 <= rank < size is needed")
        if size > len(self.shards):
            raise ValueError(
                f"{self.directory} has {len(self.shards)} shards, too few for size={size} ranks; "
                "use fewer ranks, or write it anew with smaller shard_bytes"
            )
        ends = np.cumsum([shard.nonzeros for shard in self.shards])
        cuts = [0]
        for r in range(1, size):
            target = ends[-1] * r / size
            cut = int(np.searchsorted(ends, target)) + 1  # at this cut the target is reached
            if cut > 1 and ends[cut - 1] - target > target - ends[cut - 2]:
                cut -= 1
            # every rank before and after this cut gets one shard at least
            cuts.append(min(max(cut, cuts[-1] + 1), len(self.shards) - (size - r)))
        cuts.append(len(self.shards))
        return range(cuts[rank], cuts[rank + 1])

    def row_range(self, rank: int = 0, size: int = 1) -> range:
        """Numbers of the rows in the shards of `rank`."""
        mine = self.assigned(rank, size)
        first = sum(shard.rows for shard in self.shards[: mine.start])
        return range(first, first + sum(self.shards[n].rows for n in mine))

    # -- reading --

    def labels(self, rank: int = 0, size: int = 1) -> np.ndarray:
        """The labels of all rows, or of those of `rank`: 8 bytes a row."""
        mine = self.assigned(rank, size)
        labels, at = np.empty(sum(self.shards[n].rows for n in mine)), 0
        for shard in (self.shards[n] for n in mine):
            with open(self.directory / shard.file, "rb", buffering=0) as file:
                file.seek(8 * (shard.rows + 1))
                part = labels[at : at + shard.rows].view(np.uint8)
                self._read_into(file, part, shard)
            at += shard.rows
        return labels

    def blocks(
        self, rank: int = 0, size: int = 1, order: Sequence[int] | np.ndarray | None = None
    ) -> Iterator[RowBlock]:
        """The shards of `rank` as row blocks; a thread reads the next one meanwhile.

        `order` is numbers of `assigned(rank, size)`, each at most once, in the order to read them
        in. A buffer is used again when its block is no longer referred to, so a block may be kept:
        it then costs its memory. The first time a shard is read, its checksum is compared.
        """
        mine = self.assigned(rank, size)
        numbers = list(mine) if order is None else [int(n) for n in order]
        strangers = sorted(set(numbers) - set(mine))
        if strangers or len(set(numbers)) < len(numbers):
            what = f"shards {strangers} of other ranks" if strangers else "a shard twice"
            raise ValueError(
                f"order={numbers[:16]} names {what}; rank {rank} of {size} reads shards "
                f"{mine.start} to {mine.stop - 1}, each at most once"
            )
        return self._read_ahead(numbers)

    def _read_ahead(self, numbers: list[int]) -> Iterator[RowBlock]:
        if not numbers:
            return
        starts = np.cumsum([0] + [shard.rows for shard in self.shards])
        buffers = _Buffers(max(self.shards[n].nbytes for n in numbers))
        with ThreadPoolExecutor(1, "manyhands-shard-reader") as thread:
            ahead = thread.submit(self._read, numbers[0], starts, buffers)
            for following in numbers[1:]:
                block = ahead.result()
                ahead = thread.submit(self._read, following, starts, buffers)
                yield block
                del block
            yield ahead.result()

    def _read(self, number: int, starts: np.ndarray, buffers: _Buffers) -> RowBlock:
        shard = self.shards[number]
        content = buffers.take()[: shard.nbytes]
        with open(self.directory / shard.file, "rb", buffering=0) as file:
            self._read_into(file, content, shard)
        if number not in self._verified:
            if zlib.crc32(content.data) != shard.crc32:
                raise _damaged(
                    self.directory, f"the checksum of {shard.file} is not that of its manifest"
                )
            self._verified.add(number)
        ends = np.cumsum(
            [
                8 * (shard.rows + 1),
                8 * shard.rows,
                shard.nonzeros * self.dtype.itemsize,
                4 * shard.nonzeros,
            ]
        )
        return RowBlock(
            indptr=content[: ends[0]].view(np.int64),
            indices=content[ends[2] : ends[3]].view(np.int32),
            values=content[ends[1] : ends[2]].view(self.dtype),
            labels=content[ends[0] : ends[1]].view(np.float64),
            start=int(starts[number]),
            n_features=self.n_features,
        )

    def _read_into(self, file: Any, content: np.ndarray, shard: ShardFile) -> None:
        view = content.data
        while view:
            got = file.readinto(view)
            if not got:
                raise _damaged(self.directory, f"{shard.file} ends too early")
            view = view[got:]


class _Buffers:
    """Memory for shards, used again when no block refers to it any more."""

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self.held = [np.empty(nbytes, np.uint8)]
        self.unused = self._references()[0]  # of a buffer that only this list refers to

    def _references(self) -> list[int]:
        return [sys.getrefcount(buffer) for buffer in self.held]

    def take(self) -> np.ndarray:
        references = self._references()
        if self.unused in references:
            return self.held[references.index(self.unused)]
        if len(self.held) == BUFFERS:
            del self.held[0]  # its block is kept by the caller, so it is the caller's
        self.held.append(np.empty(self.nbytes, np.uint8))
        return self.held[-1]


# -- the manifest --


def _damaged(directory: Path, what: str) -> ValueError:
    return ValueError(f"row shards {directory} are damaged: {what}; remove the folder, write again")


def _read_manifest(directory: Path) -> tuple[int, np.dtype, tuple[ShardFile, ...]]:
    path = directory / MANIFEST
    if not directory.is_dir():
        raise FileNotFoundError(f"row shards {directory}: there is no such folder")
    if not path.exists():
        raise ValueError(
            f"{directory} holds no complete row shards: it has no {MANIFEST}, which is written "
            "last. If writing was interrupted, remove the folder and write again"
        )
    try:
        content = json.loads(path.read_bytes())
        known = content["format"]
        if known != FORMAT:
            raise _damaged(directory, f"its format is {known!r}, {FORMAT!r} is needed")
        if content["byte_order"] != sys.byteorder:
            raise _damaged(directory, f"its bytes are in {content['byte_order']}-endian order")
        dtype = np.dtype(content["dtype"])
        shards = tuple(ShardFile(**shard) for shard in content["shards"])
        totals = (content["n_rows"], content["n_nonzeros"])
        n_features = int(content["n_features"])
    except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as e:
        raise _damaged(directory, f"{MANIFEST} does not parse ({type(e).__name__}: {e})") from e
    counted = (sum(s.rows for s in shards), sum(s.nonzeros for s in shards))
    if not shards or dtype not in DTYPES or counted != totals:
        raise _damaged(
            directory,
            f"{MANIFEST} says {totals} rows and non-zeros of {dtype}, its shards have {counted}",
        )
    wrong = [shard.file for shard in shards if shard.nbytes != shard.needed_nbytes(dtype)]
    if wrong:
        raise _damaged(directory, f"{MANIFEST} gives {wrong[0]} a size that its rows do not have")
    return n_features, dtype, shards
