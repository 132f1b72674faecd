"""What of a call goes to which shard: ids lose their repeats, dense tables are cut, filters withhold what need not travel."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from torch import Tensor

from manyhands.core import Rows, Table, Tensors
from manyhands.errors import StoreError
from manyhands.server.client.request import Outs, ShardPart
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
    vector_of,
)

GIVEN = "what it is pulled into"
DIRECT = 0.7  # share of distinct ids from which on repeats are left in
LOOK = 16  # of so many lists of ids one is looked at for repeats
PARTITIONS = 4  # of each table, remembered: a push nearly always follows a pull of the same ids


class Router:
    def __init__(self, slots: SlotMap, code: m.RowCodec, kkt: float | None, shared: bool):
        self.slots, self.code, self.kkt = slots, code, kkt
        self.shards, self.shared = len(slots.shards), shared  # shared: all reach us through memory
        self.generation = 0  # how often rows were moved
        self.counted: Counter[str] = Counter()
        self.specs: dict[str, Table] = {}
        self._partitions: dict[str, list[Partition]] = {}
        self._distinct: dict[
            str, tuple[int, float]
        ] = {}  # how often ids were seen, and the share of distinct ones

    def spec(self, name: str) -> Table:
        if name not in self.specs:
            raise StoreError(
                f"table {name!r} is unknown; there is {', '.join(map(repr, self.specs)) or 'none'}; create it first"
            )
        return self.specs[name]

    def ranges(self, table: Table) -> list[tuple[int, int]]:
        return ranges(table.length or 0, self.shards)

    def change(self, slots: SlotMap) -> None:
        """Take another map."""
        if not np.array_equal(slots.owner, self.slots.owner):
            self._partitions.clear()
            self.generation += 1
        self.slots = slots

    def wanted(self, rows: Rows, into: Tensors | None) -> tuple[list[list[ShardPart]], Outs]:
        """Of each table what is asked of each shard, and where it is to go."""
        shares, outs = [], Outs()
        for name, ids in rows.items():
            table, given = self.spec(name), None if into is None else into[name]
            if table.length is not None:
                no_ids(table, ids)
                outs[name] = (
                    torch.empty(table.length, dtype=dtype_of(table))
                    if given is None
                    else vector_of(table, given, GIVEN)
                )
                shares += self.shares({name: None})
                continue
            numbers = _numbers(table, ids)
            outs[name] = None if given is None else block_of(table, numbers.size, given, GIVEN)
            if numbers.size and self._direct(table, numbers):
                shares.append(
                    [ShardPart(table, 0, ids=numbers, key=self._key(table, numbers), direct=True)]
                )
                continue
            if given is None:
                outs[name] = torch.empty(numbers.size, table.dim, dtype=dtype_of(table))
            shares += self.shares({name: ids})
        return shares, outs

    def _direct(self, table: Table, ids: np.ndarray) -> bool:
        """Whether ids travel as they are, repeats and all: where there is one shard and few of them repeat, that saves a pass over all
        rows. Now and then it is looked how many do."""
        if (
            self.shards > 1
            or self.code != "none"
            or (self.kkt is not None and table.optimizer == "ftrl")
        ):
            return False
        seen, share = self._distinct.get(table.name, (0, 1.0))
        if seen % LOOK == 0:
            share = self._partition(table, ids).distinct.size / max(1, ids.size)
        self._distinct[table.name] = seen + 1, share
        return share >= DIRECT

    def _key(self, table: Table, ids: np.ndarray) -> int:
        return 0 if self.shared else key_of(ids, table.name)

    def shares(self, rows: Rows, updates: Tensors | None = None) -> list[list[ShardPart]]:
        """Of each table, what goes to each shard."""
        if updates is not None and rows.keys() != updates.keys():
            raise StoreError(
                f"rows are of tables {sorted(rows)}, updates of {sorted(updates)}; the same are needed"
            )
        found = []
        for name, ids in rows.items():
            table, given = self.spec(name), None
            if table.length is not None:
                no_ids(table, ids)
                given = (
                    None if updates is None else vector_of(table, updates[name], "updates").numpy()
                )
                shares = [
                    ShardPart(table, s, part=part, updates=given)
                    for s, part in enumerate(self.ranges(table))
                ]
            elif updates is not None and self._direct(table, numbers := _numbers(table, ids)):
                given = _flat(table, numbers.size, updates[name])
                shares = [
                    ShardPart(
                        table,
                        0,
                        ids=numbers,
                        key=self._key(table, numbers),
                        direct=True,
                        updates=given,
                    )
                ]
            else:
                cut = self._partition(table, ids_of(table, ids))
                given = (
                    None
                    if updates is None
                    else block_of(table, cut.raw.size, updates[name], "updates").numpy().reshape(-1)
                )
                shares = [
                    ShardPart(table, s, cut=cut, ids=cut.ids(s), key=cut.keys[s], updates=given)
                    for s in range(self.shards)
                ]
                if given is not None and cut.zero is not None:
                    for share in shares:
                        self._withhold(share, cut.zero)
            # a shard refuses its part alone: where there are several, all must be known to be good before one has it
            if given is not None and self.shards > 1 and not finite(given):
                raise not_finite(
                    name, shares[0].cut.raw if shares[0].cut is not None else None, given
                )
            found.append(shares)
        return found

    def _partition(self, table: Table, ids: np.ndarray) -> Partition:
        if (known := self._known(table, ids)) is not None:
            return known
        cut = partition(ids, table.name, self.slots.owner, self.shards)
        if self.kkt is not None and table.optimizer == "ftrl":
            cut.zero = np.zeros(cut.distinct.size * table.dim, np.bool_)
        kept = self._partitions.setdefault(table.name, [])
        kept.append(cut)
        if len(kept) > PARTITIONS:
            kept.pop(0)
        return cut

    def _known(self, table: Table, ids: np.ndarray) -> Partition | None:
        return next(
            (cut for cut in reversed(self._partitions.get(table.name, [])) if cut.same(ids)), None
        )

    def _withhold(self, share: ShardPart, zero: np.ndarray) -> None:
        """|g| <= l1 - delta cannot move a weight that is 0, but for what the server has summed up to now: delta is the margin for it."""
        assert share.cut is not None and share.updates is not None and self.kkt is not None
        dim, bound = share.table.dim, float(share.table.options.get("l1", 0.0)) - self.kkt
        share.ready = np.empty(share.numbers, share.table.dtype)
        share.cut.collect(share.updates, share.shard, dim, share.ready)
        start = share.cut.starts[share.shard] * dim
        keep, withheld = withhold(share.ready, zero[start : start + share.ready.size], dim, bound)
        self.counted["withheld"] += withheld
        if not keep.all() and share.ids is not None:
            share.ready = np.ascontiguousarray(share.ready.reshape(-1, dim)[keep]).reshape(-1)
            share.ids = share.ids[keep]
            share.key = 0  # not one to remember
            share.measure()


def _numbers(table: Table, ids: Tensor | None) -> np.ndarray:
    """As `ids_of`, which says what is wrong; what is right is let through at once."""
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
