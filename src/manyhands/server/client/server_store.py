"""Store over servers: one connection to every shard and one to the coordinator.

One compiled pass removes repeated ids and partitions the rest by shard, straight into the buffers
that are sent; all tables of a call go to a shard in one frame. Pushes are on their way when `push`
returns; an error is raised by the push's `wait`, or by the next call. Filters change only what
travels:

    key lists   a list of ids that a shard knows already is named by its hash (sockets only: shared
                memory would save nothing)
    payload     bf16, fp16 or int8 in place of the table's own numbers, see `row_encoding`
    kkt=delta   of an L1 model (server optimizer ftrl), gradients |g| <= l1 - delta of weights that
                were 0 when last pulled are not sent; None: off
"""

from __future__ import annotations

import contextlib
import math
import ssl
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from torch import Tensor

from manyhands.core import Late, PushOptions, Rows, Table, Tensors, Tick
from manyhands.errors import ServerLost, StoreError
from manyhands.server.client.connection import Connection
from manyhands.server.client.dial import Transport
from manyhands.server.client.heartbeat import Heartbeat
from manyhands.server.client.request import Pulled, Pushed
from manyhands.server.client.request_sender import RequestSender
from manyhands.server.client.table_requests import start_table
from manyhands.server.client.whole_tables import (
    begin_snapshot,
    create_on_shards,
    dump_shard,
    restore_dense,
    restore_rows,
)
from manyhands.server.counters import since, together
from manyhands.server.elastic.computed_steps import ComputedSteps
from manyhands.server.hot_copies.hot_reads import HotReads
from manyhands.server.protocol import messages as m
from manyhands.server.slots import SlotMap
from manyhands.server.snapshots.store_snapshot import StoreSnapshot
from manyhands.server.table_content import arrays_of, first_values, join
from manyhands.server.validate import empty_updates, ids_of

# the coordinator times a tick, since it knows which rank is awaited; the client waits this longer
SLACK_S = 5.0


class ServerStore:
    """`coordinator` is HOST:PORT. All ranks open a store with the same `size`. A worker without a
    heartbeat for `lease_s` is taken for dead; None: as the coordinator was started. In `namespace`
    the workers of one run have their own clock; a `guest` has none, see `guest_store`.
    With `elastic`, workers may be replaced, and lease their steps (`elastic.client`)."""

    background = True

    def __init__(
        self,
        coordinator: str,
        rank: int,
        size: int,
        token: str = "",
        *,
        timeout_s: float = 60.0,
        lease_s: float | None = None,
        payload: str = "none",
        transport: Transport = "auto",
        tls: ssl.SSLContext | None = None,
        kkt: float | None = None,
        namespace: str = "",
        guest: bool = False,
        elastic: bool = False,
    ):
        root = _checked(coordinator, rank, size, payload, transport)
        code: m.RowCodec = payload  # type: ignore[assignment]
        self.rank, self.size, self.timeout_s, self._worker = rank, size, timeout_s, rank
        self._token, self._tls = token, tls
        # `_has_pending`: pushed with pending=True in this clock
        self._incarnation, self._clock, self._has_pending = -1, 0, False
        self._last_stats: dict[str, float] = {}
        self.steps: ComputedSteps | None = None  # of an elastic worker
        self._heartbeat: Heartbeat | None = None
        prove = lambda: self._proof("control")
        # two: a tick may wait for other ranks, and a lost server must be found meanwhile
        self._control, self._maps = (
            Connection(root, token, prove, timeout_s=timeout_s, transport="tcp", tls=tls)
            for _ in range(2)
        )

        connect = partial(self._connect, transport)
        try:
            entered = self._control.ask(
                m.Join(size, None, lease_s, namespace, guest, elastic),
                "registration with the coordinator",
            )
            self._incarnation, self._clock = entered.incarnation, entered.clock
            self._worker = entered.worker  # what servers know this rank by
            self._heartbeat = Heartbeat(root, token, self._proof("heartbeat"), entered.lease_s, tls)
            self._sender = RequestSender(
                SlotMap.of(entered),
                connect,
                self._maps,
                code=code,
                kkt=kkt,
                timeout_s=timeout_s,
                version=entered.version,
                recovers=any(len(chain.members) > 1 for chain in entered.chains),
                # a guest has no clock: it expects to read what it wrote
                hot=HotReads(rank, len(entered.shards), 0.0 if guest else entered.hot[1]),
            )
            self._control.patient = self._maps.patient = entered.recovers
            self._sender.catch_up(entered.commits)
        except BaseException:
            self._close_control()
            raise
        self._router = self._sender.router

    def _connect(
        self, transport: Transport, where: m.ShardAddress, sender: RequestSender
    ) -> Connection:
        return Connection(
            where,
            self._token,
            lambda: self._proof("data", where.shard),
            timeout_s=self.timeout_s,
            transport=transport,
            tls=self._tls,
            on_epoch=sender.on_epoch,
            on_absence=sender.on_absence,
        )

    def _proof(self, role: Any, shard: int = 0) -> m.Proof:
        return m.Proof(b"", role, shard, self._worker, self._incarnation, b"")

    # -- rows --

    def pull(self, rows: Rows, into: Tensors | None = None, *, remember: bool = False) -> Tensors:
        return self.pull_async(rows, into, remember=remember).result()

    def pull_async(
        self, rows: Rows, into: Tensors | None = None, *, remember: bool = False
    ) -> Pulled:
        """The rows as they are when the shards serve this, after all that was pushed before."""
        sender = self._sender
        with sender.lock:
            sender.check()
            copies = not remember and sender.reads_copies()
            parts, outs = self._router.wanted(rows, into, copies)
            return Pulled(sender, sender.post([], parts, None, remember), outs)

    def push(self, rows: Rows, updates: Tensors, **options: Unpack[PushOptions]) -> Pushed:
        sender = self._sender
        with sender.lock:
            sender.check()
            how = m.PushMessage(self._clock, **options)
            if self.steps is not None:
                self.steps.mark(how)
            requests = sender.post(self._router.parts(rows, updates), [], how, False)
            self._has_pending |= how.pending
            return Pushed(sender, requests)

    def exchange(
        self, rows: Rows, updates: Tensors, *, wants: Rows, **options: Unpack[PushOptions]
    ) -> Pulled:
        """A push and, in the same frame and after it, a pull of `wants`."""
        sender = self._sender
        with sender.lock:
            sender.check()
            parts, outs = self._router.wanted(wants, None, sender.reads_copies())
            how = m.PushMessage(self._clock, **options)
            requests = sender.post(self._router.parts(rows, updates), parts, how, False)
            self._has_pending |= how.pending
            return Pulled(sender, requests, outs)

    def push_buffers(self, rows: Rows) -> Tensors:
        """Memory for the updates of these rows, from which a push is not copied where that is
        possible (see `push_buffers.py`). It may be written to again after the push's `wait`; its
        content is undefined then."""
        found: Tensors = {}
        for name, ids in rows.items():
            table, sender = self._router.table(name), self._sender
            if len(sender.connections) > 1 or sender.code != "none":
                found[name] = empty_updates(table, ids)
                continue
            n = table.length
            shape = (ids_of(table, ids).size, table.dim) if n is None else (n,)
            found[name] = sender.buffers.allocate(sender.connections[0].arena, shape, table.dtype)
        return found

    # -- clocks and steps --

    def tick(
        self,
        staleness: float = math.inf,
        quorum: int | None = None,
        *,
        late: Late = "drop",
        delay: int | None = None,
    ) -> Tick:
        self._sender.flush()
        answer = self._control.ask(
            m.TickClock(
                self._clock,
                staleness,
                quorum,
                late,
                delay,
                self._has_pending,
                self._sender.version,
                self.timeout_s,
            ),
            f"tick of clock {self._clock}",
            timeout_s=self.timeout_s + SLACK_S,
        )
        with self._sender.lock:
            self._clock, self._has_pending = answer.clock, False
            self._sender.add_commits(answer.version, answer.commits)
            self._sender.hot.ticked(staleness)
        return Tick(answer.clock, answer.counted)

    def claim_step(self, limit: int, shared: bool) -> int | None:
        step: int | None = self._control.ask(m.ClaimStep(limit, shared), "step claim").step
        return step

    def request_sync(self) -> None:
        self._control.ask(m.RequestSync(), "sync request")

    def ask(self, message: m.Message, what: str, timeout_s: float | None) -> Any:
        """Ask the coordinator."""
        return self._control.ask(message, what, timeout_s=timeout_s)

    @property
    def incarnation(self) -> int:
        """How many processes have been this worker before."""
        return self._incarnation

    def flush(self) -> None:
        self._sender.flush()
        self._sender.hot.settle()

    # -- whole tables --

    def create(
        self, table: Table, values: Tensor | None = None, state: Tensors | None = None
    ) -> None:
        with self._sender.lock:
            self._sender.check()
            if self.rank > 0:
                self._control.ask(
                    m.AwaitTable(table.name, self.timeout_s),
                    f"wait for table {table.name}",
                    timeout_s=self.timeout_s + SLACK_S,
                )
                values = state = None
            else:
                start_table(self._control, self._sender, table.name)
            vector = first_values(table, values, state)
            spans = self._router.ranges(table) if table.length is not None else None
            create_on_shards(self._sender.connections, table, spans, vector, state)
            self._router.tables[table.name] = table
            self._sender.hot.settle()
            if self.rank == 0:
                self._control.ask(m.TableCreated(table.name), f"create of {table.name}")

    def dump(self, name: str) -> Tensors:
        with self._sender.lock:
            table = self._router.table(name)
            self.flush()
            shards = [dump_shard(connection, name) for connection in self._sender.connections]
        return join(table, shards)

    def restore(self, name: str, content: Tensors) -> None:
        with self._sender.lock:
            table = self._router.table(name)
            self.flush()
            arrays, connections = arrays_of(table, content), self._sender.connections
            if table.length is not None:
                restore_dense(connections, table, self._router.ranges(table), arrays)
            else:
                ids_of(table, content["ids"])
                restore_rows(connections, table, self._router.slots, [arrays])
            self._sender.hot.settle()

    def snapshot(
        self,
        names: Sequence[str],
        folder: Path,
        tag: str,
        base: str = "",
        incremental: bool = False,
    ) -> StoreSnapshot:
        """Over connections of its own: its requests do not wait behind those of training."""
        with self._sender.lock:
            self.flush()
            data = lambda shard: lambda: self._proof("data", shard)
            own = [
                Connection(
                    where,
                    self._token,
                    data(where.shard),
                    timeout_s=self.timeout_s,
                    transport="tcp",
                    tls=self._tls,
                )
                for where in self._router.slots.shards
            ]
            return begin_snapshot(own, names, folder, tag, base, incremental)

    def restore_pieces(self, name: str, contents: Iterable[Mapping[str, np.ndarray]]) -> None:
        with self._sender.lock:
            table, slots = self._router.table(name), self._router.slots
            self.flush()
            restore_rows(self._sender.connections, table, slots, contents)
            self._sender.hot.settle()

    # -- statistics and the end --

    def stats(self) -> dict[str, float]:
        with self._sender.lock:
            connections = self._sender.connections
            shards = [c.ask(m.GetStats(), "stats").numbers for c in connections]
            counted = self._sender.counted + self._router.counted
            mine = {f"client_{name}": float(n) for name, n in counted.items()}
            mine["client_sent_bytes"] = float(sum(c.sent_bytes for c in connections))
            mine["client_received_bytes"] = float(sum(c.received_bytes for c in connections))
            mine["client_reconnects"] = float(sum(max(0, c.reconnects) for c in connections))
            now = together(shards) | self._control.ask(m.GetStats(), "stats").numbers | mine
            found, self._last_stats = since(self._last_stats, now), now
            return found

    def push_counts(self, applied: bool = True) -> dict[str, Any]:
        """By shard: pushes of this rank that were acknowledged (but for pending ones), pushes and
        steps of all ranks that are `applied` (a commit counts as one); and the commits."""
        with self._sender.lock:
            shards = self._sender.connections
            asked = [c.ask(m.GetStats(), "stats").numbers for c in shards] if applied else []
            names = {"applied": "now/version", "steps_applied": "now/steps"}
            found = {key: [int(x[name]) for x in asked] for key, name in names.items()}
            heard = [c.acknowledged for c in shards]
            return {**found, "acknowledged": heard, "commits": self._sender.version}

    def close(self) -> None:
        """Return when everything pushed has arrived; raise an error for what has not."""
        sender = self._sender
        if sender.closed:
            return
        sender.closed = True
        try:
            for connection in sender.connections:
                connection.flush()
            with contextlib.suppress(ServerLost, StoreError):  # a lost coordinator needs no leave
                self._control.ask(m.Leave(), "leave", timeout_s=min(1.0, self.timeout_s))
        except (ServerLost, StoreError) as e:
            sender.failures.append(e)
        finally:
            self.disconnect()
        if sender.failures:
            raise sender.failures.pop(0)

    def disconnect(self) -> None:
        """Close all connections at once, whatever is under way."""
        self._sender.close()
        self._close_control()

    def _close_control(self) -> None:
        self._control.close()
        self._maps.close()
        if self._heartbeat is not None:
            self._heartbeat.close()


def _checked(
    coordinator: str, rank: int, size: int, payload: str, transport: str
) -> m.ShardAddress:
    if payload not in ("none", "bf16", "fp16", "int8"):
        raise StoreError(f"payload={payload!r}; one of none, bf16, fp16, int8 is needed")
    if transport not in ("auto", "tcp", "unix", "shared"):
        raise StoreError(f"transport={transport!r}; one of auto, tcp, unix, shared is needed")
    if not 0 <= rank < size:
        raise StoreError(f"rank {rank} of {size}; 0 to {size - 1} is needed")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit():
        raise StoreError(f"coordinator {coordinator!r}; HOST:PORT is needed, such as 10.0.0.1:9000")
    return m.ShardAddress(host.strip("[]"), int(port))
