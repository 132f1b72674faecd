"""Shard counters: rows, bytes, staleness, the hottest keys, and the load of each slot.

Rows and bytes are exact. Hot keys and loads come from a few ids of every 16th request: counting
must stay cheap. Hot keys are found by Misra and Gries: with room for n keys, a key that makes up
more than 2 / n of the sample is among them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping

import numpy as np

from manyhands.server.hot_copies.hot_ids import HotIds
from manyhands.server.slots import SLOTS
from manyhands.server.tables.hashing import seed_of, slot_of

EVERY, IDS, ROOM, SHOWN = 16, 64, 1024, 5
GROUPS = 32  # of slots, for the balance
STALENESS = (0, 1, 2, 4, 8, 16)  # the largest of each class
NAMES = ("stale_0", "stale_1", "stale_2", "stale_3_4", "stale_5_8", "stale_9_16", "stale_more")


class ShardCounters:
    """Not thread-safe: the caller holds the shard's lock."""

    def __init__(self) -> None:
        self._of: Counter[str] = Counter()
        self._hot: dict[str, Counter[int]] = {}
        self._sampled: Counter[str] = Counter()  # table -> ids
        self._requests = 0
        self.hot_ids: HotIds | None = None  # where hot rows are copied
        self.loads = np.zeros(SLOTS)

    def add(self, name: str, number: int = 1) -> None:
        self._of[name] += number

    def pulled(self, table: str, ids: np.ndarray | None, nbytes: int) -> None:
        self._of["pulls"] += 1
        self._of["pulled_bytes"] += nbytes
        if ids is not None:
            self._of["pulled_rows"] += ids.size
            self._sample(table, ids)

    def pushed(self, table: str, ids: np.ndarray | None, nbytes: int, tau: int) -> None:
        self._of["pushes"] += 1
        self._of["pushed_bytes"] += nbytes
        self._of[NAMES[bisect_left(STALENESS, tau)]] += 1
        if ids is not None:
            self._of["pushed_rows"] += ids.size
            self._sample(table, ids)

    def forget(self, table: str) -> None:
        self._hot.pop(table, None)
        if self.hot_ids is not None:
            self.hot_ids.forget(table)
        self._sampled.pop(table, None)

    def values(self) -> dict[str, float]:
        """Counters since the start; gauges under "now/"; shares of hot keys under "hot/"."""
        found: dict[str, float] = {name: float(n) for name, n in self._of.items()}
        groups = self.loads.reshape(GROUPS, -1).sum(1)
        if groups.any():
            found["now/balance"] = float(groups.max() / groups.mean())
        for table, keys in self._hot.items():
            for key, n in keys.most_common(SHOWN):
                found[f"hot/{table}/{key}"] = n / self._sampled[table]
        return found

    def _sample(self, table: str, ids: np.ndarray) -> None:
        self._requests += 1
        if self._requests % EVERY or not ids.size:
            return
        step = max(1, ids.size // IDS)
        some = np.ascontiguousarray(ids[(self._requests // EVERY) % step :: step][:IDS])
        np.add.at(self.loads, slot_of(some, seed_of(table), SLOTS), step * EVERY)
        if self.hot_ids is not None:
            self.hot_ids.sampled(table, some, step * EVERY)
        keys = self._hot.setdefault(table, Counter())
        keys.update(some.tolist())
        self._sampled[table] += some.size
        if len(keys) > ROOM:
            median = sorted(keys.values())[len(keys) // 2]
            self._hot[table] = Counter({k: n - median for k, n in keys.items() if n > median})


def since(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """The increase of counters between two readings; gauges have their value of now, and so have
    counters that are smaller than before: another server began to count."""
    return {
        k: v if k.startswith(("now/", "hot/")) or v < before.get(k, 0.0) else v - before.get(k, 0.0)
        for k, v in now.items()
    }


def together(shards: list[dict[str, float]]) -> dict[str, float]:
    """Of several shards: sums of counters and sizes, the largest balance and share of a key, and
    how uneven the shards are ("now/shards").
    """
    found: dict[str, float] = {}
    for counted in shards:
        for name, n in counted.items():
            largest = name == "now/balance" or name.startswith("hot/")
            found[name] = max(found.get(name, n), n) if largest else found.get(name, 0.0) + n
    rows = [counted.get("pulled_rows", 0.0) + counted.get("pushed_rows", 0.0) for counted in shards]
    if len(shards) > 1 and any(rows):
        found["now/shards"] = max(rows) * len(rows) / sum(rows)
    return found
