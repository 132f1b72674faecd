"""Router: divides a pull or push into parts, one for each table and shard.

Repeated ids are removed, dense tables are cut into ranges, and the KKT filter leaves out gradients
that cannot change anything.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from torch import Tensor

from manyhands.core import Rows, Table, Tensors
from manyhands.server.client.request import Outs, ShardPart
from manyhands.server.hot_copies.hot_reads import HotReads
from manyhands.server.protocol import messages as m
from manyhands.server.slots import SlotMap, ranges
from manyhands.server.tables.gradient_kernels import finite
from manyhands.server.tables.partition import (
    Partition,
    key_of,
    partition,
    withhold,
)
from manyhands.server.validate import (
    block_of,
    dtype_of,
    ids_of,
    no_ids,
    not_finite,
    unequal_tables,
    unknown_table,
    vector_of,
)

TARGET = "the tensor to pull into"
DIRECT = 0.7  # fraction of distinct ids from which on repeats are left in
MEASURE_EVERY = 16  # lists of ids, to measure that fraction
PARTITIONS = 4  # remembered for each table: a push nearly always follows a pull of the same ids


class Router:
    def __init__(
        self, slots: SlotMap, code: m.RowCodec, kkt: float | None, shared: bool, hot: HotReads
    ):
        self.slots, self.code, self.kkt, self.hot = slots, code, kkt, hot
        self.shards, self.shared = len(slots.shards), shared  # all connections share memory
        self.generation = 0  # how often rows moved to other shards
        self.counted: Counter[str] = Counter()
        self.tables: dict[str, Table] = {}
        self._partitions: dict[str, list[Partition]] = {}
        # by table: how many lists of ids there were, and the fraction of distinct ids
        self._distinct: dict[str, tuple[int, float]] = {}

    def table(self, name: str) -> Table:
        if name not in self.tables:
            raise unknown_table(name, self.tables)
        return self.tables[name]

    def ranges(self, table: Table) -> list[tuple[int, int]]:
        return ranges(table.length or 0, self.shards)

    def change(self, slots: SlotMap) -> None:
        """Use another slot map."""
        if not np.array_equal(slots.owner, self.slots.owner):
            self._partitions.clear()
            self.generation += 1
        self.slots = slots
        self.hot.moved()

    def wanted(
        self, rows: Rows, into: Tensors | None, copies: bool = False
    ) -> tuple[list[list[ShardPart]], Outs]:
        """Parts of a pull, by table and shard, and the tensors that its rows go to. With `copies`,
        hot rows of a table are one more part."""
        parts, outs = [], Outs()
        for name, ids in rows.items():
            table, given = self.table(name), None if into is None else into[name]
            if table.length is not None:
                no_ids(table, ids)
                outs[name] = (
                    torch.empty(table.length, dtype=dtype_of(table))
                    if given is None
                    else vector_of(table, given, TARGET)
                )
                parts += self.parts({name: None})
                continue
            numbers = _numbers(table, ids)
            outs[name] = None if given is None else block_of(table, numbers.size, given, TARGET)
            if numbers.size and self._direct(table, numbers):
                parts.append(
                    [ShardPart(table, 0, ids=numbers, key=self._key(table, numbers), direct=True)]
                )
                continue
            if given is None:
                outs[name] = torch.empty(numbers.size, table.dim, dtype=dtype_of(table))
            parts += self.parts({name: ids}, copies=copies)
        return parts, outs

    def _direct(self, table: Table, ids: np.ndarray) -> bool:
        """Whether ids travel as given, with their repeats: with one shard and few repeats that
        saves a pass over all rows. The fraction of distinct ids is measured now and then."""
        if (
            self.shards > 1
            or self.code != "none"
            or (self.kkt is not None and table.optimizer == "ftrl")
        ):
            return False
        seen, distinct = self._distinct.get(table.name, (0, 1.0))
        if seen % MEASURE_EVERY == 0:
            distinct = self._partition(table, ids).distinct.size / max(1, ids.size)
        self._distinct[table.name] = seen + 1, distinct
        return distinct >= DIRECT

    def _key(self, table: Table, ids: np.ndarray) -> int:
        return 0 if self.shared else key_of(ids, table.name)

    def parts(
        self, rows: Rows, updates: Tensors | None = None, copies: bool = False
    ) -> list[list[ShardPart]]:
        """Parts of a push, or without `updates` of a pull, by table and shard."""
        if updates is not None and rows.keys() != updates.keys():
            raise unequal_tables(rows, updates)
        found = []
        for name, ids in rows.items():
            table, given = self.table(name), None
            if table.length is not None:
                no_ids(table, ids)
                given = (
                    None if updates is None else vector_of(table, updates[name], "updates").numpy()
                )
                parts = [
                    ShardPart(table, s, span=span, updates=given)
                    for s, span in enumerate(self.ranges(table))
                ]
            elif updates is not None and self._direct(table, numbers := _numbers(table, ids)):
                given = _flat(table, numbers.size, updates[name])
                key = self._key(table, numbers)
                parts = [ShardPart(table, 0, ids=numbers, key=key, direct=True, updates=given)]
            else:
                numbers = ids_of(table, ids)
                hot = self.hot.ids(name, numbers.size) if copies else None
                cut = self._partition(table, numbers, hot)
                given = (
                    None
                    if updates is None
                    else block_of(table, cut.raw.size, updates[name], "updates").numpy().reshape(-1)
                )
                parts = [
                    ShardPart(
                        table, s, partition=cut, ids=cut.ids(s), key=cut.keys[s], updates=given
                    )
                    for s in range(self.shards)
                ]
                if hot is not None and (some := cut.ids(self.shards)).size:
                    parts.append(ShardPart(table, self.shards, partition=cut, ids=some, hot=True))
                if given is not None and cut.zero is not None:
                    for part in parts:
                        self._withhold(part, cut.zero)
            # a shard refuses its own part only: with several, check all before one of them gets it
            if given is not None and self.shards > 1 and not finite(given):
                cut_by = parts[0].partition
                raise not_finite(name, cut_by.raw if cut_by is not None else None, given)
            found.append(parts)
        return found

    def _partition(self, table: Table, ids: np.ndarray, hot: np.ndarray | None = None) -> Partition:
        if (known := self._known(table, ids, hot)) is not None:
            return known
        cut = partition(ids, table.name, self.slots.owner, self.shards, hot)
        if self.kkt is not None and table.optimizer == "ftrl":
            cut.zero = np.zeros(cut.distinct.size * table.dim, np.bool_)
        kept = self._partitions.setdefault(table.name, [])
        kept.append(cut)
        if len(kept) > PARTITIONS:
            kept.pop(0)
        return cut

    def _known(self, table: Table, ids: np.ndarray, hot: np.ndarray | None) -> Partition | None:
        for cut in reversed(self._partitions.get(table.name, [])):
            # without hot ids among them all is as if none were known
            fits = cut.hot is hot or (hot is None and cut.starts[-1] == cut.starts[-2])
            if fits and cut.same(ids):
                return cut
        return None

    def _withhold(self, part: ShardPart, zero: np.ndarray) -> None:
        """KKT filter: |g| <= l1 - delta cannot move a weight that is 0, but for what the server has
        summed up so far; delta is the margin for that."""
        assert part.partition is not None and part.updates is not None and self.kkt is not None
        dim, bound = part.table.dim, float(part.table.options.get("l1", 0.0)) - self.kkt
        part.ready = np.empty(part.numbers, part.table.dtype)
        part.partition.collect(part.updates, part.shard, dim, part.ready)
        start = part.partition.starts[part.shard] * dim
        keep, withheld = withhold(part.ready, zero[start : start + part.ready.size], dim, bound)
        self.counted["withheld"] += withheld
        if not keep.all() and part.ids is not None:
            part.ready = np.ascontiguousarray(part.ready.reshape(-1, dim)[keep]).reshape(-1)
            part.ids = part.ids[keep]
            part.key = 0  # the shard need not remember this list
            part.measure()


def _numbers(table: Table, ids: Tensor | None) -> np.ndarray:
    """As `ids_of`, with fewer checks for ids that need no conversion."""
    if (
        type(ids) is Tensor
        and ids.dtype is torch.int64
        and ids.ndim == 1
        and ids.is_cpu
        and ids.is_contiguous()
    ):
        return ids.numpy()
    return ids_of(table, ids)


def _flat(table: Table, n: int, x: Tensor) -> np.ndarray:
    if (
        type(x) is Tensor
        and x.dtype is dtype_of(table)
        and x.shape == (n, table.dim)
        and x.is_cpu
        and x.is_contiguous()
    ):
        return x.detach().numpy().reshape(-1)
    return block_of(table, n, x, "updates").numpy().reshape(-1)
