"""Everything one server thread knows: tables, which pushes it had, what workers hold, what they saw. It never waits.

    push      applied at once, exactly once: all of it is checked before any of it is applied
    hold      kept until a commit names (worker, clock), then applied with the others' as one push, in rank order:
              sum_i w_i g_i / sum_i w_i,  or where no weights are given  sum_i g_i

What a commit does is a function of what was held and of its members, not of who came first, so all shards agree; and since a
push reaches every shard (with no ids where none of its rows are there), the number of shards changes nothing.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple, cast

import numpy as np

from manyhands.core import Table
from manyhands.errors import StoreError
from manyhands.server.counters import ShardCounters
from manyhands.server.dedup import DedupMarks
from manyhands.server.pending import (
    PendingPush,
    combine,
    shares_of,
    united,
)
from manyhands.server.protocol.messages import PushMessage
from manyhands.server.slots import SLOTS
from manyhands.server.tables.delay_compensation import MEAN_SQUARE, compensate
from manyhands.server.tables.dense import DenseTable
from manyhands.server.tables.gradient_kernels import finite
from manyhands.server.tables.row_storage import INDEX_BYTES
from manyhands.server.tables.sparse import SparseTable
from manyhands.server.validate import not_finite

EXPIRE_EVERY = 1024  # pushes, where a table does not say after how many rows expire


class Want(NamedTuple):
    table: str
    ids: np.ndarray | None = None  # None: this shard's part of a dense table


class TableUpdate(NamedTuple):
    table: str
    ids: np.ndarray | None
    updates: np.ndarray  # scratch: a push may change it


class Shard:
    def __init__(
        self,
        index: int = 0,
        *,
        memory_bytes: int | None = None,
        modules: Sequence[str] = (),
        say: Callable[[str], None] = warnings.warn,
    ):
        self.index, self.memory_bytes, self.modules = index, memory_bytes, tuple(modules)
        self.committed = 0  # the last commit applied
        self.version = 0  # pushes applied, a commit being one
        self.marks = DedupMarks()
        self._say = say
        self._said: set[str] = set()
        self._tables: dict[str, SparseTable | DenseTable] = {}
        self._held: dict[int, PendingPush] = {}
        self._spare: dict[
            tuple[int, str], np.ndarray
        ] = {}  # of what was held: fresh memory costs more than the copy
        self._seen: dict[
            tuple[int, str], int
        ] = {}  # (worker, table) -> the table's version at its last pull
        self._remembered: dict[tuple[int, str], np.ndarray] = {}
        self._mean_square: dict[str, np.ndarray] = {}
        self._counts = ShardCounters()
        self._lock = threading.Lock()

    # -- tables --

    def create(
        self,
        table: Table,
        part: tuple[int, int] | None = None,
        values: np.ndarray | None = None,
        state: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Make a table, or where it is there compare: one that differs is refused. `part`: the range of a dense one that lies
        here, `values` and `state` (zeros where None) what it starts from, by the names that `dump` gives."""
        with self._lock:
            there = self._tables.get(table.name)
            if there is not None:
                _same(there, table, part)
            elif table.length is None:
                self._tables[table.name] = SparseTable(
                    table, self.memory_bytes, modules=self.modules
                )
            else:
                start, stop = part if part is not None else (0, table.length)
                rules = self._take_mean_square(table.name, state or {})
                self._tables[table.name] = DenseTable(
                    table, start, stop, values, rules, modules=self.modules
                )

    def _take_mean_square(
        self, name: str, state: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """What compensation keeps of a dense table is kept here; the rest, which its rule keeps, is given back."""
        self._mean_square.pop(name, None)
        if MEAN_SQUARE in state:
            self._mean_square[name] = state[MEAN_SQUARE].copy()
        return {key: value for key, value in state.items() if key != MEAN_SQUARE}

    def spec(self, name: str) -> Table:
        with self._lock:
            return self._table(name).spec

    def tables(self) -> list[str]:
        with self._lock:
            return list(self._tables)

    # -- pull --

    def pull(
        self,
        worker: int,
        wants: Sequence[Want],
        outs: Sequence[np.ndarray],
        *,
        remember: bool = False,
    ) -> int:
        """Write rows to `outs`; how many pushes had been applied here."""
        with self._lock:
            found = [self._table(want.table) for want in wants]
            self._share_memory()
            for want, table, out in zip(wants, found, outs, strict=True):
                _fits(table, want.ids, out, "is pulled into")
                if remember and not isinstance(table, DenseTable):
                    raise StoreError(
                        f"table {want.table!r} is sparse; only what was seen of a dense one can be remembered"
                    )
            for want, table, out in zip(wants, found, outs, strict=True):
                if isinstance(table, SparseTable):
                    assert want.ids is not None
                    table.pull(want.ids, out)
                else:
                    table.pull(out, table.start, table.stop)
                    if remember:
                        self._remember(worker, want.table, table.values)
                self._seen[worker, want.table] = table.version
                self._counts.pulled(want.table, want.ids, out.nbytes)
            return self.version

    def _remember(self, worker: int, name: str, values: np.ndarray) -> None:
        kept = self._remembered.get((worker, name))
        if kept is None:
            self._remembered[worker, name] = values.copy()
        else:
            kept[:] = values

    # -- push --

    def push(
        self,
        worker: int,
        incarnation: int,
        sequence: int,
        parts: Sequence[TableUpdate],
        how: PushMessage,
    ) -> bool:
        """False: it had been here before, and nothing changed. Updates are scratch: they may be changed."""
        with self._lock:
            if not self.marks.fresh(worker, incarnation, sequence):
                self._counts.add("duplicates")
                return False
            try:
                _check_words(how)
                tables = self._check(worker, parts, how)
                if self.marks.replaces(worker, incarnation):
                    self._held.pop(
                        worker, None
                    )  # only this: what is remembered may be what the new one has pulled
                if how.pending:
                    self._hold(worker, parts, how)
                else:
                    self._prepare(worker, parts, tables, how)
                    for part, table in zip(parts, tables, strict=True):  # nothing here refuses
                        self._apply(worker, part, table, how)
                    self.version += 1
            except StoreError:
                self._counts.add("refused")
                raise
            self.marks.add(worker, incarnation, sequence)
            return True

    def _check(
        self, worker: int, parts: Sequence[TableUpdate], how: PushMessage
    ) -> list[SparseTable | DenseTable]:
        tables = [self._table(part.table) for part in parts]
        if len({part.table for part in parts}) < len(parts):
            raise StoreError(
                f"one push names a table twice: {[part.table for part in parts]}; put the ids of a table together"
            )
        for part, table in zip(parts, tables, strict=True):
            _fits(table, part.ids, part.updates, "gets updates")
            if how.compensate is not None and isinstance(table, SparseTable):
                raise StoreError(
                    f"compensate is for dense tables, and {part.table!r} is sparse; push it without"
                )
            # where nothing of a table lies, nothing was pulled
            if (
                how.compensate is not None
                and part.updates.size
                and (worker, part.table) not in self._remembered
            ):
                raise StoreError(
                    f"compensate for table {part.table!r}, but worker {worker} has nothing to compare with; "
                    "pull it with remember=True first"
                )
            if how.pending and not finite(part.updates.reshape(-1)):
                raise not_finite(part.table, part.ids, part.updates)
        return tables

    def _prepare(
        self,
        worker: int,
        parts: Sequence[TableUpdate],
        tables: Sequence[SparseTable | DenseTable],
        how: PushMessage,
    ) -> None:
        """Sum repeated ids and refuse what is not finite, for all parts before any is applied."""
        self._share_memory()
        for part, table in zip(parts, tables, strict=True):
            if isinstance(table, SparseTable):
                assert part.ids is not None
                _prepare_rows(table, part.ids, part.updates)
            else:
                table.prepare(part.updates)
        if how.compensate:
            for part, table in zip(parts, tables, strict=True):
                assert isinstance(table, DenseTable)
                seen, mean_square = self._remembered.get((worker, part.table), table.values), None
                if how.decay is not None:
                    mean_square = self._mean_square.setdefault(
                        part.table, np.zeros_like(table.values)
                    )
                compensate(
                    part.updates, table.values, seen, how.compensate, mean_square, how.decay or 0.0
                )
                table.prepare(part.updates)

    def _apply(
        self, worker: int, part: TableUpdate, table: SparseTable | DenseTable, how: PushMessage
    ) -> None:
        tau = table.version - self._seen.get((worker, part.table), table.version)
        lr = how.lr
        if how.adapt and tau > 1:
            lr = table.optimizer.lr(lr) / tau
        if isinstance(table, SparseTable):
            table.apply(lr)
            self._tidy(table)
        else:
            table.apply(part.updates, lr)
        self._counts.pushed(part.table, part.ids, part.updates.nbytes, tau)

    def _share_memory(self) -> None:
        """Each sparse table may have what the others have not taken."""
        if self.memory_bytes is None or len(self._tables) < 2:
            return
        taken = {
            name: t.rows * (t.row_bytes + INDEX_BYTES)
            for name, t in self._tables.items()
            if isinstance(t, SparseTable)
        }
        fixed = sum(t.nbytes for t in self._tables.values() if isinstance(t, DenseTable))
        for name, mine in taken.items():
            cast(SparseTable, self._tables[name]).limit(
                self.memory_bytes - fixed - sum(taken.values()) + mine
            )

    def _tidy(self, table: SparseTable) -> None:
        """After a push: forget rows when it is time, and say once that memory is used up."""
        spec = table.spec
        if (
            spec.expire_after is not None
            or spec.expire_count is not None
            or spec.expire_norm is not None
        ):
            every = EXPIRE_EVERY if spec.expire_after is None else max(1, spec.expire_after // 4)
            if table.version % every == 0:
                self._counts.add("expired_rows", table.expire())
        if table.refused and spec.name not in self._said:
            self._said.add(spec.name)
            self._say(
                f"table {spec.name!r} on shard {self.index} has reached its memory limit of {self.memory_bytes} bytes with {table.rows} "
                "rows: new ids read as their first values and their gradients are dropped, rows that are there go on learning; "
                "raise the limit, add servers, or let rows expire"
            )

    # -- hold and commit --

    def _hold(self, worker: int, parts: Sequence[TableUpdate], how: PushMessage) -> None:
        held = self._held.get(worker)
        if held is not None and held.clock > how.clock:
            return  # overtaken on the way by what replaces it
        if held is None or held.clock < how.clock:
            if held is not None:
                self._take_back(worker, held)
            held = self._held[worker] = PendingPush(how.clock)
        for part in parts:
            name = part.table
            held.lrs[name], held.weights[name] = how.lr, how.weight
            if part.ids is not None:
                ids, updates = united(part.ids, part.updates)
                held.ids.setdefault(name, []).append(ids)
                held.updates.setdefault(name, []).append(updates)
            elif name in held.updates:
                held.updates[name][0] += part.updates
            else:
                copy = self._spare.pop((worker, name), None)
                copy = np.empty(part.updates.size, part.updates.dtype) if copy is None else copy
                copy[:] = part.updates
                held.updates[name] = [copy]

    def commit(self, version: int, members: Sequence[tuple[int, int]]) -> None:
        """Apply together what `members` (worker, clock) hold; what others hold stays. A version that was applied is ignored."""
        with self._lock:
            if version <= self.committed:
                return
            self.committed = version
            came = [
                (w, self._held.pop(w))
                for w, clock in sorted(members)
                if w in self._held and self._held[w].clock == clock
            ]
            if not came:
                return
            self._share_memory()
            trouble = None
            for name in dict.fromkeys(name for _, held in came for name in held.weights):
                try:
                    self._merge(name, [(w, held) for w, held in came if name in held.weights])
                except (
                    StoreError
                ) as e:  # a sum that overflows: the other tables have theirs all the same
                    self._counts.add("refused")
                    trouble = e
            self.version += 1
            for worker, held in came:
                self._take_back(worker, held)
            if trouble is not None:
                raise trouble

    def _merge(self, name: str, came: Sequence[tuple[int, PendingPush]]) -> None:
        shares = shares_of([held.weights[name] for _, held in came])
        if shares is None:
            return
        table = self._tables[name]
        lr = max(came, key=lambda one: one[1].clock)[1].lrs[
            name
        ]  # of the newest, of equals the first: the same on every shard
        for worker, held in came:
            tau, mine = (
                table.version - self._seen.get((worker, name), table.version),
                held.updates[name],
            )
            ids = held.ids[name][0] if name in held.ids else None
            self._counts.pushed(name, ids, sum(some.nbytes for some in mine), tau)
        if isinstance(table, DenseTable):
            total = came[0][1].updates[name][0]
            combine([held.updates[name][0] for _, held in came], shares, total)
            table.push(total, lr)
        else:
            ids = np.concatenate([some for _, held in came for some in held.ids[name]])
            updates = np.concatenate([some for _, held in came for some in held.updates[name]])
            lengths = [sum(some.size for some in held.ids[name]) for _, held in came]
            updates *= np.repeat(np.array(shares, updates.dtype), lengths)[:, None]
            _prepare_rows(table, ids, updates)
            table.apply(lr)
            self._tidy(table)

    def _take_back(self, worker: int, held: PendingPush) -> None:
        for name, updates in held.updates.items():
            if name not in held.ids:
                self._spare[worker, name] = updates[0]

    def forget(self, worker: int) -> None:
        """It will not come back: what it held and what was remembered for it is given up. Its marks stay."""
        with self._lock:
            self._forget(worker)

    def _forget(self, worker: int) -> None:
        self._held.pop(worker, None)
        for kept in (self._spare, self._seen, self._remembered):
            for key in [key for key in kept if key[0] == worker]:
                del kept[key]

    # -- whole tables, for checkpoints and for copies of this shard --

    def dump(self, name: str, slot: int | None = None, slots: int = SLOTS) -> dict[str, np.ndarray]:
        """A table, or one slot of a sparse one: `ids` and `meta` (sparse), `values`, `state/<name>`, `version` (and the rule's
        step); and `marks`, which pushes it has had."""
        with self._lock:
            table = self._table(name)
            found: dict[str, np.ndarray] = {}
            if isinstance(table, SparseTable):
                found["ids"], found["values"], state, found["meta"] = table.items(slot, slots)
            else:
                found["values"], state = table.dump()
            found |= {f"state/{key}": value for key, value in state.items()}
            if name in self._mean_square:
                found[f"state/{MEAN_SQUARE}"] = self._mean_square[name].copy()
            version = np.array([table.version, table.optimizer.step], np.int64)
            return found | {"version": version, "marks": self.marks.dump()}

    def clear(self, name: str) -> None:
        """Empty a sparse table, before another content is loaded."""
        with self._lock:
            table = self._table(name)
            if isinstance(table, SparseTable):
                self._tables[name] = SparseTable(
                    table.spec, self.memory_bytes, modules=self.modules
                )

    def load(self, name: str, content: Mapping[str, np.ndarray]) -> None:
        """Put what `dump` gave, a part of it for sparse tables, in place of what is there; marks only where they are given."""
        with self._lock:
            table = self._table(name)
            state = {
                key.removeprefix("state/"): value
                for key, value in content.items()
                if key.startswith("state/")
            }
            try:
                if isinstance(table, SparseTable):
                    table.load(content["ids"], content["values"], state, content.get("meta"))
                else:
                    table.load(content["values"], self._take_mean_square(name, state))
            except KeyError as e:
                raise StoreError(
                    f"table {name!r}: {e} is missing in what is to be restored; there is {sorted(content)}"
                ) from e
            if "version" in content:
                table.version, table.optimizer.step = map(int, content["version"])
            if "marks" in content:
                self.marks.load(content["marks"])
            for key in [key for key in self._seen if key[1] == name]:
                del self._seen[key]

    def stats(self) -> dict[str, float]:
        """Counters since the start; gauges under "now/" and "hot/". See `counts.since`."""
        with self._lock:
            found = self._counts.values()
            sparse = [t for t in self._tables.values() if isinstance(t, SparseTable)]
            found["dropped_rows"] = float(sum(t.refused for t in sparse))
            found["now/rows"] = float(sum(t.rows for t in sparse))
            found["now/bytes"] = float(
                sum(t.nbytes for t in sparse)
                + sum(t.values.nbytes for t in self._tables.values() if isinstance(t, DenseTable))
            )
            found["now/held"] = float(len(self._held))
            return found

    def slot_loads(self) -> np.ndarray:
        """Rows asked for by slot, estimated."""
        with self._lock:
            return self._counts.loads.copy()

    def _table(self, name: str) -> SparseTable | DenseTable:
        if name not in self._tables:
            raise StoreError(
                f"table {name!r} is unknown; there is {', '.join(map(repr, self._tables)) or 'none'}; create it first"
            )
        return self._tables[name]


def _prepare_rows(table: SparseTable, ids: np.ndarray, updates: np.ndarray) -> None:
    try:
        table.prepare(ids, updates)
    except StoreError as e:
        raise (
            e if finite(updates.reshape(-1)) else not_finite(table.spec.name, ids, updates)
        ) from e


def _check_words(how: PushMessage) -> None:
    if how.lr is not None and not 0 <= how.lr < float("inf"):
        raise StoreError(f"lr={how.lr} of a push; a finite number, 0 or more, is needed")
    if how.pending and (how.adapt or how.compensate is not None):
        raise StoreError(
            "pending with adapt or compensate: pending pushes are applied together with others'; leave one of them out"
        )
    if how.weight is not None and not (how.pending and 0 <= how.weight < float("inf")):
        raise StoreError(
            f"weight={how.weight}{'' if how.pending else ' without pending=True'}; a finite number, 0 or more, of a pending push"
        )
    if how.decay is not None and (how.compensate is None or not 0 <= how.decay < 1):
        raise StoreError(f"decay={how.decay}; it belongs to compensate, and lies in [0, 1)")


def _fits(
    table: SparseTable | DenseTable, ids: np.ndarray | None, values: np.ndarray, what: str
) -> None:
    name = table.spec.name
    if isinstance(table, SparseTable):
        if ids is None:
            raise StoreError(f"table {name!r} is sparse and needs ids; given: none")
        if ids.dtype != np.int64 or ids.ndim != 1:
            raise StoreError(
                f"table {name!r}: ids are {ids.dtype} of shape {ids.shape}; int64 of one axis is needed"
            )
        shape: tuple[int, ...] = (ids.size, table.dim)
    else:
        if ids is not None:
            raise StoreError(
                f"table {name!r} is dense: all of it is pulled and pushed, without ids"
            )
        shape = (table.values.size,)
    if values.dtype != table.dtype or values.shape != shape:
        raise StoreError(
            f"table {name!r} {what} {values.dtype} of shape {values.shape}; {table.dtype} of shape {shape} is needed"
        )


def _same(there: SparseTable | DenseTable, table: Table, part: tuple[int, int] | None) -> None:
    old, new = asdict(there.spec), asdict(table)
    if changed := [key for key in old if old[key] != new[key]]:
        given, needed = (
            ", ".join(f"{key}={spec[key]!r}" for key in changed) for spec in (new, old)
        )
        raise StoreError(
            f"table {table.name!r} is there with {needed}; given: {given}; create it with the same, or choose another name"
        )
    if isinstance(there, DenseTable) and part is not None and part != (there.start, there.stop):
        raise StoreError(
            f"table {table.name!r}: the range {part} was given, but {(there.start, there.stop)} of it lies here"
        )
