"""Tables of a shard: creates and lists them, deletes rows and drops tables, each exactly once.

A deletion is numbered as pushes are, so a request that comes again after a broken connection finds
its mark (`dedup`); the answer that it got, or would have got, is kept until the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from manyhands.core import Table
from manyhands.errors import StoreError
from manyhands.server.protocol.table_messages import ANYBODY, StoredPart
from manyhands.server.table_updates import check_same
from manyhands.server.tables.dense import DenseTable
from manyhands.server.tables.sparse import SparseTable
from manyhands.server.validate import unknown_table

if TYPE_CHECKING:
    from manyhands.server.counters import ShardCounters
    from manyhands.server.dedup import DedupMarks
    from manyhands.server.pending import PendingPushes
    from manyhands.server.tables.delay_compensation import DelayCompensation


class ShardTables:
    """The part of a `Shard` that is about whole tables and deletions; it uses the shard's state."""

    lock: threading.Lock
    contents: dict[str, SparseTable | DenseTable]
    dedup: DedupMarks
    pending: PendingPushes
    pulled: dict[tuple[int, str], int]
    compensation: DelayCompensation
    memory_bytes: int | None
    modules: tuple[str, ...]
    _counters: ShardCounters
    _warned: set[str]

    def __init__(self) -> None:
        self.drops = 0  # tables that were dropped: what is known of layouts may be wrong since
        # worker -> incarnation and sequence of its last deletion, and the answer
        self._deleted: dict[int, tuple[int, int, int]] = {}

    def create(
        self,
        table: Table,
        span: tuple[int, int] | None = None,
        values: np.ndarray | None = None,
        state: Mapping[str, np.ndarray] | None = None,
    ) -> bool:
        """Create a table, or refuse one that exists with another spec; False: it was there.

        `span` is the range of a dense table that is stored here; `values` and `state` (zeros where
        None) are what it starts from, by the names that `dump` uses.
        """
        with self.lock:
            old = self.contents.get(table.name)
            if old is not None:
                check_same(old, table, span)
            elif table.length is None:
                self.contents[table.name] = SparseTable(
                    table, self.memory_bytes, modules=self.modules
                )
            else:
                start, stop = span if span is not None else (0, table.length)
                own = self.compensation.take_state(table.name, state or {})
                self.contents[table.name] = DenseTable(
                    table, start, stop, values, own, modules=self.modules
                )
            return old is None

    def spec(self, name: str) -> Table:
        with self.lock:
            return self.table(name).spec

    def layout(self, name: str) -> tuple[Table, int]:
        """Spec of a table, and how many elements of a dense one are stored here."""
        with self.lock:
            table = self.table(name)
            return table.spec, table.values.size if isinstance(table, DenseTable) else 0

    def tables(self) -> list[str]:
        with self.lock:
            return list(self.contents)

    def table(self, name: str) -> SparseTable | DenseTable:
        if name not in self.contents:
            raise unknown_table(name, self.contents)
        return self.contents[name]

    def stored(self, name: str | None = None) -> list[StoredPart]:
        """All tables, or that of one name, with what of them is stored here."""
        with self.lock:
            return [
                StoredPart(t.spec, t.rows, t.nbytes)
                if isinstance(t, SparseTable)
                else StoredPart(t.spec, t.values.size, t.nbytes)
                for t in self.contents.values()
                if name in (None, t.spec.name)
            ]

    # -- deletions --

    def delete_rows(
        self, worker: int, incarnation: int, sequence: int, name: str, ids: np.ndarray
    ) -> int:
        """Delete rows with their optimizer state; returns how many there were. The next push of
        such an id makes its row anew."""
        with self.lock:
            if not self.dedup.fresh(worker, incarnation, sequence):
                return self._answer_again(worker, incarnation, sequence)
            table = self.table(name)
            if not isinstance(table, SparseTable):
                raise StoreError(f"table {name!r} is dense: it has no rows to delete; drop it")
            gone = table.erase(np.ascontiguousarray(ids))
            self._counters.add("deleted_rows", gone)
            return self._mark(worker, incarnation, sequence, gone)

    def drop(self, worker: int, incarnation: int, sequence: int, name: str) -> int:
        """Delete a table with all that was kept for it; returns 1, or 0 where there was none."""
        with self.lock:
            counted = worker != ANYBODY
            if counted and not self.dedup.fresh(worker, incarnation, sequence):
                return self._answer_again(worker, incarnation, sequence)
            there = self.contents.pop(name, None) is not None
            self.drops += 1
            self.pending.forget(name)
            self.compensation.forget(name)
            self._counters.forget(name)
            self._warned.discard(name)
            for key in [key for key in self.pulled if key[1] == name]:
                del self.pulled[key]
            return self._mark(worker, incarnation, sequence, int(there)) if counted else int(there)

    def _mark(self, worker: int, incarnation: int, sequence: int, answer: int) -> int:
        self.dedup.add(worker, incarnation, sequence)
        self._deleted[worker] = incarnation, sequence, answer
        return answer

    def _answer_again(self, worker: int, incarnation: int, sequence: int) -> int:
        self._counters.add("duplicates")
        kept = self._deleted.get(worker)
        return kept[2] if kept is not None and kept[:2] == (incarnation, sequence) else 0

    def deletions(self) -> np.ndarray:
        """The answers that are kept, for a copy of this shard."""
        return np.array([(w, *kept) for w, kept in self._deleted.items()], np.int64).reshape(-1, 4)

    def take_deletions(self, kept: np.ndarray) -> None:
        self._deleted = {worker: (i, s, answer) for worker, i, s, answer in kept.tolist()}
