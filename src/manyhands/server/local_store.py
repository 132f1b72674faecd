"""Local store: tables in this process, for one rank or for several that are threads of it.

It calls the same shards, clock and placement that servers use. A push copies its updates once,
since server optimizers use them as scratch memory; a pull writes rows where they are wanted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Unpack

import numpy as np
import torch
from torch import Tensor

from manyhands.core import (
    CompleteReply,
    Finished,
    Late,
    PushOptions,
    Reply,
    Rows,
    Table,
    Tensors,
    Tick,
    Work,
)
from manyhands.errors import StoreError
from manyhands.server.clock import Clock
from manyhands.server.counters import since, together
from manyhands.server.namespaces.table_list import total_of
from manyhands.server.protocol.messages import PushMessage
from manyhands.server.protocol.table_messages import StoredPart
from manyhands.server.shard import Shard
from manyhands.server.slots import even, ranges
from manyhands.server.snapshots.shard_snapshot import ShardSnapshots
from manyhands.server.snapshots.store_snapshot import StoreSnapshot
from manyhands.server.table_content import arrays_of, first_values, join, rows_of, slice_of
from manyhands.server.table_updates import TablePull, TableUpdate
from manyhands.server.tables.gradient_kernels import finite
from manyhands.server.tables.hashing import seed_of, slot_of
from manyhands.server.tables.partition import Partition, partition
from manyhands.server.validate import (
    block_of,
    dtype_of,
    empty_updates,
    ids_of,
    no_ids,
    not_finite,
    unequal_tables,
    unknown_table,
    vector_of,
)

TARGET = "the tensor to pull into"


class LocalStore:
    """Ranks that share tables are given the same `shards` and `clock`."""

    background = False

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        shards: Sequence[Shard] | None = None,
        clock: Clock | None = None,
        *,
        timeout_s: float = 600.0,
    ):
        if size > 1 and (shards is None or clock is None):
            raise StoreError(
                f"a store of {size} ranks needs shards and a clock that they share; "
                "give all of them the same"
            )
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.shards = [Shard()] if shards is None else list(shards)
        self.clock = Clock(size) if clock is None else clock
        if self.clock.size != size:
            raise StoreError(
                f"a store of {size} ranks was given a clock of {self.clock.size}; "
                "give both the same number"
            )
        joined = self.clock.join(rank)
        self._incarnation, self._now, self._version = joined.incarnation, joined.clock, 0
        self._sequence = self._requests = 0
        self._has_pending = False
        self._owner = even(len(self.shards))
        self._tables: dict[str, Table] = {}
        self._last_stats: dict[str, float] = {}
        self._snapshots: list[ShardSnapshots] = []
        self._commit()  # commits that other ranks decided and have not sent to the shards yet

    # -- tables --

    def create(
        self, table: Table, values: Tensor | None = None, state: Tensors | None = None
    ) -> None:
        if self.rank > 0:
            self.clock.wait_for_table(table.name, self.timeout_s)
            values = state = None
        vector = first_values(table, values, state)
        if table.length is None:
            for shard in self.shards:
                shard.create(table)
        else:
            spans = ranges(table.length, len(self.shards))
            for shard, span in zip(self.shards, spans, strict=True):
                mine = None if vector is None else vector[span[0] : span[1]].numpy()
                kept = {name: slice_of(table, x, span) for name, x in (state or {}).items()}
                shard.create(table, span, mine, kept or None)
        self._tables[table.name] = table
        self.clock.table_created(table.name)

    # -- rows --

    def pull(self, rows: Rows, into: Tensors | None = None, *, remember: bool = False) -> Tensors:
        found: Tensors = {}
        wants: list[list[TablePull]] = [[] for _ in self.shards]
        outs: list[list[np.ndarray]] = [[] for _ in self.shards]
        spread: list[tuple[Partition, list[np.ndarray], Tensor]] = []
        for name, ids in rows.items():
            table = self._table(name)
            out = self._out(table, ids, None if into is None else into.get(name))
            found[name] = out
            array = out.detach().numpy()
            if table.length is not None:
                for s, (start, stop) in enumerate(ranges(table.length, len(self.shards))):
                    wants[s].append(TablePull(name))
                    outs[s].append(array.reshape(-1)[start:stop])
            elif len(self.shards) == 1:
                wants[0].append(TablePull(name, ids_of(table, ids)))
                outs[0].append(array)
            else:
                cut = partition(ids_of(table, ids), name, self._owner, len(self.shards))
                parts = [
                    np.empty((cut.ids(s).size, table.dim), array.dtype)
                    for s in range(len(self.shards))
                ]
                for s, part in enumerate(parts):
                    wants[s].append(TablePull(name, np.ascontiguousarray(cut.ids(s))))
                    outs[s].append(part)
                spread.append((cut, parts, out))
        for shard, want, out_parts in zip(self.shards, wants, outs, strict=True):
            shard.pull(self.rank, want, out_parts, remember=remember)
        for cut, parts, out in spread:
            for s, part in enumerate(parts):
                cut.spread(part.reshape(-1), s, part.shape[1], out.detach().numpy().reshape(-1))
        return found

    def push(self, rows: Rows, updates: Tensors, **options: Unpack[PushOptions]) -> Work:
        if rows.keys() != updates.keys():
            raise unequal_tables(rows, updates)
        parts: list[list[TableUpdate]] = [[] for _ in self.shards]
        for name, ids in rows.items():
            table = self._table(name)
            if table.length is not None:
                no_ids(table, ids)
                array = vector_of(table, updates[name], "updates").numpy()
                for s, (start, stop) in enumerate(ranges(table.length, len(self.shards))):
                    parts[s].append(TableUpdate(name, None, array[start:stop].copy()))
                numbers = None
            else:
                numbers = ids_of(table, ids)
                array = block_of(table, numbers.size, updates[name], "updates").numpy()
                if len(self.shards) == 1:
                    parts[0].append(TableUpdate(name, numbers, array.copy()))
                else:
                    cut = partition(numbers, name, self._owner, len(self.shards))
                    for s in range(len(self.shards)):
                        mine = np.empty((cut.ids(s).size, table.dim), array.dtype)
                        cut.collect(array.reshape(-1), s, table.dim, mine.reshape(-1))
                        parts[s].append(TableUpdate(name, np.ascontiguousarray(cut.ids(s)), mine))
            # a shard refuses its own part only: with several, check all before one of them gets it
            if len(self.shards) > 1 and not finite(array.reshape(-1)):
                raise not_finite(name, numbers, array)
        how = PushMessage(self._now, **options)
        for shard, some in zip(self.shards, parts, strict=True):
            shard.push(self.rank, self._incarnation, self._sequence, some, how)
        self._sequence += 1
        self._has_pending |= how.pending
        return Finished()

    # -- tables that come and go --

    def stored(self) -> list[StoredPart]:
        shards = [shard.stored() for shard in self.shards]
        self._tables = {part.table.name: part.table for part in shards[0]}
        return total_of(shards)

    def delete(self, name: str, ids: Tensor) -> int:
        """Delete rows with their optimizer state; returns how many there were."""
        numbers = ids_of(self._table(name), ids)
        self._sequence += 1
        return sum(
            shard.delete_rows(self.rank, self._incarnation, self._sequence - 1, name, numbers)
            for shard in self.shards
        )

    def drop(self, name: str) -> bool:
        self._table(name)
        self._sequence += 1
        who = self.rank, self._incarnation, self._sequence - 1
        there = [shard.drop(*who, name) for shard in self.shards]
        del self._tables[name]
        return any(there)

    # -- background requests: done when they return --

    def pull_async(
        self, rows: Rows, into: Tensors | None = None, *, remember: bool = False
    ) -> Reply:
        return CompleteReply(self.pull(rows, into, remember=remember))

    def push_buffers(self, rows: Rows) -> Tensors:
        return {name: empty_updates(self._table(name), ids) for name, ids in rows.items()}

    def exchange(
        self, rows: Rows, updates: Tensors, *, wants: Rows, **options: Unpack[PushOptions]
    ) -> Reply:
        self.push(rows, updates, **options)
        return CompleteReply(self.pull(wants))

    # -- clocks and steps --

    def tick(
        self,
        staleness: float = math.inf,
        quorum: int | None = None,
        *,
        late: Late = "drop",
        delay: int | None = None,
    ) -> Tick:
        tick = self.clock.tick(
            self.rank, self._now, staleness, quorum, late, delay, self._has_pending, self.timeout_s
        )
        self._now, self._has_pending = tick.clock, False
        self._commit()
        return tick

    def _commit(self) -> None:
        for version, members in self.clock.commits_since(self._version):
            for shard in self.shards:
                shard.commit(version, members)
            self._version = version

    def claim_step(self, limit: int, shared: bool) -> int | None:
        self._requests += 1
        return self.clock.claim(self.rank, limit, shared, self._requests)

    def request_sync(self) -> None:
        self.clock.request_sync(self.rank)

    def flush(self) -> None: ...

    # -- whole tables --

    def dump(self, name: str) -> Tensors:
        return join(self._table(name), [shard.dump(name) for shard in self.shards])

    def restore(self, name: str, content: Tensors) -> None:
        table = self._table(name)
        arrays = arrays_of(table, content)
        if table.length is not None:
            spans = ranges(table.length, len(self.shards))
            for shard, span in zip(self.shards, spans, strict=True):
                mine = {
                    key: slice_of(table, torch.from_numpy(x), span) for key, x in arrays.items()
                }
                shard.load(name, mine)
            return
        ids_of(table, content["ids"])
        self.restore_pieces(name, [arrays])

    def restore_pieces(self, name: str, contents: Iterable[Mapping[str, np.ndarray]]) -> None:
        for shard in self.shards:
            shard.clear(name)
        for content in contents:
            ids = content["ids"] if "ids" in content else content["erased"]
            owner = self._owner[slot_of(ids, seed_of(name), self._owner.size)]
            for s, shard in enumerate(self.shards):
                share = float(np.mean(self._owner == s))
                shard.load(name, rows_of(content, owner == s, share))

    def snapshot(
        self,
        names: Sequence[str],
        folder: Path,
        tag: str,
        base: str = "",
        incremental: bool = False,
    ) -> StoreSnapshot:
        ports = self._snapshots = self._snapshots or [ShardSnapshots(s) for s in self.shards]
        return StoreSnapshot.begin(ports, names, folder, tag, base, incremental)

    def stats(self) -> dict[str, float]:
        now = together([shard.stats() for shard in self.shards]) | self.clock.stats()
        found, self._last_stats = since(self._last_stats, now), now
        return found

    def close(self) -> None: ...

    # -- arguments --

    def _table(self, name: str) -> Table:
        if name not in self._tables:
            raise unknown_table(name, self._tables)
        return self._tables[name]

    def _out(self, table: Table, ids: Tensor | None, given: Tensor | None) -> Tensor:
        if table.length is not None:
            no_ids(table, ids)
            return (
                torch.empty(table.length, dtype=dtype_of(table))
                if given is None
                else vector_of(table, given, TARGET)
            )
        n = ids_of(table, ids).size
        made = torch.empty(n, table.dim, dtype=dtype_of(table)) if given is None else given
        return block_of(table, n, made, TARGET)
