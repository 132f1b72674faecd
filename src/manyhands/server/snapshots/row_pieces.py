"""Row pieces: the rows of a sparse table in bounded pieces, by ranges of the upper hash bits.

    piece = read_piece(table, lo)                  some thousand rows; the next begin at piece.stop
    read_piece(table, lo, since=V)                 ... of those, rows whose last push came after V
    load_piece(other, piece)                       rows, optimizer state, push counts and times

The index is nearly in the order of the hashes, so a range of hashes is a range of buckets and what
overflowed behind it. A range means the same rows after the index has grown: pieces may be read one
by one, with other pushes between them (the caller holds the shard's lock for each piece).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from manyhands.kernels.compile import U32, U64, compiled
from manyhands.server.tables.hashing import mix
from manyhands.server.tables.index_kernels import LATEST, MAX_COUNT, home_of, next_bucket
from manyhands.server.tables.row_kernels import gather
from manyhands.server.tables.sparse import SparseTable

END = 1 << 32  # of the upper 32 bits of hashes
ROWS, BYTES = 8192, 4 << 20  # of a piece, at most
SCANNED = 32  # pieces' worth of rows that are looked at, at most, for one piece of changed rows


class RowPiece(NamedTuple):
    """Copies of rows, in the order of their ids."""

    ids: np.ndarray
    rows: np.ndarray  # [n, stride]: values, then optimizer state
    counts: np.ndarray  # pushes, up to 4095
    times: np.ndarray  # version of the last push
    start: int  # upper hash bits: [start, stop)
    stop: int

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self[:4])


@compiled
def list_range(entries, seed, lo, hi, oldest, newest, ids, rows, meta):
    """Write ids, rows and (count, time) of entries whose upper hash bits lie in [lo, hi) and whose
    time lies in [oldest, newest]; returns how many there are, of which `ids.size` are written.
    """
    size, buckets, found = U64(entries.size), U64(entries.size // 8), 0
    bucket, last = home_of(U64(lo) << U64(32), buckets), home_of(U64(hi - 1) << U64(32), buckets)
    behind = False  # whether the range's own buckets are done, and only overflow can follow
    for _ in range(buckets):
        for i in range(bucket, bucket + U64(8), U64(2)):
            entry = entries[i + U64(1)]
            if U32(entry) == 0:
                break
            time = np.int64(entry >> U64(44))
            if time < oldest or time > newest:
                continue
            upper = np.int64(mix(entries[i] ^ seed) >> U64(32))
            if upper < lo or upper >= hi:
                continue
            if found < ids.size:
                ids[found] = np.int64(entries[i])
                rows[found] = np.int64(U32(entry)) - 1
                meta[2 * found] = np.int64((entry >> U64(32)) & U64(MAX_COUNT))
                meta[2 * found + 1] = time
            found += 1
        behind = behind or bucket == last
        if behind and U32(entries[bucket + U64(7)]) == 0:
            break
        bucket = next_bucket(bucket, size)
    return found


def read_piece(
    table: SparseTable,
    lo: int = 0,
    hi: int = END,
    *,
    since: int = -1,
    until: int | None = None,
    most: int | None = None,
) -> RowPiece:
    """Rows from `lo` on of [lo, hi), at most `most`, whose last push came after version `since` and
    not after `until`. Where a table's times are coarse (`time_shift`) there may be more: those that
    were pushed at about these versions.
    """
    storage = table.storage
    most = most or max(1, min(ROWS, BYTES // (table.row_bytes + 24)))
    oldest, newest = time_range(table, since, until)
    # half as many as fit: how many there are in a range varies, and a second try costs a pass;
    # where only a few of many rows have changed, go on until there are some
    step = max(1, END * most // (2 * max(1, table.rows)))
    stop = min(hi, lo + step)
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    total, at = 0, lo
    while True:
        room = most - total
        ids, rows = np.empty(room, np.int64), np.empty(room, np.int64)
        meta = np.empty(2 * room, np.int64)
        n = list_range(storage.entries, storage.seeds[0], at, stop, oldest, newest, ids, rows, meta)
        if n > room and stop - at > 1:
            if total:
                stop = at
                break
            stop = at + max(1, (stop - at) // 2)
            continue
        if n > room:  # more ids of one hash than fit: all of them
            most = total + n
            continue
        found.append((ids[:n], rows[:n], meta[: 2 * n].reshape(n, 2)))
        total += n
        if stop == hi or 4 * total > most or stop - lo > SCANNED * step:
            break
        at, stop = stop, min(hi, stop + step)
    ids, rows, meta = (np.concatenate([x[i] for x in found]) for i in range(3))
    order = np.argsort(ids)
    counts, times = meta[order, 0], (meta[order, 1] + storage.time_base) << storage.time_shift
    return RowPiece(ids[order], copy_rows(table, rows[order]), counts, times, lo, stop)


def read_pieces(
    table: SparseTable, since: int = -1, until: int | None = None
) -> Iterator[RowPiece]:
    """All rows, piece by piece; the caller holds the shard's lock during each `next`."""
    lo = 0
    while lo < END:
        piece = read_piece(table, lo, since=since, until=until)
        lo = piece.stop
        yield piece


def time_range(table: SparseTable, since: int, until: int | None) -> tuple[int, int]:
    """Versions after `since` and up to `until`, as times of entries."""
    storage = table.storage
    newest = LATEST if until is None else (until >> storage.time_shift) - storage.time_base
    return ((since + 1) >> storage.time_shift) - storage.time_base if since >= 0 else 0, newest


def copy_rows(table: SparseTable, rows: np.ndarray) -> np.ndarray:
    """Copies of rows, with their optimizer state, by their numbers in the slab."""
    out = np.empty((rows.size, table.stride), table.dtype)
    gather(table.storage.slab, rows, out.reshape(-1), table.stride, table.stride)
    return out


def load_piece(table: SparseTable, piece: RowPiece) -> None:
    """Put rows in place, without admission; rows that are there are replaced."""
    values, state = table.views(piece.rows)
    if table.optimizer.kind.counts_pushes:
        state = {**state, "step": np.full((piece.ids.size, 1), table.optimizer.step, np.int64)}
    meta = np.stack([piece.counts, piece.times], 1)
    table.load(piece.ids, np.ascontiguousarray(values), state, meta)
