"""Copy on write: a sparse table as it was at one moment (the cut), copied while pushes go on.

    copier     reads the rows whose last push is not after the cut, range of hashes by range
    push       before it changes such a row in a range that is not copied yet, keeps its old content
               in a side buffer, which is written to the same file

So every row of the cut is written exactly once, either way. A row that was pushed after the cut has
a later time and is not copied again. The side buffer is bounded: a push that finds it full writes
it out before it goes on. All of this happens under the shard's lock.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from manyhands.errors import StoreError
from manyhands.kernels.compile import U64, compiled
from manyhands.server.snapshots.row_pieces import (
    END,
    ROWS,
    RowPiece,
    copy_rows,
    read_piece,
    time_range,
)
from manyhands.server.tables.index_kernels import MAX_COUNT, find_rows
from manyhands.server.tables.row_kernels import NOWHERE
from manyhands.server.tables.sparse import SparseTable

SIDE_BYTES = 16 << 20  # of old rows in memory, at most
MOST_ERASED = 1 << 23  # ids that are remembered between two snapshots


@compiled
def choose_uncopied(entries, hashes, rows, entries_at, copied, oldest, newest, chosen, meta):
    """Write which rows were last pushed in [oldest, newest] and have upper hash bits >= `copied`,
    and their (count, time); returns how many.
    """
    found = 0
    for i in range(rows.size):
        if rows[i] == NOWHERE or np.int64(hashes[i] >> U64(32)) < copied:
            continue
        entry = entries[entries_at[i]]
        time = np.int64(entry >> U64(44))
        if oldest <= time and time <= newest:
            chosen[found] = i
            meta[2 * found] = np.int64((entry >> U64(32)) & U64(MAX_COUNT))
            meta[2 * found + 1] = time
            found += 1
    return found


class TableCut:
    """A sparse table at the cut: rows pushed after version `since` (-1: all) and up to now.

    `spill` writes old rows to the file; it is called under the shard's lock. Not thread-safe.
    """

    def __init__(
        self,
        table: SparseTable,
        since: int = -1,
        spill: Callable[[RowPiece], None] = lambda piece: None,
        side_bytes: int = SIDE_BYTES,
    ):
        self.table, self.since, self.version = table, since, table.version
        self.step, self.rows = table.optimizer.step, table.rows
        self.time_base = table.storage.time_base
        self.copied = 0  # upper hash bits below this are copied
        self.failure: StoreError | None = None  # why the cut can no longer be had
        self._spill, self._most = spill, side_bytes
        self._side: list[RowPiece] = []
        self.side_bytes = self.peak_bytes = 0  # now, and at most so far

    @property
    def done(self) -> bool:
        return self.copied >= END or self.failure is not None

    def begin(self) -> None:
        if self.table.storage.time_shift:
            raise StoreError(
                f"table {self.table.spec.name!r} keeps coarse times (expire_after="
                f"{self.table.spec.expire_after}): copy it at once, under the lock"
            )
        self.table.cut = self

    def end(self) -> None:
        if self.table.cut is self:
            self.table.cut = None

    def fail(self, why: str | StoreError) -> None:
        """Give up: the state of the cut can no longer be had."""
        if self.failure is None:
            name = self.table.spec.name
            said = StoreError(f"table {name!r}: {why}") if isinstance(why, str) else why
            self.failure = said
        self.side_bytes, self._side = 0, []
        self.end()

    # -- the copier --

    def next_piece(self) -> RowPiece | None:
        """The next rows of the cut; the caller goes on until `done`. None: it has failed."""
        self._check_times()
        if self.failure is not None:
            return None
        piece = read_piece(self.table, self.copied, since=self.since, until=self.version)
        self.copied = piece.stop
        return piece

    def take_side(self) -> list[RowPiece]:
        """Old rows that pushes have put aside, to be written by the caller."""
        side, self._side, self.side_bytes = self._side, [], 0
        return side

    # -- pushes and erasures --

    def keep(self, ids: np.ndarray, hashes: np.ndarray) -> None:
        """Put aside the rows of `ids` as they were at the cut, before they change."""
        self._check_times()
        oldest, newest = time_range(self.table, self.since, self.version)
        for start in range(0, ids.size, ROWS):
            part = slice(start, start + ROWS)
            if self.failure is None:
                self._keep(ids[part], hashes[part], oldest, newest)

    def _check_times(self) -> None:
        """Entries have 20 bits for a time, and times too long ago are written as the earliest one:
        then rows of the cut could no longer be told from later ones."""
        storage = self.table.storage
        if storage.time_base != self.time_base and self.version - storage.time_base < 1:
            self.fail("more than 500 000 pushes came while it was copied; use a faster disk")

    def _keep(self, ids: np.ndarray, hashes: np.ndarray, oldest: int, newest: int) -> None:
        storage, n = self.table.storage, ids.size
        rows, entries_at = np.empty(n, np.int64), np.empty(n, np.int64)
        find_rows(storage.entries, ids, hashes, rows, entries_at, False, 0)
        chosen, meta = np.empty(n, np.int64), np.empty(2 * n, np.int64)
        found = choose_uncopied(
            *(storage.entries, hashes, rows, entries_at, self.copied, oldest, newest),
            *(chosen, meta),
        )
        if not found:
            return
        which = np.unique(ids[chosen[:found]], return_index=True)[1]  # in order, each once
        chosen, meta = chosen[:found][which], meta[: 2 * found].reshape(found, 2)[which]
        times = (meta[:, 1] + storage.time_base) << storage.time_shift
        kept = copy_rows(self.table, rows[chosen])
        piece = RowPiece(ids[chosen], kept, meta[:, 0], times, 0, END)
        if self._side and self.side_bytes + piece.nbytes > self._most:
            try:
                for old in self.take_side():
                    self._spill(old)
            except StoreError as e:  # of the snapshot: the push itself is fine
                return self.fail(e)
            except OSError as e:
                return self.fail(f"its old rows cannot be written ({e})")
        self._side.append(piece)
        self.side_bytes += piece.nbytes
        self.peak_bytes = max(self.peak_bytes, self.side_bytes)


class ErasedIds:
    """Ids erased from a table, in order, so that what was erased since a snapshot can be told.

    A position is how many ids had been erased by then. When they become too many, the oldest are
    forgotten, and the next snapshot has to be a full one.
    """

    def __init__(self, most: int = MOST_ERASED):
        self._most, self._parts = most, list[np.ndarray]()
        self.first = self.position = 0  # what is remembered: [first, position)

    def add(self, ids: np.ndarray) -> None:
        self._parts.append(ids.copy())
        self.position += ids.size
        if self.position - self.first > self._most:
            self.forget(self.position)

    def since(self, position: int) -> np.ndarray | None:
        """Ids erased after a position, each once; None: not known any more."""
        if position < self.first:
            return None
        ids = np.concatenate([*self._parts, np.empty(0, np.int64)])
        return np.unique(ids[position - self.first :])

    def forget(self, position: int) -> None:
        """Forget what was erased before a position."""
        while self._parts and self.first + self._parts[0].size <= position:
            self.first += self._parts.pop(0).size
