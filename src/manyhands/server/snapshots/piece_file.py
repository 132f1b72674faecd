"""Piece file: a table of one shard, or what changed of it, in pieces with checksums.

    "mhtable1"                                               8 bytes
    piece*     header (kind, rows, hash range, bytes, crc32) and payload
    directory  where each piece begins; the table's spec, version, optimizer step   (JSON, a piece)
    offset of the directory, "mhtable1"                      16 bytes

    rows, aside   ids int64 | times int64 | counts int32 | rows [n, values and optimizer state]
    erased        ids int64: rows of an earlier file that are gone
    array         a part of a dense table's values or optimizer state

Pieces of kind `rows` are in the order of their hashes, so that the piece of an id can be found;
those of kind `aside` were kept by pushes and hold any. Within a piece rows are in the order of
their ids. Nothing in a file is executed, and every byte is covered by a checksum.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from manyhands.errors import CheckpointError
from manyhands.server.snapshots.row_pieces import END, RowPiece

MAGIC = b"mhtable1"
FORMAT = 1
_HEADER = struct.Struct("<4sHHIIIQI")  # piece, kind, 0, count, first hash, last hash, bytes, crc32
_CHECK = struct.Struct("<II")  # crc32 of the header, 0
_TRAILER = struct.Struct("<Q8s")
HEADER_BYTES = _HEADER.size + _CHECK.size
ROWS, ASIDE, ERASED, ARRAY, DIRECTORY = range(1, 6)
ARRAY_BYTES = 4 << 20  # of a dense table, in one piece
ERASED_IDS = 1 << 18  # in one piece


class WrittenFile(NamedTuple):
    """A file as the manifest of a checkpoint names it."""

    name: str
    nbytes: int
    sha256: str


class _Entry(NamedTuple):
    """A piece in the directory."""

    at: int
    kind: int
    size: int  # rows or numbers
    start: int
    stop: int
    nbytes: int


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


class PieceWriter:
    """Writes one file. Thread-safe: the copier and pushes write to it."""

    def __init__(self, path: Path):
        self.path = path
        self._file = path.open("xb", buffering=0)
        self._digest, self._size = hashlib.sha256(), 0
        self._directory: list[_Entry] = []
        self._lock = threading.Lock()
        self._write(MAGIC)

    def rows(self, piece: RowPiece, aside: bool = False) -> None:
        n = piece.ids.size
        if n:
            parts = (
                np.ascontiguousarray(piece.ids, "<i8"),
                np.ascontiguousarray(piece.times, "<i8"),
                np.ascontiguousarray(piece.counts, "<i4"),
                np.zeros(n % 2, "<i4"),
                np.ascontiguousarray(piece.rows),
            )
            self._piece(ASIDE if aside else ROWS, n, piece.start, piece.stop, *parts)

    def erased(self, ids: np.ndarray) -> None:
        for at in range(0, ids.size, ERASED_IDS):
            some = np.ascontiguousarray(ids[at : at + ERASED_IDS], "<i8")
            self._piece(ERASED, some.size, 0, END, some)

    def array(self, number: int, x: np.ndarray) -> None:
        """The array of this number among those that the directory describes, in parts."""
        step = max(1, ARRAY_BYTES // x.itemsize)
        for at in range(0, x.size, step):
            some = np.ascontiguousarray(x.reshape(-1)[at : at + step])
            self._piece(ARRAY, some.size, number, number + 1, some)

    def close(self, head: Mapping[str, Any]) -> WrittenFile:
        """Write the directory and sync the file."""
        with self._lock:
            at = self._size
            rows = sum(e.size for e in self._directory if e.kind in (ROWS, ASIDE))
            text = {"format": FORMAT, **head, "rows": rows, "pieces": self._directory}
        body = np.frombuffer(json.dumps(text, separators=(",", ":")).encode(), np.uint8)
        self._piece(DIRECTORY, 0, 0, END, body)
        with self._lock:
            self._write(_TRAILER.pack(at, MAGIC))
            os.fsync(self._file.fileno())
            self._file.close()
        return WrittenFile(self.path.name, self._size, self._digest.hexdigest())

    def abandon(self) -> None:
        """Close and remove a file that will not be completed."""
        with self._lock:
            self._file.close()
        self.path.unlink(missing_ok=True)

    def _piece(self, kind: int, count: int, start: int, stop: int, *parts: np.ndarray) -> None:
        views = [x.data.cast("B") for x in parts if x.size]
        nbytes, crc = sum(map(len, views)), 0
        for view in views:
            crc = zlib.crc32(view, crc)
        head = _HEADER.pack(b"mhpc", kind, 0, count, start, stop - 1, nbytes, crc)
        padding = bytes(_aligned(nbytes) - nbytes)
        with self._lock:
            self._directory.append(_Entry(self._size, kind, count, start, stop, nbytes))
            self._write(head + _CHECK.pack(zlib.crc32(head), 0))
            for view in views:
                self._write(view)
            self._write(padding)

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        self._digest.update(view)
        self._size += len(view)
        while len(view):
            view = view[self._file.write(view) :]


class PieceFile:
    """Reads one file: `head` is what its directory says of the table. Raises CheckpointError, by
    name of the file, where it is torn or damaged.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as e:
            raise self._damaged(f"it cannot be read ({e})") from e
        size = len(self._map)
        if size < len(MAGIC) + _TRAILER.size or self._map[: len(MAGIC)] != MAGIC:
            raise self._damaged("it is no table file")
        at, magic = _TRAILER.unpack(self._map[size - _TRAILER.size :])
        if magic != MAGIC or at + HEADER_BYTES > size:
            raise self._damaged("its end is missing: it was not written completely")
        kind, _, _, _, body = self._read(at)
        if kind != DIRECTORY:
            raise self._damaged("it has no directory where its end says")
        try:
            self.head: dict[str, Any] = json.loads(bytes(body))
            self.pieces = [_Entry(*entry) for entry in self.head.pop("pieces")]
        except (ValueError, TypeError, KeyError) as e:
            raise self._damaged(f"its directory cannot be read ({e})") from e
        if self.head["format"] > FORMAT:
            raise CheckpointError(
                f"table file {path} has format {self.head['format']}, this version reads up to "
                f"{FORMAT}; update manyhands"
            )

    def close(self) -> None:
        self._map.close()

    @property
    def rows(self) -> int:
        return int(self.head["rows"])

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"table file {self.path} is damaged: {why}")

    def _read(self, at: int) -> tuple[int, int, int, int, memoryview]:
        """Kind, count, hash range and payload of the piece at an offset, checked."""
        raw = self._map[at : at + HEADER_BYTES]
        if len(raw) < HEADER_BYTES or _CHECK.unpack_from(raw, _HEADER.size) != (
            zlib.crc32(raw[: _HEADER.size]),
            0,
        ):
            raise self._damaged(f"the header of the piece at byte {at} has a wrong checksum")
        _, kind, _, count, start, last, nbytes, crc = _HEADER.unpack_from(raw)
        body = memoryview(self._map)[at + HEADER_BYTES : at + HEADER_BYTES + nbytes]
        if len(body) < nbytes or zlib.crc32(body) != crc:
            raise self._damaged(f"the piece at byte {at} has a wrong checksum")
        return kind, count, start, last + 1, body

    # -- pieces --

    def erased(self) -> np.ndarray:
        """Ids whose rows of earlier files are gone."""
        found = [np.frombuffer(self._read(e.at)[4], "<i8") for e in self.pieces if e.kind == ERASED]
        return np.concatenate([*found, np.empty(0, np.int64)])

    def row_pieces(self) -> Iterator[RowPiece]:
        """The rows, piece by piece, as they come in the file; views of it."""
        for entry in self.pieces:
            if entry.kind in (ROWS, ASIDE):
                yield self.row_piece(entry)

    def row_piece(self, entry: _Entry) -> RowPiece:
        _, n, start, stop, body = self._read(entry.at)
        stride, dtype = int(self.head["stride"]), np.dtype(self.head["table"]["dtype"])
        ids, times = np.frombuffer(body, "<i8", n), np.frombuffer(body, "<i8", n, 8 * n)
        counts = np.frombuffer(body, "<i4", n, 16 * n)
        rows = np.frombuffer(body, dtype, n * stride, _aligned(20 * n)).reshape(n, stride)
        return RowPiece(ids, rows, counts, times, start, stop)

    def arrays(self) -> dict[str, np.ndarray]:
        """Values and optimizer state of a dense table."""
        found: dict[str, np.ndarray] = {}
        for number, (name, dtype) in enumerate(self.head["arrays"]):
            parts = [
                np.frombuffer(self._read(e.at)[4], dtype)
                for e in self.pieces
                if e.kind == ARRAY and e.start == number
            ]
            found[name] = np.concatenate([*parts, np.empty(0, dtype)])
        return found
