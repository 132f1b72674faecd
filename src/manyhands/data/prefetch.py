"""A walk that draws batches before they are wanted, so that the rows they will look up travel while others compute.

What is asked of it (position, samples of the step, whether they count) is that of the batch handed out last: drawing ahead is
nobody else's business.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from manyhands.core import Position
from manyhands.data.batches import Batch, IndexedBatches, StreamedBatches


class RowPrefetcher(Protocol):
    """What `embedding.tables.Tables` looks like from here."""

    def prefetch(self, values: Any) -> None: ...
    def begin(self, values: Any) -> None: ...


@dataclass
class _Drawn:
    batch: Batch
    after: Position
    total: int
    own: int
    counts: bool


class PrefetchedBatches:
    """`depth` batches are drawn ahead; with 0 a batch's rows are asked for, all together, when it is handed out."""

    def __init__(self, walk: IndexedBatches | StreamedBatches, rows: RowPrefetcher, depth: int):
        self.walk, self.source, self.steps_per_epoch = walk, walk.source, walk.steps_per_epoch
        self._rows, self._depth = rows, depth
        self._drawn: deque[_Drawn] = deque()
        self._handed: _Drawn | None = None

    @property
    def position(self) -> Position:
        return self.walk.position if self._handed is None or not self._depth else self._handed.after

    @property
    def samples(self) -> int | None:
        return self.walk.samples

    @property
    def total(self) -> int:
        return self.walk.total if self._handed is None else self._handed.total

    @property
    def own(self) -> int:
        return self.walk.own if self._handed is None else self._handed.own

    @property
    def counts(self) -> bool:
        return self.walk.counts if self._handed is None else self._handed.counts

    def next(self) -> Batch:
        while len(self._drawn) <= self._depth:
            self._draw()
        self._handed = self._drawn.popleft()
        self._rows.begin(self._handed.batch.values)
        return self._handed.batch

    def _draw(self) -> None:
        before = self.walk.position
        batch = self.walk.next()
        after = self.walk.position if batch.last else before
        self._drawn.append(_Drawn(batch, after, self.walk.total, self.walk.own, self.walk.counts))
        if self._depth and batch.values is not None:
            self._rows.prefetch(batch.values)

    def close(self) -> None:
        self._drawn.clear()
        self.walk.close()
