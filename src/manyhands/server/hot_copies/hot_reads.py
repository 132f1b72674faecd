"""Hot reads: which ids one worker reads from copies, at the shard that its rank chooses.

A copy misses at most the pushes of the last `age` seconds, this worker's own among them. Where that
is too much, no copy is read:

    staleness=0      never: a synchronous run is the same with copies and without
    staleness=4      until a tick is `age` ago: what all had pushed before it is in every copy then
    flush, create, restore, a commit     the same
    adapt            never: the server measures the staleness of a push by the worker's pulls

Long lists of ids are not looked at: their rows need a request to every shard anyway.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

import numpy as np

from manyhands.server.client.connection import Connection
from manyhands.server.client.pending_request import PendingRequest
from manyhands.server.protocol import hot_messages as h
from manyhands.server.slots import SlotMap

ASK_S = 0.2  # between two looks at what is hot
ANSWER_S = 0.01  # until the answer is looked at
MOST_IDS = 4096  # of a list that is looked at


class HotReads:
    """`age` 0: no copies are read."""

    def __init__(
        self, rank: int, shards: int, age: float, clock: Callable[[], float] | None = None
    ):
        self.shard, self.age = rank % shards, age if shards > 1 else 0.0
        self._clock = time.monotonic if clock is None else clock
        self._exact = False
        self._since = self._clock()  # copies must be younger than this
        self._asked = -math.inf
        self._request: PendingRequest | None = None
        self._ids: dict[str, np.ndarray] = {}  # by table, ascending
        self._lock = threading.Lock()

    def settle(self) -> None:
        """What was pushed until now must be seen from now on."""
        self._since = self._clock()

    def ticked(self, staleness: float) -> None:
        self._exact = staleness == 0
        if staleness < math.inf:
            self.settle()

    def stop(self) -> None:
        self.age, self._ids = 0.0, {}

    @property
    def usable(self) -> bool:
        return bool(self.age) and not self._exact and self._clock() - self._since >= self.age

    def ids(self, table: str, count: int) -> np.ndarray | None:
        """The ids of a table to be read from copies; None: none of so many."""
        return self._ids.get(table) if count <= MOST_IDS else None

    def missed(self, table: str) -> None:
        """A copy was too old or gone: ask owners, until the next list."""
        with self._lock:
            self._ids.pop(table, None)

    def moved(self) -> None:
        """Another slot map: the shard of this worker may have become the owner."""
        with self._lock:
            self._ids, self._asked = {}, -math.inf

    def ask(self, connection: Connection, slots: SlotMap, timeout_s: float) -> None:
        """Now and then: ask for the list of copies. A pull soon after takes the answer, which is
        there by then: no pull waits for it."""
        now, asked = self._clock(), self._request
        if asked is not None and (asked.done or now - self._asked >= ANSWER_S):
            self._request = None
            connection.wait(asked, quiet=True)
            if isinstance(asked.answer, h.HotList):
                self.learn(asked.answer.tables, slots)
        if self._request is None and now - self._asked >= ASK_S:
            self._asked = now
            asked = PendingRequest(
                "list of hot rows", lambda: (h.ListHot(), ()), time.monotonic() + timeout_s
            )
            self._request = connection.post(asked)

    def learn(self, tables: dict[str, list[int]], slots: SlotMap) -> None:
        found = {}
        for name, listed in tables.items():
            ids = np.array(sorted(listed), np.int64)
            # what this worker's shard owns is read there without this
            ids = ids[slots.shard_of(name, ids) != self.shard]
            old = self._ids.get(name)
            if ids.size:  # the same array, where it is: partitions are known by it
                found[name] = old if old is not None and np.array_equal(old, ids) else ids
        with self._lock:
            self._ids = found if self.age else {}
