"""Observed store: a store around a store that counts the bytes and seconds of every call.

    pull                       rows and the ids that asked for them
    push                       updates and their ids
    tick, claim_step, flush    no bytes, but time

Bytes are those of encoded numbers (`payload`), whether they travel through a socket or through
memory, so that plans can be compared. Seconds are those inside a call, and inside `result` and
`wait` of what it began: an exchange that overlaps with compute is free.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, Unpack

from torch import Tensor

from manyhands.core import (
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
from manyhands.server.protocol import row_encoding
from manyhands.server.protocol.messages import RowCodec

T = TypeVar("T")
CLAIM_STEP = "deal"  # in event files


class TrafficMeter(Protocol):
    """Keeps the totals and emits the events: the run's `exchange.observed.ObservedGroup`."""

    def enter(self, name: str) -> None: ...
    def count(self, name: str, nbytes: int, seconds: float, calls: int = 1) -> None: ...


class ObservedStore:
    """`code`: how numbers are encoded on the way."""

    def __init__(
        self,
        store: TableStore,
        meter: TrafficMeter,
        code: RowCodec = "none",
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.store, self.rank, self.size = store, store.rank, store.size
        self.background = store.background
        self._meter, self._code, self._clock = meter, code, clock
        self._tables: dict[str, Table] = {}

    def create(
        self, table: Table, values: Tensor | None = None, state: Tensors | None = None
    ) -> None:
        self.store.create(table, values, state)
        self._tables[table.name] = table

    def pull(self, rows: Rows, into: Tensors | None = None, *, remember: bool = False) -> Tensors:
        return self._timed(
            "pull", self._nbytes(rows), lambda: self.store.pull(rows, into, remember=remember)
        )

    def pull_async(
        self, rows: Rows, into: Tensors | None = None, *, remember: bool = False
    ) -> Reply:
        start = self._clock()
        reply = self.store.pull_async(rows, into, remember=remember)
        return _ObservedRequest(
            self, "pull", self._nbytes(rows), self._clock() - start, reply.result
        )

    def push_buffers(self, rows: Rows) -> Tensors:
        return self.store.push_buffers(rows)

    def push(self, rows: Rows, updates: Tensors, **options: Unpack[PushOptions]) -> Work:
        start = self._clock()
        work = self.store.push(rows, updates, **options)
        return _ObservedRequest(self, "push", self._nbytes(rows), self._clock() - start, work.wait)

    def exchange(
        self, rows: Rows, updates: Tensors, *, wants: Rows, **options: Unpack[PushOptions]
    ) -> Reply:
        start = self._clock()
        reply = self.store.exchange(rows, updates, wants=wants, **options)
        seconds = self._clock() - start
        self._meter.count("push", self._nbytes(rows), 0.0)
        return _ObservedRequest(self, "pull", self._nbytes(wants), seconds, reply.result)

    def tick(
        self,
        staleness: float = math.inf,
        quorum: int | None = None,
        *,
        late: Late = "drop",
        delay: int | None = None,
    ) -> Tick:
        return self._timed(
            "tick", 0, lambda: self.store.tick(staleness, quorum, late=late, delay=delay)
        )

    def claim_step(self, limit: int, shared: bool) -> int | None:
        return self._timed(CLAIM_STEP, 0, lambda: self.store.claim_step(limit, shared))

    def request_sync(self) -> None:
        self.store.request_sync()

    def flush(self) -> None:
        self._timed("flush", 0, self.store.flush)

    def dump(self, name: str) -> Tensors:
        return self.store.dump(name)

    def restore(self, name: str, content: Tensors) -> None:
        self.store.restore(name, content)

    def snapshot(
        self,
        names: Sequence[str],
        folder: Path,
        tag: str,
        base: str = "",
        incremental: bool = False,
    ) -> TableSnapshot:
        return self.store.snapshot(names, folder, tag, base, incremental)

    def restore_pieces(self, name: str, contents: Iterable[Mapping[str, Any]]) -> None:
        self.store.restore_pieces(name, contents)

    def stats(self) -> dict[str, float]:
        return self.store.stats()

    def close(self) -> None:
        self.store.close()

    # -- totals --

    def _timed(self, name: str, nbytes: int, act: Callable[[], T]) -> T:
        start = self._clock()
        self._meter.enter(name)
        done = act()
        self._meter.count(name, nbytes, self._clock() - start)
        return done

    def _nbytes(self, rows: Rows) -> int:
        total = 0
        for name, ids in rows.items():
            table = self._tables.get(name)
            if table is not None:
                item, count = (
                    4 if table.dtype == "float32" else 8,
                    0 if ids is None else ids.numel(),
                )
                numbers, width = (
                    (count * table.dim, table.dim)
                    if table.length is None
                    else (table.length, row_encoding.BLOCK)
                )
                total += row_encoding.nbytes(self._code, numbers, item, width) + 8 * count
        return total


class _ObservedRequest:
    """A request under way. The call is counted at once, since the caller may never wait; the first
    wait is counted when it is over."""

    def __init__(
        self,
        store: ObservedStore,
        name: str,
        nbytes: int,
        seconds: float,
        finish: Callable[[], Any],
    ):
        self._store, self._name, self._finish, self._waited = store, name, finish, False
        store._meter.count(name, nbytes, seconds)

    def wait(self) -> None:
        self.result()

    def result(self) -> Any:
        if self._waited:
            return self._finish()
        self._waited = True
        start = self._store._clock()
        self._store._meter.enter(self._name)
        try:
            return self._finish()
        finally:
            self._store._meter.count(self._name, 0, self._store._clock() - start, calls=0)
