"""Replicator: hands the changes of one shard on to the next server of its chain, in their order.

    submit     number a change, hand it on, apply it here; all under one lock, so the order is the
               same on every server. The next server works on it at the same time
    wait       until all servers of the chain have it
    assign     the coordinator has another chain for this shard: connect to the next server, or go
               on alone, or lead

A connection to the next server that broke is opened again, and what that server lacks is handed on
once more. Only the coordinator's word lets a server go on without the next one, also where that is
a learner with a complete copy: the coordinator may have made it a member already. `ChainMember`
decides; this class has the threads and the connections.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import numpy as np

from manyhands.errors import StoreError
from manyhands.server.protocol import handshake
from manyhands.server.protocol import messages as m
from manyhands.server.protocol import replication_messages as r
from manyhands.server.protocol.frame import Channel, Malformed
from manyhands.server.replication.chain import ChainMember
from manyhands.server.replication.handed_on import Change, Link, Payloads

PAUSE_S = 0.02  # between two attempts to connect
PART_S = 0.2  # for the coordinator to take a server out of the chain
BROKEN = (OSError, ssl.SSLError, Malformed, handshake.HandshakeRefused)

Result = TypeVar("Result")
Parts = Sequence[np.ndarray]


class NotLeading(Exception):
    """Another server leads this shard now; nothing was acknowledged."""


class Parted(Exception):
    """The next server lacks changes that are not kept any more."""


class Replicator:
    """`connect(server, shard)` opens a connection to another server's shard. `part(shard, server)`
    tells the coordinator that a server cannot be a member of this chain any more. `fail(reason)`
    ends this server: it could not apply what the others have."""

    def __init__(
        self,
        shard: int,
        me: int,
        connect: Callable[[int, int], Channel],
        part: Callable[[int, int], None],
        fail: Callable[[str], None],
    ):
        self.shard, self.wait_for_all = shard, True
        self.member: ChainMember[Change] = ChainMember(me)
        self.payloads = Payloads()
        self.member.forget = self.payloads.forget
        self.order = threading.Lock()  # held while a change is numbered, handed on and applied
        self.state = threading.Condition()  # guards `member` and `link`
        self.link: Link | None = None
        self.incoming: Link | None = None  # from the server before
        self.teacher: int | None = None  # the server that copies this shard to us
        self.copying: Link | None = None  # to a learner that does not follow yet
        self.confirmed: int | None = None  # the learner that said it has everything
        self.finished = 0  # changes whose content is in the tables; `member.applied` runs ahead
        self._connect, self._part, self.fail = connect, part, fail
        self._connecting: int | None = None
        self._closed = False

    @classmethod
    def alone(cls) -> Replicator:
        """Of a shard without copies."""

        def nobody(*_: object) -> NoReturn:
            raise ConnectionError("this shard has no copies")

        found = cls(0, 0, nobody, nobody, nobody)
        found.assign(m.ShardChain(1, [0]))
        return found

    # -- changes --

    def submit(
        self,
        message: Callable[[int], r.Forward | r.ForwardTable],
        parts: Callable[[], Parts],
        apply: Callable[[], Result],
    ) -> tuple[int, Result | StoreError]:
        """Apply a change here and hand it on; its number, and what `apply` returned, or why it was
        refused, here as on all servers of the chain."""
        with self.order:
            member = self.member
            if not member.leads or self._closed:
                raise NotLeading
            if member.after is None:  # alone: nobody to hand it on to
                member.applied += 1
                member.acknowledged = member.applied
                return member.applied, _outcome(apply)
            change = self.payloads.keep(message(member.applied + 1), parts())
            with self.state:
                number = member.lead(change)
            self.hand_on(change)
            return number, self.apply(apply)

    def apply(self, apply: Callable[[], Result]) -> Result | StoreError:
        """Apply a change that other servers apply too; any fault but a refusal ends this server."""
        try:
            return _outcome(apply)
        except Exception as e:
            self.fail(f"shard {self.shard} could not apply a change: {type(e).__name__}: {e}")
            raise NotLeading from e

    def hand_on(self, change: Change) -> None:
        """The caller holds `order`. A connection that breaks here is opened again by its thread."""
        link = self.link
        if link is None:
            return
        try:
            link.send(change, self.payloads.arena)
        except BROKEN:
            link.channel.stop()

    @property
    def applied(self) -> int:
        return self.member.applied

    def check_leads(self) -> None:
        if not self.member.leads or self._closed:
            raise NotLeading

    def acknowledged(self, number: int) -> bool:
        """Whether a change need not be waited for (any more)."""
        return self.member.acknowledged >= number or not self.wait_for_all

    def wait(self, number: int) -> None:
        """Until all servers of the chain have this change."""
        member = self.member
        if self.acknowledged(number):
            return
        with self.state:
            self.state.wait_for(
                lambda: member.acknowledged >= number or not member.leads or self._closed
            )
            if member.acknowledged < number:
                raise NotLeading

    # -- the chain --

    def assign(self, chain: m.ShardChain) -> None:
        with self.state:
            member = self.member
            member.change(chain.version, chain.members)
            if member.learner is not None and chain.learner != member.learner:
                member.teach(None)
            if self.copying is not None and self.copying.server != chain.learner:
                self.copying.channel.stop()  # it may be stuck in a send, with `order` held
                self.copying = None
            if self.link is not None and self.link.server != member.after:
                self.link.channel.stop()
                self.link = None
            self._check_incoming(chain)
            self.state.notify_all()
            after = member.after
            connect = after is not None and self.link is None and self._connecting != after
            if connect:
                self._connecting = after
        if connect and after is not None:
            threading.Thread(
                target=self._reach, args=(after,), name="manyhands-chain", daemon=True
            ).start()

    def _check_incoming(self, chain: m.ShardChain) -> None:
        """Listen to nobody but the server before this one in the newest chain."""
        member, last = self.member, chain.members[-1] if chain.members else None
        learning = chain.learner == member.me and member.me not in chain.members
        self.teacher = last if learning else None
        if self.incoming is not None and self.incoming.server not in (member.before, self.teacher):
            self.incoming.channel.stop()
            self.incoming = None

    def listens_to(self, server: int) -> bool:
        return server in (self.member.before, self.teacher) and not self._closed

    def _reach(self, server: int) -> None:
        """Connect to the next server, for as long as it is the next, and hand on what it lacks."""
        try:
            while self.member.after == server and not self._closed:
                try:
                    channel = self._connect(server, self.shard)
                except BROKEN:
                    time.sleep(PAUSE_S)
                    continue
                try:
                    self._attach(server, channel)
                    return
                except Parted:
                    channel.close()
                    self._part(self.shard, server)
                    time.sleep(PART_S)
                except BROKEN:
                    channel.close()
                    time.sleep(PAUSE_S)
        finally:
            with self.state:
                if self._connecting == server:
                    self._connecting = None

    def _attach(self, server: int, channel: Channel) -> None:
        channel.send(r.Follow(self.member.me, self.member.version))
        _, answer = channel.receive()
        if not isinstance(answer, m.Done):
            raise Malformed("garbage", "the next server does not follow yet")
        with self.order:
            with self.state:
                if self.member.after != server or self._closed:
                    channel.close()
                    return
                missing = self.member.missing(answer.value)
                if missing is None:
                    raise Parted
                self.listen(Link(server, channel))
            # without `state`: the coordinator's next chain must get through to stop this send, and
            # so must acknowledgements, or both sides would wait to send
            for _, change in missing:
                self.hand_on(change)

    def listen(self, link: Link) -> None:
        """Use this connection from now on; the caller holds `order` and `state`."""
        self.link = link
        threading.Thread(
            target=self._read, args=(link,), name="manyhands-chain", daemon=True
        ).start()

    def _read(self, link: Link) -> None:
        """Take acknowledgements, until the connection breaks or another takes its place."""
        try:
            while True:
                _, message = link.channel.receive()
                if not isinstance(message, m.Done):
                    break
                with self.state:
                    if self.link is not link:
                        break
                    link.acknowledged = message.value
                    self.member.acknowledge(message.value)
                    self.state.notify_all()
        except BROKEN:
            pass
        link.channel.close()
        with self.state:
            if self.link is not link:
                return
            self.link = None
            if self.member.learner == link.server and self.confirmed != link.server:
                # the copy may be incomplete. The coordinator does not count on it: copy it again
                self.member.teach(None)
            self.state.notify_all()
            again = self.member.after == link.server and not self._closed
            if again:
                self._connecting = link.server
        if again:
            self._reach(link.server)

    def close(self) -> None:
        with self.state:
            self._closed = True
            for link in (self.link, self.incoming, self.copying):
                if link is not None:
                    link.channel.stop()
            self.state.notify_all()
        if self.order.acquire(timeout=1.0):  # nobody writes to it any more
            self.payloads.arena.close()
            self.order.release()


def _outcome(apply: Callable[[], Result]) -> Result | StoreError:
    try:
        return apply()
    except StoreError as e:
        return e
