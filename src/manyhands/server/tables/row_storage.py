"""Row storage of a sparse table: its index and its rows, in memory that grows with them.

    entries    the index (see `index_kernels`); at most FULLEST full, then rebuilt larger
    slab       the rows, `stride` elements each; address space for all rows that fit into memory is
               reserved at once and becomes memory where it is first touched, so rows rarely move
    sketch     how often admission has seen ids that have no row yet

Not thread-safe.
"""

from __future__ import annotations

import mmap
import os
import sys

import numpy as np

from manyhands.core import Table
from manyhands.server.tables.hashing import seed_of
from manyhands.server.tables.index_kernels import (
    ADMIT_AFTER,
    CAPACITY,
    HEAD_SIZE,
    INIT,
    LATEST,
    LIVE,
    MAX_ROWS,
    NOW,
    REFUSED,
    SIGHTED,
    TOP,
    UNADMITTED,
    find_rows,
    insert_rows,
)
from manyhands.server.tables.index_maintenance import erase, rebuild, shift_times
from manyhands.server.tables.row_kernels import INITS

# The index is at most FULLEST full and grows by GROWTH: 25 to 31 bytes a row.
FULLEST, GROWTH = 0.65, 1.25
SMALL = 1 << 14  # buckets up to which the index doubles instead
# Bytes per row that an index may take while it grows: the new one at its fullest, and the old one.
INDEX_BYTES = 45
MAX_SKETCH = 1 << 26  # counters of the sketch

MAP_NORESERVE = 0x4000  # of Linux; Python knows it from 3.13 on


def reserve(nbytes: int, huge: bool = True) -> np.ndarray:
    """Address space that becomes zeroed memory where it is first touched, in pages of 2 MB where
    the system has them.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if sys.platform == "linux":
        flags |= MAP_NORESERVE
    space = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            space.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        except OSError:  # a kernel without them
            pass
    return np.frombuffer(space, np.uint8)


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class RowStorage:
    """`blank` is what the optimizer state of a new row starts as."""

    def __init__(
        self,
        table: Table,
        stride: int,
        blank: np.ndarray,
        memory_bytes: int | None,
        huge: bool,
    ):
        self.name, self.dtype, self.dim, self.stride = table.name, blank.dtype, table.dim, stride
        self.row_bytes = stride * self.dtype.itemsize
        self.memory_bytes = memory_bytes
        self._huge, self._blank = huge, blank
        self.head = np.zeros(HEAD_SIZE, np.int64)
        self.head[ADMIT_AFTER] = table.admit_after
        self.head[INIT] = INITS[table.init if table.scale > 0 else "zeros"]
        share = min(int(table.admit_share * 2.0**64), 2**64 - 1)
        self.seeds = np.array(
            [seed_of(table.name), seed_of(table.name, table.seed + 1), share], np.uint64
        )
        unit = table.scale * 2.0**-31 if table.init == "uniform" else table.scale
        self.unit = self.dtype.type(unit)
        self._admits_late = table.admit_after > 1
        self._sketch = np.zeros(1 << 16 if self._admits_late else 1, np.uint16)
        self.moves = 0  # how often entries were moved
        # the time of a push in an entry is (version >> time_shift) - time_base
        self.time_base = self.time_shift = 0
        while (table.expire_after or 0) >> self.time_shift >= LATEST // 4:
            self.time_shift += 1
        self.limit(memory_bytes)
        self._empty_index(64)
        self.slab = self._links = np.empty(0, self.dtype)
        self._grow_slab()

    # -- memory --

    def limit(self, memory_bytes: int | None) -> None:
        """Limit the memory of rows to come; rows that exist stay."""
        self.memory_bytes = memory_bytes
        most = 2**32 - 2
        if memory_bytes is not None:
            most = min(most, max(0, memory_bytes) // (self.row_bytes + INDEX_BYTES))
        self.head[MAX_ROWS] = most

    @property
    def nbytes(self) -> int:
        """Bytes of rows (erased ones included), index and sketch."""
        return int(self.head[TOP]) * self.row_bytes + self.entries.nbytes + self._sketch.nbytes

    def matrix(self) -> np.ndarray:
        """All rows in use, and erased ones between them, as [rows, stride]."""
        return self.slab[: int(self.head[TOP]) * self.stride].reshape(-1, self.stride)

    def _empty_index(self, buckets: int) -> None:
        """An empty index. Its buckets are cache lines, so it begins at one."""
        space = reserve(64 * buckets, self._huge and buckets > SMALL)
        self.entries = space.view(np.uint64)[: 8 * buckets]
        self.head[CAPACITY] = int(4 * buckets * FULLEST)

    def grow_index(self) -> None:
        old = self.entries
        size = old.size // 8
        most = int(min(self.head[MAX_ROWS] / (4 * FULLEST) + 8, 2**32 - 1))
        self._empty_index(max(size + 1, min(int(size * (2 if size < SMALL else GROWTH)), most)))
        self.moves += 1
        rebuild(old, self.entries, self.seeds[0])

    def _grow_slab(self) -> None:
        """Reserve room for all rows that this machine's memory could hold. Where so much cannot be
        reserved, reserve less; rows are copied when it is used up.
        """
        now = self.slab.size // self.stride
        wanted = max(min(int(self.head[MAX_ROWS]), _machine_bytes() // self.row_bytes), 2 * now, 1)
        while True:
            try:
                space = reserve(wanted * self.row_bytes, self._huge)
                break
            except (OSError, ValueError, OverflowError):
                wanted //= 4
                if wanted <= now:
                    raise MemoryError(
                        f"table {self.name!r}: no memory for more than {now} rows"
                    ) from None
        used = int(self.head[TOP]) * self.stride
        slab = space[: wanted * self.row_bytes].view(self.dtype)
        slab[:used] = self.slab[:used]
        self.slab, self._links = slab, slab.view(np.uint32)

    # -- rows --

    def find(
        self,
        ids: np.ndarray,
        hashes: np.ndarray,
        rows: np.ndarray,
        entries_at: np.ndarray,
        push: bool,
        force: bool = False,
        make: bool = True,
    ) -> bool:
        """Write the rows of ids to `rows`, making (where `make`) those that admission (unless
        `force`) and memory allow. Returns whether all existed before.
        """
        if not find_rows(self.entries, ids, hashes, rows, entries_at, push, self.head[NOW]):
            return True
        if not make:
            return False
        done = 0
        while True:
            done = insert_rows(
                self.entries,
                self.head,
                self.seeds,
                ids,
                hashes,
                done,
                ids.size,
                rows,
                push,
                self.slab,
                self._links,
                self.dim,
                self.stride,
                self._blank,
                self.unit,
                self._sketch,
                force,
            )
            if done == ids.size:
                return False
            if self.head[LIVE] >= self.head[CAPACITY]:
                self.grow_index()
            else:
                self._grow_slab()

    def erase(self, ids: np.ndarray) -> int:
        """Erase rows with their optimizer state; returns how many there were."""
        self.moves += 1
        link_stride = self.row_bytes // 4
        return int(erase(self.entries, self.head, self.seeds[0], ids, self._links, link_stride))

    # -- time and admission --

    def set_time(self, version: int) -> None:
        """Set the time of the push that comes next, in the 20 bits that an entry has for it."""
        now = (version >> self.time_shift) - self.time_base
        if not 0 <= now <= LATEST:  # later than can be written, or set back
            back = now - LATEST // 2
            shift_times(self.entries, back)
            self.time_base, now = self.time_base + back, now - back
        self.head[NOW] = now

    def admission(self) -> tuple[np.ndarray, np.ndarray]:
        """How often admission has seen ids without a row, and what it and memory have refused."""
        return self._sketch.copy(), self.head[[REFUSED, UNADMITTED, SIGHTED]]

    def admit_as(self, sketch: np.ndarray, counts: np.ndarray) -> None:
        """Go on as a table with this `admission`."""
        self._sketch = sketch.copy()
        self.head[[REFUSED, UNADMITTED, SIGHTED]] = counts

    def widen_sketch(self, ids: int) -> None:
        """Keep four counters for every id seen, `ids` to come: each counter becomes two copies."""
        if not self._admits_late:
            return
        limit = self.memory_bytes
        most = MAX_SKETCH if limit is None else min(MAX_SKETCH, limit // 16)
        while self._sketch.size < min(4 * (self.head[SIGHTED] + ids), most):
            self._sketch = np.concatenate([self._sketch, self._sketch])
