"""Rows found by id: one shard's part of a sparse table. One thread works on it at a time; whoever shares it locks it."""

from __future__ import annotations

import mmap
import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from manyhands.core import Table
from manyhands.errors import StoreError
from manyhands.server.tables import kernels as k
from manyhands.server.tables.dense import DenseTable, State
from manyhands.server.tables.optimizers import RULES
from manyhands.server.tables.row_lookup import RowLookup, note
from manyhands.server.tables.table_optimizer import TableOptimizer, check_spec, plain

__all__ = ["DenseTable", "SparseTable", "warm_up"]

FULLEST, GROWTH = (
    0.65,
    1.25,
)  # of the index: at most so full, and it becomes so much larger: 25 to 31 bytes a row
SMALL = 1 << 14  # buckets up to which it doubles
FOUND = 4  # pulls whose rows are remembered
MOST_PLACES = 1 << 26  # that sightings are counted in
INDEX_SHARE = 45  # bytes a row that an index may take while it grows: the new one, at its fullest, and the old

MAP_NORESERVE = 0x4000  # of Linux; Python knows it from 3.13 on


def reserve(nbytes: int, huge: bool = True) -> np.ndarray:
    """Address space that becomes memory, all zero, where it is first touched: in pages of 2 MB where the system gives them."""
    flags = (
        mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (MAP_NORESERVE if sys.platform == "linux" else 0)
    )
    space = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            space.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        except OSError:  # a kernel without them
            pass
    return np.frombuffer(space, np.uint8)


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class SparseTable:
    """Rows by id. `prepare` and `apply` are the two halves of a push: the first can refuse and changes nothing."""

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
        self._widths = {
            name: self.dim if plane == "full" else 1
            for name, plane in self.optimizer.planes.items()
        }
        self.stride = self.dim + sum(self._widths.values())
        self._wide = self.dim * sum(plane == "full" for plane in self.optimizer.planes.values())
        self._narrow = self.stride - self.dim - self._wide
        self.row_bytes = self.stride * self.dtype.itemsize
        self.version = 0
        self._huge = huge
        self._head = np.zeros(k.HEAD, np.int64)
        self._head[k.ADMIT_AFTER] = table.admit_after
        self._head[k.INIT] = k.INITS[table.init if table.scale > 0 else "zeros"]
        share = min(int(table.admit_share * 2.0**64), 2**64 - 1)
        self._seeds = np.array(
            [k.seed_of(table.name), k.seed_of(table.name, table.seed + 1), share], np.uint64
        )
        self._unit = self.dtype.type(
            table.scale * 2.0**-31 if table.init == "uniform" else table.scale
        )
        self._blank = np.concatenate(
            [
                np.full(n, self.optimizer.starts.get(name, 0), self.dtype)
                for name, n in self._widths.items()
            ]
            or [np.empty(0, self.dtype)]
        )
        self._sketch = np.zeros(1 << 16 if table.admit_after > 1 else 1, np.uint16)
        self._base, self._shift = 0, 0  # of when rows were last pushed: (version >> shift) - base
        while (table.expire_after or 0) >> self._shift >= k.LATEST // 4:
            self._shift += 1
        self._memory_bytes = memory_bytes
        self._limit()
        self._hold(64)
        self._slab = self._links = np.empty(0, self.dtype)
        self._grow_slab()
        self._moves, self._found = 0, deque[RowLookup](maxlen=FOUND)  # how often entries were moved
        self._known: RowLookup | None = None
        self._scratch(1024)
        self._flat, self._count = np.empty(0, self.dtype), 0

    # -- memory --

    def limit(self, memory_bytes: int) -> None:
        """From now on: rows that are there stay."""
        self._memory_bytes = memory_bytes
        self._limit()

    def _limit(self) -> None:
        most = 2**32 - 2
        if self._memory_bytes is not None:
            most = min(most, max(0, self._memory_bytes) // (self.row_bytes + INDEX_SHARE))
        self._head[k.MOST] = most

    def _hold(self, buckets: int) -> None:
        """An empty index. Its buckets are cache lines, so it begins at one."""
        self._entries = reserve(64 * buckets, self._huge and buckets > SMALL).view(np.uint64)[
            : 8 * buckets
        ]
        self._head[k.ROOM] = int(4 * buckets * FULLEST)

    def _grow_index(self) -> None:
        old = self._entries
        size = old.size // 8
        most = int(min(self._head[k.MOST] / (4 * FULLEST) + 8, 2**32 - 1))
        self._hold(max(size + 1, min(int(size * (2 if size < SMALL else GROWTH)), most)))
        self._moves += 1
        k.regrow(old, self._entries, self._seeds[0])

    def _grow_slab(self) -> None:
        """Reserve room for all rows that this machine's memory could hold; where so much cannot be reserved, less, and rows are
        copied when it is used up."""
        held = self._slab.size // self.stride
        wanted = max(min(int(self._head[k.MOST]), _memory() // self.row_bytes), 2 * held, 1)
        while True:
            try:
                space = reserve(wanted * self.row_bytes, self._huge)
                break
            except (OSError, ValueError, OverflowError):
                wanted //= 4
                if wanted <= held:
                    raise MemoryError(
                        f"table {self.spec.name!r}: no memory for more than {held} rows"
                    ) from None
        used = int(self._head[k.TOP]) * self.stride
        slab = space[: wanted * self.row_bytes].view(self.dtype)
        slab[:used] = self._slab[:used]
        self._slab, self._links = slab, slab.view(np.uint32)

    def _scratch(self, n: int) -> None:
        self._rows, self._first, self._at = (
            np.empty(n, np.int64),
            np.empty(n, np.int64),
            np.empty(n, np.int64),
        )
        self._distinct, self._places = np.empty(n, np.int64), np.empty(_power(2 * n), np.int32)
        self._hashes, self._distinct_hashes = np.empty(n, np.uint64), np.empty(n, np.uint64)

    @property
    def rows(self) -> int:
        return int(self._head[k.LIVE])

    @property
    def nbytes(self) -> int:
        """What rows, index and admission take; the room for the rows that were forgotten is part of it."""
        return int(self._head[k.TOP]) * self.row_bytes + self._entries.nbytes + self._sketch.nbytes

    @property
    def full(self) -> bool:
        return bool(self._head[k.LIVE] >= self._head[k.MOST])

    @property
    def refused(self) -> int:
        """Gradients of rows that the memory limit kept out."""
        return int(self._head[k.REFUSED])

    @property
    def unadmitted(self) -> int:
        """Gradients of rows that were not yet, or never will be, admitted."""
        return int(self._head[k.UNADMITTED])

    # -- rows --

    def _find(
        self,
        ids: np.ndarray,
        hashes: np.ndarray,
        rows: np.ndarray,
        places: np.ndarray,
        push: bool,
        force: bool = False,
    ) -> bool:
        """Whether all of them had rows before."""
        if not k.seek(self._entries, ids, hashes, rows, places, push, self._head[k.NOW]):
            return True
        done = 0
        while True:
            done = k.enter(
                self._entries, self._head, self._seeds, ids, hashes, done, ids.size, rows, push, self._slab, self._links,
                self.dim, self.stride, self._blank, self._unit, self._sketch, force,
            )  # fmt: skip
            if done == ids.size:
                return False
            if self._head[k.LIVE] >= self._head[k.ROOM]:
                self._grow_index()
            else:
                self._grow_slab()

    def pull(self, ids: np.ndarray, out: np.ndarray) -> None:
        """Copy rows to `out`, making those that are new; what has no row reads as it would start."""
        ids = self._check_ids(ids)
        self._check_block(out, ids.size, "out")
        if not out.flags.aligned or not out.flags.writeable:
            raise StoreError(
                f"table {self.spec.name!r}: out is read-only or not aligned; give memory of its own"
            )
        found = self._next_found(ids.size)
        rows, hashes, flat = found.rows[: ids.size], found.hashes[: ids.size], out.reshape(-1)
        k.hash_all(ids, self._seeds[0], hashes)
        if self._find(ids, hashes, rows, found.places[: ids.size], False):
            found.count, found.moves = ids.size, self._moves
        if k.gather(self._slab, rows, flat, self.dim, self.stride):
            k.gather_first(
                rows, flat, self.dim, ids, self._seeds[1], self._head[k.INIT], self._unit
            )

    def _next_found(self, n: int) -> RowLookup:
        """The oldest of the few that are kept."""
        found = self._found.popleft() if len(self._found) == FOUND else RowLookup(max(n, 1024))
        if found.rows.size < n:
            found = RowLookup(n)
        found.count = 0
        self._found.append(found)
        return found

    def prepare(self, ids: np.ndarray, grads: np.ndarray) -> int:
        """Sum the gradients of equal ids (in `grads`) and refuse what is not finite; how many distinct ids there are."""
        ids = self._check_ids(ids)
        self._check_block(grads, ids.size, "gradients")
        self._flat = plain(grads).reshape(-1)
        hashes, places = self._hashes[: ids.size], self._places[: _power(2 * ids.size)]
        k.hash_all(ids, self._seeds[0], hashes)
        self._known = next(
            (found for found in reversed(self._found) if found.holds(hashes, self._moves)), None
        )
        self._count = k.unite(
            ids,
            hashes,
            self._flat,
            self.dim,
            places,
            self._distinct,
            self._distinct_hashes,
            self._first,
        )
        if self._count < 0:
            bad = np.unique(ids[~np.isfinite(self._flat.reshape(-1, self.dim)).all(axis=1)])
            some = ", ".join(map(str, bad[:5].tolist())) + (", ..." if bad.size > 5 else "")
            raise StoreError(
                f"table {self.spec.name!r}: gradients of {bad.size} ids are not finite (ids {some}); the table is unchanged: lower the "
                "learning rate or clip gradients, and look for what made them"
            )
        return self._count

    def apply(self, lr: float | None = None) -> int:
        """Run the rule on what was prepared; how many rows it changed."""
        n, head = self._count, self._head
        self.version += 1
        self._tell_time()
        self._widen_sketch()
        rows, first, optimizer = self._rows[:n], self._first[:n], self.optimizer
        dropped = head[k.REFUSED] + head[k.UNADMITTED]
        known, self._known = self._known, None
        if known is not None and known.moves == self._moves:
            note(self._entries, known.places, known.rows, first, rows, head[k.NOW])
        else:
            self._find(self._distinct[:n], self._distinct_hashes[:n], rows, self._at[:n], True)
        dropped = int(head[k.REFUSED] + head[k.UNADMITTED] - dropped)
        if dropped > 0:
            first, rows = first[rows != k.NOWHERE], rows[rows != k.NOWHERE]
        optimizer.step += 1
        if optimizer.scatter is not None:
            p, q = optimizer.numbers(lr)
            optimizer.scatter(
                self._slab,
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
            self._apply_own(rows, first, lr)
        self._flat, self._count = np.empty(0, self.dtype), 0
        return n - dropped

    def _tell_time(self) -> None:
        """Write into `head` when this push is, in the few bits that rows have for it."""
        now = (self.version >> self._shift) - self._base
        if not 0 <= now <= k.LATEST:  # later than can be written, or set back
            back = now - k.LATEST // 2
            k.rebase(self._entries, back)
            self._base, now = self._base + back, now - back
        self._head[k.NOW] = now

    def _widen_sketch(self) -> None:
        """Keep several places for every sighting: a place becomes two, both with what it counted."""
        most = (
            MOST_PLACES
            if self._memory_bytes is None
            else min(MOST_PLACES, self._memory_bytes // 16)
        )
        while self.spec.admit_after > 1 and self._sketch.size < min(
            4 * (self._head[k.SIGHTED] + self._count), most
        ):
            self._sketch = np.concatenate([self._sketch, self._sketch])

    def _apply_own(self, rows: np.ndarray, first: np.ndarray, lr: float | None) -> None:
        table = self._slab[: int(self._head[k.TOP]) * self.stride].reshape(-1, self.stride)
        block, grads = table[rows], self._flat.reshape(-1, self.dim)[first]
        w, state = self._cut(block)
        try:
            self.optimizer.own.update(w, grads, state, self.optimizer.lr(lr))
        except Exception as e:
            raise StoreError(
                f"table {self.spec.name!r}: rule {self.spec.optimizer!r} failed: {type(e).__name__}: {e}; its rows are as before"
            ) from e
        table[rows] = block

    def push(self, ids: np.ndarray, grads: np.ndarray, lr: float | None = None) -> int:
        self.prepare(ids, grads)
        return self.apply(lr)

    def _cut(self, block: np.ndarray) -> tuple[np.ndarray, State]:
        """Views of values and state in rows."""
        at, state = self.dim, {}
        for name, width in self._widths.items():
            state[name] = block[:, at : at + width]
            at += width
        return block[:, : self.dim], state

    # -- forgetting --

    def erase(self, ids: np.ndarray) -> int:
        """Forget rows with all that the rule kept of them; how many there were."""
        ids = self._check_ids(ids)
        self._moves += 1
        return int(
            k.erase(
                self._entries, self._head, self._seeds[0], ids, self._links, self.row_bytes // 4
            )
        )

    def expire(self) -> int:
        """Forget what the table's `expire_...` say; how many rows."""
        spec = self.spec
        if spec.expire_after is None and spec.expire_count is None and spec.expire_norm is None:
            return 0
        oldest = (
            0
            if spec.expire_after is None
            else ((self.version - spec.expire_after) >> self._shift) + 1 - self._base
        )
        ids = np.empty(self.rows, np.int64)
        n = k.stale(
            self._entries,
            self._slab,
            self.dim,
            self.stride,
            oldest,
            spec.expire_count or 0,
            spec.expire_norm or 0.0,
            ids,
        )
        return self.erase(ids[:n])

    # -- whole tables --

    def items(
        self, slot: int | None = None, slots: int = 1024
    ) -> tuple[np.ndarray, np.ndarray, State, np.ndarray]:
        """Copies of all rows, or those of one slot, in no order: ids, values [n, dim], state by name, and of each row how often it
        was pushed (up to 4095) and at which version last [n, 2]."""
        which, mask, none = (
            -1 if slot is None else slot,
            np.uint64(slots - 1),
            np.empty(0, np.int64),
        )
        n = k.listed(self._entries, self._seeds[0], mask, which, none, none, none)
        ids, rows, meta = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(2 * n, np.int64)
        if n > 0:
            k.listed(self._entries, self._seeds[0], mask, which, ids, rows, meta)
        block = self._slab[: int(self._head[k.TOP]) * self.stride].reshape(-1, self.stride)[rows]
        values, state = self._cut(block)
        meta = meta.reshape(n, 2)
        meta[:, 1] = (meta[:, 1] + self._base) << self._shift
        state = {name: np.ascontiguousarray(x) for name, x in state.items()}
        if self.optimizer.rule.counts:
            state["step"] = np.full((n, 1), self.optimizer.step, np.int64)
        return ids, np.ascontiguousarray(values), state, meta

    def load(
        self,
        ids: np.ndarray,
        values: np.ndarray,
        state: Mapping[str, np.ndarray],
        meta: np.ndarray | None = None,
    ) -> None:
        """Put rows back as `items` gave them, whatever admission says; rows that are there are replaced."""
        ids = self._check_ids(ids)
        self._check_block(values, ids.size, "values")
        needed = [*self._widths, *(["step"] if self.optimizer.rule.counts else [])]
        if sorted(state) != sorted(needed):
            raise StoreError(
                f"table {self.spec.name!r}: state {sorted(state)} was given, rule {self.spec.optimizer!r} keeps {sorted(needed)}; give what items() gave"
            )
        rows = np.empty(ids.size, np.int64)
        if (
            ids.size + self.rows > self._head[k.MOST]
            and np.unique(ids).size + self.rows > self._head[k.MOST]
        ):
            raise StoreError(
                f"table {self.spec.name!r}: {ids.size} rows to load, and the memory limit of {self._memory_bytes} bytes has room for "
                f"{self._head[k.MOST] - self.rows}; raise the limit or load them into more servers"
            )
        hashes = np.empty(ids.size, np.uint64)
        k.hash_all(ids, self._seeds[0], hashes)
        self._find(ids, hashes, rows, self._at[: ids.size], False, force=True)
        table = self._slab[: int(self._head[k.TOP]) * self.stride].reshape(-1, self.stride)
        table[rows, : self.dim] = values
        at = self.dim
        for name, width in self._widths.items():
            table[rows, at : at + width] = state[name].reshape(ids.size, width)
            at += width
        if "step" in needed and "step" not in self._widths and ids.size > 0:
            self.optimizer.step = max(self.optimizer.step, int(state["step"].max()))
        if meta is not None and ids.size > 0:
            self.version = max(self.version, int(meta[:, 1].max()))
            self._tell_time()
            packed = np.stack(
                [
                    np.clip(meta[:, 0], 0, k.MOST_COUNTED),
                    np.clip((meta[:, 1] >> self._shift) - self._base, 0, k.LATEST),
                ],
                1,
            )
            k.set_meta(self._entries, self._seeds[0], ids, packed.astype(np.int64).reshape(-1))

    # -- the door --

    def _check_ids(self, ids: Any) -> np.ndarray:
        if not isinstance(ids, np.ndarray) or ids.dtype != np.int64 or ids.ndim != 1:
            given = (
                f"{ids.dtype} of shape {ids.shape}"
                if isinstance(ids, np.ndarray)
                else type(ids).__name__
            )
            raise StoreError(
                f"table {self.spec.name!r}: ids are {given}; int64 of one axis is needed: convert them"
            )
        if ids.size > self._rows.size:
            self._scratch(ids.size)
        return plain(ids)

    def _check_block(self, block: Any, n: int, what: str) -> None:
        if (
            not isinstance(block, np.ndarray)
            or block.dtype != self.dtype
            or block.shape != (n, self.dim)
            or not block.flags.c_contiguous
        ):
            given = (
                f"{block.dtype} of shape {block.shape}"
                if isinstance(block, np.ndarray)
                else type(block).__name__
            )
            raise StoreError(
                f"table {self.spec.name!r}: {what} are {given}; {self.dtype} of shape ({n}, {self.dim}), contiguous, is needed"
            )


def _power(n: int) -> int:
    return 1 << max(10, (n - 1).bit_length())


def warm_up(dtype: str = "float32", rules: Sequence[str] = tuple(RULES)) -> None:
    """Compile, or load from where compiled code is kept, everything that tables of these rules run."""
    ids = np.arange(2)
    for rule in rules:
        spec = Table("warm up", optimizer=rule, dtype=dtype, admit_after=2, expire_count=1)  # type: ignore[arg-type]
        table, out = SparseTable(spec), np.zeros((2, 1), dtype)
        table.pull(ids, out)
        table.push(ids, out)
        table.load(*table.items(0))
        table.expire()
        table._grow_index()
        dense = DenseTable(replace(spec, length=2), 0, 2)
        dense.push(out.reshape(-1))
