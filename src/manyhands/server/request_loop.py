"""How a shard's requests are answered: the loop of one connection, between its socket (or shared memory) and the tables.

A pull that goes through a socket is answered in pieces, read into a buffer that stays in the cache and sent while the worker already
reads the ones before. A push is received whole: all of it is checked before any of it is applied.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

from manyhands.core import Table
from manyhands.errors import NotFinite, StoreError
from manyhands.server.protocol import arena, row_encoding
from manyhands.server.protocol import messages as m
from manyhands.server.protocol.frame import (
    Channel,
    Closed,
    Cursor,
    Malformed,
    encode,
)
from manyhands.server.shard import Shard
from manyhands.server.updates import TablePull, TableUpdate

if TYPE_CHECKING:
    from manyhands.server.process import Server

PIECE_BYTES = 1 << 21  # of a pull, read and sent at a time
KEPT_LISTS, KEPT_IDS = 16, 1 << 22  # key lists that both ends of a connection remember
SEGMENTS = 8  # of shared memory that one connection may have at a time


class KeyLists:
    """Lists of ids that both ends know, by table and hash. Both ends do the same to it in the same order, so both forget the same."""

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
        if count > KEPT_IDS // 2:
            return
        if (old := self._lists.pop((table, key), None)) is not None:
            self._ids -= old[0]
        self._lists[table, key] = count, ids
        self._ids += count
        while len(self._lists) > KEPT_LISTS or self._ids > KEPT_IDS:
            _, (gone, _) = self._lists.popitem(last=False)
            self._ids -= gone


class _Unknown(Exception):
    """A list of ids was named by its hash, and it is not known here (any more)."""


class Desk:
    """One shard and those who ask it."""

    def __init__(self, server: Server, shard: Shard):
        self.server, self.shard = server, shard
        self.specs: dict[
            str, tuple[Table, int]
        ] = {}  # with the elements that are here of a dense one
        self._lock = threading.Lock()
        self._conversations: set[_Conversation] = set()
        self._ended: Counter[str] = Counter()  # what was counted in others

    def attend(self, channel: Channel, proof: m.Proof) -> None:
        conversation = _Conversation(self, channel, proof)
        with self._lock:
            self._conversations.add(conversation)
        try:
            conversation.run()
        finally:
            with self._lock:
                self._conversations.remove(conversation)
                self._ended.update(conversation.counted())

    def create(
        self,
        table: Table,
        part: tuple[int, int] | None,
        values: np.ndarray | None,
        state: dict[str, np.ndarray] | None,
    ) -> None:
        self.shard.create(table, part, values, state)
        self.specs[table.name] = table, part[1] - part[0] if part is not None else table.length or 0

    def stats(self) -> dict[str, float]:
        found = self.shard.stats()
        with self._lock:
            counted = self._ended.copy()
            for conversation in self._conversations:
                counted.update(conversation.counted())
            found |= counted
            found["now/queue"] = max(
                0, sum(conversation.busy for conversation in self._conversations) - 1
            )
        if self.shard.index == 0:
            found |= {f"refused/{reason}": n for reason, n in list(self.server.refused.items())}
        return found


class _Conversation:
    def __init__(self, desk: Desk, channel: Channel, proof: m.Proof):
        self._desk, self._shard, self._channel = desk, desk.shard, channel
        self._worker, self._incarnation = proof.worker, proof.incarnation
        self._segments: dict[int, arena.ArenaSegment] = {}
        self._keys = KeyLists()
        self._in = self._out = self._piece = self._plain = np.empty(0, np.uint8)
        self._used = 0  # of `_plain`
        self._ignoring = False  # what was sent before the other side heard that one must come again
        self._requests, self.busy = 0, False

    def counted(self) -> Counter[str]:
        channel = self._channel
        return Counter(
            server_requests=self._requests,
            server_received_bytes=channel.received_bytes,
            server_sent_bytes=channel.sent_bytes,
        )

    def run(self) -> None:
        channel = self._channel
        while True:
            head, message = channel.receive()
            memory = self._receive(head.payload_bytes)
            if isinstance(message, m.Attach):
                self._attach(head.number, message)
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
            except _Unknown:
                self._keys = KeyLists()  # as the other side does when it hears this
                self._ask_to_resend(head.number, m.Resend("keys"))
            except StoreError as e:
                channel.send(
                    m.Failed("finite" if isinstance(e, NotFinite) else "store", str(e)), head.number
                )
            except (Malformed, OSError):
                raise
            except Exception as e:  # a fault of ours, or no memory: the one who asked must hear of it, the others must not
                channel.send(m.Failed("internal", f"{type(e).__name__}: {e}"), head.number)
            finally:
                self.busy = False

    def _ask_to_resend(self, number: int, message: m.Resend) -> None:
        self._ignoring = True
        self._channel.send(message, number)

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
            case m.CreateTable():
                arrays = unpack(message.arrays, memory)
                state = {
                    name.removeprefix("state/"): x for name, x in arrays.items() if name != "values"
                }
                self._desk.create(message.table, message.part, arrays.get("values"), state or None)
                self._channel.send(m.Done(), number)
            case m.DumpTable():
                content = self._shard.dump(message.name)
                described, parts = pack(content)
                self._channel.send(m.TableContent(described), number, parts)
            case m.RestoreTable():
                if message.clear:
                    self._shard.clear(message.name)
                self._shard.load(message.name, unpack(message.arrays, memory))
                self._channel.send(m.Done(), number)
            case m.GetStats():
                self._channel.send(m.Stats(self._desk.stats()), number)
            case _:
                raise Malformed("garbage", f"a {type(message).__name__} was sent to a shard")

    # -- push and pull --

    def _exchange(self, number: int, x: m.Exchange, memory: np.ndarray) -> None:
        if x.epoch != self._desk.server.epoch:
            self._ask_to_resend(number, m.Resend("epoch", self._desk.server.epoch))
            return
        answer, self._used = None, 0
        if x.arena is not None:  # both are looked at before anything is applied
            memory = self._piece_of(x.arena.segment, x.arena.at, x.arena.nbytes)
            answer = self._piece_of(x.arena.segment, x.arena.answer_at, x.arena.answer_bytes)
        cursor = Cursor(memory)
        parts = [self._part(request, x.codec, cursor) for request in x.push]
        wants = [TablePull(request.table, self._ids(request, cursor)) for request in x.pull]
        for version, members in x.commits:
            self._shard.commit(version, members)
        applied = True
        if x.options is not None:
            applied = self._shard.push(
                self._worker, self._incarnation, x.sequence, parts, x.options
            )
        if not wants:
            self._channel.send(m.RowsReply(0, applied), number)
        else:
            self._rows(number, x, wants, applied, answer)

    def _spec(self, name: str) -> tuple[Table, int]:
        found = self._desk.specs.get(name)
        return (
            (self._shard.spec(name), 0) if found is None else found
        )  # the shard says what is wrong with the name

    def _ids(self, request: m.TableRequest, cursor: Cursor) -> np.ndarray | None:
        if request.mode == m.DENSE:
            return None
        if request.mode == m.IDS_KNOWN:
            known = self._keys.know(request.table, request.key, request.count)
            if known is None or known[1] is None:
                raise _Unknown
            return known[1]
        ids = cursor.take(request.count, np.int64)
        if request.key:
            self._keys.learn(request.table, request.key, request.count, ids.copy())
        return ids

    def _numbers(self, request: m.TableRequest) -> tuple[np.dtype, int, int, tuple[int, ...]]:
        """Of a part: dtype, how many, how many with one scale, and their shape."""
        spec, here = self._spec(request.table)
        if (request.mode == m.DENSE) != (spec.length is not None):
            raise StoreError(
                f"table {request.table!r} is {'sparse: give ids' if spec.length is None else 'dense: give no ids'}"
            )
        if spec.length is not None and request.count != here:
            raise StoreError(
                f"table {request.table!r}: {request.count} numbers were given for the {here} that are on this shard"
            )
        if spec.length is not None:
            return np.dtype(spec.dtype), here, row_encoding.BLOCK, (here,)
        return np.dtype(spec.dtype), request.count * spec.dim, spec.dim, (request.count, spec.dim)

    def _part(self, request: m.TableRequest, codec: m.RowCodec, cursor: Cursor) -> TableUpdate:
        dtype, count, width, shape = self._numbers(request)
        ids = self._ids(request, cursor)
        nbytes = row_encoding.nbytes(codec, count, dtype.itemsize, width)
        raw = (
            cursor.take(nbytes, np.uint8)
            if request.updates_at is None
            else self._piece_of(*request.updates_at, nbytes)
        )
        if codec == "none":
            return TableUpdate(request.table, ids, raw.view(dtype).reshape(shape))
        values = self._scratch(count, dtype)
        row_encoding.decode(codec, raw, values, width)
        return TableUpdate(request.table, ids, values.reshape(shape))

    def _scratch(self, count: int, dtype: np.dtype) -> np.ndarray:
        """Memory for this request: fresh memory would cost more than what is done to it."""
        nbytes = arena.aligned(count * dtype.itemsize)
        if self._used + nbytes > self._plain.size:
            self._plain, self._used = np.empty(2 * (self._used + nbytes), np.uint8), 0
        self._used += nbytes
        return self._plain[self._used - nbytes :][: count * dtype.itemsize].view(dtype)

    def _rows(
        self,
        number: int,
        x: m.Exchange,
        wants: list[TablePull],
        applied: bool,
        answer: np.ndarray | None,
    ) -> None:
        shapes = [self._numbers(request) for request in x.pull]
        sizes = [
            row_encoding.nbytes(x.codec, count, dtype.itemsize, width)
            for dtype, count, width, _ in shapes
        ]
        if answer is None and x.codec == "none" and not x.remember and sum(sizes) > 2 * PIECE_BYTES:
            self._rows_in_pieces(number, wants, shapes, applied)
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
        version = self._shard.pull(self._worker, wants, outs, remember=x.remember)
        if x.codec != "none":
            for out, raw, (_, _, width, _) in zip(outs, raws, shapes, strict=True):
                row_encoding.encode(x.codec, out.reshape(-1), raw, width)
        if x.arena is not None:
            self._channel.send(m.RowsReply(version, applied), number)
        else:
            self._channel.send(m.RowsReply(version, applied), number, raws)

    def _rows_in_pieces(
        self, number: int, wants: list[TablePull], shapes: list[Any], applied: bool
    ) -> None:
        """The rows of a pull are of one moment each, not all of the same: others may push between two pieces."""
        if self._piece.size == 0:
            self._piece = np.empty(2 * PIECE_BYTES, np.uint8)
        total = sum(arena.aligned(count * dtype.itemsize) for dtype, count, _, _ in shapes)
        begun = False
        for want, (dtype, count, width, shape) in zip(wants, shapes, strict=True):
            row_bytes = width * dtype.itemsize
            step = max(1, PIECE_BYTES // row_bytes) if want.ids is not None else shape[0]
            for first in range(0, shape[0], step):
                n = min(step, shape[0] - first)
                nbytes = n * (row_bytes if want.ids is not None else dtype.itemsize)
                room = self._piece if nbytes <= self._piece.size else np.empty(nbytes, np.uint8)
                raw = room[:nbytes]
                ids = None if want.ids is None else want.ids[first : first + n]
                out = raw.view(dtype).reshape((n, width) if ids is not None else (n,))
                try:
                    version = self._shard.pull(self._worker, [TablePull(want.table, ids)], [out])
                except StoreError as e:
                    if begun:  # too late for a word: the frame has begun
                        raise Closed(str(e)) from e
                    raise
                views = [raw.data]
                if not begun:
                    views.insert(
                        0, memoryview(encode(m.RowsReply(version, applied), number, total))
                    )
                    begun = True
                if first + n == shape[0]:
                    views.append(memoryview(bytes(-(count * dtype.itemsize) % arena.ALIGN)))
                self._channel.write(views)
        if not begun:
            raise StoreError("a pull of nothing")

    # -- shared memory --

    def _attach(self, number: int, message: m.Attach) -> None:
        if self._channel.sock.family != socket.AF_UNIX:
            raise Malformed(
                "garbage", "shared memory was offered through a connection that cannot carry it"
            )
        _, descriptors, _, _ = socket.recv_fds(self._channel.sock, 1, 1)
        for gone in message.drop:
            self._segments.pop(gone, None)
        if len(descriptors) != 1 or len(self._segments) >= SEGMENTS:
            raise Malformed(
                "garbage",
                f"{len(descriptors)} descriptors came with {len(self._segments)} segments here",
            )
        try:
            self._segments[message.segment] = arena.attach(
                message.segment, message.nbytes, descriptors[0]
            )
        except ValueError as e:
            raise Malformed("garbage", str(e)) from e
        self._channel.send(m.Done(), number)

    def _piece_of(self, number: int, at: int, nbytes: int) -> np.ndarray:
        segment = self._segments.get(number)
        if segment is None:
            raise Malformed("garbage", f"segment {number} was never attached")
        if at < 0 or nbytes < 0 or at + nbytes > segment.memory.size or at % arena.ALIGN:
            raise Malformed("size", f"{nbytes} bytes at {at} of a segment of {segment.memory.size}")
        return segment.memory[at : at + nbytes]


def pack(arrays: dict[str, np.ndarray]) -> tuple[list[m.ArraySpec], list[np.ndarray]]:
    whole = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
    return [m.ArraySpec(name, x.dtype.str, list(x.shape)) for name, x in whole.items()], list(
        whole.values()
    )


def unpack(described: list[m.ArraySpec], memory: np.ndarray) -> dict[str, np.ndarray]:
    """Views of the payload."""
    cursor, found = Cursor(memory), {}
    for array in described:
        if array.dtype not in ("<f4", "<f8", "<i8", "<i4", "<u8", "|u1"):
            raise Malformed("garbage", f"an array of {array.dtype!r}")
        if any(n < 0 for n in array.shape):
            raise Malformed("size", f"an array of shape {array.shape}")
        count = int(np.prod(array.shape, dtype=np.int64)) if array.shape else 1
        found[array.name] = cursor.take(count, np.dtype(array.dtype)).reshape(array.shape)
    return found
