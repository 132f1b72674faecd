"""The coordinator: who is there, where everything lies, and who may go on. It holds no rows.

    servers register; when all are there each gets the slot map, says so, and then workers are let in
    workers enter, tick, draw steps, meet; each keeps a second connection whose end, or silence for `lease_s`, means that it is dead:
    it is evicted, and the others' clocks move on

What to decide is `Clock`'s; this is its door.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from manyhands.errors import PeerLost, StoreError
from manyhands.server.clock import Clock
from manyhands.server.protocol import messages as m
from manyhands.server.protocol.frame import Channel, Closed, Malformed
from manyhands.server.slots import SlotMap

GRACE_S = 0.5  # after a lease's connection broke: a network may have lost it, and its worker comes back at once


class _Member:
    """A server."""

    def __init__(self, places: list[m.ShardAddress], tell: Callable[[SlotMap | None], None]):
        self.places, self.tell = places, tell  # None: the run is over
        self.ready, self.gone = 0, False  # the epoch it has taken


class Coordinator:
    def __init__(self, servers: int, workers: int | None = None, lease_s: float = 10.0):
        self.servers, self.lease_s = servers, lease_s
        self.clock = Clock(workers) if workers is not None else None
        self.slots: SlotMap | None = None
        self.evicted: list[int] = []
        self._members: list[_Member] = []
        self._incarnations: dict[int, int] = {}
        self._left: set[tuple[int, int]] = set()  # (worker, incarnation) that said goodbye
        self._leases: dict[tuple[int, int], int] = {}  # how many connections each has
        self._changed = threading.Condition()
        self._closing = False

    def attend(self, channel: Channel, proof: m.Proof) -> None:
        match proof.role:
            case "server":
                self._serve_server(channel)
            case "heartbeat":
                self._hold_lease(channel, proof)
            case _:
                self._serve_worker(channel, proof)

    def close(self) -> None:
        """Whoever waits here hears of it."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            members = [each for each in self._members if not each.gone]
        for each in members:
            each.tell(None)
        if self.clock is not None:
            self.clock.close()

    @property
    def over(self) -> bool:
        """All workers have come, and all have gone."""
        with self._changed:
            clock, came = self.clock, len(self._incarnations)
        return clock is not None and came == clock.size and not clock.alive()

    # -- servers --

    def register_here(
        self, places: list[m.ShardAddress], assign: Callable[[SlotMap], None]
    ) -> None:
        """The server that coordinates is one of the servers."""

        def tell(slots: SlotMap | None) -> None:
            if slots is not None:
                assign(slots)
                self._taken(member, slots.epoch)

        member = _Member(places, tell)
        self._join(member)

    def _serve_server(self, channel: Channel) -> None:
        _, message = channel.receive()
        if not isinstance(message, m.Register):
            raise Malformed("garbage", f"a {type(message).__name__} came, where a server registers")
        lock = threading.Lock()

        def tell(slots: SlotMap | None) -> None:
            with lock:
                try:
                    channel.send(m.Leave() if slots is None else slots.message())
                except OSError:
                    pass  # its own thread sees that it went

        member = _Member(message.shards, tell)
        try:
            self._join(member)
        except StoreError as e:
            channel.send(m.Failed("store", str(e)))
            return
        try:
            while True:
                _, message = channel.receive()
                if isinstance(message, m.Ready):
                    self._taken(member, message.epoch)
        finally:
            with self._changed:
                member.gone = True
                self._changed.notify_all()

    def _join(self, member: _Member) -> None:
        with self._changed:
            gone = next(
                (
                    i
                    for i, old in enumerate(self._members)
                    if old.gone and len(old.places) == len(member.places)
                ),
                None,
            )
            if len(self._members) < self.servers:
                self._members.append(member)
            elif gone is not None:  # it takes a dead one's place; what that held is lost
                self._members[gone] = member
            else:
                raise StoreError(
                    f"all {self.servers} servers are there; start the coordinator with more, or this one for another run"
                )
            if len(self._members) < self.servers:
                return
            places = [place for each in self._members for place in each.places]
            old = self.slots
            self.slots = (
                SlotMap.start(places)
                if old is None
                else SlotMap(old.epoch + 1, old.owner, tuple(places))
            )
        self._tell()

    def assign(self, slots: SlotMap) -> None:
        """Give out another map, of a later epoch."""
        with self._changed:
            if self.slots is None or slots.epoch <= self.slots.epoch:
                raise StoreError(
                    f"a slot map of epoch {slots.epoch}; it must come after {self.slots and self.slots.epoch}"
                )
            self.slots = slots
        self._tell()

    def _tell(self) -> None:
        with self._changed:
            slots, members = self.slots, [each for each in self._members if not each.gone]
        assert slots is not None
        for each in members:
            each.tell(slots)

    def _taken(self, member: _Member, epoch: int) -> None:
        with self._changed:
            member.ready = epoch
            self._changed.notify_all()

    def _map(self, timeout_s: float = 60.0) -> SlotMap:
        """When all servers have it."""

        def ready() -> bool:
            epoch = self.slots.epoch if self.slots is not None else 0
            return self._closing or (
                epoch > 0 and all(each.ready >= epoch or each.gone for each in self._members)
            )

        with self._changed:
            if not self._changed.wait_for(ready, timeout_s) or self.slots is None:
                raise StoreError(
                    f"{len(self._members)} of {self.servers} servers have come; start the others"
                )
            return self.slots

    # -- workers --

    def _hold_lease(self, channel: Channel, proof: m.Proof) -> None:
        who = proof.worker, proof.incarnation
        with self._changed:
            self._leases[who] = self._leases.get(who, 0) + 1
            self._changed.notify_all()
        try:
            channel.limit(self.lease_s)
            while True:
                channel.receive()
        except (Closed, OSError, TimeoutError):
            pass
        finally:
            with self._changed:
                self._leases[who] -= 1
                self._changed.wait_for(
                    lambda: self._leases.get(who) or who in self._left or self._closing, GRACE_S
                )
                dead = not self._leases.get(who) and who not in self._left and not self._closing
                dead = dead and self._incarnations.get(proof.worker) == proof.incarnation
                if not self._leases.get(who):
                    self._leases.pop(who, None)
                if dead:
                    self.evicted.append(proof.worker)
            if dead and self.clock is not None:
                self.clock.evict(proof.worker)

    def _serve_worker(self, channel: Channel, proof: m.Proof) -> None:
        incarnation = proof.incarnation
        while True:
            head, message = channel.receive()
            try:
                if isinstance(message, m.Join):
                    answer: m.Message = self._enter(proof.worker, message)
                    incarnation = self._incarnations[proof.worker]
                else:
                    answer = self._answer(proof.worker, incarnation, message, head.number)
            except StoreError as e:
                answer = m.Failed("store", str(e))
            except PeerLost as e:
                answer = m.Failed("peer", str(e), list(e.ranks))
            channel.send(answer, head.number)
            if isinstance(message, m.Leave):
                return

    def _enter(self, worker: int, message: m.Join) -> m.AssignSlots:
        slots = self._map()
        with self._changed:
            if self.clock is None:
                self.clock = Clock(message.size)
            clock = self.clock
        if message.size != clock.size:
            raise StoreError(
                f"worker {worker} says that there are {message.size} workers, the coordinator was started for {clock.size}"
            )
        entered = clock.enter(worker, message.incarnation)
        with self._changed:
            self._incarnations[worker] = entered.incarnation
            self._left -= {
                who for who in self._left if who[0] == worker and who[1] < entered.incarnation
            }
        answer = slots.message()
        answer.incarnation, answer.clock, answer.version = entered
        answer.lease_s = self.lease_s
        return answer

    def _answer(self, worker: int, incarnation: int, x: Any, number: int) -> m.Message:
        clock = self.clock
        if clock is None or self._incarnations.get(worker) is None:
            raise StoreError(f"worker {worker} asks before it entered")
        if incarnation != self._incarnations[worker]:
            raise StoreError(
                f"worker {worker} is now another process, of incarnation {self._incarnations[worker]}; this is {incarnation}"
            )
        match x:
            case m.TickClock():
                tick = clock.tick(
                    worker, x.clock, x.staleness, x.quorum, x.late, x.delay, x.pending, x.timeout_s
                )
                commits = clock.commits_since(x.version)
                return m.ClockTicked(
                    tick.clock, tick.counted, commits[-1][0] if commits else x.version, commits
                )
            case m.ClaimStep():
                return m.StepClaimed(clock.deal(worker, x.limit, x.shared, number))
            case m.SetFirstStep():
                clock.start(worker, x.base)
            case m.RequestSync():
                clock.call(worker)
            case m.TableCreated():
                clock.made(x.name)
            case m.AwaitTable():
                clock.wait_made(x.name, x.timeout_s)
            case m.GetSlotMap():
                return self._map().message()
            case m.GetStats():
                return m.Stats(clock.stats())
            case m.Ping():
                pass
            case m.Leave():
                with self._changed:
                    self._left.add((worker, incarnation))
                    self._changed.notify_all()
                clock.evict(worker)
            case _:
                raise Malformed("garbage", f"a {type(x).__name__} was sent to the coordinator")
        return m.Done()

    # -- what those who started it may want to know --

    def wait_for_servers(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        try:
            self._map(max(0.0, deadline - time.monotonic()))
            return True
        except StoreError:
            return False
