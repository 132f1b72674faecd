"""Prefetched batches: embedding rows of the next batches are pulled while one computes.

Position, samples of the step and whether they count are those of the current batch, as if nothing
were prefetched.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from manyhands.core import Position
from manyhands.data.batches import Batch, IndexedBatches, StreamedBatches


class RowPrefetcher(Protocol):
    """Pulls the embedding rows that a batch looks up (`embedding.tables.EmbeddingTables`)."""

    def prefetch(self, values: Any) -> None:
        """Begin to pull the rows of a later batch."""
        ...

    def begin(self, values: Any) -> None:
        """Have the rows of the current batch."""
        ...


@dataclass
class _Prefetched:
    """A batch, and what the batch iterator said when it gave it."""

    batch: Batch
    after: Position
    total: int
    own: int
    counts: bool


class PrefetchedBatches:
    """A batch iterator that is `depth` batches early; with 0, the rows of a batch are pulled, all
    together, when it is current."""

    def __init__(self, batches: IndexedBatches | StreamedBatches, rows: RowPrefetcher, depth: int):
        self.batches, self.source = batches, batches.source
        self._rows, self._depth = rows, depth
        self._waiting: deque[_Prefetched] = deque()
        self._current: _Prefetched | None = None

    @property
    def position(self) -> Position:
        if self._current is None or not self._depth:
            return self.batches.position
        return self._current.after

    @property
    def batches_per_epoch(self) -> int | None:
        return self.batches.batches_per_epoch

    @property
    def samples(self) -> int | None:
        return self.batches.samples

    @property
    def total(self) -> int:
        return self.batches.total if self._current is None else self._current.total

    @property
    def own(self) -> int:
        return self.batches.own if self._current is None else self._current.own

    @property
    def counts(self) -> bool:
        return self.batches.counts if self._current is None else self._current.counts

    @property
    def loading(self) -> bool:
        return self.batches.loading

    def next(self) -> Batch:
        while len(self._waiting) <= self._depth:
            self._prefetch()
        self._current = self._waiting.popleft()
        self._rows.begin(self._current.batch.values)
        return self._current.batch

    def _prefetch(self) -> None:
        batches = self.batches
        before = batches.position
        batch = batches.next()
        after = batches.position if batch.last else before
        self._waiting.append(_Prefetched(batch, after, batches.total, batches.own, batches.counts))
        if self._depth and batch.values is not None:
            self._rows.prefetch(batch.values)

    def close(self) -> None:
        self._waiting.clear()
        self.batches.close()
