"""A store without servers: tables in this process, for one rank or for several that are threads of it.

The same shards, clock and placement as behind the wire, called directly. What is pushed is copied once, since rules use it as
scratch; what is pulled is written where it is wanted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from manyhands.server.protocol.messages import PushMessage
from manyhands.server.shard import Shard, TableUpdate, Want
from manyhands.server.slots import even, ranges
from manyhands.server.tables.gradient_kernels import finite
from manyhands.server.tables.hashing import seed_of, slot_of
from manyhands.server.tables.partition import Partition, partition
from manyhands.server.validate import (
    block_of,
    dtype_of,
    ids_of,
    no_ids,
    not_finite,
    part_of,
    vector_of,
)


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
                f"a store of {size} ranks that share nothing; give them the same shards and clock"
            )
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.shards = [Shard()] if shards is None else list(shards)
        self.clock = Clock(size) if clock is None else clock
        if self.clock.size != size:
            raise StoreError(
                f"a store of {size} ranks with a clock of {self.clock.size}; give both the same number"
            )
        entered = self.clock.enter(rank)
        self._incarnation, self._now, self._version = entered.incarnation, entered.clock, 0
        self._sequence = self._requests = 0
        self._holds = False
        self._owner = even(len(self.shards))
        self._specs: dict[str, Table] = {}
        self._told: dict[str, float] = {}
        self._commit()  # what others may have decided and not yet told the shards

    # -- tables --

    def create(
        self, table: Table, values: Tensor | None = None, state: Tensors | None = None
    ) -> None:
        if self.rank > 0:
            self.clock.wait_made(table.name, self.timeout_s)
            values = state = None
        if table.length is None and (values is not None or state):
            raise StoreError(
                f"table {table.name!r} is sparse: its rows start by themselves; restore takes given ones"
            )
        if values is not None:
            values = vector_of(table, values, "values")
        parts = (
            [None] * len(self.shards)
            if table.length is None
            else ranges(table.length, len(self.shards))
        )
        for shard, part in zip(self.shards, parts, strict=True):
            if part is None:
                shard.create(table)
            else:
                share = None if values is None else values[part[0] : part[1]].numpy()
                kept = (
                    {name: part_of(table, x, part) for name, x in state.items()} if state else None
                )
                shard.create(table, part, share, kept)
        self._specs[table.name] = table
        self.clock.made(table.name)

    # -- rows --

    def pull(self, rows: Rows, into: Tensors | None = None, *, remember: bool = False) -> Tensors:
        found: Tensors = {}
        wants: list[list[Want]] = [[] for _ in self.shards]
        outs: list[list[np.ndarray]] = [[] for _ in self.shards]
        spread: list[tuple[Partition, list[np.ndarray], Tensor]] = []
        for name, ids in rows.items():
            table = self._spec(name)
            out = self._out(table, ids, None if into is None else into.get(name))
            found[name] = out
            array = out.detach().numpy()
            if table.length is not None:
                for s, (start, stop) in enumerate(ranges(table.length, len(self.shards))):
                    wants[s].append(Want(name))
                    outs[s].append(array.reshape(-1)[start:stop])
            elif len(self.shards) == 1:
                wants[0].append(Want(name, ids_of(table, ids)))
                outs[0].append(array)
            else:
                cut = partition(ids_of(table, ids), name, self._owner, len(self.shards))
                parts = [
                    np.empty((cut.ids(s).size, table.dim), array.dtype)
                    for s in range(len(self.shards))
                ]
                for s, part in enumerate(parts):
                    wants[s].append(Want(name, np.ascontiguousarray(cut.ids(s))))
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
            raise StoreError(
                f"rows are of tables {sorted(rows)}, updates of {sorted(updates)}; the same are needed"
            )
        parts: list[list[TableUpdate]] = [[] for _ in self.shards]
        for name, ids in rows.items():
            table = self._spec(name)
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
            # a shard refuses its part alone: where there are several, all must be known to be good before one has it
            if len(self.shards) > 1 and not finite(array.reshape(-1)):
                raise not_finite(name, numbers, array)
        how = PushMessage(self._now, **options)
        for shard, some in zip(self.shards, parts, strict=True):
            shard.push(self.rank, self._incarnation, self._sequence, some, how)
        self._sequence += 1
        self._holds |= how.pending
        return Finished()

    # -- requests that others make in the background: here they are done when they return --

    def pull_async(
        self, rows: Rows, into: Tensors | None = None, *, remember: bool = False
    ) -> Reply:
        return CompleteReply(self.pull(rows, into, remember=remember))

    def exchange(
        self, rows: Rows, updates: Tensors, *, wants: Rows, **options: Unpack[PushOptions]
    ) -> Reply:
        self.push(rows, updates, **options)
        return CompleteReply(self.pull(wants))

    # -- clocks --

    def tick(
        self,
        staleness: float = math.inf,
        quorum: int | None = None,
        *,
        late: Late = "drop",
        delay: int | None = None,
    ) -> Tick:
        tick = self.clock.tick(
            self.rank, self._now, staleness, quorum, late, delay, self._holds, self.timeout_s
        )
        self._now, self._holds = tick.clock, False
        self._commit()
        return tick

    def _commit(self) -> None:
        for version, members in self.clock.commits_since(self._version):
            for shard in self.shards:
                shard.commit(version, members)
            self._version = version

    def claim_step(self, limit: int, shared: bool) -> int | None:
        self._requests += 1
        return self.clock.deal(self.rank, limit, shared, self._requests)

    def request_sync(self) -> None:
        self.clock.call(self.rank)

    def flush(self) -> None: ...

    # -- whole tables --

    def dump(self, name: str) -> Tensors:
        """Sparse rows in the order of their ids, so that it does not show how many shards there are."""
        table = self._spec(name)
        shards = [shard.dump(name) for shard in self.shards]
        for content in shards:
            del content["marks"]
        if table.length is None:
            order = np.argsort(
                np.concatenate([content["ids"] for content in shards]), kind="stable"
            )
            join = {
                key: np.concatenate([c[key] for c in shards])[order]
                for key in shards[0]
                if key != "version"
            }
        else:
            join = {
                k: np.concatenate([c[k] for c in shards])
                for k, v in shards[0].items()
                if v.dtype != np.int64
            }
            join |= {
                k: v for k, v in shards[0].items() if v.dtype == np.int64
            }  # counts, the same for all parts
        join["version"] = shards[0]["version"]
        return {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in join.items()}

    def restore(self, name: str, content: Tensors) -> None:
        table = self._spec(name)
        arrays = {
            key: np.ascontiguousarray(value.detach().cpu().numpy())
            for key, value in content.items()
        }
        if "values" not in arrays or (table.length is None and "ids" not in arrays):
            raise StoreError(
                f"table {name!r}: ids (of a sparse table) and values are needed to restore; given: {sorted(arrays)}"
            )
        if table.length is not None:
            for shard, part in zip(
                self.shards, ranges(table.length, len(self.shards)), strict=True
            ):
                shard.load(
                    name,
                    {key: part_of(table, torch.from_numpy(x), part) for key, x in arrays.items()},
                )
            return
        owner = self._owner[slot_of(ids_of(table, content["ids"]), seed_of(name), self._owner.size)]
        for s, shard in enumerate(self.shards):
            shard.clear(name)
            shard.load(
                name,
                {
                    k: x if k == "version" else np.ascontiguousarray(x[owner == s])
                    for k, x in arrays.items()
                },
            )

    def stats(self) -> dict[str, float]:
        now = together([shard.stats() for shard in self.shards]) | self.clock.stats()
        found, self._told = since(self._told, now), now
        return found

    def close(self) -> None: ...

    # -- the door --

    def _spec(self, name: str) -> Table:
        if name not in self._specs:
            raise StoreError(
                f"table {name!r} is unknown; there is {', '.join(map(repr, self._specs)) or 'none'}; create it first"
            )
        return self._specs[name]

    def _out(self, table: Table, ids: Tensor | None, given: Tensor | None) -> Tensor:
        if table.length is not None:
            no_ids(table, ids)
            return (
                torch.empty(table.length, dtype=dtype_of(table))
                if given is None
                else vector_of(table, given, "what it is pulled into")
            )
        n = ids_of(table, ids).size
        made = torch.empty(n, table.dim, dtype=dtype_of(table)) if given is None else given
        return block_of(table, n, made, "what it is pulled into")
