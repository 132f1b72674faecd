"""Hot rows of one table, kept by a worker: which rows stay, and the compiled loops over them.

A row stays if it was asked for more often, of late, than the one it would replace (TinyLFU,
arXiv:1512.00727). A count-min sketch estimates how often; all counts are halved now and then.
"""

from __future__ import annotations

import numpy as np

from manyhands.core import Table
from manyhands.kernels.compile import compiled, inlined
from manyhands.server.tables.hashing import mix

WAYS = 8  # cells that a row may be in
FORGET_AFTER = 16  # lookups for each cell, until all counts are halved
COUNTERS = 8  # for each cell: ids seen once must not fill them before they are halved
FULL = np.uint8(255)

# -- loops --


@inlined
def _count(sketch, h):
    """Upper bound of how often, of late: the smaller of two counters (a count-min sketch)."""
    mask = np.uint64(sketch.size - 1)
    return min(sketch[h & mask], sketch[(h >> np.uint64(32)) & mask])


@inlined
def _first(h, cells):
    return np.int64((h >> np.uint64(8)) % np.uint64(cells // WAYS)) * WAYS


@inlined
def _at(tags, since, first, id_):
    for at in range(first, first + WAYS):
        if since[at] > 0 and tags[at] == id_:
            return at
    return -1


@compiled
def _serve(ids, out, missing, tags, since, rows, sketch, dim, now, age):
    """Copy rows that are kept and young enough; list the positions of the rest in `missing`. Count
    every lookup."""
    n = 0
    mask = np.uint64(sketch.size - 1)
    for i in range(ids.size):
        h = mix(ids[i])
        a, b = h & mask, (h >> np.uint64(32)) & mask
        least = min(sketch[a], sketch[b])
        # raise only the smaller: the id's own count, not what ids that share a counter add
        if least < FULL:
            sketch[a] = max(sketch[a], np.uint8(least + 1))
            sketch[b] = max(sketch[b], np.uint8(least + 1))
        at = _at(tags, since, _first(h, tags.size), ids[i])
        if at >= 0 and now - since[at] <= age:
            source, target = rows[at * dim : (at + 1) * dim], out[i * dim : (i + 1) * dim]
            for d in range(dim):
                target[d] = source[d]
        else:
            missing[n] = i
            n += 1
    return n


@compiled
def _keep(ids, values, tags, since, rows, sketch, dim, now):
    """Keep fresh rows: in their own cell, an empty one, or that of the least wanted row if it is
    wanted less."""
    for i in range(ids.size):
        h = mix(ids[i])
        first = _first(h, tags.size)
        best = _at(tags, since, first, ids[i])
        if best < 0:
            least = np.int64(_count(sketch, h))
            for at in range(first, first + WAYS):
                wanted = np.int64(-1) if since[at] == 0 else np.int64(_count(sketch, mix(tags[at])))
                if wanted < least:
                    best, least = at, wanted
        if best >= 0:
            tags[best], since[best] = ids[i], now
            target, source = rows[best * dim : (best + 1) * dim], values[i * dim : (i + 1) * dim]
            for d in range(dim):
                target[d] = source[d]


@compiled
def _descend(ids, grads, tags, since, rows, dim, lr):
    for i in range(ids.size):
        at = _at(tags, since, _first(mix(ids[i]), tags.size), ids[i])
        if at >= 0:
            row, grad = rows[at * dim : (at + 1) * dim], grads[i * dim : (i + 1) * dim]
            for d in range(dim):
                row[d] -= lr * grad[d]


class HotRows:
    """At most `cells` rows of one table."""

    def __init__(self, table: Table, cells: int):
        cells = -(-cells // WAYS) * WAYS
        dtype = np.dtype(table.dtype)
        self.table, self.dim, self.dtype = table, table.dim, dtype
        self.tags = np.zeros(cells, np.int64)
        self.since = np.zeros(cells, np.int64)  # the pull that it came by; 0: empty
        self.rows = np.zeros(cells * table.dim, dtype)
        self.sketch = np.zeros(1 << (COUNTERS * cells - 1).bit_length(), np.uint8)
        self.clock = self.lookups = self.hits = self._counted = 0
        options = table.options
        # the table's own lr, where a push is w -= lr g and nothing else; else None
        self.lr = (
            options.get("lr")
            if table.optimizer == "sgd" and not any(v for k, v in options.items() if k != "lr")
            else None
        )

    def serve(self, ids: np.ndarray, out: np.ndarray, age: float) -> np.ndarray:
        """Fill `out` as far as possible; return the positions in `ids` of what is missing."""
        self.clock += 1
        missing = np.empty(ids.size, np.int64)
        bound = min(age, 1 << 62)
        n = _serve(
            ids,
            out,
            missing,
            self.tags,
            self.since,
            self.rows,
            self.sketch,
            self.dim,
            self.clock,
            np.int64(bound),
        )
        self.lookups += ids.size
        self.hits += ids.size - n
        self._counted += ids.size
        if self._counted > FORGET_AFTER * self.tags.size:
            self._counted = 0
            self.sketch >>= np.uint8(1)
        return missing[:n]

    def keep(self, ids: np.ndarray, values: np.ndarray, clock: int) -> None:
        _keep(ids, values, self.tags, self.since, self.rows, self.sketch, self.dim, clock)

    def descend(self, ids: np.ndarray, grads: np.ndarray, lr: float) -> None:
        _descend(ids, grads, self.tags, self.since, self.rows, self.dim, self.dtype.type(lr))
