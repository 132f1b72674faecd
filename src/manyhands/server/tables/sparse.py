"""Sparse table: rows by id, one shard's part of it. Not thread-safe."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from manyhands.core import Table
from manyhands.errors import StoreError
from manyhands.server.tables.checks import check_spec, contiguous, describe
from manyhands.server.tables.dense import State
from manyhands.server.tables.gradient_kernels import sum_duplicates
from manyhands.server.tables.hashing import hash_ids
from manyhands.server.tables.index_kernels import (
    INIT,
    LATEST,
    LIVE,
    MAX_COUNT,
    MAX_ROWS,
    NOW,
    REFUSED,
    UNADMITTED,
    count_pushes,
)
from manyhands.server.tables.index_maintenance import list_entries, list_expired, write_meta
from manyhands.server.tables.row_kernels import NOWHERE, gather, gather_first
from manyhands.server.tables.row_lookup import RowLookup
from manyhands.server.tables.row_storage import RowStorage
from manyhands.server.tables.table_optimizer import TableOptimizer

if TYPE_CHECKING:
    from manyhands.server.snapshots.copy_on_write import ErasedIds, TableCut

LOOKUPS = 4  # pulls whose rows are remembered


class SparseTable:
    """Rows by id. A push is `prepare`, which can refuse and changes nothing, then `apply`."""

    def __init__(
        self,
        table: Table,
        memory_bytes: int | None = None,
        *,
        modules: Sequence[str] = (),
        huge: bool = True,
    ):
        check_spec(table)
        self.spec = table
        self.optimizer = TableOptimizer(table, modules)
        self.dtype, self.dim = np.dtype(table.dtype), table.dim
        state = self.optimizer.state
        self.widths = {name: self.dim if x == "full" else 1 for name, x in state.items()}
        self.stride = self.dim + sum(self.widths.values())
        self._wide = self.dim * sum(x == "full" for x in state.values())
        self._narrow = self.stride - self.dim - self._wide
        self.version = 0  # pushes applied
        self.cut: TableCut | None = None  # of a snapshot that is being copied
        self.erased: ErasedIds | None = None  # None: nobody needs to know
        self.on_erase: list[Callable[[np.ndarray], None]] = []
        self.loads = 0  # how often rows were loaded
        first = self.optimizer.starts
        blank = [np.full(n, first.get(name, 0), self.dtype) for name, n in self.widths.items()]
        blank.append(np.empty(0, self.dtype))
        self.storage = RowStorage(table, self.stride, np.concatenate(blank), memory_bytes, huge)
        self.row_bytes = self.storage.row_bytes
        self._lookups = deque[RowLookup](maxlen=LOOKUPS)
        self._known: RowLookup | None = None  # of the push that is being made
        self._make_scratch(1024)
        self._flat, self._count = np.empty(0, self.dtype), 0  # the push that was prepared

    def _make_scratch(self, n: int) -> None:
        self._rows, self._first = np.empty(n, np.int64), np.empty(n, np.int64)
        self._entries_at, self._distinct = np.empty(n, np.int64), np.empty(n, np.int64)
        self._buckets = np.empty(_power(2 * n), np.int32)
        self._hashes, self._distinct_hashes = np.empty(n, np.uint64), np.empty(n, np.uint64)

    @property
    def rows(self) -> int:
        return int(self.storage.head[LIVE])

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes

    @property
    def full(self) -> bool:
        return bool(self.storage.head[LIVE] >= self.storage.head[MAX_ROWS])

    @property
    def refused(self) -> int:
        """Gradients dropped because the memory limit allowed no row for them."""
        return int(self.storage.head[REFUSED])

    @property
    def unadmitted(self) -> int:
        """Gradients dropped because their rows were not admitted."""
        return int(self.storage.head[UNADMITTED])

    # -- pull --

    def pull(self, ids: np.ndarray, out: np.ndarray, *, make: bool = True) -> None:
        """Copy rows to `out`, making those that are new (`make`); an id without a row reads as it
        would start.
        """
        ids = self._check_ids(ids)
        self._check_block(out, ids.size, "out")
        if not out.flags.aligned or not out.flags.writeable:
            raise StoreError(
                f"table {self.spec.name!r}: out is read-only or not aligned; give another array"
            )
        storage, lookup = self.storage, self._next_lookup(ids.size)
        rows, hashes, flat = lookup.rows[: ids.size], lookup.hashes[: ids.size], out.reshape(-1)
        hash_ids(ids, storage.seeds[0], hashes)
        if storage.find(ids, hashes, rows, lookup.entries_at[: ids.size], False, make=make):
            lookup.count, lookup.moves = ids.size, storage.moves
        if gather(storage.slab, rows, flat, self.dim, self.stride):
            kind, unit = storage.head[INIT], storage.unit
            gather_first(rows, flat, self.dim, ids, storage.seeds[1], kind, unit)

    def _next_lookup(self, n: int) -> RowLookup:
        """The oldest of the few that are kept, to be used again."""
        full = len(self._lookups) == LOOKUPS
        lookup = self._lookups.popleft() if full else RowLookup(max(n, 1024))
        if lookup.rows.size < n:
            lookup = RowLookup(n)
        lookup.count = 0
        self._lookups.append(lookup)
        return lookup

    # -- push --

    def push(self, ids: np.ndarray, grads: np.ndarray, lr: float | None = None) -> int:
        self.prepare(ids, grads)
        return self.apply(lr)

    def prepare(self, ids: np.ndarray, grads: np.ndarray) -> int:
        """Sum the gradients of equal ids (in `grads`) and refuse gradients that are not finite.

        Returns how many distinct ids there are.
        """
        ids = self._check_ids(ids)
        self._check_block(grads, ids.size, "gradients")
        self._flat = contiguous(grads).reshape(-1)
        hashes, buckets = self._hashes[: ids.size], self._buckets[: _power(2 * ids.size)]
        hash_ids(ids, self.storage.seeds[0], hashes)
        moves = self.storage.moves
        self._known = next((x for x in reversed(self._lookups) if x.matches(hashes, moves)), None)
        self._count = sum_duplicates(
            ids,
            hashes,
            self._flat,
            self.dim,
            buckets,
            self._distinct,
            self._distinct_hashes,
            self._first,
        )
        if self._count < 0:
            bad = np.unique(ids[~np.isfinite(self._flat.reshape(-1, self.dim)).all(axis=1)])
            some = ", ".join(map(str, bad[:5].tolist())) + (", ..." if bad.size > 5 else "")
            raise StoreError(
                f"table {self.spec.name!r}: gradients of {bad.size} ids are not finite "
                f"(ids {some}); the table is unchanged: lower the learning rate or clip gradients, "
                "and look for what made them"
            )
        return self._count

    def apply(self, lr: float | None = None) -> int:
        """Run the optimizer on what was prepared; returns how many rows it changed."""
        n, storage, head = self._count, self.storage, self.storage.head
        if self.cut is not None:
            self.cut.keep(self._distinct[:n], self._distinct_hashes[:n])
        self.version += 1
        storage.set_time(self.version)
        storage.widen_sketch(n)
        rows, first, optimizer = self._rows[:n], self._first[:n], self.optimizer
        dropped = head[REFUSED] + head[UNADMITTED]
        known, self._known = self._known, None
        if known is not None and known.moves == storage.moves:
            count_pushes(storage.entries, known.entries_at, known.rows, first, rows, head[NOW])
        else:
            ids, hashes = self._distinct[:n], self._distinct_hashes[:n]
            storage.find(ids, hashes, rows, self._entries_at[:n], True)
        dropped = int(head[REFUSED] + head[UNADMITTED] - dropped)
        if dropped > 0:
            first, rows = first[rows != NOWHERE], rows[rows != NOWHERE]
        optimizer.step += 1
        if optimizer.update_sparse is not None:
            p, q = optimizer.numbers(lr)
            optimizer.update_sparse(
                storage.slab,
                rows,
                self._flat,
                first,
                self.dim,
                self.stride,
                self._wide,
                self._narrow,
                p,
                q,
            )
        else:
            self._apply_custom(rows, first, lr)
        self._flat, self._count = np.empty(0, self.dtype), 0
        return n - dropped

    def _apply_custom(self, rows: np.ndarray, first: np.ndarray, lr: float | None) -> None:
        matrix = self.storage.matrix()
        block, grads = matrix[rows], self._flat.reshape(-1, self.dim)[first]
        w, state = self.views(block)
        try:
            self.optimizer.custom.update(w, grads, state, self.optimizer.lr(lr))
        except Exception as e:
            raise StoreError(
                f"table {self.spec.name!r}: optimizer {self.spec.optimizer!r} failed: "
                f"{type(e).__name__}: {e}; the rows are unchanged"
            ) from e
        matrix[rows] = block

    def views(self, block: np.ndarray) -> tuple[np.ndarray, State]:
        """Views of values and state in rows."""
        at, state = self.dim, {}
        for name, width in self.widths.items():
            state[name] = block[:, at : at + width]
            at += width
        return block[:, : self.dim], state

    # -- erase and expire --

    def limit(self, memory_bytes: int) -> None:
        self.storage.limit(memory_bytes)

    def erase(self, ids: np.ndarray) -> int:
        """Erase rows with their optimizer state; returns how many there were."""
        ids = self._check_ids(ids)
        if self.cut is not None:
            hash_ids(ids, self.storage.seeds[0], self._hashes[: ids.size])
            self.cut.keep(ids, self._hashes[: ids.size])
        if self.erased is not None:
            self.erased.add(ids)
        for tell in self.on_erase:
            tell(ids)
        return self.storage.erase(ids)

    def expire(self) -> int:
        """Erase the rows that the table's `expire_...` options name; returns how many."""
        spec, storage = self.spec, self.storage
        if spec.expire_after is None and spec.expire_count is None and spec.expire_norm is None:
            return 0
        oldest = 0
        if spec.expire_after is not None:
            first = (self.version - spec.expire_after) >> storage.time_shift
            oldest = first + 1 - storage.time_base
        ids = np.empty(self.rows, np.int64)
        n = list_expired(
            storage.entries,
            storage.slab,
            self.dim,
            self.stride,
            oldest,
            spec.expire_count or 0,
            spec.expire_norm or 0.0,
            ids,
        )
        return self.erase(ids[:n])

    # -- dump and restore --

    def items(
        self, slot: int | None = None, slots: int = 1024
    ) -> tuple[np.ndarray, np.ndarray, State, np.ndarray]:
        """Copies of all rows, or of those of one slot, in no order.

        ids, values [n, dim], state by name, and of each row how often it was pushed (up to 4095)
        and at which version last [n, 2].
        """
        storage, none = self.storage, np.empty(0, np.int64)
        which, mask = -1 if slot is None else slot, np.uint64(slots - 1)
        n = list_entries(storage.entries, storage.seeds[0], mask, which, none, none, none)
        ids, rows, meta = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(2 * n, np.int64)
        if n > 0:
            list_entries(storage.entries, storage.seeds[0], mask, which, ids, rows, meta)
        values, state = self.views(storage.matrix()[rows])
        meta = meta.reshape(n, 2)
        meta[:, 1] = (meta[:, 1] + storage.time_base) << storage.time_shift
        state = {name: np.ascontiguousarray(x) for name, x in state.items()}
        if self.optimizer.kind.counts_pushes:
            state["step"] = np.full((n, 1), self.optimizer.step, np.int64)
        return ids, np.ascontiguousarray(values), state, meta

    def load(
        self,
        ids: np.ndarray,
        values: np.ndarray,
        state: Mapping[str, np.ndarray],
        meta: np.ndarray | None = None,
    ) -> None:
        """Put rows back as `items` returned them, without admission; existing rows are replaced."""
        storage, ids = self.storage, self._check_ids(ids)
        self._check_block(values, ids.size, "values")
        needed = [*self.widths, *(["step"] if self.optimizer.kind.counts_pushes else [])]
        if sorted(state) != sorted(needed):
            raise StoreError(
                f"table {self.spec.name!r}: state {sorted(state)} was given, optimizer "
                f"{self.spec.optimizer!r} keeps {sorted(needed)}; give what items() returned"
            )
        self._check_room(ids)
        if self.cut is not None:
            self.cut.fail("rows were loaded into it meanwhile")
        self.loads += 1
        self.erased = None  # loaded rows may have been pushed long ago: what changed is not known
        rows, hashes = np.empty(ids.size, np.int64), np.empty(ids.size, np.uint64)
        hash_ids(ids, storage.seeds[0], hashes)
        storage.find(ids, hashes, rows, self._entries_at[: ids.size], False, force=True)
        matrix = storage.matrix()
        matrix[rows, : self.dim] = values
        at = self.dim
        for name, width in self.widths.items():
            matrix[rows, at : at + width] = state[name].reshape(ids.size, width)
            at += width
        if "step" in needed and "step" not in self.widths and ids.size > 0:
            self.optimizer.step = max(self.optimizer.step, int(state["step"].max()))
        if meta is not None and ids.size > 0:
            self._load_meta(ids, meta)

    def _load_meta(self, ids: np.ndarray, meta: np.ndarray) -> None:
        storage = self.storage
        self.version = max(self.version, int(meta[:, 1].max()))
        storage.set_time(self.version)
        counts = np.clip(meta[:, 0], 0, MAX_COUNT)
        times = np.clip((meta[:, 1] >> storage.time_shift) - storage.time_base, 0, LATEST)
        packed = np.stack([counts, times], 1).astype(np.int64).reshape(-1)
        write_meta(storage.entries, storage.seeds[0], ids, packed)

    # -- checks --

    def _check_room(self, ids: np.ndarray) -> None:
        most = self.storage.head[MAX_ROWS]
        if ids.size + self.rows > most and np.unique(ids).size + self.rows > most:
            raise StoreError(
                f"table {self.spec.name!r}: {ids.size} rows to load, and the memory limit of "
                f"{self.storage.memory_bytes} bytes has room for {most - self.rows}; "
                "raise the limit or load them into more servers"
            )

    def _check_ids(self, ids: Any) -> np.ndarray:
        if not isinstance(ids, np.ndarray) or ids.dtype != np.int64 or ids.ndim != 1:
            raise StoreError(
                f"table {self.spec.name!r}: ids are {describe(ids)}; "
                "int64 of one axis is needed: convert them"
            )
        if ids.size > self._rows.size:
            self._make_scratch(ids.size)
        return contiguous(ids)

    def _check_block(self, block: Any, n: int, what: str) -> None:
        if (
            not isinstance(block, np.ndarray)
            or block.dtype != self.dtype
            or block.shape != (n, self.dim)
            or not block.flags.c_contiguous
        ):
            raise StoreError(
                f"table {self.spec.name!r}: {what} are {describe(block)}; "
                f"{self.dtype} of shape ({n}, {self.dim}), contiguous, is needed"
            )


def _power(n: int) -> int:
    return 1 << max(10, (n - 1).bit_length())
