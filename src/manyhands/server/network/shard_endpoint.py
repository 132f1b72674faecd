"""Shard endpoint: one shard with the connections that use it, and their counters."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from manyhands.core import Table
from manyhands.server.hot_copies.held_copies import HeldCopies
from manyhands.server.network.request_loop import RequestLoop
from manyhands.server.protocol.frame import Channel
from manyhands.server.protocol.messages import Proof
from manyhands.server.replication.replicator import Replicator
from manyhands.server.shard import Shard
from manyhands.server.snapshots.shard_snapshot import ShardSnapshots


@dataclass
class ServerStatus:
    """What the shards of a server share: the epoch of its slot map, and its refused connections."""

    epoch: int = 0
    first: int = -1  # the first of its shards, which tells the counters of the server
    refused: Counter[str] = field(default_factory=Counter)  # by reason
    copies: HeldCopies | None = None  # of hot rows
    copy_age: float = 0.0

    def hot_copies(self) -> dict[str, list[int]]:
        """Ids of the copies here that may be read, by table."""
        return {} if self.copies is None else self.copies.listed(self.copy_age)


class ShardEndpoint:
    """Serves the connections of one shard."""

    def __init__(self, status: ServerStatus, shard: Shard, replicator: Replicator | None = None):
        self.status, self.shard = status, shard
        self.replicator = Replicator.alone() if replicator is None else replicator
        self.snapshots = ShardSnapshots(shard)
        # by table: its spec, and how many elements of a dense one are stored here
        self._specs: dict[str, tuple[Table, int]] = {}
        self._drops = 0  # tables that had been dropped when these were looked up
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

    def layout(self, name: str) -> tuple[Table, int]:
        """Spec of a table, and how many elements of a dense one are stored here."""
        if self._drops != self.shard.drops:
            self._drops, self._specs = self.shard.drops, {}
        specs = self._specs  # another thread may begin anew
        found = specs.get(name)
        if found is None:
            found = specs[name] = self.shard.layout(name)
        return found

    def stats(self) -> dict[str, float]:
        found = self.shard.stats()
        with self._lock:
            counted = self._ended.copy()
            for loop in self._loops:
                counted.update(loop.counters())
            found |= counted
            found["now/queue"] = max(0, sum(loop.busy for loop in self._loops) - 1)
        if self.status.first == self.shard.index:
            found |= {f"refused/{reason}": n for reason, n in list(self.status.refused.items())}
            if (copies := self.status.copies) is not None:
                found |= {"copies_read": copies.served, "copies_missed": copies.missed}
        return found
