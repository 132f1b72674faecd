"""Coordinator: membership of servers and workers, the slot map, and the workers' clock.

    servers    register; when all have registered, each gets the slot map and confirms it; only then
               can workers join
    workers    join, tick, claim steps and request syncs over one connection each; a second
               connection carries heartbeats, and a worker whose heartbeats stop for `lease_s` or
               whose connection closes is evicted, so that the others' clocks move on

`Clock` decides; this class receives the requests. It stores no rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from manyhands.errors import Evicted, PeerLost, StoreError
from manyhands.server.clock import Clock
from manyhands.server.elastic.answers import answer_elastic
from manyhands.server.protocol import messages as m
from manyhands.server.protocol.frame import Channel, Closed, Malformed
from manyhands.server.slots import SlotMap

# After a heartbeat connection broke: the network may have lost it, and its worker reconnects.
GRACE_S = 0.5
# Commits that a process which replaces another brings to the shards: each worker brings those that
# it knows with every request, so that shards lack a few at most.
CATCH_UP = 256


class _ServerState:
    """One registered server. `send` gives it a slot map, or None when the run is over."""

    def __init__(self, shards: list[m.ShardAddress], send: Callable[[SlotMap | None], None]):
        self.shards, self.send = shards, send
        self.epoch, self.gone = 0, False  # the epoch of the map it uses


class Coordinator:
    """`workers`: how many will join; None: as many as the first one says."""

    def __init__(self, servers: int, workers: int | None = None, lease_s: float = 10.0):
        self.num_servers, self.lease_s = servers, lease_s
        self.clock = Clock(workers) if workers is not None else None
        self.slots: SlotMap | None = None
        self.evicted: list[int] = []
        self._servers: list[_ServerState] = []
        self._incarnations: dict[int, int] = {}
        self._left: set[tuple[int, int]] = set()  # (worker, incarnation) that left by itself
        self._leases: dict[int, float] = {}  # of workers that gave one
        self._heartbeats: dict[tuple[int, int], int] = {}  # how many connections each has
        self._changed = threading.Condition()
        self._closing = False

    def serve(self, channel: Channel, proof: m.Proof) -> None:
        match proof.role:
            case "server":
                self._serve_server(channel)
            case "heartbeat":
                self._serve_heartbeat(channel, proof)
            case _:
                self._serve_worker(channel, proof)

    def close(self) -> None:
        """End the run: servers and waiting workers are told."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            servers = [each for each in self._servers if not each.gone]
        for each in servers:
            each.send(None)
        if self.clock is not None:
            self.clock.close()

    @property
    def over(self) -> bool:
        """Whether all workers have joined, and all have left."""
        with self._changed:
            clock, joined = self.clock, len(self._incarnations)
        return clock is not None and joined == clock.size and not clock.alive()

    # -- servers --

    def register_here(
        self, shards: list[m.ShardAddress], assign: Callable[[SlotMap], None]
    ) -> None:
        """The server that coordinates is one of the servers."""

        def send(slots: SlotMap | None) -> None:
            if slots is not None:
                assign(slots)
                self._confirm(server, slots.epoch)

        server = _ServerState(shards, send)
        self._add_server(server)

    def _serve_server(self, channel: Channel) -> None:
        _, message = channel.receive()
        if not isinstance(message, m.Register):
            raise Malformed("garbage", f"a {type(message).__name__} came, where a server registers")
        lock = threading.Lock()

        def send(slots: SlotMap | None) -> None:
            with lock:
                try:
                    channel.send(m.Leave() if slots is None else slots.message())
                except OSError:
                    pass  # the thread that receives from it sees the end

        server = _ServerState(message.shards, send)
        try:
            self._add_server(server)
        except StoreError as e:
            channel.send(m.Failed("store", str(e)))
            return
        try:
            while True:
                _, message = channel.receive()
                if isinstance(message, m.Ready):
                    self._confirm(server, message.epoch)
        finally:
            with self._changed:
                server.gone = True
                self._changed.notify_all()

    def _add_server(self, server: _ServerState) -> None:
        with self._changed:
            count = len(server.shards)
            gone = [i for i, s in enumerate(self._servers) if s.gone and len(s.shards) == count]
            if len(self._servers) < self.num_servers:
                self._servers.append(server)
            elif gone:  # it replaces a dead server; what that one stored is lost
                self._servers[gone[0]] = server
            else:
                raise StoreError(
                    f"all {self.num_servers} servers have registered; start the coordinator with "
                    "more, or this server for another run"
                )
            if len(self._servers) < self.num_servers:
                return
            shards = [shard for each in self._servers for shard in each.shards]
            old = self.slots
            self.slots = (
                SlotMap.start(shards)
                if old is None
                else SlotMap(old.epoch + 1, old.owner, tuple(shards))
            )
        self._send_map()

    def assign(self, slots: SlotMap) -> None:
        """Send all servers another map, of a later epoch."""
        with self._changed:
            if self.slots is None or slots.epoch <= self.slots.epoch:
                now = self.slots.epoch if self.slots is not None else None
                raise StoreError(
                    f"a slot map of epoch {slots.epoch}; an epoch after {now} is needed"
                )
            self.slots = slots
        self._send_map()

    def _send_map(self) -> None:
        with self._changed:
            slots, servers = self.slots, [each for each in self._servers if not each.gone]
        assert slots is not None
        for each in servers:
            each.send(slots)

    def _confirm(self, server: _ServerState, epoch: int) -> None:
        with self._changed:
            server.epoch = epoch
            self._changed.notify_all()

    def _slot_map(self, timeout_s: float = 60.0) -> SlotMap:
        """The slot map, when all servers use it."""

        def ready() -> bool:
            epoch = self.slots.epoch if self.slots is not None else 0
            return self._closing or (
                epoch > 0 and all(each.epoch >= epoch or each.gone for each in self._servers)
            )

        with self._changed:
            if not self._changed.wait_for(ready, timeout_s) or self.slots is None:
                raise StoreError(
                    f"{len(self._servers)} of {self.num_servers} servers have registered; "
                    "start the others"
                )
            return self.slots

    # -- workers --

    def _serve_heartbeat(self, channel: Channel, proof: m.Proof) -> None:
        who, why = (proof.worker, proof.incarnation), "closed its heartbeat connection"
        with self._changed:
            lease_s = self._leases.get(proof.worker, self.lease_s)
            self._heartbeats[who] = self._heartbeats.get(who, 0) + 1
            self._changed.notify_all()
        try:
            channel.limit(lease_s)
            while True:
                channel.receive()
        except TimeoutError:
            why = f"sent no heartbeat for {lease_s:g} s"
        except (Closed, OSError):
            pass
        finally:
            with self._changed:
                self._heartbeats[who] -= 1
                self._changed.wait_for(
                    lambda: self._heartbeats.get(who) or who in self._left or self._closing, GRACE_S
                )
                dead = not self._heartbeats.get(who) and who not in self._left and not self._closing
                dead = dead and self._incarnations.get(proof.worker) == proof.incarnation
                if not self._heartbeats.get(who):
                    self._heartbeats.pop(who, None)
                if dead:
                    self.evicted.append(proof.worker)
            if dead and self.clock is not None:
                self.clock.evict(
                    proof.worker,
                    f"it {why}, so the coordinator removed it (lease_s={lease_s:g}). Look at its "
                    "log; if it was only paused, raise lease_s and resume the run",
                )

    def _serve_worker(self, channel: Channel, proof: m.Proof) -> None:
        incarnation = proof.incarnation
        while True:
            head, message = channel.receive()
            try:
                if isinstance(message, m.Join):
                    answer: m.Message = self._join(proof.worker, message)
                    incarnation = self._incarnations[proof.worker]
                else:
                    answer = self._answer(proof.worker, incarnation, message, head.number)
            except StoreError as e:
                answer = m.Failed("evicted" if isinstance(e, Evicted) else "store", str(e))
            except PeerLost as e:
                answer = m.Failed("peer", str(e), list(e.ranks))
            channel.send(answer, head.number)
            if isinstance(message, m.Leave):
                return

    def _join(self, worker: int, message: m.Join) -> m.AssignSlots:
        slots = self._slot_map()
        with self._changed:
            if self.clock is None:
                self.clock = Clock(message.size)
            clock = self.clock
        if message.size != clock.size:
            raise StoreError(
                f"worker {worker} expects {message.size} workers, but the coordinator was started "
                f"for {clock.size}; give both the same number"
            )
        clock.elastic.used |= message.elastic
        joined = clock.join(worker, message.incarnation)
        with self._changed:
            self._incarnations[worker] = joined.incarnation
            if message.lease_s is not None:
                self._leases[worker] = message.lease_s
            self._left -= {
                who for who in self._left if who[0] == worker and who[1] < joined.incarnation
            }
        answer = slots.message()
        answer.incarnation, answer.clock, answer.version = joined
        answer.lease_s = message.lease_s or self.lease_s
        answer.commits = (
            clock.commits_since(max(0, joined.version - CATCH_UP)) if joined.incarnation else []
        )
        return answer

    def _answer(self, worker: int, incarnation: int, x: Any, number: int) -> m.Message:
        clock = self.clock
        if clock is None or self._incarnations.get(worker) is None:
            raise StoreError(f"worker {worker} sent a request before it joined")
        if incarnation != self._incarnations[worker]:
            raise StoreError(
                f"worker {worker} was replaced by another process, of incarnation "
                f"{self._incarnations[worker]}; this is incarnation {incarnation}"
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
                return m.StepClaimed(clock.claim(worker, x.limit, x.shared, number))
            case m.RequestSync():
                clock.request_sync(worker)
            case m.TableCreated():
                clock.table_created(x.name)
            case m.AwaitTable():
                clock.wait_for_table(x.name, x.timeout_s)
            case m.GetSlotMap():
                return self._slot_map().message()
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
                if (answer := answer_elastic(clock.elastic, worker, x, number)) is None:
                    raise Malformed("garbage", f"a {type(x).__name__} was sent to the coordinator")
                return answer
        return m.Done()
