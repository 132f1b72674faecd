"""Held copies: copies of other shards' hot rows on one server, each with the time it was asked for.

A copy holds every push that was acknowledged before it was asked for. Its age is counted from then,
by the clock of the server that holds it, so no two clocks have to agree. A copy is served under the
slot map that it came by, and no other.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from manyhands.server.protocol.messages import Exchange
from manyhands.server.table_updates import TablePull

Rows = tuple[np.ndarray, np.ndarray]  # ids, and a row for each


@dataclass(eq=False)
class _Source:
    """What came from one server last."""

    epoch: int
    asked: float
    tables: Mapping[str, Rows]


@dataclass(eq=False)
class _Table:
    """Copies of one table, of all sources; never changed but for `reads`. Lists, not arrays: most
    requests are for a row or two."""

    place: dict[int, int]  # by id
    rows: np.ndarray
    asked: list[float]  # when, for each row
    epoch: list[int]
    reads: list[int]


class HeldCopies:
    """Thread-safe. Reads take no lock: they use the tables of the moment."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._lock = clock, threading.Lock()
        self._sources: dict[int, _Source] = {}
        self._tables: dict[str, _Table] = {}
        self._reads: dict[str, Counter[int]] = {}
        self.served = self.missed = 0  # rows; parts of requests

    def put(self, source: int, epoch: int, asked: float, tables: Mapping[str, Rows]) -> None:
        """Copies that `source` sent, in place of all that came from it before."""
        with self._lock:
            old = self._sources.get(source)
            if not tables and (old is None or not old.tables):
                return
            self._sources[source] = _Source(epoch, asked, tables)
            changed = set(tables) | set({} if old is None else old.tables)
            self._merge(changed)

    def drop(self, source: int) -> None:
        with self._lock:
            gone = self._sources.pop(source, None)
            if gone is not None:
                self._merge(set(gone.tables))

    def read(self, table: str, ids: np.ndarray, epoch: int, age: float) -> np.ndarray | None:
        """The rows of these ids, none older than `age`; None: not all of them are here so."""
        held = self._tables.get(table)
        if held is not None and ids.size:
            at, oldest = [held.place.get(key, -1) for key in ids.tolist()], self._clock() - age
            if all(a >= 0 and held.asked[a] >= oldest and held.epoch[a] == epoch for a in at):
                for a in at:
                    held.reads[a] += 1
                self.served += len(at)
                return held.rows[at[0] : at[0] + 1] if len(at) == 1 else held.rows[at]
        self.missed += 1
        return None

    def listed(self, age: float) -> dict[str, list[int]]:
        """Ids of copies that are no older than `age`, by table."""
        oldest = self._clock() - age
        found = {
            name: [key for key, a in held.place.items() if held.asked[a] >= oldest]
            for name, held in self._tables.items()
        }
        return {name: ids for name, ids in found.items() if ids}

    def take_reads(self, source: int) -> list[tuple[str, list[int], list[int]]]:
        """How often copies of this source were read since the last call: table, ids, counts."""
        with self._lock:
            there = self._sources.get(source)
            found = []
            for name, (ids, _) in ({} if there is None else there.tables).items():
                self._collect(name)
                counted = self._reads.get(name, Counter())
                counts = {key: counted.pop(key) for key in ids.tolist() if counted[key]}
                if counts:
                    found.append((name, list(counts), list(counts.values())))
            return found

    def _collect(self, name: str) -> None:
        held = self._tables.get(name)
        if held is not None and any(held.reads):
            counted = self._reads.setdefault(name, Counter())
            for key, a in held.place.items():
                counted[key] += held.reads[a]
                held.reads[a] = 0

    def _merge(self, names: set[str]) -> None:
        for name in names:
            self._collect(name)
            parts = [(s, *s.tables[name]) for s in self._sources.values() if name in s.tables]
            # two servers may disagree for a moment about a table: the newer one is right
            parts.sort(key=lambda part: part[0].asked)
            parts = [p for p in parts if p[2].shape[1:] == parts[-1][2].shape[1:]]
            parts = [p for p in parts if p[2].dtype == parts[-1][2].dtype]
            if not parts:
                self._tables.pop(name, None)
                self._reads.pop(name, None)
                continue
            ids = np.concatenate([ids for _, ids, _ in parts])
            rows = np.concatenate([rows for _, _, rows in parts])
            asked = np.concatenate([np.full(ids.size, s.asked) for s, ids, _ in parts])
            epoch = np.concatenate([np.full(ids.size, s.epoch) for s, ids, _ in parts])
            # of an id that came twice, the copy that was asked for last
            order = np.lexsort((asked, ids))
            last = np.append(ids[order][1:] != ids[order][:-1], True)
            order = order[last]
            self._tables[name] = _Table(
                {key: a for a, key in enumerate(ids[order].tolist())},
                rows[order],
                asked[order].tolist(),
                epoch[order].tolist(),
                [0] * order.size,
            )


def read_copies(
    copies: HeldCopies | None, x: Exchange, pulls: Sequence[TablePull], layouts: Sequence[Any]
) -> dict[int, np.ndarray | None]:
    """What of a request is read from copies, by its place among the pulls; None: not here, too old,
    or of a table that had other rows. A layout is (dtype, count, width, shape) of a pull."""
    found: dict[int, np.ndarray | None] = {}
    for at, (request, pull) in enumerate(zip(x.pull, pulls, strict=True)):
        if request.copies and pull.ids is not None:
            rows = None
            if copies is not None:
                rows = copies.read(pull.table, pull.ids, x.epoch, request.copies)
            dtype, _, _, shape = layouts[at]
            fits = rows is not None and rows.shape == shape and rows.dtype == dtype
            found[at] = rows if fits else None
    return found
