"""Hot rows kept by the worker: a Store around a Store, so that a power-law id distribution does not melt one server.

    a pull        serves what it holds and fetched at most `age` of its table's pulls ago; asks for the rest
    a row stays   where it was asked for more often, of late, than the one it would push out (TinyLFU, arXiv:1512.00727)

What it serves misses at most what was pushed during the last `age` pulls: by others, and under rules other than plain sgd by this
rank too (an sgd step is made on the rows here as well). A tick with a smaller bound counts: staleness=0 leaves nothing to serve,
so a synchronous run is the same with a cache and without. `flush`, which comes before an evaluation or a checkpoint, empties it.
"""

from __future__ import annotations

import math
from typing import Unpack

import numpy as np
import torch
from torch import Tensor

from manyhands.core import (
    CompleteReply,
    Late,
    PushOptions,
    Reply,
    Rows,
    Table,
    TableStore,
    Tensors,
    Tick,
    Work,
)
from manyhands.errors import PlanError
from manyhands.kernels.compile import compiled, inlined
from manyhands.server.tables.hashing import mix

WAYS = 8  # places that a row may stand in
FORGET_AFTER = 16  # lookups a place before all counts are halved: what was hot once cools down
COUNTERS = 8  # a place: ids seen once must not fill them before they are halved
FULL = np.uint8(255)

# -- loops --


@inlined
def _count(sketch, h):
    """How often of late, at most: the smaller of two counters (a count-min sketch)."""
    mask = np.uint64(sketch.size - 1)
    return min(sketch[h & mask], sketch[(h >> np.uint64(32)) & mask])


@inlined
def _first(h, places):
    return np.int64((h >> np.uint64(8)) % np.uint64(places // WAYS)) * WAYS


@inlined
def _at(tags, since, first, id_):
    for at in range(first, first + WAYS):
        if since[at] > 0 and tags[at] == id_:
            return at
    return -1


@compiled
def _serve(ids, out, missing, tags, since, rows, sketch, dim, now, age):
    """Copy what is here and young enough; list the places of the rest. Every lookup is counted."""
    n = 0
    mask = np.uint64(sketch.size - 1)
    for i in range(ids.size):
        h = mix(ids[i])
        a, b = h & mask, (h >> np.uint64(32)) & mask
        least = min(sketch[a], sketch[b])
        if (
            least < FULL
        ):  # only the smaller is raised: an id's own count, not what others that fall there add
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
    """Hold fresh rows: in their own place, an empty one, or that of the least wanted if that is wanted less."""
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


class _Held:
    """The rows of one table."""

    def __init__(self, table: Table, places: int):
        places = -(-places // WAYS) * WAYS
        dtype = np.dtype(table.dtype)
        self.table, self.dim, self.dtype = table, table.dim, dtype
        self.tags, self.since = (
            np.zeros(places, np.int64),
            np.zeros(places, np.int64),
        )  # since: the pull it came by; 0: empty
        self.rows = np.zeros(places * table.dim, dtype)
        self.sketch = np.zeros(1 << (COUNTERS * places - 1).bit_length(), np.uint8)
        self.clock = self.lookups = self.hits = self._counted = 0
        options = table.options
        # lr of the table's own, where a push is w -= lr g and nothing else
        self.lr = (
            options.get("lr")
            if table.optimizer == "sgd" and not any(v for k, v in options.items() if k != "lr")
            else None
        )

    def serve(self, ids: np.ndarray, out: np.ndarray, age: float) -> np.ndarray:
        """Fill `out` as far as possible; the places in `ids` of what is missing."""
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


class CachedStore:
    """`rows` of each sparse table, at most `age` pulls old. 0 of either: as if it were not there."""

    background = True  # also over a store without: a push then goes with the next request here too

    def __init__(self, store: TableStore, rows: int, age: int = 8):
        if rows < 0 or age < 0:
            raise PlanError(
                f"cache={rows} cache_age={age}, but neither can be negative; 0 keeps nothing"
            )
        self.store, self.rank, self.size = store, store.rank, store.size
        self._places, self._age, self._bound = rows, age, float(age)
        self._held: dict[str, _Held] = {}
        self._emptied = 0

    def create(
        self, table: Table, values: Tensor | None = None, state: Tensors | None = None
    ) -> None:
        self.store.create(table, values, state)
        if self._places and self._age and table.length is None and table.name not in self._held:
            self._held[table.name] = _Held(table, self._places)

    def pull(self, rows: Rows, into: Tensors | None = None, *, remember: bool = False) -> Tensors:
        if remember or not self._held.keys() & rows.keys():
            return self.store.pull(rows, into, remember=remember)
        wanted = _Wanted(self, rows, into or {})
        return wanted.fill(self.store.pull(wanted.rest) if wanted.rest else {})

    def pull_async(
        self, rows: Rows, into: Tensors | None = None, *, remember: bool = False
    ) -> Reply:
        if not self.store.background:
            return CompleteReply(self.pull(rows, into, remember=remember))
        if remember or not self._held.keys() & rows.keys():
            return self.store.pull_async(rows, into, remember=remember)
        wanted = _Wanted(self, rows, into or {})
        return (
            _Coming(wanted, self.store.pull_async(wanted.rest))
            if wanted.rest
            else CompleteReply(wanted.fill({}))
        )

    def push(self, rows: Rows, updates: Tensors, **options: Unpack[PushOptions]) -> Work:
        self._descend(rows, updates, options)
        return self.store.push(rows, updates, **options)

    def exchange(
        self, rows: Rows, updates: Tensors, *, wants: Rows, **options: Unpack[PushOptions]
    ) -> Reply:
        """A push and, after it, a pull of what is not here: in one request where the store can."""
        if not self.store.background:
            self.push(rows, updates, **options)
            return self.pull_async(wants)
        self._descend(rows, updates, options)
        wanted = _Wanted(self, wants, {})
        if wanted.rest:
            return _Coming(wanted, self.store.exchange(rows, updates, wants=wanted.rest, **options))
        self.store.push(rows, updates, **options)
        return CompleteReply(wanted.fill({}))

    def _descend(self, rows: Rows, updates: Tensors, options: PushOptions) -> None:
        if options.get("pending") or options.get("adapt"):
            return
        lr = options.get("lr")
        for name, ids in rows.items():
            held = self._held.get(name)
            if held is None or ids is None or held.lr is None:
                continue
            grads = updates[name].detach()
            if grads.shape == (
                len(ids),
                held.dim,
            ):  # what the store will refuse changes nothing here either
                held.descend(
                    ids.contiguous().numpy(),
                    _flat(grads, held.dtype),
                    held.lr if lr is None else lr,
                )

    def tick(
        self,
        staleness: float = math.inf,
        quorum: int | None = None,
        *,
        late: Late = "drop",
        delay: int | None = None,
    ) -> Tick:
        self._bound = min(float(self._age), staleness)
        return self.store.tick(staleness, quorum, late=late, delay=delay)

    def claim_step(self, limit: int, shared: bool) -> int | None:
        return self.store.claim_step(limit, shared)

    def request_sync(self) -> None:
        self.store.request_sync()

    def flush(self) -> None:
        self.empty()
        self.store.flush()

    def dump(self, name: str) -> Tensors:
        return self.store.dump(name)

    def restore(self, name: str, content: Tensors) -> None:
        self.store.restore(name, content)
        self.empty()

    def stats(self) -> dict[str, float]:
        own = {"cache_lookups": 0.0, "cache_hits": 0.0}
        for held in self._held.values():
            own["cache_lookups"] += held.lookups
            own["cache_hits"] += held.hits
            held.lookups = held.hits = 0
        return {**self.store.stats(), **own}

    def empty(self) -> None:
        """Forget the rows, not how often they were wanted. What was asked for before this is not held when it comes."""
        self._emptied += 1
        for held in self._held.values():
            held.since[:] = 0

    def close(self) -> None:
        self.store.close()


class _Wanted:
    """One pull: what is here, what must be asked for, and how both become one answer."""

    def __init__(self, cache: CachedStore, rows: Rows, into: Tensors):
        self._cache, self._emptied = cache, cache._emptied
        self.into = into
        self.out: Tensors = {}
        self.rest: Rows = {}
        self._parts: dict[str, tuple[_Held, int, np.ndarray, np.ndarray]] = {}
        for name, ids in rows.items():
            held = cache._held.get(name)
            if held is None or ids is None:
                self.rest[name] = ids
                continue
            wanted = ids.contiguous().numpy()
            out = torch.empty(len(ids), held.dim, dtype=getattr(torch, held.table.dtype))
            missing = held.serve(wanted, out.numpy().reshape(-1), cache._bound)
            self.out[name] = out
            if len(missing):
                self._parts[name] = held, held.clock, missing, wanted[missing]
                self.rest[name] = torch.from_numpy(self._parts[name][3])

    def fill(self, came: Tensors) -> Tensors:
        for name, values in came.items():
            if name not in self._parts:
                self.out[name] = values
                continue
            held, clock, missing, ids = self._parts[name]
            self.out[name].numpy()[missing] = values.numpy()
            if self._emptied == self._cache._emptied:
                held.keep(ids, _flat(values, held.dtype), clock)
        for name, target in self.into.items():
            if name in self.out:
                target.copy_(self.out[name])
                self.out[name] = target
        return self.out


class _Coming:
    def __init__(self, wanted: _Wanted, reply: Reply):
        self._wanted, self._reply = wanted, reply
        self._found: Tensors | None = None

    def result(self) -> Tensors:
        if self._found is None:
            self._found = self._wanted.fill(self._reply.result())
        return self._found


def _flat(values: Tensor, dtype: np.dtype) -> np.ndarray:
    return np.ascontiguousarray(values.numpy(), dtype).reshape(-1)
