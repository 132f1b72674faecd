"""Copying: a whole shard to a server that has nothing of it, while workers go on.

    rows of all tables, piece by piece; the lock is free between two pieces
    rows that changed meanwhile, again and again, until few are left
    under the lock: the last of them, dense tables, and the state beside rows; from here on all
    changes are handed on to the learner too, which has exactly what this server has

The learner then is the last member of the chain, by the coordinator's word.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from manyhands.server.protocol import messages as m
from manyhands.server.protocol import replication_messages as r
from manyhands.server.protocol.arrays import pack
from manyhands.server.protocol.frame import Channel, Malformed, encode_body
from manyhands.server.protocol.kinds import KIND_OF
from manyhands.server.replication.copied_state import give_state
from manyhands.server.replication.replicator import Link, Replicator
from manyhands.server.shard import Shard
from manyhands.server.tables.dense import DenseTable


class Copy:
    """From the last member of a chain to its learner. `done(shard, learner, seconds, bytes)`."""

    def __init__(
        self,
        shard: Shard,
        replicator: Replicator,
        learner: int,
        channel: Channel,
        done: Callable[[int, int, float, int], None],
    ):
        self._shard, self._replicator = shard, replicator
        self._learner, self._channel, self._done = learner, channel, done

    def run(self) -> None:
        replicator, channel, begun = self._replicator, self._channel, time.monotonic()
        channel.send(r.Follow(replicator.member.me, replicator.member.version, True))
        _, answer = channel.receive()
        if not isinstance(answer, m.Done):
            raise Malformed("garbage", "the learner does not follow")
        with replicator.order:
            self._send_all()
            message, parts = give_state(self._shard, replicator.applied)
            channel.send(message, 0, parts)
            number = replicator.applied
            with replicator.state:
                link = Link(self._learner, channel)
                replicator.member.teach(self._learner)
                replicator.listen(link)
        with replicator.state:
            replicator.state.wait_for(
                lambda: link.acknowledged >= number or replicator.link is not link
            )
            if link.acknowledged < number:
                return
        self._done(replicator.shard, self._learner, time.monotonic() - begun, channel.sent_bytes)

    def _send_all(self) -> None:
        for name in self._shard.tables():
            table = self._shard.contents[name]
            span = (table.start, table.stop) if isinstance(table, DenseTable) else None
            self._send(m.CreateTable(table.spec, span, []), [])
            content = self._shard.dump(name)
            del content["marks"]
            described, parts = pack(content)
            self._send(m.RestoreTable(name, False, described), parts)

    def _send(self, message: m.Message, parts: list) -> None:
        kind = KIND_OF[type(message)]
        self._channel.send(r.ForwardTable(0, kind, encode_body(message)), 0, parts)
