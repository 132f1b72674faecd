"""Held shards: the shards that one server holds, as the newest slot map says.

A shard that the map gives to this server is made; one that it takes away is dropped. The first
server of a chain serves workers (`ShardEndpoint`); every one hands changes on (`Replicator`); the
last one copies the shard to a learner (`Copy`), and the others' changes come in through `follow`.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence

from manyhands.server.hot_copies.copy_refresh import CopyRefresh
from manyhands.server.hot_copies.held_copies import HeldCopies
from manyhands.server.network.shard_endpoint import ServerStatus, ShardEndpoint
from manyhands.server.protocol import hot_messages as h
from manyhands.server.protocol import messages as m
from manyhands.server.protocol import replication_messages as r
from manyhands.server.protocol.frame import Channel, Malformed
from manyhands.server.replication.copying import Copy
from manyhands.server.replication.follower import Follower
from manyhands.server.replication.handed_on import Link
from manyhands.server.replication.replicator import BROKEN, Replicator
from manyhands.server.shard import Shard
from manyhands.server.slots import SlotMap

SMOOTH = 0.2  # weight of the newest measurement of a load
FOLLOW_S = 5.0  # for the slot map that makes a server follow to arrive, after another's came


class HeldShards:
    """`connect(where, shard)` opens a connection to a shard of another server; `tell(message)`
    sends the coordinator something; `fail(reason)` ends this server."""

    def __init__(
        self,
        status: ServerStatus,
        modules: Sequence[str],
        *,
        connect: Callable[[m.ShardAddress], Channel],
        tell: Callable[[m.Message], None],
        fail: Callable[[str], None],
    ):
        self._status, self._modules = status, modules
        self._connect, self._tell, self._fail = connect, tell, fail
        self.endpoints: dict[int, ShardEndpoint] = {}
        self.me = -1
        self._slots: SlotMap | None = None
        self._memory_bytes: int | None = None
        self._hot = 0.0, 0.0  # share of accesses, and age of copies: see `hot_copies`
        self.refresh: CopyRefresh | None = None
        self._rates: dict[int, tuple[float, float, float]] = {}  # shard: rows, time, rows a second
        self._copying: set[tuple[int, int]] = set()  # (shard, learner)
        self._copies = itertools.count(1)  # that this server has begun
        self._begun: dict[int, tuple[int, int]] = {}  # shard -> (teacher, its copy) that came last
        # held while a map is used: the shards get chains in their order. Taken before `_changed`
        self._assigning = threading.Lock()
        self._changed = threading.Condition()
        self._closed = False

    @property
    def shards(self) -> list[Shard]:
        with self._changed:
            return [endpoint.shard for _, endpoint in sorted(self.endpoints.items())]

    def find(self, shard: int) -> ShardEndpoint:
        with self._changed:
            found = self.endpoints.get(shard)
        if found is None:
            raise Malformed(
                "moved", f"shard {shard} was asked for, this server has {sorted(self.endpoints)}"
            )
        return found

    def close(self) -> None:
        with self._changed:
            self._closed = True
            endpoints = list(self.endpoints.values())
            self._changed.notify_all()
        for endpoint in endpoints:
            endpoint.replicator.close()
        if self.refresh is not None:
            self.refresh.close()

    # -- the slot map --

    def assign(self, slots: SlotMap, message: m.AssignSlots) -> None:
        """Hold what this map says. Replies to workers from here on are those of its epoch."""
        with self._assigning:
            self._use(slots, message)

    def _use(self, slots: SlotMap, message: m.AssignSlots) -> None:
        with self._changed:
            if self._slots is not None and slots.epoch <= self._slots.epoch:
                return
            # given up and registered again, under another number: what it has is out of date
            gone = list(self.endpoints.values()) if self.me not in (-1, message.you) else []
            self.endpoints = {} if gone else self.endpoints
            self.me, self._memory_bytes = message.you, message.memory_bytes
            self._hot = message.hot
            mine = {
                shard
                for shard, chain in enumerate(slots.chains)
                if self.me in chain.members or chain.learner == self.me
            }
            gone += [self.endpoints.pop(shard) for shard in sorted(self.endpoints.keys() - mine)]
            for shard in sorted(mine - self.endpoints.keys()):
                self.endpoints[shard] = self._make(shard)
            self._slots = slots
            self._status.first = min(self.endpoints, default=-1)
            self._status.epoch = slots.epoch
            endpoints = dict(self.endpoints)
        for endpoint in gone:
            endpoint.replicator.close()
        for shard, endpoint in endpoints.items():
            endpoint.replicator.wait_for_all = message.ack == "all"
            endpoint.replicator.assign(slots.chains[shard])
        with self._changed:
            self._changed.notify_all()
        self._start_copies(slots, endpoints)
        if self._hot[0]:
            self._copy_hot(slots)

    def _make(self, shard: int) -> ShardEndpoint:
        made = Shard(
            shard, memory_bytes=self._memory_bytes, modules=self._modules, hot=self._hot[0]
        )
        replicator = Replicator(
            shard,
            self.me,
            self._reach,
            lambda number, server: self._tell(r.Part(number, server)),
            self._fail,
        )
        return ShardEndpoint(self._status, made, replicator)

    def _reach(self, server: int, shard: int) -> Channel:
        slots = self._slots
        if slots is None or server not in slots.servers:
            raise ConnectionError(f"server {server} is not in the slot map")
        where = slots.servers[server]
        return self._connect(
            m.ShardAddress(where.host, where.port, shard, where.local, where.machine)
        )

    # -- copies of hot rows --

    def _copy_hot(self, slots: SlotMap) -> None:
        """Hold copies of the hot rows of other shards; the caller holds `_assigning`."""
        if self.refresh is None:
            self._status.copies, self._status.copy_age = HeldCopies(), self._hot[1]
            self.refresh = CopyRefresh(
                self._hot[1],
                copies=self._status.copies,
                connect=lambda server: self._reach(server, 0),
                led=self._led,
                epoch=lambda: self._status.epoch,
            )
        leads = [chain.members[0] for chain in slots.chains if chain.members]
        alone = leads.count(self.me) == 1  # its hot rows need no copy here
        if not self._closed:
            self.refresh.assign((s for s in set(leads) if s != self.me or not alone), self.me)
        if self._closed:
            self.refresh.close()
        with self._changed:
            self._changed.notify_all()

    def _led(self) -> list[tuple[Shard, Replicator]]:
        with self._changed:
            endpoints = list(self.endpoints.values())
        return [(e.shard, e.replicator) for e in endpoints if e.replicator.member.leads]

    # -- copies to learners --

    def _start_copies(self, slots: SlotMap, endpoints: dict[int, ShardEndpoint]) -> None:
        for shard, endpoint in endpoints.items():
            chain = slots.chains[shard]
            last = bool(chain.members) and chain.members[-1] == self.me
            key = shard, chain.learner
            if not last or chain.learner < 0 or endpoint.replicator.member.learner is not None:
                continue
            with self._changed:
                if key in self._copying:
                    continue
                self._copying.add(key)
            threading.Thread(
                target=self._copy, args=(*key, endpoint), name="manyhands-copy", daemon=True
            ).start()

    def _copy(self, shard: int, learner: int, endpoint: ShardEndpoint) -> None:
        """Copy to a learner, as often as it takes, while the map says so."""
        try:
            while self._learns(shard, learner, endpoint):
                channel: Channel | None = None
                try:
                    channel = self._reach(learner, shard)
                    Copy(
                        endpoint.shard,
                        endpoint.replicator,
                        learner,
                        channel,
                        next(self._copies),
                        self._copied,
                    ).run()
                except BROKEN:
                    if channel is not None:
                        channel.close()
                    time.sleep(0.05)
        finally:
            with self._changed:
                self._copying.discard((shard, learner))

    def _learns(self, shard: int, learner: int, endpoint: ShardEndpoint) -> bool:
        """Whether this server still has to copy the shard to the learner."""
        with self._changed:
            slots = self._slots
            if self._closed or slots is None or self.endpoints.get(shard) is not endpoint:
                return False
            chain = slots.chains[shard]
        last = bool(chain.members) and chain.members[-1] == self.me
        return last and chain.learner == learner and endpoint.replicator.member.learner is None

    def _copied(self, shard: int, learner: int, seconds: float, nbytes: int) -> None:
        self._tell(r.Copied(shard, learner, seconds, nbytes))

    def loads(self) -> r.Loads:
        """Rows a second that workers ask for, by shard; smoothed over some calls."""
        now = time.monotonic()
        with self._changed:
            endpoints = dict(self.endpoints)
        found = {}
        for shard, endpoint in endpoints.items():
            if not endpoint.replicator.member.leads:
                continue
            total = float(endpoint.shard.slot_loads().sum())
            before, at, rate = self._rates.get(shard, (total, now, 0.0))
            if now > at:
                rate += SMOOTH * (max(0.0, total - before) / (now - at) - rate)
            self._rates[shard] = total, now, rate
            found[shard] = rate
        return r.Loads(found)

    def tell_again(self) -> None:
        """After the connection to the coordinator was lost: what it may not have heard."""
        with self._changed:
            endpoints = dict(self.endpoints)
        for shard, endpoint in endpoints.items():
            replicator = endpoint.replicator
            learner = replicator.member.learner
            if learner is not None and learner == replicator.confirmed:
                self._copied(shard, learner, 0.0, 0)

    # -- changes from the server before --

    def follow(self, channel: Channel, shard: int) -> None:
        _, message = channel.receive()
        if isinstance(message, h.FetchHot):
            with self._changed:  # its sender may have got the slot map first
                self._changed.wait_for(lambda: self._closed or self.refresh is not None, FOLLOW_S)
            if self.refresh is not None:
                self.refresh.serve(channel, message)
        if not isinstance(message, r.Follow):
            raise Malformed("garbage", f"a {type(message).__name__} came, where a server hands on")
        endpoint = self._followed(shard, message)
        if endpoint is None:
            channel.send(m.Failed("store", "this server does not follow that one"))
            return
        Follower(endpoint.shard, endpoint.replicator, Link(message.server, channel)).run()

    def _followed(self, shard: int, message: r.Follow) -> ShardEndpoint | None:
        """The shard whose changes come from that server; None: they do not."""

        def ready() -> bool:
            chain = self._slots.chains[shard] if self._slots is not None else None
            return self._closed or (chain is not None and chain.version >= message.version)

        with self._changed:
            if not self._changed.wait_for(ready, FOLLOW_S) or self._closed:
                return None
            endpoint = self.endpoints.get(shard)
            if endpoint is None or not endpoint.replicator.listens_to(message.server):
                return None
        return endpoint if not message.copy else self._afresh(shard, message)

    def _afresh(self, shard: int, message: r.Follow) -> ShardEndpoint | None:
        """An empty shard for a copy; None: its sender does not teach this server, or has begun
        another copy since. (That one may be complete, and the coordinator may count on it.)"""
        with self._assigning:
            with self._changed:
                old, slots = self.endpoints.get(shard), self._slots
                if slots is None or old is None or old.replicator.teacher != message.server:
                    return None
                server, attempt = self._begun.get(shard, (-1, 0))
                if server == message.server and message.copy <= attempt:
                    return None
                self._begun[shard] = message.server, message.copy
                made = self.endpoints[shard] = self._make(shard)
            old.replicator.close()
            made.replicator.wait_for_all = old.replicator.wait_for_all
            made.replicator.assign(slots.chains[shard])
        return made
