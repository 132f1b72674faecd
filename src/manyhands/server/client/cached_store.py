"""Cached store: a store around a store that keeps hot rows on the worker.

    a pull        serves rows fetched at most `age` of their table's pulls ago; asks for the rest
    a row stays   if it was asked for more often, of late, than the one it would replace

With ids of a power-law distribution this keeps one server from becoming the bottleneck. Served rows
miss at most the pushes of the last `age` pulls: by other ranks, and by this rank too unless
the server optimizer is plain sgd (an sgd step is made on the rows here as well). A tick with a
smaller bound counts: with staleness=0 nothing is served, so a synchronous run is the same with a
cache and without. `flush`, which comes before an evaluation or a checkpoint, empties the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from manyhands.core import (
    CompleteReply,
    Late,
    PushOptions,
    Reply,
    Rows,
    Table,
    TableSnapshot,
    TableStore,
    Tensors,
    Tick,
    Work,
)
from manyhands.errors import PlanError
from manyhands.server.client.hot_rows import HotRows
from manyhands.server.validate import ids_of


class CachedStore:
    """Keeps `rows` of each sparse table, at most `age` pulls old. 0 of either: keeps nothing."""

    # also over a store without one: callers then send a push with the next request here too
    background = True

    def __init__(self, store: TableStore, rows: int, age: int = 8):
        if rows < 0 or age < 0:
            raise PlanError(
                f"cache={rows} cache_age={age}, but neither can be negative; 0 keeps nothing"
            )
        self.store, self.rank, self.size = store, store.rank, store.size
        self._cells, self._age, self._bound = rows, age, float(age)
        self._hot: dict[str, HotRows] = {}
        self._emptied = 0  # how often

    def create(
        self, table: Table, values: Tensor | None = None, state: Tensors | None = None
    ) -> None:
        self.store.create(table, values, state)
        if self._cells and self._age and table.length is None and table.name not in self._hot:
            self._hot[table.name] = HotRows(table, self._cells)

    def pull(self, rows: Rows, into: Tensors | None = None, *, remember: bool = False) -> Tensors:
        if remember or not self._hot.keys() & rows.keys():
            return self.store.pull(rows, into, remember=remember)
        wanted = _Wanted(self, rows, into or {})
        return wanted.fill(self.store.pull(wanted.rest) if wanted.rest else {})

    def pull_async(
        self, rows: Rows, into: Tensors | None = None, *, remember: bool = False
    ) -> Reply:
        if not self.store.background:
            return CompleteReply(self.pull(rows, into, remember=remember))
        if remember or not self._hot.keys() & rows.keys():
            return self.store.pull_async(rows, into, remember=remember)
        wanted = _Wanted(self, rows, into or {})
        return (
            _CachedReply(wanted, self.store.pull_async(wanted.rest))
            if wanted.rest
            else CompleteReply(wanted.fill({}))
        )

    def push_buffers(self, rows: Rows) -> Tensors:
        return self.store.push_buffers(rows)

    def push(self, rows: Rows, updates: Tensors, **options: Unpack[PushOptions]) -> Work:
        self._descend(rows, updates, options)
        return self.store.push(rows, updates, **options)

    def exchange(
        self, rows: Rows, updates: Tensors, *, wants: Rows, **options: Unpack[PushOptions]
    ) -> Reply:
        """A push and, after it, a pull of what is not kept here."""
        if not self.store.background:
            self.push(rows, updates, **options)
            return self.pull_async(wants)
        self._descend(rows, updates, options)
        wanted = _Wanted(self, wants, {})
        if wanted.rest:
            return _CachedReply(
                wanted, self.store.exchange(rows, updates, wants=wanted.rest, **options)
            )
        self.store.push(rows, updates, **options)
        return CompleteReply(wanted.fill({}))

    def _descend(self, rows: Rows, updates: Tensors, options: PushOptions) -> None:
        if options.get("pending") or options.get("adapt"):
            return
        lr = options.get("lr")
        for name, ids in rows.items():
            hot = self._hot.get(name)
            if hot is None or ids is None or hot.lr is None:
                continue
            grads = updates[name].detach()
            # updates that the store will refuse change nothing here either
            if grads.shape == (len(ids), hot.dim):
                hot.descend(
                    ids_of(hot.table, ids),
                    _flat(grads, hot.dtype),
                    hot.lr if lr is None else lr,
                )

    def tick(
        self,
        staleness: float = math.inf,
        quorum: int | None = None,
        *,
        late: Late = "drop",
        delay: int | None = None,
    ) -> Tick:
        self._bound = min(float(self._age), staleness)
        return self.store.tick(staleness, quorum, late=late, delay=delay)

    def claim_step(self, limit: int, shared: bool) -> int | None:
        return self.store.claim_step(limit, shared)

    def request_sync(self) -> None:
        self.store.request_sync()

    def flush(self) -> None:
        self.empty()
        self.store.flush()

    def dump(self, name: str) -> Tensors:
        return self.store.dump(name)

    def restore(self, name: str, content: Tensors) -> None:
        self.store.restore(name, content)
        self.empty()

    def restore_pieces(self, name: str, contents: Iterable[Mapping[str, Any]]) -> None:
        self.store.restore_pieces(name, contents)
        self.empty()

    def snapshot(
        self,
        names: Sequence[str],
        folder: Path,
        tag: str,
        base: str = "",
        incremental: bool = False,
    ) -> TableSnapshot:
        return self.store.snapshot(names, folder, tag, base, incremental)

    def stats(self) -> dict[str, float]:
        own = {"cache_lookups": 0.0, "cache_hits": 0.0}
        for hot in self._hot.values():
            own["cache_lookups"] += hot.lookups
            own["cache_hits"] += hot.hits
            hot.lookups = hot.hits = 0
        return {**self.store.stats(), **own}

    def empty(self) -> None:
        """Forget the rows, not how often they were wanted. Rows that were asked for before this
        are not kept when they come."""
        self._emptied += 1
        for hot in self._hot.values():
            hot.since[:] = 0

    def close(self) -> None:
        self.store.close()


class _Wanted:
    """One pull: the rows served from here, the rows to ask for, and both as one answer."""

    def __init__(self, cache: CachedStore, rows: Rows, into: Tensors):
        self._cache, self._emptied = cache, cache._emptied
        self.into = into
        self.out: Tensors = {}
        self.rest: Rows = {}
        self._parts: dict[str, tuple[HotRows, int, np.ndarray, np.ndarray]] = {}
        for name, ids in rows.items():
            hot = cache._hot.get(name)
            if hot is None or ids is None:
                self.rest[name] = ids
                continue
            wanted = ids_of(hot.table, ids)
            out = torch.empty(len(ids), hot.dim, dtype=getattr(torch, hot.table.dtype))
            missing = hot.serve(wanted, out.numpy().reshape(-1), cache._bound)
            self.out[name] = out
            if len(missing):
                self._parts[name] = hot, hot.clock, missing, wanted[missing]
                self.rest[name] = torch.from_numpy(self._parts[name][3])

    def fill(self, came: Tensors) -> Tensors:
        for name, values in came.items():
            if name not in self._parts:
                self.out[name] = values
                continue
            hot, clock, missing, ids = self._parts[name]
            self.out[name].numpy()[missing] = values.numpy()
            if self._emptied == self._cache._emptied:
                hot.keep(ids, _flat(values, hot.dtype), clock)
        for name, target in self.into.items():
            if name in self.out:
                target.copy_(self.out[name].view(target.shape))
                self.out[name] = target
        return self.out


class _CachedReply:
    """Reply whose missing rows are on their way."""

    def __init__(self, wanted: _Wanted, reply: Reply):
        self._wanted, self._reply = wanted, reply
        self._found: Tensors | None = None

    def result(self) -> Tensors:
        if self._found is None:
            self._found = self._wanted.fill(self._reply.result())
        return self._found


def _flat(values: Tensor, dtype: np.dtype) -> np.ndarray:
    return np.ascontiguousarray(values.numpy(), dtype).reshape(-1)
