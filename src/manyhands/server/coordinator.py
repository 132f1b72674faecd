"""Coordinator: membership of servers and workers, the slot map, and the workers' clock.

    servers    register (`ServerRegistry`); only when all use the slot map can workers join
    workers    join, tick, claim steps and request syncs over one connection each; a second
               connection carries heartbeats, and a worker whose heartbeats stop for `lease_s` or
               whose connection closes is evicted, so that the others' clocks move on
    operators  ask for the state of servers, drain them, even out their load

`Clock` decides; this class receives the requests. It stores no rows. With `save`, everything that
an answer tells is saved before it is sent: a coordinator that was killed and started again goes on
where it was, and repeated requests get the same answers.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from manyhands.errors import PeerLost, StoreError
from manyhands.server.clock import Clock
from manyhands.server.protocol import messages as m
from manyhands.server.protocol import replication_messages as r
from manyhands.server.protocol.frame import Channel, Closed, Malformed
from manyhands.server.server_registry import ServerRegistry
from manyhands.server.slots import SlotMap

# After a heartbeat connection broke: the network may have lost it, and its worker reconnects.
GRACE_S = 0.5


class Coordinator:
    """`workers`: how many will join; None: as many as the first one says. `save` keeps a state,
    `saved` is the one that was kept last."""

    def __init__(
        self,
        registry: ServerRegistry,
        workers: int | None = None,
        lease_s: float = 10.0,
        *,
        save: Callable[[bytes], None] | None = None,
        saved: bytes | None = None,
    ):
        self.registry, self.lease_s = registry, lease_s
        self.clock = Clock(workers) if workers is not None else None
        self.evicted: list[int] = []
        self._incarnations: dict[int, int] = {}
        self._left: set[tuple[int, int]] = set()  # (worker, incarnation) that left by itself
        self._leases: dict[int, float] = {}  # of workers that gave one
        self._heartbeats: dict[tuple[int, int], int] = {}  # how many connections each has
        self._changed = threading.Condition()
        self._closing = False
        self._save, self._saving, self._kept = save, threading.Lock(), b""
        registry.recovers = registry.recovers or save is not None
        if saved:
            self._load(saved)

    @property
    def slots(self) -> SlotMap | None:
        return self.registry.slots

    def serve(self, channel: Channel, proof: m.Proof) -> None:
        match proof.role:
            case "server":
                self._serve_server(channel)
            case "heartbeat":
                self._serve_heartbeat(channel, proof)
            case "operator":
                self._serve_operator(channel)
            case _:
                self._serve_worker(channel, proof)

    def close(self) -> None:
        """End the run: servers and waiting workers are told."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self.registry.close()
        if self.clock is not None:
            self.clock.close()

    @property
    def over(self) -> bool:
        """Whether all workers have joined, and all have left."""
        with self._changed:
            clock, joined = self.clock, len(self._incarnations)
        return clock is not None and joined == clock.size and not clock.alive()

    # -- state that outlives this process --

    def save(self) -> None:
        """Keep the present state, before anybody is told of it."""
        if self._save is None:
            return
        with self.registry.lock, self._saving:  # in this order, everywhere
            clock = self.clock
            state = msgspec.msgpack.encode(
                {
                    "registry": self.registry.state(),
                    "clock": None if clock is None else clock.state(),
                    "incarnations": list(self._incarnations.items()),
                    "leases": list(self._leases.items()),
                    "left": sorted(self._left),
                }
            )
            if state != self._kept:
                self._save(state)
                self._kept = state

    def _load(self, saved: bytes) -> None:
        state = msgspec.msgpack.decode(saved)
        self.registry.load(state["registry"])
        if state["clock"] is not None:
            self.clock = Clock.of(state["clock"])
        self._incarnations = dict(state["incarnations"])
        self._leases = dict(state["leases"])
        self._left = {(worker, incarnation) for worker, incarnation in state["left"]}
        threading.Thread(target=self._await_workers, name="manyhands-return", daemon=True).start()

    def _await_workers(self) -> None:
        """Workers that do not come back after this coordinator was started again are evicted."""
        begun = time.monotonic()
        for worker, incarnation in list(self._incarnations.items()):
            lease_s = self._leases.get(worker, self.lease_s)
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closing or self._heartbeats.get((worker, incarnation)),  # noqa: B023
                    max(0.0, begun + lease_s - time.monotonic()),
                )
                gone = not self._heartbeats.get((worker, incarnation)) and not self._closing
                gone = gone and (worker, incarnation) not in self._left
                gone = gone and self._incarnations.get(worker) == incarnation
            if gone and self.clock is not None:
                self.evicted.append(worker)
                self.clock.evict(worker)

    # -- servers --

    def register_here(self, entry: m.Register, assign: Callable[[m.AssignSlots], None]) -> None:
        """The server that coordinates is one of the servers."""

        def send(message: m.Message) -> None:
            if isinstance(message, m.AssignSlots):
                assign(message)
                self.registry.confirm(self._here, message.epoch)

        # confirmations come before `register` returns
        self._here = self.registry.register(entry, lambda message: None)
        self._here.send, self._here.heard = send, math.inf  # it sends no pings
        self.registry.publish()

    def tell_here(self, message: m.Message) -> None:
        """What the server that coordinates tells the coordinator."""
        self._told(self._here, message)

    def _told(self, server: Any, message: Any) -> None:
        registry = self.registry
        if server.heard < math.inf:
            server.heard = time.monotonic()
        if isinstance(message, m.Ready):
            registry.confirm(server, message.epoch)
        elif isinstance(message, r.Copied):
            registry.copied(server, message.shard, message.learner, message.seconds, message.nbytes)
        elif isinstance(message, r.Loads):
            registry.loads |= message.rates
        elif isinstance(message, r.Part):
            registry.part(server, message.shard, message.server)

    def _serve_server(self, channel: Channel) -> None:
        _, message = channel.receive()
        if not isinstance(message, m.Register):
            raise Malformed("garbage", f"a {type(message).__name__} came, where a server registers")
        lock = threading.Lock()

        def send(message: m.Message) -> None:
            with lock:
                try:
                    channel.send(message)
                except OSError:
                    pass  # the thread that receives from it sees the end

        try:
            server = self.registry.register(message, send)
        except StoreError as e:
            channel.send(m.Failed("store", str(e)))
            return
        try:
            while True:
                _, message = channel.receive()
                self._told(server, message)
        finally:
            self.registry.disconnected(server, send)

    # -- operators --

    def _serve_operator(self, channel: Channel) -> None:
        while True:
            head, message = channel.receive()
            answer: m.Message = m.Done()
            try:
                match message:
                    case r.GetStatus():
                        text = json.dumps(self.registry.status())
                        answer = r.ServerStatusReply(text)
                    case r.Drain():
                        self.registry.drain(message.server)
                    case r.Rebalance():
                        answer = m.Done(int(self.registry.rebalance()))
                    case _:
                        raise Malformed("garbage", f"an operator sent a {type(message).__name__}")
            except StoreError as e:
                answer = m.Failed("store", str(e))
            channel.send(answer, head.number)

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
                answer = m.Failed("store", str(e))
            except PeerLost as e:
                answer = m.Failed("peer", str(e), list(e.ranks))
            self.save()
            channel.send(answer, head.number)
            if isinstance(message, m.Leave):
                return

    def _join(self, worker: int, message: m.Join) -> m.AssignSlots:
        slots = self.registry.slot_map()
        with self._changed:
            if self.clock is None:
                self.clock = Clock(message.size)
            clock = self.clock
        if message.size != clock.size:
            raise StoreError(
                f"worker {worker} expects {message.size} workers, but the coordinator was started "
                f"for {clock.size}; give both the same number"
            )
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
        answer.lease_s, answer.recovers = message.lease_s or self.lease_s, self._save is not None
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
                return self.registry.slot_map().message()
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
