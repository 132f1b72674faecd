"""Copy refresh: one server's threads that ask the others for their hot rows, again and again.

    every half of `age`     a server that has hot rows
    every IDLE_S            one that has none

Nobody waits for it but its own threads. What a server cannot be asked for grows old here and is
then not served.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

import numpy as np

from manyhands.server.hot_copies.held_copies import HeldCopies, Rows
from manyhands.server.protocol import hot_messages as h
from manyhands.server.protocol.arrays import pack, unpack
from manyhands.server.protocol.frame import Channel, Malformed
from manyhands.server.replication.replicator import BROKEN, NotLeading, Replicator
from manyhands.server.shard import Shard
from manyhands.server.tables.sparse import SparseTable

IDLE_S = 0.1
RETRY_S = 0.2  # after a connection broke
Led = Iterable[tuple[Shard, Replicator]]


class CopyRefresh:
    """`connect(server)` opens a connection to another server; `led()` are the shards here that
    workers use; `epoch()` is that of the slot map here."""

    def __init__(
        self,
        age: float,
        *,
        copies: HeldCopies,
        connect: Callable[[int], Channel],
        led: Callable[[], Led],
        epoch: Callable[[], int],
    ):
        self.age, self.copies = age, copies
        self._connect, self._led, self._epoch = connect, led, epoch
        self._threads: dict[int, threading.Event] = {}  # by server; set: it is to end
        self._channels: dict[int, Channel] = {}
        self._lock = threading.Lock()

    # -- the side that asks --

    def assign(self, servers: Iterable[int], me: int) -> None:
        """Ask these servers from now on, and no others."""
        wanted = set(servers)
        with self._lock:
            gone = {s: self._threads.pop(s) for s in self._threads.keys() - wanted}
            new = {s: threading.Event() for s in wanted - self._threads.keys()}
            self._threads |= new
        for server, end in gone.items():
            self._end(server, end)
        for server, end in new.items():
            ask = self._ask_here if server == me else self._ask
            threading.Thread(
                target=self._run, args=(server, end, ask), name="manyhands-hot", daemon=True
            ).start()

    def close(self) -> None:
        self.assign((), -1)

    def _end(self, server: int, end: threading.Event) -> None:
        end.set()
        with self._lock:
            channel = self._channels.pop(server, None)
        if channel is not None:
            channel.stop()

    def _run(
        self, server: int, end: threading.Event, ask: Callable[[int, threading.Event], bool]
    ) -> None:
        while not end.is_set():
            try:
                pause = self.age / 2 if ask(server, end) else max(self.age / 2, IDLE_S)
            except BROKEN:
                self._close(server)
                pause = RETRY_S
            end.wait(pause)
        self._close(server)
        self.copies.drop(server)

    def _close(self, server: int) -> None:
        with self._lock:
            channel = self._channels.pop(server, None)
        if channel is not None:
            channel.close()

    def _ask(self, server: int, end: threading.Event) -> bool:
        """Whether that server has hot rows."""
        channel = self._channels.get(server)
        if channel is None:
            channel = self._connect(server)
            with self._lock:
                self._channels[server] = channel
            if end.is_set():
                return False
        asked = time.monotonic()  # before it is sent: the copy is at least as new as this
        channel.send(h.FetchHot(self.copies.take_reads(server)))
        head, answer = channel.receive()
        memory = np.empty(head.payload_bytes, np.uint8)
        channel.body(memory.data)
        if not isinstance(answer, h.HotContent):
            raise Malformed("garbage", f"a {type(answer).__name__} came in place of hot rows")
        arrays = unpack(answer.arrays, memory)
        names = [name.removeprefix("ids/") for name in arrays if name.startswith("ids/")]
        tables = {name: (arrays[f"ids/{name}"], arrays[f"rows/{name}"]) for name in names}
        self.copies.put(server, answer.epoch, asked, tables)
        return bool(tables)

    def _ask_here(self, server: int, end: threading.Event) -> bool:
        """The same for shards of this server, whose hot rows are read at its other shards."""
        asked = time.monotonic()
        epoch, tables = self._collect(self.copies.take_reads(server))
        self.copies.put(server, epoch, asked, tables)
        return bool(tables)

    # -- the side that is asked --

    def serve(self, channel: Channel, message: h.FetchHot) -> None:
        """Answer another server until its connection ends."""
        while True:
            epoch, tables = self._collect(message.reads)
            described, parts = pack(
                {f"ids/{name}": ids for name, (ids, _) in tables.items()}
                | {f"rows/{name}": rows for name, (_, rows) in tables.items()}
            )
            channel.send(h.HotContent(epoch, described), 0, parts)
            _, message = channel.receive()
            if not isinstance(message, h.FetchHot):
                raise Malformed("garbage", f"a {type(message).__name__} came for hot rows")

    def _collect(
        self, reads: list[tuple[str, list[int], list[int]]]
    ) -> tuple[int, dict[str, Rows]]:
        """The hot rows of all shards that this server leads, by table."""
        epoch, found = self._epoch(), dict[str, list[Rows]]()
        for shard, replicator in self._led():
            mine = hot_rows_of(shard, reads)
            try:
                replicator.check_leads()
                replicator.wait(replicator.applied)  # what is read must not be lost
            except NotLeading:
                continue
            for name, rows in mine.items():
                found.setdefault(name, []).append(rows)
        return epoch, {
            name: (np.concatenate([r[0] for r in some]), np.concatenate([r[1] for r in some]))
            for name, some in found.items()
        }


def hot_rows_of(shard: Shard, reads: list[tuple[str, list[int], list[int]]]) -> dict[str, Rows]:
    """The hot rows of one shard as they are now; `reads` of copies count as reads of its own."""
    found: dict[str, Rows] = {}
    with shard.lock:
        hot = shard.hot_ids
        if hot is None:
            return {}
        known = hot.now()
        for name, read, counts in reads:
            mine = set(known[name].tolist()) if name in known else set()
            some = [(key, n) for key, n in zip(read, counts, strict=True) if key in mine]
            hot.read_elsewhere(name, [key for key, _ in some], [n for _, n in some])
        for name, ids in known.items():
            table = shard.contents.get(name)
            if isinstance(table, SparseTable):
                rows = np.empty((ids.size, table.dim), table.dtype)
                table.pull(ids, rows, make=False)
                found[name] = ids, rows
    return found
