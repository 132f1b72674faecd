"""Request loop: receives the requests of one connection to a shard, applies and answers them.

A pull over a socket is answered in chunks: each is read into a buffer that stays in the cache, and
sent while the worker already reads the chunks before. A push is received whole: all of it is
checked before any of it is applied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from manyhands.core import Table
from manyhands.errors import Evicted, NotFinite, StoreError
from manyhands.server.hot_copies.held_copies import read_copies
from manyhands.server.namespaces.known_tables import KnownTables
from manyhands.server.network.attached_segments import AttachedSegments
from manyhands.server.network.late_answers import LateAnswers
from manyhands.server.network.row_chunks import CHUNK_BYTES, send_in_chunks
from manyhands.server.protocol import arena, row_encoding
from manyhands.server.protocol import hot_messages as h
from manyhands.server.protocol import messages as m
from manyhands.server.protocol import replication_messages as r
from manyhands.server.protocol import table_messages as t
from manyhands.server.protocol.arrays import joined, pack, unpack
from manyhands.server.protocol.frame import (
    Channel,
    Cursor,
    Malformed,
    encode_body,
)
from manyhands.server.protocol.key_lists import KeyLists
from manyhands.server.protocol.kinds import KIND_OF
from manyhands.server.replication.follower import change_table
from manyhands.server.replication.replicator import NotLeading
from manyhands.server.snapshots.snapshot_requests import answer_snapshot
from manyhands.server.snapshots.table_pieces import ArrayParts, dump_piece
from manyhands.server.table_updates import TablePull, TableUpdate

if TYPE_CHECKING:
    from manyhands.server.network.shard_endpoint import ShardEndpoint


class _UnknownKeys(Exception):
    """A request names a key list by its hash, and this end does not have it (any more)."""


def _kind(e: StoreError) -> Literal["finite", "evicted", "store"]:
    return (
        "finite" if isinstance(e, NotFinite) else "evicted" if isinstance(e, Evicted) else "store"
    )


class RequestLoop:
    """One connection of a worker to a shard."""

    def __init__(self, endpoint: ShardEndpoint, channel: Channel, proof: m.Proof):
        self._endpoint, self._shard, self._channel = endpoint, endpoint.shard, channel
        self._status = endpoint.status
        self._worker, self._incarnation = proof.worker, proof.incarnation
        self._segments = AttachedSegments(channel)
        self._keys, self._parts = KeyLists(), ArrayParts()
        self._known = KnownTables()
        self._in = self._out = self._chunk = self._scratch_bytes = np.empty(0, np.uint8)
        self._scratch_used = 0
        self._ignoring = False  # requests sent before the worker got our Resend
        self._requests, self.busy = 0, False
        self._late = LateAnswers(channel, endpoint.replicator)

    def counters(self) -> Counter[str]:
        channel = self._channel
        return Counter(
            server_requests=self._requests,
            server_received_bytes=channel.received_bytes,
            server_sent_bytes=channel.sent_bytes,
        )

    def run(self) -> None:
        try:
            self._run()
        finally:
            self._late.close()

    def _send(self, message: m.Message, number: int, payload: Sequence[np.ndarray] = ()) -> None:
        self._late.drain()
        self._channel.send(message, number, payload)

    def _run(self) -> None:
        channel = self._channel
        while True:
            head, message = channel.receive()
            memory = self._receive(head.payload_bytes)
            if isinstance(message, m.Attach):
                self._segments.attach(message)
                self._send(m.Done(), head.number)
                continue
            if isinstance(message, m.Resume):
                self._ignoring = False
                continue
            if self._ignoring:
                continue
            self._requests += 1
            self.busy = True
            try:
                self._answer(head.number, message, memory)
            except _UnknownKeys:
                self._keys = KeyLists()  # as the worker does when it gets this
                self._ask_to_resend(head.number, m.Resend("keys"))
            except NotLeading:
                self._ask_to_resend(head.number, m.Resend("epoch", self._status.epoch))
            except StoreError as e:
                self._send(m.Failed(_kind(e), str(e)), head.number)
            except (Malformed, OSError):
                raise
            except Exception as e:  # a fault of ours, or no memory: only this worker gets an error
                self._send(m.Failed("internal", f"{type(e).__name__}: {e}"), head.number)
            finally:
                self.busy = False

    def _ask_to_resend(self, number: int, message: m.Resend) -> None:
        self._ignoring = True
        self._send(message, number)

    def _receive(self, nbytes: int) -> np.ndarray:
        if nbytes == 0:
            return self._in[:0]
        if nbytes > self._in.size:
            self._in = np.empty(max(nbytes, 2 * self._in.size if nbytes < 1 << 28 else 0), np.uint8)
        self._channel.body(self._in[:nbytes].data)
        return self._in[:nbytes]

    def _answer(self, number: int, message: Any, memory: np.ndarray) -> None:
        match message:
            case m.Exchange():
                self._exchange(number, message, memory)
            case m.CreateTable() | m.RestoreTable():
                self._change_table(number, message, memory)
            case t.DeleteRows() if message.epoch != self._status.epoch:
                self._ask_to_resend(number, m.Resend("epoch", self._status.epoch))
            case t.DeleteRows() | t.DropTable():
                message.worker, message.incarnation = self._worker, self._incarnation
                self._change_table(number, message, memory)
            case t.ListTables():
                self._known.forget(message.name)
                self._send(t.TableList(self._shard.stored(message.name)), number)
            case m.DumpTable():
                self._endpoint.replicator.check_leads()
                content, stop = dump_piece(self._shard, message.name, message.start, message.nbytes)
                self._endpoint.replicator.wait(self._endpoint.replicator.applied)
                described, parts = pack(content)
                self._send(m.TableContent(described, stop), number, parts)
            case m.BeginSnapshot():
                try:
                    self._endpoint.replicator.check_leads()
                except NotLeading:  # its connection knows no other server
                    raise StoreError(f"shard {self._shard.index} has moved; begin again") from None
                reply, payload = answer_snapshot(self._endpoint.snapshots, message)
                self._send(reply, number, payload)
            case m.GetSnapshot() | m.FetchSnapshot() | m.EndSnapshot():
                reply, payload = answer_snapshot(self._endpoint.snapshots, message)
                self._send(reply, number, payload)
            case h.ListHot():
                self._send(h.HotList(self._status.hot_copies()), number)
            case m.GetStats():
                self._send(m.Stats(self._endpoint.stats()), number)
            case _:
                raise Malformed("garbage", f"a {type(message).__name__} was sent to a shard")

    def _change_table(self, number: int, message: Any, memory: np.ndarray) -> None:
        parts = [memory]
        if isinstance(message, m.RestoreTable):
            if message.clear:
                self._parts.clear(message.name)
            whole = self._parts.add(message.name, unpack(message.arrays, memory), message.more)
            if whole is None:
                self._send(m.Done(), number)
                return
            described, parts = pack(whole)
            message = m.RestoreTable(message.name, message.clear, described)
        elif isinstance(message, m.CreateTable):
            self._known.forget(message.table.name)
        outcome = self._submit(
            lambda n: r.ForwardTable(n, KIND_OF[type(message)], encode_body(message)),
            lambda: parts,
            lambda: change_table(self._shard, message, joined(parts)),
        )
        self._send(m.Done(outcome or 0), number)

    def _submit(self, message: Any, parts: Any, apply: Any) -> Any:
        """Apply a change on all servers of the chain; what `apply` returned here."""
        replicator = self._endpoint.replicator
        change, outcome = replicator.submit(message, parts, apply)
        replicator.wait(change)
        if isinstance(outcome, StoreError):
            raise outcome
        return outcome

    # -- push and pull --

    def _exchange(self, number: int, x: m.Exchange, memory: np.ndarray) -> None:
        if x.epoch != self._status.epoch:
            self._ask_to_resend(number, m.Resend("epoch", self._status.epoch))
            return
        answer, self._scratch_used = None, 0
        if x.arena is not None:  # both are checked before anything is applied
            memory = self._segments.view(x.arena.segment, x.arena.at, x.arena.nbytes)
            answer = self._segments.view(x.arena.segment, x.arena.answer_at, x.arena.answer_bytes)
        cursor = Cursor(memory)
        parts = [self._update(request, x.codec, cursor) for request in x.push]
        pulls = [TablePull(request.table, self._ids(request, cursor)) for request in x.pull]
        applied = True
        if x.options is not None or x.commits:
            replicator = self._endpoint.replicator
            change, outcome = replicator.submit(
                lambda change: self._forward(change, x, parts),
                lambda: [array for part in parts for array in part[1:] if array is not None],
                lambda: self._apply(x, parts),
            )
            if not pulls and outcome in (True, False) and not self._channel.secure:
                return self._answer_push(change, outcome is True, number)
            replicator.wait(change)
            if isinstance(outcome, StoreError):
                raise outcome
            applied = bool(outcome)
        if not pulls:
            self._send(m.RowsReply(0, applied), number)
        else:
            self._send_rows(number, x, pulls, applied, answer)

    def _answer_push(self, change: int, applied: bool, number: int) -> None:
        """Now, or when the other servers of the chain have it; the next request need not wait."""
        if self._endpoint.replicator.acknowledged(change):
            self._send(m.RowsReply(0, applied), number)
        else:
            self._late.add(change, m.RowsReply(0, applied), number)

    def _apply(self, x: m.Exchange, parts: list[TableUpdate]) -> bool:
        for version, members in x.commits:
            self._shard.commit(version, members)
        if x.options is None:
            return True
        return self._shard.push(self._worker, self._incarnation, x.sequence, parts, x.options)

    def _forward(self, change: int, x: m.Exchange, parts: list[TableUpdate]) -> r.Forward:
        """The same for the next server, with ids and updates as they are."""
        requests = [
            m.TableRequest(
                part.table,
                part.updates.size if part.ids is None else part.ids.size,
                m.DENSE if part.ids is None else m.IDS_SENT,
            )
            for part in parts
        ]
        pulled = {}
        if x.options is not None and x.options.adapt:
            versions = self._shard.pulled
            keys = [(self._worker, part.table) for part in parts]
            pulled = {key[1]: versions[key] for key in keys if key in versions}
        who = self._worker, self._incarnation
        return r.Forward(change, *who, x.sequence, requests, x.options, x.commits, pulled, [])

    def _pull(self, x: m.Exchange, pulls: list[TablePull], outs: list[np.ndarray]) -> int:
        if x.remember:  # a change: of what the shard remembers
            tables, who = [pull.table for pull in pulls], (self._worker, self._incarnation)
            version: int = self._submit(
                lambda n: r.Forward(n, *who, x.sequence, [], None, [], {}, tables),
                lambda: [],
                lambda: self._shard.pull(self._worker, pulls, outs, remember=True),
            )
            return version
        version = self._shard.pull(self._worker, pulls, outs)
        replicator = self._endpoint.replicator
        replicator.wait(replicator.applied)  # what is read must not be lost
        return version

    def _spec(self, name: str) -> tuple[Table, int]:
        return self._known.check(name, self._endpoint.layout(name))

    def _ids(self, request: m.TableRequest, cursor: Cursor) -> np.ndarray | None:
        if request.mode == m.DENSE:
            return None
        if request.mode == m.IDS_KNOWN:
            known = self._keys.know(request.table, request.key, request.count)
            if known is None or known[1] is None:
                raise _UnknownKeys
            return known[1]
        ids = cursor.take(request.count, np.int64)
        if request.key:
            self._keys.learn(request.table, request.key, request.count, ids.copy())
        return ids

    def _layout(self, request: m.TableRequest) -> tuple[np.dtype, int, int, tuple[int, ...]]:
        """Of one table's part: dtype, count of numbers, how many share one scale, and shape."""
        spec, here = self._spec(request.table)
        if (request.mode == m.DENSE) != (spec.length is not None):
            kind = "sparse: give ids" if spec.length is None else "dense: give no ids"
            raise StoreError(f"table {request.table!r} is {kind}")
        if spec.length is not None and request.count != here:
            raise StoreError(
                f"table {request.table!r}: {request.count} numbers were given, but this shard "
                f"stores {here} of it"
            )
        if spec.length is not None:
            return np.dtype(spec.dtype), here, row_encoding.BLOCK, (here,)
        return np.dtype(spec.dtype), request.count * spec.dim, spec.dim, (request.count, spec.dim)

    def _update(self, request: m.TableRequest, codec: m.RowCodec, cursor: Cursor) -> TableUpdate:
        dtype, count, width, shape = self._layout(request)
        ids = self._ids(request, cursor)
        nbytes = row_encoding.nbytes(codec, count, dtype.itemsize, width)
        raw = (
            cursor.take(nbytes, np.uint8)
            if request.updates_at is None
            else self._segments.view(*request.updates_at, nbytes)
        )
        if codec == "none":
            return TableUpdate(request.table, ids, raw.view(dtype).reshape(shape))
        values = self._scratch(count, dtype)
        row_encoding.decode(codec, raw, values, width)
        return TableUpdate(request.table, ids, values.reshape(shape))

    def _scratch(self, count: int, dtype: np.dtype) -> np.ndarray:
        """Memory for this request, reused: fresh memory would cost more than the work on it."""
        nbytes = arena.aligned(count * dtype.itemsize)
        if self._scratch_used + nbytes > self._scratch_bytes.size:
            self._scratch_bytes = np.empty(2 * (self._scratch_used + nbytes), np.uint8)
            self._scratch_used = 0
        at = self._scratch_used
        self._scratch_used += nbytes
        return self._scratch_bytes[at : at + count * dtype.itemsize].view(dtype)

    def _send_rows(
        self,
        number: int,
        x: m.Exchange,
        pulls: list[TablePull],
        applied: bool,
        answer: np.ndarray | None,
    ) -> None:
        shapes = [self._layout(request) for request in x.pull]
        sizes = [
            row_encoding.nbytes(x.codec, count, dtype.itemsize, width)
            for dtype, count, width, _ in shapes
        ]
        copied = read_copies(self._status.copies, self._worker, x, pulls, shapes)
        in_chunks = answer is None and x.codec == "none" and not x.remember and not copied
        if in_chunks and sum(sizes) > 2 * CHUNK_BYTES:
            self._late.drain()
            if self._chunk.size == 0:
                self._chunk = np.empty(2 * CHUNK_BYTES, np.uint8)
            read = lambda pull, out: self._pull(x, [pull], [out])
            send_in_chunks(self._channel, read, number, pulls, shapes, applied, self._chunk)
            return
        if answer is None:
            total = sum(map(arena.aligned, sizes))
            if total > self._out.size:
                self._out = np.empty(total, np.uint8)
            answer = self._out
        cursor = Cursor(answer)
        raws = [cursor.take(size, np.uint8) for size in sizes]
        if x.codec == "none":
            outs = [
                raw.view(dtype).reshape(shape)
                for raw, (dtype, _, _, shape) in zip(raws, shapes, strict=True)
            ]
        else:
            outs = [self._scratch(count, dtype).reshape(shape) for dtype, count, _, shape in shapes]
        own = [at for at in range(len(pulls)) if at not in copied]
        version = self._pull(x, [pulls[at] for at in own], [outs[at] for at in own]) if own else 0
        for at, rows in copied.items():
            outs[at][:] = 0 if rows is None else rows
        missed = [at for at, rows in copied.items() if rows is None]
        if x.codec != "none":
            for out, raw, (_, _, width, _) in zip(outs, raws, shapes, strict=True):
                row_encoding.encode(x.codec, out.reshape(-1), raw, width)
        if x.arena is not None:
            self._send(m.RowsReply(version, applied, missed), number)
        else:
            self._send(m.RowsReply(version, applied, missed), number, raws)
