"""Request to one shard: one frame with its part of a push, a pull or both, and the reply."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from manyhands.core import Table, Tensors
from manyhands.server.client.connection import Connection
from manyhands.server.client.pending_request import Parts, PendingRequest
from manyhands.server.protocol import messages as m
from manyhands.server.protocol import row_encoding
from manyhands.server.protocol.arena import Arena, ArenaBlock
from manyhands.server.protocol.frame import Cursor, aligned
from manyhands.server.tables.partition import Partition

if TYPE_CHECKING:
    from manyhands.server.client.request_sender import RequestSender


Outs = dict[str, Tensor | None]  # None: not made yet


class Moved(Exception):
    """The slot map changed and other shards have the rows now; the request did nothing."""


@dataclass(eq=False)
class ShardPart:
    """Part of a request: what of one table goes to one shard."""

    table: Table
    shard: int
    span: tuple[int, int] | None = None  # of a dense table: begin and end
    partition: Partition | None = None  # of a sparse one
    ids: np.ndarray | None = None
    key: int = 0
    hot: bool = False  # copies of hot rows, at the shard of this worker's choice
    direct: bool = False  # ids as given, with their repeats: rows come back in that order
    updates: np.ndarray | None = None  # all of them, as given; None: a pull
    ready: np.ndarray | None = None  # updates by distinct id, where they had to be made before
    buffer: ArenaBlock | None = None  # that holds the updates already
    ids_at: int = 0  # offsets of its ids and updates in the block
    raw_at: int = 0

    def __post_init__(self) -> None:
        self.measure()

    def measure(self) -> None:
        """Compute what follows from the other fields; it is read often."""
        if self.span is not None:
            self.count = self.numbers = self.span[1] - self.span[0]
            self.width = row_encoding.BLOCK
        else:
            self.count, self.width = 0 if self.ids is None else self.ids.size, self.table.dim
            self.numbers = self.count * self.width

    def raw_bytes(self, code: m.RowCodec) -> int:
        return row_encoding.nbytes(
            code, self.numbers, 4 if self.table.dtype == "float32" else 8, self.width
        )

    def write(self, code: m.RowCodec, cursor: Cursor) -> None:
        if self.ids is not None:
            self.ids_at = cursor.at
            cursor.take(self.ids.size, np.int64)[:] = self.ids
        if self.updates is None or self.buffer is not None:
            return
        self.raw_at = cursor.at
        raw, dtype = cursor.take(self.raw_bytes(code), np.uint8), np.dtype(self.table.dtype)
        if self.span is not None:
            row_encoding.encode(code, self.updates[self.span[0] : self.span[1]], raw, self.width)
        elif self.direct:
            np.copyto(raw.view(dtype), self.updates)
        elif self.ready is not None:
            row_encoding.encode(code, self.ready, raw, self.width)
        else:
            assert self.partition is not None
            plain = raw.view(dtype) if code == "none" else np.empty(self.numbers, dtype)
            # sums repeats on the way into the buffer
            self.partition.collect(self.updates, self.shard, self.table.dim, plain)
            if code != "none":
                row_encoding.encode(code, plain, raw, self.width)

    def read(self, code: m.RowCodec, cursor: Cursor, out: np.ndarray) -> None:
        """Write rows to `out`: the whole table, or a row for each id as given."""
        if self.direct:
            np.copyto(out, self.rows(cursor).reshape(-1))
            return
        raw, dtype = cursor.take(self.raw_bytes(code), np.uint8), np.dtype(self.table.dtype)
        if self.span is not None:
            row_encoding.decode(code, raw, out[self.span[0] : self.span[1]], self.width)
            return
        if code == "none":
            rows = raw.view(dtype)
        else:
            rows = np.empty(self.numbers, dtype)
            row_encoding.decode(code, raw, rows, self.width)
        self.spread(rows, out)

    def rows(self, cursor: Cursor) -> np.ndarray:
        """The rows as an array over the memory they came in."""
        return (
            cursor.take(self.raw_bytes("none"), np.uint8)
            .view(self.table.dtype)
            .reshape(self.count, self.table.dim)
        )

    def spread(self, rows: np.ndarray, out: np.ndarray) -> None:
        assert self.partition is not None
        if self.partition.zero is not None:
            start = self.partition.starts[self.shard] * self.table.dim
            np.equal(rows, 0, out=self.partition.zero[start : start + rows.size])
        self.partition.spread(rows, self.shard, self.table.dim, out)


def describe(push: list[ShardPart], pull: list[ShardPart], how: m.PushMessage | None) -> str:
    if how is None and not pull:
        return "commit"
    names = ", ".join(dict.fromkeys(part.table.name for part in (*push, *pull)))
    kind = "push and pull" if push and pull else "push" if how is not None else "pull"
    return f"{kind} of {names or 'nothing'}"


class Request(PendingRequest):
    """One frame to one shard: parts of a push, and of a pull after it."""

    def __init__(
        self,
        sender: RequestSender,
        connection: Connection,
        push: list[ShardPart],
        pull: list[ShardPart],
        how: m.PushMessage | None,
        sequence: int,
        remember: bool,
    ):
        super().__init__(
            lambda: describe(push, pull, how), self._compose, time.monotonic() + sender.timeout_s
        )
        self.sender, self.connection = sender, connection
        self.push, self.pull, self.how = push, pull, how
        self.sequence, self.remember = sequence, remember
        self.code: m.RowCodec = sender.code
        # of the slot map by which it was partitioned
        self.epoch, self.generation = sender.epoch, sender.generation
        ids = sum(aligned(8 * part.ids.size) for part in (*push, *pull) if part.ids is not None)
        for part in push:
            if (part.direct or part.span is not None) and self.code == "none":
                part.buffer = sender.buffers.find(connection.arena, part.updates)
        self.payload_bytes = ids + sum(
            aligned(part.raw_bytes(self.code)) for part in push if part.buffer is None
        )
        self.answer_bytes = sum(aligned(part.raw_bytes(self.code)) for part in pull)
        self.answer_at = self.payload_bytes
        self.block = connection.arena.allocate(self.payload_bytes + self.answer_bytes)
        cursor = Cursor(self.block.memory)
        for part in (*push, *pull):
            part.write(self.code, cursor)
        for part in push:
            part.updates = part.ready = None  # the caller's again
        self.on_answer, self.on_loss = self._answered, self._lost

    def _compose(self) -> tuple[m.Message, Parts]:
        commits, self.commits = self.sender.commits_for(self.connection)
        epoch = self.sender.epoch if self.generation == self.sender.generation else self.epoch
        message = m.Exchange(
            epoch, self.sequence, [], [], self.how, self.code, self.remember, commits
        )
        assert self.block is not None
        memory, parts, whole = self.block.memory, [], True
        for given, part in [
            *((True, part) for part in self.push),
            *((False, part) for part in self.pull),
        ]:
            keyed = m.TableRequest(part.table.name, part.count)
            keyed.copies = self.sender.hot.age if part.hot else 0.0
            (message.push if given else message.pull).append(keyed)
            if part.ids is not None:
                keyed.mode = m.IDS_SENT
                if not self.connection.shared and part.count and part.key:
                    keyed.key = part.key
                    if self.connection.keys.know(keyed.table, keyed.key, keyed.count) is not None:
                        keyed.mode, whole = m.IDS_KNOWN, False
                        self.sender.counted["key_hits"] += 1
                    else:
                        self.connection.keys.learn(keyed.table, keyed.key, keyed.count)
                if keyed.mode == m.IDS_SENT:
                    parts.append(memory[part.ids_at : part.ids_at + 8 * part.count])
            if part.buffer is not None:
                whole = False
                if self.connection.shared:
                    keyed.updates_at = part.buffer.segment.number, part.buffer.at
                parts.append(part.buffer.memory[: part.raw_bytes(self.code)])
            elif given:
                parts.append(memory[part.raw_at : part.raw_at + part.raw_bytes(self.code)])
        if self.connection.shared:
            at = self.block.at
            message.arena = m.ArenaRange(
                self.block.segment.number,
                at,
                self.payload_bytes,
                at + self.answer_at,
                self.answer_bytes,
            )
            return message, ()
        return message, [memory[: self.payload_bytes]] if whole and self.payload_bytes else parts

    def _answered(self, _: PendingRequest) -> None:
        if self.commits:
            self.sender.committed(self.connection, self.commits)
        if self.error is not None and self.how is not None:
            self.sender.failures.append(self.error)
        elif self.how is not None and not self.how.pending:
            self.connection.acknowledged += 1
        if not self.pull or self.abandoned or self.error is not None:
            self.release()

    def _lost(self, _: PendingRequest) -> None:
        """Whoever calls next learns of a push without acknowledgement, also if nobody waits for
        it."""
        assert self.error is not None
        if self.how is not None:
            self.sender.failures.append(self.error)
        for part in self.push:
            part.buffer = None  # never to be used again: the server may read it yet

    def move(self, arena: Arena) -> None:
        super().move(arena)
        for part in self.push:
            if part.buffer is not None:
                part.buffer = arena.copy(part.buffer)

    def release(self) -> None:
        for part in self.push:
            if part.buffer is not None:
                buffer, part.buffer = part.buffer, None
                self.connection.arena.release(buffer)
        if self.block is not None:
            block, self.block = self.block, None
            self.connection.arena.release(block)

    def read(self, outs: Outs) -> None:
        """Copy rows to `outs`; where that is None, make a tensor over the memory they came in."""
        block = self.block
        if not self.pull:
            return
        assert block is not None
        cursor = Cursor(block.memory, self.answer_at)
        for at, part in enumerate(self.pull):
            out = outs[part.table.name]
            if at in self.answer.missed:
                cursor.take(part.raw_bytes(self.code), np.uint8)
            elif out is None:
                array = part.rows(cursor)
                self.connection.arena.lend(block, array)
                outs[part.table.name] = torch.from_numpy(array)
            else:
                part.read(self.code, cursor, out.detach().numpy().reshape(-1))

    @property
    def missed(self) -> list[ShardPart]:
        """Hot rows of which the shard had no copy that is new enough."""
        return [self.pull[at] for at in self.answer.missed] if self.pull else []

    def abandon(self) -> None:
        """The caller gave up the rows."""
        self.abandoned = True
        if self.done:
            self.release()

    def updates_of(self, part: ShardPart) -> np.ndarray:
        """The updates of a part, decoded from the block."""
        assert self.block is not None
        raw = self.block.memory[part.raw_at : part.raw_at + part.raw_bytes(self.code)]
        values = np.empty(part.numbers, part.table.dtype)
        row_encoding.decode(self.code, raw, values, part.width)
        return values


class Pushed:
    """Work of a push: `wait` returns when every shard has applied or stored it."""

    def __init__(self, sender: RequestSender, requests: list[Request]):
        self._sender, self._requests = sender, requests

    def wait(self) -> None:
        self._sender.finish(self._requests)


class Pulled:
    """Reply to a pull: rows that are on their way."""

    def __init__(self, sender: RequestSender, requests: list[Request], outs: Outs):
        self._sender, self._requests, self._outs = sender, requests, outs
        self._found: Tensors | None = None

    def result(self) -> Tensors:
        if self._found is None:
            todo, self._requests = self._requests, []
            try:
                while todo:
                    self._sender.receive(todo[0], self._outs)
                    todo.pop(0)
            finally:
                for request in todo:
                    request.abandon()
            self._found = {name: out for name, out in self._outs.items() if out is not None}
        return self._found

    def wait(self) -> None:
        self.result()

    def __del__(self) -> None:
        for request in self._requests:
            request.abandon()
