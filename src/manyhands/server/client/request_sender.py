"""Request sender: posts a push or pull to all shards, and sends it again after a slot-map change.

    push      goes to every shard, also with nothing for it: tables count their pushes
    commits   travel with the next request to a shard, until it is known to have applied them
    moved     a shard refuses rows that the slot map gave to another shard; they are sent there

An error of a push is raised by its `wait`, or else by the next call (`check`).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch

from manyhands.core import Rows, Tensors
from manyhands.errors import ManyhandsError, StoreError
from manyhands.server.client.connection import Connection
from manyhands.server.client.push_buffers import PushBuffers
from manyhands.server.client.request import Moved, Outs, Pulled, Request, ShardPart, describe
from manyhands.server.client.route import Router
from manyhands.server.protocol import messages as m
from manyhands.server.slots import SLOTS, SlotMap


class RequestSender:
    """`connect(where, sender)` makes the connection to a shard; it opens when it is first used."""

    def __init__(
        self,
        slots: SlotMap,
        connect: Callable[[m.ShardAddress, RequestSender], Connection],
        maps: Connection,
        *,
        code: m.RowCodec,
        kkt: float | None,
        timeout_s: float,
        version: int,
        recovers: bool = False,
    ):
        self.code, self.timeout_s, self.version = code, timeout_s, version
        self.lock = threading.RLock()
        self.counted: Counter[str] = Counter()
        self.failures: list[Exception] = []  # of pushes that no `wait` has reported
        self.closed = False
        self.buffers = PushBuffers()
        self._maps = maps  # to the coordinator
        self.connections = [connect(where, self) for where in slots.shards]
        for connection in self.connections:
            connection.patient = recovers
        self.router = Router(slots, code, kkt, all(c.shared for c in self.connections))
        self._commits: m.Commits = []
        self._moved: list[Request] = []
        self._sequences = [0] * len(self.connections)
        # the last commit that each shard is known to have applied
        self._applied = [version] * len(self.connections)

    @property
    def epoch(self) -> int:
        return self.router.slots.epoch

    @property
    def generation(self) -> int:
        return self.router.generation

    # -- requests --

    def check(self) -> None:
        """Raise errors of pushes that no `wait` reported; resend what another shard has now."""
        if self.closed:
            raise StoreError("the store was closed")
        self._resend_moved()
        if self.failures:
            raise self.failures.pop(0)

    def post(
        self,
        push: list[list[ShardPart]],
        pull: list[list[ShardPart]],
        how: m.PushMessage | None,
        remember: bool,
    ) -> list[Request]:
        """Send parts, by table and shard. `how` is None without a push."""
        requests = []
        for s, connection in enumerate(self.connections):
            wanted = [parts[s] for parts in pull if parts[s].count]
            if how is None and not wanted and self._applied[s] == self.version:
                continue
            given = [parts[s] for parts in push]
            connection.settle(partial(describe, given, wanted, how))
            request = Request(self, connection, given, wanted, how, self._sequences[s], remember)
            self._sequences[s] += how is not None
            requests.append(request)
            connection.post(request)
        return requests

    def take_sequence(self, shard: int) -> int:
        """The next number of a change on a shard; the caller holds `lock`."""
        self._sequences[shard] += 1
        return self._sequences[shard] - 1

    def receive(self, request: Request, outs: Outs) -> None:
        """Wait for the rows of one shard and write them to `outs`."""
        try:
            request.connection.wait(request)
            request.read(outs)
        except Moved:
            self._resend_moved()
            self._pull_moved(request, outs)
        except Exception as e:
            if e in self.failures:
                self.failures.remove(e)
            raise
        finally:
            request.release()

    def finish(self, requests: list[Request]) -> None:
        """Wait until requests are answered; raise the first error among them."""
        errors = []
        for request in requests:
            request.connection.wait(request, quiet=True)
            if request.error is not None and not isinstance(request.error, Moved):
                errors.append(request.error)
                if request.error in self.failures:
                    self.failures.remove(request.error)
        self._resend_moved()
        if errors:
            raise errors[0]

    def flush(self) -> None:
        """Wait until every shard has all that was pushed and all commits that this rank knows of: a
        shard without requests has not heard of them."""
        for connection in self.connections:
            connection.flush()
        with self.lock:
            while self._moved:
                self._resend_moved()
                for connection in self.connections:
                    connection.flush()
            self.check()
            while min(self._applied) < self.version:
                self.finish(self.post([], [], None, False))

    def close(self) -> None:
        for connection in self.connections:
            connection.close()

    # -- commits --

    def add_commits(self, version: int, commits: m.Commits) -> None:
        self.version = version
        self._commits += commits

    def catch_up(self, commits: m.Commits) -> None:
        """Commits that were made before this process joined, and that a shard may not have: only
        the workers that they were told to know of them, and one of these may be dead."""
        if commits:
            self._applied = [commits[0][0] - 1] * len(self.connections)
            self._commits = list(commits)

    def commits_for(self, connection: Connection) -> tuple[m.Commits, int]:
        """What a shard must apply before it serves; it ignores commits that it has."""
        applied = self._applied[self.connections.index(connection)]
        commits = [commit for commit in self._commits if commit[0] > applied]
        return commits, commits[-1][0] if commits else 0

    def committed(self, connection: Connection, version: int) -> None:
        s = self.connections.index(connection)
        self._applied[s] = max(self._applied[s], version)
        self._commits = [commit for commit in self._commits if commit[0] > min(self._applied)]

    # -- slot-map changes --

    def on_absence(self, connection: Connection) -> None:
        """A server cannot be reached, or does not answer: has another one taken its place?"""
        try:
            self._use(self._look_up(1.0))
        except ManyhandsError:
            return

    def on_epoch(self, connection: Connection, epoch: int) -> None:
        """A shard has another slot map. If only its number differs, requests stay as they are."""
        found = self._look_up(self.timeout_s)
        if found.epoch < epoch:
            time.sleep(0.01)  # the coordinator is sending it out at this moment
        self._use(found)
        refused = connection.withdraw(
            lambda p: isinstance(p, Request) and p.generation != self.generation, Moved()
        )
        self._moved += [r for r in refused if isinstance(r, Request) and r.push]

    def _look_up(self, timeout_s: float) -> SlotMap:
        return SlotMap.of(self._maps.ask(m.GetSlotMap(), "slot map", timeout_s=timeout_s))

    def _use(self, slots: SlotMap) -> None:
        if len(slots.shards) != len(self.connections):
            raise StoreError(
                f"there are {len(slots.shards)} shards now, and there were "
                f"{len(self.connections)}; open the store again"
            )
        self.router.change(slots)
        for shard, (connection, where) in enumerate(
            zip(self.connections, slots.shards, strict=True)
        ):
            chain, said = slots.chains[shard] if slots.chains else None, ""
            if chain is not None and not chain.members:
                lost = slots.lost_slots(shard).size
                said = f"; with shard {shard}, {lost} of {SLOTS} slots are lost"
            connection.redirect(where, 0 if chain is None else chain.life, said)

    def _resend_moved(self) -> None:
        """Partition the pushes that a shard refused again, and send them."""
        while self._moved:
            request = self._moved.pop(0)
            rows: Rows = {}
            updates: Tensors = {}
            for part in request.push:
                if part.ids is None:
                    raise StoreError(
                        f"table {part.table.name!r} is dense, and its shards changed; "
                        "open the store again"
                    )
                rows[part.table.name] = torch.from_numpy(part.ids)
                updates[part.table.name] = torch.from_numpy(request.updates_of(part)).view(
                    -1, part.table.dim
                )
            assert request.how is not None
            request.release()
            self.post(self.router.parts(rows, updates), [], request.how, False)

    def _pull_moved(self, request: Request, outs: Outs) -> None:
        for part in request.pull:
            assert part.ids is not None
            name = part.table.name
            with self.lock:
                self.check()
                parts, again = self.router.wanted({name: torch.from_numpy(part.ids)}, None)
                reply = Pulled(self, self.post([], parts, None, False), again)
            rows, out = reply.result()[name], outs[name]
            if out is None:
                outs[name] = rows
            elif part.direct:
                out.copy_(rows)
            else:
                part.spread(rows.numpy().reshape(-1), out.detach().numpy().reshape(-1))
