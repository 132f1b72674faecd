"""Shard: one lock's part of a server's tables, with dedup marks, pending pushes and counters.

    push       applied at once, exactly once: all of it is checked before any of it is applied
    pending    kept until a commit names (worker, clock), then applied with the others' as one push,
               in rank order:  sum_i w_i g_i / sum_i w_i,  or without weights  sum_i g_i

What a commit does depends on the pending pushes and on its members, not on their order of arrival,
so all shards agree. A push reaches every shard (with no ids where none of its rows are there), so
the number of shards changes nothing. A shard never waits.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np

from manyhands.errors import StoreError
from manyhands.server.counters import ShardCounters
from manyhands.server.dedup import DedupMarks
from manyhands.server.hot_copies.hot_ids import HotIds
from manyhands.server.namespaces.shard_tables import ShardTables
from manyhands.server.pending import (
    PendingPush,
    PendingPushes,
    factors_of,
    merge_dense,
    merge_rows,
)
from manyhands.server.protocol.messages import RUN_BITS, PushMessage
from manyhands.server.slots import SLOTS
from manyhands.server.table_updates import (
    TablePull,
    TableUpdate,
    check_fits,
    check_options,
    prepare_rows,
)
from manyhands.server.tables.delay_compensation import DelayCompensation
from manyhands.server.tables.dense import DenseTable
from manyhands.server.tables.dump import dump_table, restore_table, state_in
from manyhands.server.tables.gradient_kernels import finite
from manyhands.server.tables.row_storage import INDEX_BYTES
from manyhands.server.tables.sparse import SparseTable
from manyhands.server.validate import not_finite

EXPIRE_EVERY = 1024  # pushes between two expiries, where the table's options do not tell


class Shard(ShardTables):
    """Thread-safe: one lock for all tables. `warn` gets a text when a table reaches its limit. From
    the share `hot` of accesses on an id is hot (`hot_copies`)."""

    def __init__(
        self,
        index: int = 0,
        *,
        memory_bytes: int | None = None,
        modules: Sequence[str] = (),
        hot: float = 0.0,
        warn: Callable[[str], None] = warnings.warn,
    ):
        super().__init__()
        self.index, self.memory_bytes, self.modules = index, memory_bytes, tuple(modules)
        self.committed: dict[int, int] = {}  # run -> the last commit applied
        self.version = 0  # pushes applied; a commit counts as one
        self.dedup = DedupMarks()
        self._warn = warn
        self._warned: set[str] = set()
        self.contents: dict[str, SparseTable | DenseTable] = {}
        self.pending = PendingPushes()
        # (worker, table) -> the table's version at the worker's last pull
        self.pulled: dict[tuple[int, str], int] = {}
        self.compensation = DelayCompensation()
        self._counters = ShardCounters()
        self._counters.hot_ids = HotIds(hot) if hot else None
        self.lock = threading.Lock()

    @property
    def hot_ids(self) -> HotIds | None:
        return self._counters.hot_ids

    # -- pull --

    def pull(
        self,
        worker: int,
        pulls: Sequence[TablePull],
        outs: Sequence[np.ndarray],
        *,
        remember: bool = False,
    ) -> int:
        """Write rows to `outs`; returns how many pushes had been applied here."""
        with self.lock:
            tables = [self.table(pull.table) for pull in pulls]
            self._share_memory()
            for pull, table, out in zip(pulls, tables, outs, strict=True):
                check_fits(table, pull.ids, out, "is pulled into")
                if remember and not isinstance(table, DenseTable):
                    raise StoreError(
                        f"table {pull.table!r} is sparse; remember is for dense tables only"
                    )
            for pull, table, out in zip(pulls, tables, outs, strict=True):
                if isinstance(table, SparseTable):
                    assert pull.ids is not None
                    table.pull(pull.ids, out, make=False)
                else:
                    table.pull(out, table.start, table.stop)
                    if remember:
                        self.compensation.remember(worker, pull.table, table.values)
                self.pulled[worker, pull.table] = table.version
                self._counters.pulled(pull.table, pull.ids, out.nbytes)
            return self.version

    # -- push --

    def push(
        self,
        worker: int,
        incarnation: int,
        sequence: int,
        parts: Sequence[TableUpdate],
        push: PushMessage,
    ) -> bool:
        """Returns False where this push was applied before, and nothing changed. Updates are
        scratch: they may be changed.
        """
        with self.lock:
            steps = () if push.pending else push.steps  # a commit counts pending ones
            if not self.dedup.fresh(worker, incarnation, sequence, steps, push.done_below):
                self._counters.add("duplicates")
                return False
            try:
                check_options(push)
                tables = self._check(worker, parts, push)
                if self.dedup.replaces(worker, incarnation):
                    # only this: the new process may have pulled what is remembered
                    self.pending.drop(worker)
                if push.pending:
                    self.pending.add(worker, parts, push)
                else:
                    self._prepare(worker, parts, tables, push)
                    for part, table in zip(parts, tables, strict=True):  # nothing here refuses
                        self._apply(worker, part, table, push)
                    self.version += 1
            except StoreError:
                self._counters.add("refused")
                raise
            self.dedup.add(worker, incarnation, sequence, steps)
            return True

    def remember(self, worker: int, tables: Sequence[str]) -> None:
        """As a pull with `remember` that reads nothing."""
        with self.lock:
            for name in tables:
                table = self.table(name)
                if isinstance(table, DenseTable):
                    self.compensation.remember(worker, name, table.values)
                    self.pulled[worker, name] = table.version

    def _check(
        self, worker: int, parts: Sequence[TableUpdate], push: PushMessage
    ) -> list[SparseTable | DenseTable]:
        tables = [self.table(part.table) for part in parts]
        if len({part.table for part in parts}) < len(parts):
            names = [part.table for part in parts]
            raise StoreError(
                f"one push names a table twice: {names}; put the ids of a table together"
            )
        for part, table in zip(parts, tables, strict=True):
            check_fits(table, part.ids, part.updates, "gets updates")
            if push.compensate is not None and isinstance(table, SparseTable):
                raise StoreError(
                    f"compensate is for dense tables, and {part.table!r} is sparse; push it without"
                )
            # where a shard stores nothing of a table, nothing was pulled
            if (
                push.compensate is not None
                and part.updates.size
                and (worker, part.table) not in self.compensation
            ):
                raise StoreError(
                    f"compensate for table {part.table!r}, but worker {worker} has nothing to "
                    "compare with; pull it with remember=True first"
                )
            if push.pending and not finite(part.updates.reshape(-1)):
                raise not_finite(part.table, part.ids, part.updates)
        return tables

    def _prepare(
        self,
        worker: int,
        parts: Sequence[TableUpdate],
        tables: Sequence[SparseTable | DenseTable],
        push: PushMessage,
    ) -> None:
        """Sum repeated ids and refuse what is not finite, for all parts before any is applied."""
        self._share_memory()
        for part, table in zip(parts, tables, strict=True):
            if isinstance(table, SparseTable):
                assert part.ids is not None
                prepare_rows(table, part.ids, part.updates)
            else:
                table.prepare(part.updates)
        if push.compensate:
            for part, table in zip(parts, tables, strict=True):
                assert isinstance(table, DenseTable)
                g, w = part.updates, table.values
                self.compensation.apply(worker, part.table, g, w, push.compensate, push.decay)
                table.prepare(g)

    def _apply(
        self, worker: int, part: TableUpdate, table: SparseTable | DenseTable, push: PushMessage
    ) -> None:
        tau = table.version - self.pulled.get((worker, part.table), table.version)
        lr = push.lr
        if push.adapt and tau > 1:
            lr = table.optimizer.lr(lr) / tau
        if isinstance(table, SparseTable):
            table.apply(lr)
            self._expire(table)
        else:
            table.apply(part.updates, lr)
        self._counters.pushed(part.table, part.ids, part.updates.nbytes, tau)

    def _share_memory(self) -> None:
        """Each sparse table may have the memory that the others have not taken."""
        if self.memory_bytes is None or len(self.contents) < 2:
            return
        taken = {
            name: t.rows * (t.row_bytes + INDEX_BYTES)
            for name, t in self.contents.items()
            if isinstance(t, SparseTable)
        }
        fixed = sum(t.nbytes for t in self.contents.values() if isinstance(t, DenseTable))
        for name, mine in taken.items():
            cast(SparseTable, self.contents[name]).limit(
                self.memory_bytes - fixed - sum(taken.values()) + mine
            )

    def _expire(self, table: SparseTable) -> None:
        """After a push: expire rows when it is time, and warn once that memory is used up."""
        spec = table.spec
        if (
            spec.expire_after is not None
            or spec.expire_count is not None
            or spec.expire_norm is not None
        ):
            every = EXPIRE_EVERY if spec.expire_after is None else max(1, spec.expire_after // 4)
            if table.version % every == 0:
                self._counters.add("expired_rows", table.expire())
        if table.refused and spec.name not in self._warned:
            self._warned.add(spec.name)
            self._warn(
                f"table {spec.name!r} on shard {self.index} has reached its memory limit of "
                f"{self.memory_bytes} bytes with {table.rows} rows: new ids read as their first "
                "values and their gradients are dropped, existing rows go on learning; raise the "
                "limit, add servers, or let rows expire"
            )

    # -- commit --

    def commit(self, version: int, members: Sequence[tuple[int, int]]) -> None:
        """Apply the pending pushes of `members` (worker, clock) together; those of other workers
        stay pending. A version that was applied before is ignored.
        """
        with self.lock:
            run = members[0][0] >> RUN_BITS if members else 0
            if version <= self.committed.get(run, 0):
                return
            self.committed[run] = version
            pushes = self.pending.take(members)
            if not pushes:
                return
            self._share_memory()
            error = None
            for name in dict.fromkeys(name for _, push in pushes for name in push.weights):
                try:
                    self._merge(name, [(w, push) for w, push in pushes if name in push.weights])
                except StoreError as e:  # a sum that overflows: the other tables get theirs
                    self._counters.add("refused")
                    error = e
            self.version += 1
            for worker, push in pushes:
                self.pending.release(worker, push)
            if error is not None:
                raise error

    def _merge(self, name: str, members: Sequence[tuple[int, PendingPush]]) -> None:
        pushes = [push for _, push in members]
        factors = factors_of([push.weights[name] for push in pushes])
        if factors is None:
            return
        table = self.contents[name]
        # of the newest push, of equals the first: the same on every shard
        lr = max(pushes, key=lambda push: push.clock).lrs[name]
        for worker, push in members:
            tau = table.version - self.pulled.get((worker, name), table.version)
            ids = push.ids[name][0] if name in push.ids else None
            nbytes = sum(some.nbytes for some in push.updates[name])
            self._counters.pushed(name, ids, nbytes, tau)
        if isinstance(table, DenseTable):
            table.push(merge_dense(pushes, name, factors), lr)
        else:
            prepare_rows(table, *merge_rows(pushes, name, factors))
            table.apply(lr)
            self._expire(table)

    # -- dump and restore --

    def dump(self, name: str, slot: int | None = None, slots: int = SLOTS) -> dict[str, np.ndarray]:
        """A table, or one slot of a sparse one: `ids` and `meta` (sparse), `values`,
        `state/<name>`, `version` (with the optimizer's step) and `marks` (dedup marks).
        """
        with self.lock:
            table = self.table(name)
            found = dump_table(table, self.compensation.state(name), slot, slots)
            return found | {"marks": self.dedup.dump()}

    def clear(self, name: str) -> None:
        """Empty a sparse table, before other content is loaded."""
        with self.lock:
            table = self.table(name)
            if isinstance(table, SparseTable):
                self.contents[name] = SparseTable(
                    table.spec, self.memory_bytes, modules=self.modules
                )

    def erase(self, name: str, ids: np.ndarray) -> int:
        """Erase rows with their optimizer state; returns how many there were."""
        with self.lock:
            table = self.table(name)
            if not isinstance(table, SparseTable):
                raise StoreError(f"table {name!r} is dense: it has no rows to erase")
            return table.erase(ids)

    def load(self, name: str, content: Mapping[str, np.ndarray]) -> None:
        """Put what `dump` returned (of a sparse table, a part of it) in place of what is there;
        dedup marks only where they are given.
        """
        with self.lock:
            table = self.table(name)
            state = state_in(content)
            if isinstance(table, DenseTable):
                state = self.compensation.take_state(name, state)
            restore_table(table, content, state)
            if "marks" in content:
                self.dedup.load(content["marks"])
            for key in [key for key in self.pulled if key[1] == name]:
                del self.pulled[key]

    # -- stats --

    def stats(self) -> dict[str, float]:
        """Counters since the start; gauges under "now/" and "hot/". See `counters.since`."""
        with self.lock:
            found = self._counters.values()
            sparse = [t for t in self.contents.values() if isinstance(t, SparseTable)]
            dense = [t for t in self.contents.values() if isinstance(t, DenseTable)]
            found["dropped_rows"] = float(sum(t.refused for t in sparse))
            found["now/rows"] = float(sum(t.rows for t in sparse))
            found["now/bytes"] = float(
                sum(t.nbytes for t in sparse) + sum(t.values.nbytes for t in dense)
            )
            found["now/held"] = float(len(self.pending))
            found["now/version"], found["now/steps"] = self.version, self.dedup.steps
            return found

    def slot_loads(self) -> np.ndarray:
        """Rows asked for by slot, estimated."""
        with self.lock:
            return self._counters.loads.copy()
