"""Coordinator: membership of servers and workers, the slot map, and the workers' clock.

    servers    register (`ServerRegistry`); only when all use the slot map can workers join
    workers    join, tick, claim steps and request syncs over one connection each; a second
               connection carries heartbeats, and a worker whose heartbeats stop for `lease_s` or
               whose connection closes is evicted, so that the others' clocks move on
    operators  ask for the state of servers, drain them, even out their load

`Clock` decides; this class receives the requests. It stores no rows. Runs of several namespaces
have a clock each, and clients without a rank have none (`namespaces.run_registry`). With `save`,
everything that an answer tells is saved before it is sent: a coordinator that was killed and
started again goes on where it was, and repeated requests get the same answers.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from manyhands.errors import Evicted, MembershipError, PeerLost, StoreError
from manyhands.server.clock import Clock
from manyhands.server.elastic.answers import answer_elastic
from manyhands.server.namespaces.run_registry import RunRegistry
from manyhands.server.protocol import messages as m
from manyhands.server.protocol import replication_messages as r
from manyhands.server.protocol import table_messages as t
from manyhands.server.protocol.frame import Channel, Closed, Malformed
from manyhands.server.server_registry import ServerRegistry
from manyhands.server.slots import SlotMap

# After a heartbeat connection broke: the network may have lost it, and its worker reconnects.
GRACE_S = 0.5
# Commits that a process which replaces another brings to the shards: each worker brings those that
# it knows with every request, so that shards lack a few at most.
CATCH_UP = 256


class Coordinator:
    """`workers`: how many will join; None: as many as the first one says. `keep`: go on when they
    have left, for the next run. `save` keeps a state, `saved` is the one that was kept last."""

    def __init__(
        self,
        registry: ServerRegistry,
        workers: int | None = None,
        lease_s: float = 10.0,
        *,
        keep: bool = False,
        save: Callable[[bytes], None] | None = None,
        saved: bytes | None = None,
    ):
        self.registry, self.lease_s = registry, lease_s
        self.runs = RunRegistry(workers, keep)
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
        self.runs.close()

    @property
    def clock(self) -> Clock | None:
        """Of the run without a namespace."""
        return self.runs.clock_of("")

    @property
    def over(self) -> bool:
        """Whether all workers have joined, and all have left."""
        return self.runs.over

    # -- state that outlives this process --

    def save(self) -> None:
        """Keep the present state, before anybody is told of it."""
        if self._save is None:
            return
        with self.registry.lock, self._saving:  # in this order, everywhere
            state = msgspec.msgpack.encode(
                {
                    "registry": self.registry.state(),
                    "runs": self.runs.state(),
                    "incarnations": list(self._incarnations.items()),
                    "leases": list(self._leases.items()),
                    "left": sorted(self._left),
                }
            )
            if state != self._kept:
                try:
                    self._save(state)
                except MembershipError as e:  # a full disk, say: who asked will ask again
                    raise ConnectionError(f"the state was not kept: {e}") from e
                self._kept = state

    def _load(self, saved: bytes) -> None:
        state = msgspec.msgpack.decode(saved)
        self.registry.load(state["registry"])
        self.runs.load(state["runs"])
        self._incarnations = dict(state["incarnations"])
        self._leases = dict(state["leases"])
        self._left = {(worker, incarnation) for worker, incarnation in state["left"]}
        threading.Thread(target=self._await_workers, name="manyhands-return", daemon=True).start()

    def _await_workers(self) -> None:
        """Workers that do not come back after this coordinator was started again are evicted."""
        begun = time.monotonic()
        for who in list(self._incarnations.items()):
            lease_s = self._leases.get(who[0], self.lease_s)
            back = lambda who=who: self._closing or self._heartbeats.get(who) or who in self._left
            with self._changed:
                self._changed.wait_for(back, max(0.0, begun + lease_s - time.monotonic()))
                gone = not back() and self._incarnations.get(who[0]) == who[1]
            if gone:
                self.evicted.append(who[0])
                self.runs.evict(who[0], "it did not come back to a restarted coordinator")

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
        self.runs.came_back(proof.worker)
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
            if dead:
                self.runs.evict(
                    proof.worker,
                    f"it {why}, so the coordinator removed it (lease_s={lease_s:g}). Look at its "
                    "log; if it was only paused, raise lease_s and resume the run",
                )

    def _serve_worker(self, channel: Channel, proof: m.Proof) -> None:
        worker, incarnation = proof.worker, proof.incarnation
        while True:
            head, message = channel.receive()
            try:
                if isinstance(message, m.Join):
                    entered = self._join(proof.worker, message)
                    answer: m.Message = entered
                    worker, incarnation = entered.worker, entered.incarnation
                else:
                    answer = self._answer(worker, incarnation, message, head.number)
            except StoreError as e:
                answer = m.Failed("evicted" if isinstance(e, Evicted) else "store", str(e))
            except PeerLost as e:
                answer = m.Failed("peer", str(e), list(e.ranks))
            self.save()
            channel.send(answer, head.number)
            if isinstance(message, m.Leave):
                return

    def _join(self, rank: int, message: m.Join) -> m.AssignSlots:
        slots = self.registry.slot_map()
        if self.runs.keep and not message.guest:
            self._refuse_busy(rank, message.namespace)
        worker, joined = self.runs.join(rank, message)
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
        answer.worker, answer.hot = worker, self.registry.hot
        run, _ = self.runs.run_of(worker)
        if run is not None and joined.incarnation:
            answer.commits = run.commits_since(max(0, joined.version - CATCH_UP))
        return answer

    def _refuse_busy(self, rank: int, namespace: str) -> None:
        """Where runs come and go, a second run must not take the place of one that is running. Of a
        worker that died, the heartbeat connection ends at once."""
        number = self.runs.number_of(namespace, rank)
        with self._changed:
            if not self._changed.wait_for(
                lambda: not any(worker == number for worker, _ in self._heartbeats), 2 * GRACE_S
            ):
                raise StoreError(
                    f"rank {rank} of a run is here already, in namespace {namespace!r}; give this "
                    "run a namespace of its own: MANYHANDS_NAMESPACE=NAME"
                )

    def _answer(self, worker: int, incarnation: int, x: Any, number: int) -> m.Message:
        if self._incarnations.get(worker) is None:
            raise StoreError(f"worker {worker} sent a request before it joined")
        if incarnation != self._incarnations[worker]:
            raise StoreError(
                f"worker {worker} was replaced by another process, of incarnation "
                f"{self._incarnations[worker]}; this is incarnation {incarnation}"
            )
        match x:
            case m.GetSlotMap():
                return self.registry.slot_map().message()
            case m.GetStats():
                return m.Stats(self._stats(worker))
            case m.Ping():
                pass
            case m.Leave():
                with self._changed:
                    self._left.add((worker, incarnation))
                    self._changed.notify_all()
                self.runs.evict(worker)
            case _:
                return self._answer_of_run(worker, x, number)
        return m.Done()

    def _stats(self, worker: int) -> dict[str, float]:
        run, _ = self.runs.run_of(worker)
        if run is not None:
            return run.clock.stats()
        clock = self.runs.clock_of(self.runs.namespace_of(worker))
        return ({} if clock is None else clock.stats()) | {"now/guests": float(self.runs.guests())}

    def _answer_of_run(self, worker: int, x: Any, number: int) -> m.Message:
        """To what only ranks of a run ask: clocks, steps, and tables that rank 0 creates."""
        run, rank = self.runs.run_of(worker)
        if run is None:
            raise StoreError(
                f"a {type(x).__name__} of a client that is no rank of a run; clocks and steps are "
                "for ranks: join with a rank and a size"
            )
        clock = run.clock
        match x:
            case m.TickClock():
                tick, commits = run.tick(rank, x)
                return m.ClockTicked(
                    tick.clock, tick.counted, commits[-1][0] if commits else x.version, commits
                )
            case m.ClaimStep():
                return m.StepClaimed(clock.claim(rank, x.limit, x.shared, number))
            case m.RequestSync():
                clock.request_sync(rank)
            case t.StartTable():
                return m.Done(run.start_table(x.name, x.there))
            case m.TableCreated():
                clock.table_created(x.name)
            case m.AwaitTable():
                clock.wait_for_table(x.name, x.timeout_s)
            case _:
                if (answer := answer_elastic(clock.elastic, rank, x, number)) is None:
                    raise Malformed("garbage", f"a {type(x).__name__} was sent to the coordinator")
                return answer
        return m.Done()
