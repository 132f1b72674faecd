"""Copying: a whole shard to a server that has nothing of it, while workers go on.

    rows of all tables, piece by piece; the lock is free between two pieces
    rows that changed meanwhile, again and again, until few are left
    under the lock: the last of them, dense tables, and the state beside rows; from here on all
    changes are handed on to the learner too, which has exactly what this server has

The learner then is the last member of the chain, by the coordinator's word.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from manyhands.server.protocol import messages as m
from manyhands.server.protocol import replication_messages as r
from manyhands.server.protocol import table_messages as t
from manyhands.server.protocol.arrays import pack
from manyhands.server.protocol.frame import Channel, Malformed, encode_body
from manyhands.server.protocol.kinds import KIND_OF
from manyhands.server.replication.copied_state import give_state
from manyhands.server.replication.handed_on import Link
from manyhands.server.replication.replicator import Replicator
from manyhands.server.shard import Shard
from manyhands.server.snapshots.row_pieces import END, read_piece
from manyhands.server.tables.dense import DenseTable
from manyhands.server.tables.dump import STATE
from manyhands.server.tables.sparse import SparseTable

PASSES = 8  # over what changed meanwhile, at most, before nothing may change
FEW_ROWS = 16384  # of a pass: the rest can be sent while nothing changes


class _Watched:
    """A table that is being copied, and the ids that were erased since they were last sent."""

    def __init__(self, table: SparseTable):
        self.table, self.loads = table, table.loads
        self._erased: list[np.ndarray] = []
        table.on_erase.append(self._add)

    def _add(self, ids: np.ndarray) -> None:
        self._erased.append(ids.copy())

    def same(self, table: SparseTable) -> bool:
        """Whether only pushes and erasures have changed it."""
        return table is self.table and table.loads == self.loads

    def remade(self, table: SparseTable | DenseTable) -> bool:
        """Whether it was dropped and made anew, of another spec."""
        return table.spec != self.table.spec

    def take(self) -> np.ndarray:
        erased, self._erased = self._erased, []
        return np.concatenate([np.empty(0, np.int64), *erased])

    def end(self) -> None:
        if self._add in self.table.on_erase:
            self.table.on_erase.remove(self._add)


class Copy:
    """From the last member of a chain to its learner. `done(shard, learner, seconds, bytes)`."""

    def __init__(
        self,
        shard: Shard,
        replicator: Replicator,
        learner: int,
        channel: Channel,
        attempt: int,
        done: Callable[[int, int, float, int], None],
    ):
        self._shard, self._replicator = shard, replicator
        self._link, self._channel = Link(learner, channel), channel
        self._attempt, self._done = attempt, done
        self._watched: dict[str, _Watched] = {}
        self._sent = 0  # rows, in this pass

    def run(self) -> None:
        with self._replicator.state:
            self._replicator.copying = self._link
        try:
            self._run()
        finally:
            with self._replicator.state:
                if self._replicator.copying is self._link:
                    self._replicator.copying = None
            with self._shard.lock:
                for watched in self._watched.values():
                    watched.end()

    def _run(self) -> None:
        replicator, channel, begun = self._replicator, self._channel, time.monotonic()
        channel.send(r.Follow(replicator.member.me, replicator.member.version, self._attempt))
        self._answered()
        seen = self._send_rows({})
        for _ in range(PASSES):
            before, self._sent = self._sent, 0
            seen = self._send_rows(seen)
            if (
                self._sent <= FEW_ROWS or self._sent > before // 2
            ):  # few are left, or always as many
                break
        link, learner = self._link, self._link.server
        with replicator.order:  # nothing changes from here on
            self._send_rows(seen, last=True)
            number = replicator.applied
            message, parts = give_state(self._shard, number)
            channel.send(message, 0, parts)
            with replicator.state:
                if replicator.copying is not link:
                    raise Malformed("garbage", "another copy was begun")
                replicator.copying, replicator.confirmed = None, None
                replicator.member.teach(learner)
                replicator.listen(link)
        with replicator.state:
            replicator.state.wait_for(
                lambda: link.acknowledged >= number or replicator.link is not link
            )
            if replicator.link is not link or replicator.member.learner != learner:
                raise Malformed("garbage", "the learner is gone")
            replicator.confirmed = learner  # from here on only the coordinator can drop it
        self._done(replicator.shard, learner, time.monotonic() - begun, channel.sent_bytes)

    def _answered(self) -> None:
        """Wait until the learner has applied what was sent: it must not lag behind when workers
        wait for it too."""
        _, answer = self._channel.receive()
        if not isinstance(answer, m.Done):
            raise Malformed("garbage", "the learner does not follow")

    def _send_rows(self, since: Mapping[str, int], last: bool = False) -> dict[str, int]:
        """Rows that were pushed after these versions of their tables (all rows of a new table), and
        the erased ones; the versions up to which everything is sent then."""
        seen = {}
        for name in self._watched.keys() - set(self._shard.tables()):
            self._drop(name)
        for name in self._shard.tables():
            with self._shard.lock:
                table = self._shard.contents.get(name)
                if table is None:  # dropped since; the next pass tells the learner
                    continue
                seen[name] = table.version
            if name in self._watched and self._watched[name].remade(table):
                self._drop(name)
            with self._shard.lock:
                if isinstance(table, SparseTable):
                    erased = self._watch(name, table)
            if isinstance(table, DenseTable):
                if last:
                    self._send_dense(name, table)
            elif erased is None:
                self._send(m.CreateTable(table.spec, None, []), [])
                self._send(m.RestoreTable(name, True, []), [])
                self._send_changed(name, table, -1)
            else:
                self._send_erased(name, erased)
                self._send_changed(name, table, since.get(name, -1))
        if not last:
            self._channel.send(m.Ping())
            self._answered()
        return seen

    def _watch(self, name: str, table: SparseTable) -> np.ndarray | None:
        """The ids erased since the pass before; None: all rows have to be sent."""
        watched = self._watched.get(name)
        if watched is not None and watched.same(table):
            return watched.take()
        if watched is not None:
            watched.end()
        self._watched[name] = _Watched(table)
        return None

    def _drop(self, name: str) -> None:
        """The learner has a table of a spec that is no more."""
        self._watched.pop(name).end()
        self._send(t.DropTable(name, 0, []), [])

    def _send_changed(self, name: str, table: SparseTable, since: int) -> None:
        lo = 0
        while lo < END:
            with self._shard.lock:
                piece = read_piece(table, lo, since=since)
                # what was erased before: the learner has no room for more rows than there are here
                erased = self._watched[name].take()
            self._send_erased(name, erased)
            lo = piece.stop
            self._sent += piece.ids.size
            if piece.ids.size:
                values, state = table.views(piece.rows)
                arrays = {"ids": piece.ids, "values": values}
                arrays["meta"] = np.stack([piece.counts, piece.times], 1)
                # rows come in the order of their hashes: see RowStorage.expect
                arrays["expect"] = np.array([table.rows + table.rows // 20], np.int64)
                arrays |= {f"{STATE}{key}": x for key, x in state.items()}
                if table.optimizer.kind.counts_pushes:
                    steps = np.full((piece.ids.size, 1), table.optimizer.step, np.int64)
                    arrays[f"{STATE}step"] = steps
                described, parts = pack(arrays)
                self._send(m.RestoreTable(name, False, described), parts)

    def _send_erased(self, name: str, ids: np.ndarray) -> None:
        if ids.size:
            described, parts = pack({"ids": ids})
            self._send(r.EraseRows(name, described), parts)

    def _send_dense(self, name: str, table: DenseTable) -> None:
        self._send(m.CreateTable(table.spec, (table.start, table.stop), []), [])
        content = self._shard.dump(name)
        del content["marks"]
        described, parts = pack(content)
        self._send(m.RestoreTable(name, False, described), parts)

    def _send(self, message: m.Message, parts: Sequence[np.ndarray]) -> None:
        kind = KIND_OF[type(message)]
        self._channel.send(r.ForwardTable(0, kind, encode_body(message)), 0, parts)
