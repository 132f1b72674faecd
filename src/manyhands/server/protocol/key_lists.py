"""Key lists: lists of ids that both ends of a connection have cached, named by table and hash.

A worker that pulls and pushes the same ids again sends their hash instead. Both ends do the same
operations in the same order, so both evict the same lists.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

MAX_LISTS, MAX_IDS = 16, 1 << 22  # that one connection keeps


class KeyLists:
    """An LRU cache of key lists. The worker keeps their lengths only."""

    def __init__(self) -> None:
        self._lists: OrderedDict[tuple[str, int], tuple[int, np.ndarray | None]] = OrderedDict()
        self._ids = 0

    def know(self, table: str, key: int, count: int) -> tuple[int, np.ndarray | None] | None:
        found = self._lists.get((table, key))
        if found is None or found[0] != count:
            return None
        self._lists.move_to_end((table, key))
        return found

    def learn(self, table: str, key: int, count: int, ids: np.ndarray | None = None) -> None:
        if count > MAX_IDS // 2:
            return
        if (old := self._lists.pop((table, key), None)) is not None:
            self._ids -= old[0]
        self._lists[table, key] = count, ids
        self._ids += count
        while len(self._lists) > MAX_LISTS or self._ids > MAX_IDS:
            _, (gone, _) = self._lists.popitem(last=False)
            self._ids -= gone
