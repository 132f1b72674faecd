"""Server registry: the servers of a run as their coordinator knows them, and what each holds.

    register    a server comes; when all have come, each gets the slot map and confirms it
    lost        its connection is gone (and it does not come back within GRACE_S), its process is
                gone, or it sent no ping for `lease_s`: its shards go on at the next in their chains
    copied      a learner has its copy and becomes a member

Every change is a new slot map of the next epoch, saved (`changed`) before it is sent. Workers are
given a map only when all servers that are there have confirmed it. Times are monotonic.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from manyhands.errors import StoreError
from manyhands.server.protocol import handshake
from manyhands.server.protocol import messages as m
from manyhands.server.replication import placement
from manyhands.server.slots import SlotMap, even, heads

# Without a ping for so long a server hangs. One that compiles, or whose host is busy, is late by
# seconds; one that died is noticed at once.
LEASE_S = 30.0
GRACE_S = 0.5  # for a server whose connection broke to come back
LOOK_S = 0.1  # between two looks at leases
Send = Callable[[m.Message], None]


@dataclass(eq=False)
class RegisteredServer:
    """`send` is None while it is not connected."""

    number: int
    entry: m.Register
    send: Send | None
    epoch: int = 0  # of the map it uses
    heard: float = field(default_factory=time.monotonic)  # when it last sent something
    draining: bool = False

    def status(self) -> dict[str, Any]:
        return {
            "server": self.number,
            "address": str(self.entry.where),
            "pid": self.entry.pid,
            "connected": self.send is not None,
            "draining": self.draining,
        }


class ServerRegistry:
    """`servers`: how many come before the first map is made. `changed` is called, with the lock
    held, before anybody learns of a change."""

    def __init__(
        self,
        servers: int,
        *,
        replicas: int = 1,
        ack: Literal["all", "primary"] = "all",
        lease_s: float = LEASE_S,
        changed: Callable[[], None] = lambda: None,
    ):
        self.num_servers, self.replicas, self.ack, self.lease_s = servers, replicas, ack, lease_s
        self.slots: SlotMap | None = None
        self.recovers, self.hot = False, (0.0, 0.0)  # `hot`: see AssignSlots
        self.losses: list[tuple[int, str]] = []  # servers that were lost, and why
        self.loads: dict[int, float] = {}  # rows a second, by shard
        self.loads_here: Callable[[], dict[int, float]] = dict  # of a server in this process
        self._balancing = False
        self.copies: list[tuple[int, int, float, int]] = []  # shard, learner, seconds, bytes
        self._changed, self.changed = threading.Condition(), changed
        self._servers: dict[int, RegisteredServer] = {}
        self._next = 0
        self._closing = False
        self._watch: threading.Thread | None = None

    @property
    def lock(self) -> threading.Condition:
        return self._changed

    # -- servers come and go --

    def register(self, entry: m.Register, send: Send) -> RegisteredServer:
        """A new server, or one that comes back (the same process) after its connection broke."""
        with self._changed:
            found = next((s for s in self._all if s.entry.instance == entry.instance), None)
            if found is not None:
                found.send, found.heard, found.epoch = send, time.monotonic(), 0
                found.entry = entry
            else:
                self._check_room(entry)
                found = RegisteredServer(self._next, entry, send)
                self._next += 1
                self._servers[found.number] = found
                self._settle()
            slots = self.slots
        if slots is not None:
            self.publish()
        return found

    def _check_room(self, entry: m.Register) -> None:
        if self.slots is None or not entry.shards:
            return
        lost = any(not chain.members for chain in self.slots.chains)
        if not lost and not self.recovers and not entry.extra:
            raise StoreError(
                f"all {self.num_servers} servers have registered; start the coordinator with "
                "more, or this server for another run"
            )

    def disconnected(self, server: RegisteredServer, send: Send) -> None:
        """Its connection ended. Where its process is gone, nothing is waited for."""
        with self._changed:
            if server.send is not send:  # it has a newer one
                return
            server.send, server.heard = None, time.monotonic()
            gone = handshake.process_gone(server.entry.pid, server.entry.where)
        if gone or not self.recovers:
            self.lose(server, "its process ended" if gone else "it closed its connection")

    def lose(self, server: RegisteredServer, why: str) -> None:
        with self._changed:
            if self._servers.pop(server.number, None) is None or self._closing:
                return
            try:
                self._settle()
            except OSError:  # not saved, so it has not happened: `_look` tries again
                self._servers[server.number] = server
                raise
            self.losses.append((server.number, why))
            if server.send is not None:
                server.send(m.Failed("store", f"this server was given up: {why}"))
        self.publish()

    # -- the slot map --

    def _settle(self) -> None:
        """Make the map that the present servers need; the caller holds the lock."""
        if self.slots is None:
            if len(self._servers) < self.num_servers:
                return
            chains = placement.start({s.number: s.entry.shards for s in self._all}, self.replicas)
            where = self._where()
            first = SlotMap(1, even(len(chains)), heads(where, chains), where, tuple(chains))
            return self._keep(first)
        chains = list(self.slots.chains)
        self._place(chains if self.recovers else placement.adopt(chains, list(self._servers)))

    def _place(self, chains: list[m.ShardChain]) -> None:
        draining = [s.number for s in self._servers.values() if s.draining]
        self._use(placement.settle(chains, list(self._servers), self.replicas, draining))
        self._let_go()

    def _let_go(self) -> None:
        """Servers that were drained and hold nothing any more may end."""
        with self._changed:
            assert self.slots is not None
            used = {x for c in self.slots.chains for x in (*c.members, c.learner)}
            free = [s for s in self._all if s.draining and s.number not in used]
            for server in free:
                del self._servers[server.number]
            if free:
                self._use(self.slots.chains)
        for server in free:
            if server.send is not None:
                server.send(m.Leave())

    def _use(self, chains: Sequence[m.ShardChain]) -> None:
        """The next map, if it differs; the caller holds the lock."""
        assert self.slots is not None
        where = self._where()
        if list(chains) == list(self.slots.chains) and where == self.slots.servers:
            return
        self._keep(self.slots.placed(where, chains))

    def _keep(self, slots: SlotMap) -> None:
        """Use a map once it is saved: nobody must learn of one that a restart would forget."""
        before, self.slots = self.slots, slots
        try:
            self.changed()
        except BaseException:
            self.slots = before
            raise

    def _where(self) -> dict[int, m.ShardAddress]:
        return {s.number: s.entry.where for s in self._all}

    def assign(self, slots: SlotMap) -> None:
        """Send all servers another map, of a later epoch."""
        with self._changed:
            if self.slots is None or slots.epoch <= self.slots.epoch:
                now = self.slots.epoch if self.slots is not None else None
                raise StoreError(
                    f"a slot map of epoch {slots.epoch}; an epoch after {now} is needed"
                )
            self._keep(slots)
        self.publish()

    def publish(self) -> None:
        """Send the map to those that do not have it."""
        with self._changed:
            slots = self.slots
            self._changed.notify_all()
            if slots is None:
                return
            todo = [(s, s.send) for s in self._all if s.send is not None and s.epoch < slots.epoch]
            limits = [s.entry.memory_bytes for s in self._all]
        message = slots.message()
        message.ack, message.hot = self.ack, self.hot
        message.memory_bytes = min((x for x in limits if x is not None), default=None)
        for server, send in todo:
            send(replace(message, you=server.number))

    def confirm(self, server: RegisteredServer, epoch: int) -> None:
        with self._changed:
            server.epoch = max(server.epoch, epoch)
            self._changed.notify_all()

    def copied(self, server: RegisteredServer, shard: int, learner: int, *cost: Any) -> None:
        """The last member of a chain has copied everything to its learner."""
        with self._changed:
            if self.slots is None or not 0 <= shard < len(self.slots.chains):
                return
            chains = list(self.slots.chains)
            chain = chains[shard]
            if chain.learner != learner or chain.members[-1:] != [server.number]:
                return
            chains[shard] = placement.learned(chain)
            self.copies.append((shard, learner, *cost))
            self._place(chains)
            self._move_one()
        self.publish()

    def part(self, server: RegisteredServer, shard: int, other: int) -> None:
        """A member of a chain lacks what nobody can give it any more: it starts as a learner."""
        with self._changed:
            if self.slots is None or not 0 <= shard < len(self.slots.chains):
                return
            chains = list(self.slots.chains)
            chain = chains[shard]
            if server.number not in chain.members or other == chain.members[0]:
                return
            members = [x for x in chain.members if x != other]
            learner = -1 if chain.learner == other else chain.learner
            version = chain.version + 1
            chains[shard] = replace(chain, version=version, members=members, learner=learner)
            self._place(chains)
        self.publish()

    def slot_map(self, timeout_s: float = 60.0) -> SlotMap:
        """The slot map, when all servers use it."""

        def ready() -> bool:
            epoch = self.slots.epoch if self.slots is not None else 0
            return self._closing or (epoch > 0 and all(s.epoch >= epoch for s in self._all))

        with self._changed:
            if not self._changed.wait_for(ready, timeout_s) or self.slots is None:
                raise StoreError(
                    f"{len(self._servers)} of {self.num_servers} servers have registered; "
                    "start the others"
                )
            return self.slots

    # -- operators --

    def drain(self, number: int) -> None:
        """Move everything away from a server."""
        with self._changed:
            server = self._servers.get(number)
            others = [s for s in self._all if s.number != number and not s.draining]
            if server is None:
                raise StoreError(
                    f"server {number} is not there; servers are {sorted(self._servers)}"
                )
            if not others:
                raise StoreError(
                    f"server {number} is the last one: what it holds has nowhere to go; "
                    "add another server first"
                )
            server.draining = True
            self._settle()
        self.publish()

    def rebalance(self) -> bool:
        """Move shards, one after the other, from the servers with the most load to those with the
        least; False: nothing would get better."""
        with self._changed:
            self._balancing = True
            self._move_one()
            moving = self._balancing
        self.publish()
        return moving

    def _move_one(self) -> None:
        """Begin the next move; the caller holds the lock."""
        if not self._balancing or self.slots is None:
            return
        if any(c.learner >= 0 or c.leaving >= 0 for c in self.slots.chains):
            return
        count = len(self.slots.chains)
        loads = [self.loads.get(k, 0.0) for k in range(count)]
        if not sum(loads):
            loads = [1.0] * count
        live = [s.number for s in self._all if not s.draining]
        chains = placement.move(self.slots.chains, live, loads)
        self._balancing = chains is not None
        if chains is not None:
            self._use(chains)

    def status(self) -> dict[str, Any]:
        """For operators: the servers, what each holds, and what has happened."""
        with self._changed:
            chains = [] if self.slots is None else list(self.slots.chains)
            return {
                "epoch": 0 if self.slots is None else self.slots.epoch,
                "replicas": self.replicas,
                "coordinator_pid": os.getpid(),
                "servers": [s.status() | placement.held(s.number, chains) for s in self._all],
                "chains": [list(c.members) for c in chains],
                "loads": [self.loads.get(k, 0.0) for k in range(len(chains))],
                "lost_shards": [k for k, c in enumerate(chains) if not c.members],
                "losses": [list(loss) for loss in self.losses],
                "copies": [list(copy) for copy in self.copies],
            }

    @property
    def _all(self) -> list[RegisteredServer]:
        return list(self._servers.values())

    # -- watching, state, end --

    def watch(self) -> None:
        """Look for servers that sent no ping for `lease_s`, or do not come back."""
        self._watch = threading.Thread(target=self._look, name="manyhands-leases", daemon=True)
        self._watch.start()

    def _look(self) -> None:
        while not self._closing:
            time.sleep(LOOK_S)
            now = time.monotonic()
            self.loads |= self.loads_here()
            with self._changed:
                late = [
                    (s, "it did not come back")
                    if s.send is None
                    else (s, f"it sent no ping for {self.lease_s:g} s")
                    for s in self._all
                    if now - s.heard > (self.lease_s if s.send is not None else GRACE_S)
                    # without copies nothing would be won by giving up a server that hangs
                    and (self.recovers or s.send is None)
                ]
            for server, why in late:
                with contextlib.suppress(OSError):  # a full disk, say: again at the next look
                    self.lose(server, why)

    def state(self) -> dict[str, Any]:
        """What a coordinator that is started again needs; the caller holds the lock."""
        slots = self.slots
        return {
            "next": self._next,
            "slots": None if slots is None else msgspec.msgpack.encode(slots.message()),
            "servers": [[s.number, msgspec.msgpack.encode(s.entry), s.draining] for s in self._all],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`; servers have GRACE_S (from now) to come back."""
        decode = msgspec.msgpack.decode
        self._next = state["next"]
        if state["slots"] is not None:
            self.slots = SlotMap.of(decode(state["slots"], type=m.AssignSlots))
        for number, entry, draining in state["servers"]:
            server = RegisteredServer(number, decode(entry, type=m.Register), None)
            server.draining, server.heard = draining, time.monotonic() + 4 * GRACE_S
            self._servers[number] = server

    def close(self) -> None:
        with self._changed:
            self._closing = True
            todo = [s.send for s in self._all if s.send is not None]
            self._changed.notify_all()
        for send in todo:
            send(m.Leave())
