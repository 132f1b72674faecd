"""Shard source: rows on disk as a row source; one shard is in memory while the next is read."""

from __future__ import annotations

from collections.abc import Iterator

from manyhands.linear.data.shards import RowShards
from manyhands.linear.passes.rows import Rows


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
