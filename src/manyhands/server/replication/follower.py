"""Follower: receives the changes of one shard from the server before it, applies and answers them.

Each is handed on to the next server first, then applied here; it is acknowledged when the servers
after this one have it. A change that is refused (StoreError) is refused by every server alike, so
the follower says nothing of it: the first server tells the worker.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np
from msgspec.structs import replace

from manyhands.errors import StoreError
from manyhands.server.network.attached_segments import AttachedSegments
from manyhands.server.protocol import messages as m
from manyhands.server.protocol import replication_messages as r
from manyhands.server.protocol import table_messages as t
from manyhands.server.protocol.arrays import unpack
from manyhands.server.protocol.frame import Channel, Cursor, Malformed, decode
from manyhands.server.replication.copied_state import take_state
from manyhands.server.replication.handed_on import Link
from manyhands.server.replication.replicator import BROKEN, Replicator
from manyhands.server.shard import Shard
from manyhands.server.table_updates import TableUpdate


class Follower:
    """One connection from the server before this one."""

    def __init__(self, shard: Shard, replicator: Replicator, link: Link):
        self._shard, self._replicator, self._link = shard, replicator, link
        self._sent, self._sending = 0, threading.Lock()
        self._in, self._segments = np.empty(0, np.uint8), AttachedSegments(link.channel)

    def run(self) -> None:
        """Until the connection ends, or another server is the one before."""
        replicator, channel = self._replicator, self._link.channel
        with replicator.state:
            if not replicator.listens_to(self._link.server):
                return
            if replicator.incoming is not None:
                replicator.incoming.channel.stop()
            replicator.incoming = self._link
            applied = replicator.applied
        channel.send(m.Done(applied))
        threading.Thread(
            target=self._acknowledge, name="manyhands-acknowledge", daemon=True
        ).start()
        try:
            while True:
                head, message = channel.receive()
                if isinstance(message, m.Attach):
                    self._segments.attach(message)
                    continue
                self._take(message, self._receive(channel, head.payload_bytes, message))
        finally:
            with replicator.state:
                if replicator.incoming is self._link:
                    replicator.incoming = None
                replicator.state.notify_all()

    def _receive(self, channel: Channel, nbytes: int, message: Any) -> np.ndarray:
        """The payload of a message, in memory of our own: a change may use it."""
        where = getattr(message, "arena", None)
        nbytes = nbytes if where is None else where.nbytes
        if nbytes > self._in.size:
            self._in = np.empty(nbytes + nbytes // 2, np.uint8)
        if where is not None:
            np.copyto(self._in[:nbytes], self._segments.view(where.segment, where.at, nbytes))
        elif nbytes:
            channel.body(self._in[:nbytes].data)
        return self._in[:nbytes]

    def _take(self, message: Any, memory: np.ndarray) -> None:
        replicator = self._replicator
        with replicator.order:
            if replicator.incoming is not self._link:
                raise Malformed("garbage", "another server is before this one now")
            if isinstance(message, r.CopyState):
                self._finish_copy(message, memory)
            elif isinstance(message, r.ForwardTable) and message.number == 0:
                self._copy(message, memory)
            elif isinstance(message, r.Forward | r.ForwardTable):
                self._apply(message, memory)
            elif isinstance(message, m.Ping):  # has everything up to here been applied?
                self._link.channel.send(m.Done())
            else:
                raise Malformed("garbage", f"a {type(message).__name__} was sent to a follower")
        self._answer()

    def _apply(self, message: r.Forward | r.ForwardTable, memory: np.ndarray) -> None:
        replicator = self._replicator
        with replicator.state:
            # the newest chain decides, also over what was sent before it
            if replicator.incoming is not self._link:
                raise Malformed("garbage", "another server is before this one now")
            last = replicator.member.after is None
            parts = [] if last or not memory.size else [memory]
            change = replicator.payloads.keep(replace(message, arena=None), parts)
            if not replicator.member.follow(message.number, change):
                replicator.payloads.forget(change)
                return
        if not last:
            replicator.hand_on(change)
        if isinstance(message, r.Forward):
            replicator.apply(lambda: apply_push(self._shard, message, memory))
        else:
            replicator.apply(lambda: apply_table(self._shard, message, memory))
        replicator.finished = message.number

    def _copy(self, message: r.ForwardTable, memory: np.ndarray) -> None:
        """A part of a copy. Unlike a change, one that is refused here was not refused before."""
        content = decode(message.kind, message.body)
        refused = self._replicator.apply(lambda: change_table(self._shard, content, memory))
        if isinstance(refused, StoreError):
            raise Malformed("garbage", f"a part of a copy was refused: {refused}")

    def _finish_copy(self, message: r.CopyState, memory: np.ndarray) -> None:
        take_state(self._shard, message, unpack(message.arrays, memory))
        with self._replicator.state:
            member = self._replicator.member
            member.applied = member.acknowledged = message.number
            member.kept.clear()
            self._replicator.finished = message.number
        with self._sending:
            self._link.channel.send(m.Done(message.number))
            self._sent = message.number

    # -- acknowledgements --

    def _acknowledge(self) -> None:
        """Tell the server before what the servers after this one have acknowledged."""
        replicator = self._replicator
        while True:
            with replicator.state:
                replicator.state.wait_for(
                    lambda: self._known() > self._sent or replicator.incoming is not self._link
                )
                if replicator.incoming is not self._link:
                    return
            try:
                self._answer()
            except BROKEN:
                return

    def _known(self) -> int:
        """What all servers from here on have. Not what is still being applied here: this server
        may be the first one next, and must show what was acknowledged."""
        return min(self._replicator.member.acknowledged, self._replicator.finished)

    def _answer(self) -> None:
        with self._sending:
            acknowledged = self._known()
            if acknowledged > self._sent:
                self._link.channel.send(m.Done(acknowledged))
                self._sent = acknowledged


# -- changes --


def apply_push(shard: Shard, x: r.Forward, memory: np.ndarray) -> None:
    """Commits, then the push, then what the worker remembers; as on the first server."""
    cursor, parts = Cursor(memory), []
    for request in x.push:
        spec = shard.spec(request.table)
        ids = None if request.mode == m.DENSE else cursor.take(request.count, np.int64)
        count = request.count if ids is None else request.count * spec.dim
        shape = (count,) if ids is None else (request.count, spec.dim)
        parts.append(TableUpdate(request.table, ids, cursor.take(count, spec.dtype).reshape(shape)))
    for name, version in x.pulled.items():
        shard.pulled[x.worker, name] = version
    try:
        for version, members in x.commits:
            shard.commit(version, members)
        if x.options is not None:
            shard.push(x.worker, x.incarnation, x.sequence, parts, x.options)
        if x.remember:
            shard.remember(x.worker, x.remember)
    except StoreError:
        pass  # what follows a refusal is left out, as on the first server


def apply_table(shard: Shard, x: r.ForwardTable, memory: np.ndarray) -> None:
    with contextlib.suppress(StoreError):
        change_table(shard, decode(x.kind, x.body), memory)


def change_table(shard: Shard, message: Any, memory: np.ndarray) -> Any:
    """Apply a change of whole tables; returns what the worker is told."""
    arrays = unpack(message.arrays, memory)
    if isinstance(message, m.CreateTable):
        state = {k.removeprefix("state/"): x for k, x in arrays.items() if k != "values"}
        return int(shard.create(message.table, message.span, arrays.get("values"), state or None))
    elif isinstance(message, m.RestoreTable):
        if message.clear:
            shard.clear(message.name)
        if arrays:
            shard.load(message.name, arrays)
    elif isinstance(message, t.DeleteRows):
        who = message.worker, message.incarnation, message.sequence
        return shard.delete_rows(*who, message.table, arrays["ids"])
    elif isinstance(message, t.DropTable):
        return shard.drop(message.worker, message.incarnation, message.sequence, message.table)
    elif isinstance(message, r.EraseRows):
        return shard.erase(message.name, arrays["ids"])
    else:
        raise Malformed("garbage", f"a {type(message).__name__} does not change tables")
    return 0
