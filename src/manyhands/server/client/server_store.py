"""A worker's view of the servers: `core.Store` over one connection a shard and one to the coordinator.

Ids lose their repeats and are parted by shard here, in one compiled pass, straight into the buffers that are sent; all tables of a call go
to a shard in one frame. Pushes are on their way when `push` returns; an error that one of them meets is raised by its `wait`, or by
the next call. Filters, which change nothing but what travels:

    key lists   a list of ids that a connection knows already is named by its hash (sockets only: in shared memory nothing is saved)
    payload     bf16, fp16 or int8 in place of the table's own numbers, see `payload`
    kkt=delta   of an L1 model (rule ftrl), gradients |g| <= l1 - delta of weights that were 0 when last pulled stay at home; None: off
"""

from __future__ import annotations

import contextlib
import math
import ssl
import threading
import time
import weakref
from collections import Counter
from functools import partial
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from manyhands.core import (
    Late,
    PushOptions,
    Rows,
    Table,
    Tensors,
    Tick,
)
from manyhands.errors import ManyhandsError, ServerLost, StoreError
from manyhands.server.client.connection import Connection, PendingRequest, Transport
from manyhands.server.client.heartbeat import Heartbeat
from manyhands.server.client.request import (
    Moved,
    Outs,
    Pulled,
    Pushed,
    Request,
    ShardPart,
    describe,
)
from manyhands.server.client.route import Router
from manyhands.server.counters import since, together
from manyhands.server.protocol import messages as m
from manyhands.server.protocol.arena import ArenaBlock
from manyhands.server.request_loop import pack, unpack
from manyhands.server.slots import SlotMap
from manyhands.server.validate import (
    dtype_of,
    ids_of,
    part_of,
    vector_of,
)

PIECE_ROWS = 1 << 18  # of a table that is restored, at a time
SLACK_S = 5.0  # a tick is timed by the coordinator, which knows for whom one waits; the client waits a little longer


class ServerStore:
    background = True

    def __init__(
        self,
        coordinator: str,
        rank: int,
        size: int,
        token: str = "",
        *,
        timeout_s: float = 60.0,
        payload: str = "none",
        transport: Transport = "auto",
        tls: ssl.SSLContext | None = None,
        kkt: float | None = None,
    ):
        if payload not in ("none", "bf16", "fp16", "int8"):
            raise StoreError(f"payload={payload!r}; one of none, bf16, fp16, int8 is needed")
        if transport not in ("auto", "tcp", "unix", "shared"):
            raise StoreError(f"transport={transport!r}; one of auto, tcp, unix, shared is needed")
        if not 0 <= rank < size:
            raise StoreError(f"rank {rank} of {size}; 0 to {size - 1} is needed")
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdigit():
            raise StoreError(
                f"coordinator {coordinator!r}; HOST:PORT is needed, such as 10.0.0.1:9000"
            )
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.code: m.RowCodec = payload  # type: ignore[assignment]
        self.counted: Counter[str] = Counter()
        self.failures: list[Exception] = []  # of pushes that nobody has waited for
        self._token, self._transport, self._tls = token, transport, tls
        self._incarnation, self._now, self._version = -1, 0, 0
        self._holds = False
        self._commits: m.Commits = []
        self._moved: list[Request] = []
        self._rooms: dict[int, ArenaBlock] = {}  # by address
        self._told: dict[str, float] = {}
        self._lock = threading.RLock()
        self._closed = False
        root = m.ShardAddress(host.strip("[]"), int(port))
        self._links: list[Connection] = []
        self._control = Connection(
            root,
            token,
            lambda: self._proof("control"),
            timeout_s=timeout_s,
            transport="tcp",
            tls=tls,
        )
        self._lease: Heartbeat | None = None
        try:
            entered = self._control.ask(m.Join(size, None), "first word to the coordinator")
            slots = SlotMap.of(entered)
            self._incarnation, self._now, self._version = (
                entered.incarnation,
                entered.clock,
                entered.version,
            )
            self._lease = Heartbeat(root, token, self._proof("heartbeat"), entered.lease_s, tls)
            for where in slots.shards:
                self._links.append(self._open(where))
            self._route = Router(slots, self.code, kkt, all(link.shared for link in self._links))
        except BaseException:
            self._end()
            raise
        self._sequences = [0] * len(self._links)
        self._heard = [self._version] * len(
            self._links
        )  # the last commit that each shard is known to have

    def _proof(self, role: Any, shard: int = 0) -> m.Proof:
        return m.Proof(b"", role, shard, self.rank, self._incarnation, b"")

    def _open(self, where: m.ShardAddress) -> Connection:
        return Connection(
            where, self._token, lambda: self._proof("data", where.shard), timeout_s=self.timeout_s, transport=self._transport,
            tls=self._tls, on_epoch=self._on_epoch, on_absence=self._on_absence,
        )  # fmt: skip

    @property
    def epoch(self) -> int:
        return self._route.slots.epoch

    @property
    def generation(self) -> int:
        return self._route.generation

    # -- tables --

    def create(
        self, table: Table, values: Tensor | None = None, state: Tensors | None = None
    ) -> None:
        with self._lock:
            self._look()
            if self.rank > 0:
                await_s = self.timeout_s
                self._control.ask(
                    m.AwaitTable(table.name, await_s),
                    f"wait for table {table.name}",
                    timeout_s=await_s + SLACK_S,
                )
                values = state = None
            if table.length is None and (values is not None or state):
                raise StoreError(
                    f"table {table.name!r} is sparse: its rows start by themselves; restore takes given ones"
                )
            vector = None if values is None else vector_of(table, values, "values").numpy()
            for s, link in enumerate(self._links):
                part, content = None, {}
                if table.length is not None:
                    part = self._route.ranges(table)[s]
                    content = {} if vector is None else {"values": vector[part[0] : part[1]]}
                    content |= {
                        f"state/{name}": part_of(table, x, part)
                        for name, x in (state or {}).items()
                    }
                described, parts = pack(content)
                link.ask(m.CreateTable(table, part, described), f"create of {table.name}", parts)
            self._route.specs[table.name] = table
            if self.rank == 0:
                self._control.ask(m.TableCreated(table.name), f"create of {table.name}")

    # -- rows --

    def pull(self, rows: Rows, into: Tensors | None = None, *, remember: bool = False) -> Tensors:
        return self.pull_async(rows, into, remember=remember).result()

    def pull_async(
        self, rows: Rows, into: Tensors | None = None, *, remember: bool = False
    ) -> Pulled:
        """The rows as they are when the shards come to it, after all that was pushed before; `result()` gives them."""
        with self._lock:
            self._look()
            shares, outs = self._route.wanted(rows, into)
            return Pulled(self, self._post([], shares, None, remember), outs)

    def push(self, rows: Rows, updates: Tensors, **options: Unpack[PushOptions]) -> Pushed:
        with self._lock:
            self._look()
            how = m.PushMessage(self._now, **options)
            requests = self._post(self._route.shares(rows, updates), [], how, False)
            self._holds |= how.pending
            return Pushed(self, requests)

    def exchange(
        self, rows: Rows, updates: Tensors, *, wants: Rows, **options: Unpack[PushOptions]
    ) -> Pulled:
        """A push and, in the same frame and after it, a pull of `wants`."""
        with self._lock:
            self._look()
            shares, outs = self._route.wanted(wants, None)
            how = m.PushMessage(self._now, **options)
            requests = self._post(self._route.shares(rows, updates), shares, how, False)
            self._holds |= how.pending
            return Pulled(self, requests, outs)

    def room(self, rows: Rows) -> Tensors:
        """Memory for the updates of these rows: what is pushed from there is not copied where that can be (one shard, payload="none",
        few ids that repeat). It may be written to again after the push's `wait`, and its content is undefined then."""
        found: Tensors = {}
        for name, ids in rows.items():
            table = self._route.spec(name)
            shape = (
                (table.length,)
                if table.length is not None
                else (ids_of(table, ids).size, table.dim)
            )
            if len(self._links) > 1 or self.code != "none":
                found[name] = torch.empty(shape, dtype=dtype_of(table))
                continue
            arena = self._links[0].arena
            region = arena.take(math.prod(shape) * np.dtype(table.dtype).itemsize)
            array = (
                region.memory[: math.prod(shape) * np.dtype(table.dtype).itemsize]
                .view(table.dtype)
                .reshape(shape)
            )
            arena.lend(region, array)
            arena.give(region)
            self._rooms[array.ctypes.data] = region
            weakref.finalize(array, self._rooms.pop, array.ctypes.data, None).atexit = False
            found[name] = torch.from_numpy(array)
        return found

    def room_of(self, link: Connection, share: ShardPart) -> ArenaBlock | None:
        """Where updates stand, if that is memory of this connection."""
        if not self._rooms or share.updates is None:
            return None
        region = self._rooms.get(share.updates.ctypes.data)
        return (
            link.arena.hold(region)
            if region is not None and region.segment in link.arena.segments
            else None
        )

    # -- requests --

    def _post(
        self,
        push: list[list[ShardPart]],
        pull: list[list[ShardPart]],
        how: m.PushMessage | None,
        remember: bool,
    ) -> list[Request]:
        """A push goes to every shard, also where it has nothing for it: tables count their pushes. So do commits."""
        requests = []
        for s, link in enumerate(self._links):
            wanted = [shares[s] for shares in pull if shares[s].count]
            if how is None and not wanted and self._heard[s] == self._version:
                continue
            given = [shares[s] for shares in push]
            link.settle(partial(describe, given, wanted, how))
            request = Request(self, link, given, wanted, how, self._sequences[s], remember)
            self._sequences[s] += how is not None
            requests.append(request)
            link.post(request)
        return requests

    def commits_for(self, link: Connection) -> tuple[m.Commits, int]:
        """What a shard must apply before it serves: it ignores what it has."""
        heard = self._heard[self._links.index(link)]
        commits = [commit for commit in self._commits if commit[0] > heard]
        return commits, commits[-1][0] if commits else 0

    def committed(self, link: Connection, version: int) -> None:
        s = self._links.index(link)
        self._heard[s] = max(self._heard[s], version)
        self._commits = [commit for commit in self._commits if commit[0] > min(self._heard)]

    def receive(self, request: Request, outs: Outs) -> None:
        try:
            request.link.wait(request)
            request.read(outs)
        except Moved:
            self._settle_moved()
            for share in request.pull:
                assert share.ids is not None
                rows, out = (
                    self.pull({share.table.name: torch.from_numpy(share.ids)})[share.table.name],
                    outs[share.table.name],
                )
                if out is None:
                    outs[share.table.name] = rows
                elif share.direct:
                    out.copy_(rows)
                else:
                    share.spread(rows.numpy().reshape(-1), out.detach().numpy().reshape(-1))
        except Exception as e:
            if e in self.failures:
                self.failures.remove(e)
            raise
        finally:
            request.release()

    def finish(self, requests: list[Request]) -> None:
        """Until they are done; raises the first error that one of them met."""
        errors = []
        for request in requests:
            request.link.wait(request, quiet=True)
            if request.error is not None and not isinstance(request.error, Moved):
                errors.append(request.error)
                if request.error in self.failures:
                    self.failures.remove(request.error)
        self._settle_moved()
        if errors:
            raise errors[0]

    def _look(self) -> None:
        """Raise what pushes met that nobody waited for; send again what was refused because it lies elsewhere now."""
        if self._closed:
            raise StoreError("the store was closed")
        self._settle_moved()
        if self.failures:
            raise self.failures.pop(0)

    # -- the slot map --

    def _on_absence(self, link: Connection) -> None:
        """A server cannot be reached: perhaps another has taken its place."""
        try:
            found = SlotMap.of(self._control.ask(m.GetSlotMap(), "slot map", timeout_s=1.0))
        except ManyhandsError:
            return
        if len(found.shards) == len(self._links):
            self._route.change(found)
            link.where = found.shards[self._links.index(link)]

    def _on_epoch(self, link: Connection, epoch: int) -> None:
        """A shard has another map. Where only its number differs, requests can be sent as they are."""
        found = SlotMap.of(self._control.ask(m.GetSlotMap(), "slot map"))
        if len(found.shards) != len(self._links):
            raise StoreError(
                f"there are {len(found.shards)} shards now, and there were {len(self._links)}; start the store anew"
            )
        if found.epoch < epoch:
            time.sleep(0.01)  # the coordinator gives it out at this moment
        self._route.change(found)
        gone = link.withdraw(
            lambda p: isinstance(p, Request) and p.generation != self.generation, Moved()
        )
        self._moved += [
            request for request in gone if isinstance(request, Request) and request.push
        ]

    def _settle_moved(self) -> None:
        while self._moved:
            request = self._moved.pop(0)
            rows: Rows = {}
            updates: Tensors = {}
            for share in request.push:
                if share.ids is None:
                    raise StoreError(
                        f"table {share.table.name!r} is dense, and its shards changed; start the store anew"
                    )
                rows[share.table.name] = torch.from_numpy(share.ids)
                updates[share.table.name] = torch.from_numpy(request.updates_of(share)).view(
                    -1, share.table.dim
                )
            assert request.how is not None
            request.release()
            self._post(self._route.shares(rows, updates), [], request.how, False)

    # -- clocks --

    def tick(
        self,
        staleness: float = math.inf,
        quorum: int | None = None,
        *,
        late: Late = "drop",
        delay: int | None = None,
    ) -> Tick:
        self.flush()
        ask = m.TickClock(
            self._now, staleness, quorum, late, delay, self._holds, self._version, self.timeout_s
        )
        answer = self._control.ask(
            ask, f"tick of clock {self._now}", timeout_s=self.timeout_s + SLACK_S
        )
        with self._lock:
            self._now, self._holds, self._version = answer.clock, False, answer.version
            self._commits += answer.commits
        return Tick(answer.clock, answer.counted)

    def claim_step(self, limit: int, shared: bool) -> int | None:
        step: int | None = self._control.ask(m.ClaimStep(limit, shared), "step claim").step
        return step

    def request_sync(self) -> None:
        self._control.ask(m.RequestSync(), "sync request")

    def flush(self) -> None:
        """Every shard has all that was pushed, and all commits that this worker knows of: one that rests does not."""
        for link in self._links:
            link.flush()
        with self._lock:
            while self._moved:
                self._settle_moved()
                for link in self._links:
                    link.flush()
            self._look()
            while min(self._heard) < self._version:
                self.finish(self._post([], [], None, False))

    # -- whole tables --

    def dump(self, name: str) -> Tensors:
        """Sparse rows in the order of their ids, so that it does not show how many shards there are."""
        with self._lock:
            table = self._route.spec(name)
            self.flush()
            shards = []
            for link in self._links:
                pending = PendingRequest(
                    f"dump of {name}",
                    lambda: (m.DumpTable(name), ()),
                    time.monotonic() + self.timeout_s,
                )
                link.wait(link.post(pending))
                memory = pending.arrived if pending.arrived is not None else np.empty(0, np.uint8)
                shards.append(unpack(pending.answer.arrays, memory))
                del shards[-1]["marks"]
        if table.length is None:
            order = np.argsort(
                np.concatenate([content["ids"] for content in shards]), kind="stable"
            )
            join = {
                key: np.concatenate([c[key] for c in shards])[order]
                for key in shards[0]
                if key != "version"
            }
        else:
            join = {
                k: np.concatenate([c[k] for c in shards])
                for k, v in shards[0].items()
                if v.dtype != np.int64
            }
            join |= {k: v for k, v in shards[0].items() if v.dtype == np.int64}
        join["version"] = shards[0]["version"]
        return {
            key: torch.from_numpy(np.array(value, copy=True, order="C"))
            for key, value in join.items()
        }

    def restore(self, name: str, content: Tensors) -> None:
        with self._lock:
            table = self._route.spec(name)
            self.flush()
            arrays = {
                key: np.ascontiguousarray(value.detach().cpu().numpy())
                for key, value in content.items()
            }
            if "values" not in arrays or (table.length is None and "ids" not in arrays):
                raise StoreError(
                    f"table {name!r}: ids (of a sparse table) and values are needed to restore; given: {sorted(arrays)}"
                )
            if table.length is not None:
                for link, part in zip(self._links, self._route.ranges(table), strict=True):
                    self._load(
                        link,
                        name,
                        False,
                        {
                            key: part_of(table, torch.from_numpy(x), part)
                            for key, x in arrays.items()
                        },
                    )
                return
            owner = self._route.slots.shard_of(name, ids_of(table, content["ids"]))
            version = {"version": arrays.pop("version")} if "version" in arrays else {}
            for s, link in enumerate(self._links):
                mine = np.flatnonzero(owner == s)
                for at in range(0, max(1, mine.size), PIECE_ROWS):
                    some = mine[at : at + PIECE_ROWS]
                    self._load(
                        link,
                        name,
                        at == 0,
                        {key: np.ascontiguousarray(x[some]) for key, x in arrays.items()} | version,
                    )

    def _load(
        self, link: Connection, name: str, clear: bool, arrays: dict[str, np.ndarray]
    ) -> None:
        described, parts = pack(arrays)
        link.ask(m.RestoreTable(name, clear, described), f"restore of {name}", parts)

    # -- the end --

    def stats(self) -> dict[str, float]:
        with self._lock:
            told = [link.ask(m.GetStats(), "stats").numbers for link in self._links]
            mine = {
                f"client_{name}": float(n)
                for name, n in (self.counted + self._route.counted).items()
            }
            mine["client_sent_bytes"] = float(sum(link.sent_bytes for link in self._links))
            mine["client_received_bytes"] = float(sum(link.received_bytes for link in self._links))
            mine["client_reconnects"] = float(sum(max(0, link.reconnects) for link in self._links))
            now = together(told) | self._control.ask(m.GetStats(), "stats").numbers | mine
            found, self._told = since(self._told, now), now
            return found

    def close(self) -> None:
        """Everything pushed has arrived, or the error says what has not."""
        if self._closed:
            return
        self._closed = True
        try:
            for link in self._links:
                link.flush()
            with contextlib.suppress(
                ServerLost, StoreError
            ):  # who is gone already needs no goodbye
                self._control.ask(m.Leave(), "leave", timeout_s=min(1.0, self.timeout_s))
        except (ServerLost, StoreError) as e:
            self.failures.append(e)
        finally:
            self._end()
        if self.failures:
            raise self.failures.pop(0)

    def _end(self) -> None:
        for link in (*self._links, self._control):
            link.close()
        if self._lease is not None:
            self._lease.close()
