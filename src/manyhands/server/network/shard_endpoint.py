"""Shard endpoint: one shard with the connections that use it, and their counters."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from manyhands.core import Table
from manyhands.server.network.request_loop import RequestLoop
from manyhands.server.protocol.frame import Channel
from manyhands.server.protocol.messages import Proof
from manyhands.server.shard import Shard


@dataclass
class ServerStatus:
    """What the shards of a server share: the epoch of its slot map, and its refused connections."""

    epoch: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by reason


class ShardEndpoint:
    """Serves the connections of one shard."""

    def __init__(self, status: ServerStatus, shard: Shard):
        self.status, self.shard = status, shard
        # by table: its spec, and how many elements of a dense one are stored here
        self.specs: dict[str, tuple[Table, int]] = {}
        self._lock = threading.Lock()
        self._loops: set[RequestLoop] = set()
        self._ended: Counter[str] = Counter()  # counters of connections that have ended

    def serve(self, channel: Channel, proof: Proof) -> None:
        """Answer requests until the connection ends."""
        loop = RequestLoop(self, channel, proof)
        with self._lock:
            self._loops.add(loop)
        try:
            loop.run()
        finally:
            with self._lock:
                self._loops.remove(loop)
                self._ended.update(loop.counters())

    def create(
        self,
        table: Table,
        span: tuple[int, int] | None,
        values: np.ndarray | None,
        state: dict[str, np.ndarray] | None,
    ) -> bool:
        made = self.shard.create(table, span, values, state)
        stored = span[1] - span[0] if span is not None else table.length or 0
        self.specs[table.name] = table, stored
        return made

    def drop(self, worker: int, incarnation: int, sequence: int, name: str) -> int:
        there = self.shard.drop(worker, incarnation, sequence, name)
        if name not in self.shard.tables():  # else the request came again, and it was made anew
            self.specs.pop(name, None)
        return there

    def stats(self) -> dict[str, float]:
        found = self.shard.stats()
        with self._lock:
            counted = self._ended.copy()
            for loop in self._loops:
                counted.update(loop.counters())
            found |= counted
            found["now/queue"] = max(0, sum(loop.busy for loop in self._loops) - 1)
        if self.shard.index == 0:
            found |= {f"refused/{reason}": n for reason, n in list(self.status.refused.items())}
        return found
