"""Hot ids of one shard: found and dropped by their share of its accesses.

    hot            from `share` of a table's sampled accesses on, with enough samples to tell
    not any more   below half of that, or where a table is hardly used at all

Counts are halved every WINDOW_S, so they follow the load. Reads of copies reach the owner as counts
that other servers report; without them a row would cool down as soon as it was copied.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import numpy as np

from manyhands.errors import StoreError

WINDOW_S = 0.25
SAMPLES = 8.0  # of one id, to call it hot
ACCESSES = 128.0  # of a table in its window; with fewer nothing is hot
ROOM, MOST = 1024, 256  # ids that are counted, and that are hot, of a table


def checked_hot(share: float, age: float) -> tuple[float, float]:
    """The share of accesses from which on a row is hot, and the age of a copy; or an error."""
    if not 0 <= share < 1 or not 0 < age < float("inf"):
        raise StoreError(
            f"hot_rows={share} hot_age={age}; a share of accesses below 1 (0: no copies) and an "
            "age in seconds, more than 0, are needed"
        )
    return share, age if share else 0.0


class TableLoad:
    """Accesses of one table, estimated, each half as heavy with every window."""

    def __init__(self) -> None:
        self.total = 0.0
        self.accesses: Counter[int] = Counter()
        self.samples: Counter[int] = Counter()
        self.hot = np.empty(0, np.int64)

    def fade(self, factor: float) -> None:
        self.total *= factor
        for counts in (self.accesses, self.samples):
            for key in counts:
                counts[key] *= factor  # type: ignore[assignment]

    def prune(self) -> None:
        if len(self.accesses) > ROOM:
            self.accesses = Counter(dict(self.accesses.most_common(ROOM // 2)))
            self.samples = Counter({k: self.samples[k] for k in self.accesses})

    def decide(self, share: float) -> None:
        if self.total < ACCESSES:
            self.hot = np.empty(0, np.int64)
            return
        before = set(self.hot.tolist())
        found = [
            key
            for key, n in self.accesses.most_common(MOST)
            if n >= share * self.total / (2 if key in before else 1)
            and (key in before or self.samples[key] >= SAMPLES)
        ]
        self.hot = np.array(sorted(found), np.int64)


class HotIds:
    """Not thread-safe: the caller holds the shard's lock."""

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic):
        self._share, self._clock = share, clock
        self._tables: dict[str, TableLoad] = {}
        self._looked = clock()

    def sampled(self, table: str, ids: np.ndarray, each: float) -> None:
        """Ids out of one request; each stands for so many accesses."""
        load = self._tables.setdefault(table, TableLoad())
        load.total += each * ids.size
        for key in ids.tolist():
            load.accesses[key] += each  # type: ignore[assignment]
            load.samples[key] += 1
        load.prune()

    def read_elsewhere(self, table: str, ids: list[int], counts: list[int]) -> None:
        """Reads of copies of hot rows."""
        load = self._tables.get(table)
        if load is None:
            return
        load.total += sum(counts)
        for key, n in zip(ids, counts, strict=True):
            load.accesses[key] += n

    def forget(self, table: str) -> None:
        self._tables.pop(table, None)

    def now(self) -> dict[str, np.ndarray]:
        """The hot ids of each table that has any; looks at the counts once in a window."""
        windows = int((self._clock() - self._looked) / WINDOW_S)
        if windows:
            self._looked += windows * WINDOW_S
            for load in self._tables.values():
                load.fade(0.5 ** (windows - 1))  # windows without a look
                load.decide(self._share)
                load.fade(0.5)
        return {name: load.hot for name, load in self._tables.items() if load.hot.size}
