"""Table service of a shard: lists its tables, deletes rows and drops tables, each exactly once.

A deletion is numbered as pushes are, so a request that comes again after a broken connection finds
its mark (`dedup`); the answer that it got, or would have got, is kept until the next one.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from manyhands.errors import StoreError
from manyhands.server.protocol.messages import StoredPart
from manyhands.server.tables.sparse import SparseTable

if TYPE_CHECKING:
    from manyhands.server.counters import ShardCounters
    from manyhands.server.dedup import DedupMarks
    from manyhands.server.pending import PendingPushes
    from manyhands.server.tables.delay_compensation import DelayCompensation
    from manyhands.server.tables.dense import DenseTable


class TableService:
    """The part of a `Shard` that is about whole tables and deletions; it uses the shard's state."""

    _lock: threading.Lock
    _tables: dict[str, SparseTable | DenseTable]
    _dedup: DedupMarks
    _pending: PendingPushes
    _pulled: dict[tuple[int, str], int]
    _compensation: DelayCompensation
    _counters: ShardCounters
    _warned: set[str]

    def __init__(self) -> None:
        # worker -> incarnation and sequence of its last deletion, and the answer
        self._deleted: dict[int, tuple[int, int, int]] = {}

    def stored(self) -> list[StoredPart]:
        """The tables, with what of them is stored here."""
        with self._lock:
            return [
                StoredPart(t.spec, t.rows, t.nbytes)
                if isinstance(t, SparseTable)
                else StoredPart(t.spec, t.values.size, t.nbytes)
                for t in self._tables.values()
            ]

    def delete_rows(
        self, worker: int, incarnation: int, sequence: int, name: str, ids: np.ndarray
    ) -> int:
        """Delete rows with their optimizer state; returns how many there were. The next push of
        such an id makes its row anew."""
        with self._lock:
            if not self._dedup.fresh(worker, incarnation, sequence):
                return self._answer_again(worker, incarnation, sequence)
            table = self._table(name)
            if not isinstance(table, SparseTable):
                raise StoreError(f"table {name!r} is dense: it has no rows to delete; drop it")
            gone = table.erase(ids)
            self._counters.add("deleted_rows", gone)
            return self._mark(worker, incarnation, sequence, gone)

    def drop(self, worker: int, incarnation: int, sequence: int, name: str) -> int:
        """Delete a table with all that was kept for it; returns 1, or 0 where there was none."""
        with self._lock:
            if not self._dedup.fresh(worker, incarnation, sequence):
                return self._answer_again(worker, incarnation, sequence)
            there = self._tables.pop(name, None) is not None
            self._pending.forget(name)
            self._compensation.forget(name)
            self._counters.forget(name)
            self._warned.discard(name)
            for key in [key for key in self._pulled if key[1] == name]:
                del self._pulled[key]
            return self._mark(worker, incarnation, sequence, int(there))

    def _table(self, name: str) -> SparseTable | DenseTable:
        raise NotImplementedError

    def _mark(self, worker: int, incarnation: int, sequence: int, answer: int) -> int:
        self._dedup.add(worker, incarnation, sequence)
        self._deleted[worker] = incarnation, sequence, answer
        return answer

    def _answer_again(self, worker: int, incarnation: int, sequence: int) -> int:
        self._counters.add("duplicates")
        kept = self._deleted.get(worker)
        return kept[2] if kept is not None and kept[:2] == (incarnation, sequence) else 0
