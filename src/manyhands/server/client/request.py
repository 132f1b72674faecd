"""One shard's share of a push, a pull or both: where it stands in memory, how it is sent, and what becomes of the answer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from manyhands.core import Table, Tensors
from manyhands.server.client.connection import Connection, Parts, PendingRequest
from manyhands.server.protocol import messages as m
from manyhands.server.protocol import row_encoding
from manyhands.server.protocol.arena import Arena, ArenaBlock
from manyhands.server.protocol.frame import Cursor, aligned
from manyhands.server.tables.partition import Partition

if TYPE_CHECKING:
    from manyhands.server.client.server_store import ServerStore


Outs = dict[str, Tensor | None]  # None: not made yet


class Moved(Exception):
    """The rows lie elsewhere since the slot map changed; nothing was done."""


@dataclass(eq=False)
class ShardPart:
    """What of one table goes to one shard."""

    table: Table
    shard: int
    part: tuple[int, int] | None = None  # of a dense table
    cut: Partition | None = None  # of a sparse one
    ids: np.ndarray | None = None
    key: int = 0
    direct: bool = False  # ids as given, with their repeats: rows come back in their final order
    updates: np.ndarray | None = None  # all of them, as given; None: a pull
    ready: np.ndarray | None = None  # updates by distinct id, where they had to be made before
    room: ArenaBlock | None = None  # where the updates stand already
    ids_at: int = 0  # where its parts stand in the region
    raw_at: int = 0

    def __post_init__(self) -> None:
        self.measure()

    def measure(self) -> None:
        """What follows from the rest; asked for often."""
        if self.part is not None:
            self.count = self.numbers = self.part[1] - self.part[0]
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
        if self.updates is None or self.room is not None:
            return
        self.raw_at = cursor.at
        raw, dtype = cursor.take(self.raw_bytes(code), np.uint8), np.dtype(self.table.dtype)
        if self.part is not None:
            row_encoding.encode(code, self.updates[self.part[0] : self.part[1]], raw, self.width)
        elif self.direct:
            np.copyto(raw.view(dtype), self.updates)
        elif self.ready is not None:
            row_encoding.encode(code, self.ready, raw, self.width)
        else:
            assert self.cut is not None
            plain = raw.view(dtype) if code == "none" else np.empty(self.numbers, dtype)
            self.cut.collect(
                self.updates, self.shard, self.table.dim, plain
            )  # sums repeats on the way into the buffer
            if code != "none":
                row_encoding.encode(code, plain, raw, self.width)

    def read(self, code: m.RowCodec, cursor: Cursor, out: np.ndarray) -> None:
        """`out`: of the whole table, or a row for each id as given."""
        if self.direct:
            np.copyto(out, self.rows(cursor).reshape(-1))
            return
        raw, dtype = cursor.take(self.raw_bytes(code), np.uint8), np.dtype(self.table.dtype)
        if self.part is not None:
            row_encoding.decode(code, raw, out[self.part[0] : self.part[1]], self.width)
            return
        if code == "none":
            rows = raw.view(dtype)
        else:
            rows = np.empty(self.numbers, dtype)
            row_encoding.decode(code, raw, rows, self.width)
        self.spread(rows, out)

    def rows(self, cursor: Cursor) -> np.ndarray:
        """Where they stand."""
        return (
            cursor.take(self.raw_bytes("none"), np.uint8)
            .view(self.table.dtype)
            .reshape(self.count, self.table.dim)
        )

    def spread(self, rows: np.ndarray, out: np.ndarray) -> None:
        assert self.cut is not None
        if self.cut.zero is not None:
            start = self.cut.starts[self.shard] * self.table.dim
            np.equal(rows, 0, out=self.cut.zero[start : start + rows.size])
        self.cut.spread(rows, self.shard, self.table.dim, out)


def describe(push: list[ShardPart], pull: list[ShardPart], how: m.PushMessage | None) -> str:
    if how is None and not pull:
        return "commit"
    names = ", ".join(dict.fromkeys(share.table.name for share in (*push, *pull)))
    return f"{'push and pull' if push and pull else 'push' if how is not None else 'pull'} of {names or 'nothing'}"


class Request(PendingRequest):
    def __init__(
        self,
        store: ServerStore,
        link: Connection,
        push: list[ShardPart],
        pull: list[ShardPart],
        how: m.PushMessage | None,
        sequence: int,
        remember: bool,
    ):
        super().__init__(
            lambda: describe(push, pull, how), self._compose, time.monotonic() + store.timeout_s
        )
        self.store, self.link = store, link
        self.push, self.pull, self.how, self.sequence, self.remember = (
            push,
            pull,
            how,
            sequence,
            remember,
        )
        self.code: m.RowCodec = store.code
        self.epoch, self.generation = (
            store.epoch,
            store.generation,
        )  # of the map by which it was cut
        ids = sum(aligned(8 * share.ids.size) for share in (*push, *pull) if share.ids is not None)
        for share in push:
            if (share.direct or share.part is not None) and self.code == "none":
                share.room = store.room_of(link, share)
        self.payload_bytes = ids + sum(
            aligned(share.raw_bytes(self.code)) for share in push if share.room is None
        )
        self.answer_bytes = sum(aligned(share.raw_bytes(self.code)) for share in pull)
        self.answer_at = self.payload_bytes
        self.region = link.arena.take(self.payload_bytes + self.answer_bytes)
        cursor = Cursor(self.region.memory)
        for share in (*push, *pull):
            share.write(self.code, cursor)
        for share in push:
            share.updates = share.ready = None  # the caller's again
        self.on_answer = self._answered

    def _compose(self) -> tuple[m.Message, Parts]:
        commits, self.commits = self.store.commits_for(self.link)
        epoch = self.store.epoch if self.generation == self.store.generation else self.epoch
        message = m.Exchange(
            epoch, self.sequence, [], [], self.how, self.code, self.remember, commits
        )
        assert self.region is not None
        memory, parts, whole = self.region.memory, [], True
        for given, share in [
            *((True, share) for share in self.push),
            *((False, share) for share in self.pull),
        ]:
            keyed = m.TableRequest(share.table.name, share.count)
            (message.push if given else message.pull).append(keyed)
            if share.ids is not None:
                keyed.mode = m.IDS_SENT
                if not self.link.shared and share.count and share.key:
                    keyed.key = share.key
                    if self.link.keys.know(keyed.table, keyed.key, keyed.count) is not None:
                        keyed.mode, whole = m.IDS_KNOWN, False
                        self.store.counted["key_hits"] += 1
                    else:
                        self.link.keys.learn(keyed.table, keyed.key, keyed.count)
                if keyed.mode == m.IDS_SENT:
                    parts.append(memory[share.ids_at : share.ids_at + 8 * share.count])
            if share.room is not None:
                whole = False
                if self.link.shared:
                    keyed.updates_at = share.room.segment.number, share.room.at
                parts.append(share.room.memory[: share.raw_bytes(self.code)])
            elif given:
                parts.append(memory[share.raw_at : share.raw_at + share.raw_bytes(self.code)])
        if self.link.shared:
            at = self.region.at
            message.arena = m.ArenaRange(
                self.region.segment.number,
                at,
                self.payload_bytes,
                at + self.answer_at,
                self.answer_bytes,
            )
            return message, ()
        return message, [memory[: self.payload_bytes]] if whole and self.payload_bytes else parts

    def _answered(self, _: PendingRequest) -> None:
        if self.commits:
            self.store.committed(self.link, self.commits)
        if self.error is not None and self.how is not None:
            self.store.failures.append(self.error)
        if not self.pull or self.abandoned or self.error is not None:
            self.release()

    def move(self, arena: Arena) -> None:
        super().move(arena)
        for share in self.push:
            if share.room is not None:
                share.room = arena.copy(share.room)

    def release(self) -> None:
        for share in self.push:
            if share.room is not None:
                room, share.room = share.room, None
                self.link.arena.give(room)
        if self.region is not None:
            region, self.region = self.region, None
            self.link.arena.give(region)

    def read(self, outs: Outs) -> None:
        """Rows to where they are wanted; where nobody said, a tensor over the memory that they stand in."""
        region = self.region
        if not self.pull:
            return
        assert region is not None
        cursor = Cursor(region.memory, self.answer_at)
        for share in self.pull:
            out = outs[share.table.name]
            if out is None:
                array = share.rows(cursor)
                self.link.arena.lend(region, array)
                outs[share.table.name] = torch.from_numpy(array)
            else:
                share.read(self.code, cursor, out.detach().numpy().reshape(-1))

    def abandon(self) -> None:
        """Nobody will ask for the rows."""
        self.abandoned = True
        if self.done:
            self.release()

    def updates_of(self, share: ShardPart) -> np.ndarray:
        """What was to be pushed, out of the buffer."""
        assert self.region is not None
        raw = self.region.memory[share.raw_at : share.raw_at + share.raw_bytes(self.code)]
        values = np.empty(share.numbers, share.table.dtype)
        row_encoding.decode(self.code, raw, values, share.width)
        return values


class Pushed:
    """Work: `wait` comes back when every shard has it."""

    def __init__(self, store: ServerStore, requests: list[Request]):
        self._store, self._requests = store, requests

    def wait(self) -> None:
        self._store.finish(self._requests)


class Pulled:
    """Rows that are on their way."""

    def __init__(self, store: ServerStore, requests: list[Request], outs: Outs):
        self._store, self._requests, self._outs = store, requests, outs
        self._found: Tensors | None = None

    def result(self) -> Tensors:
        if self._found is None:
            todo, self._requests = self._requests, []
            try:
                while todo:
                    self._store.receive(todo[0], self._outs)
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
