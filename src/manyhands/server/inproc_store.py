"""In-process store: ranks are threads of one process, on the virtual clock of a `World`.

    pull, push, tick    spend their cost (`World.cost`), then use the shards and the clock that
                        all ranks share, as they are at that moment

Tables, placement, clocks and commits are those of real servers; only time is not. So which rank
pushed between another's pull and push is a function of the costs, the same every time, and a wait
that would never end is a `Deadlock` that names the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Unpack
from weakref import WeakKeyDictionary

from torch import Tensor

from manyhands.core import (
    Late,
    PushOptions,
    Rows,
    Table,
    Tensors,
    Tick,
    Work,
)
from manyhands.exchange.inproc import World
from manyhands.server.clock import Clock
from manyhands.server.local_store import LocalStore
from manyhands.server.shard import Shard
from manyhands.server.validate import ids_of

# virtual time of the last change of a clock
_changed_at: WeakKeyDictionary[Clock, float] = WeakKeyDictionary()


class InprocStore(LocalStore):
    """Store of one rank; all ranks of the world are given the same `shards` and `clock`."""

    def __init__(self, world: World, rank: int, shards: Sequence[Shard], clock: Clock):
        self.world = world
        super().__init__(rank, world.size, shards, clock)

    def create(
        self, table: Table, values: Tensor | None = None, state: Tensors | None = None
    ) -> None:
        if self.rank > 0:
            self._wait(
                f"create of table {table.name!r}",
                lambda: self.clock.has_table(table.name),
                lambda: [0],
            )
        super().create(table, values, state)
        self._clock_changed()

    def pull(self, rows: Rows, into: Tensors | None = None, *, remember: bool = False) -> Tensors:
        self._spend("pull", sum(self._nbytes(name, ids) for name, ids in rows.items()))
        return super().pull(rows, into, remember=remember)

    def push(self, rows: Rows, updates: Tensors, **options: Unpack[PushOptions]) -> Work:
        self._spend("push", sum(self._nbytes(name, ids) for name, ids in rows.items()))
        return super().push(rows, updates, **options)

    def tick(
        self,
        staleness: float = math.inf,
        quorum: int | None = None,
        *,
        late: Late = "drop",
        delay: int | None = None,
    ) -> Tick:
        self._spend("tick", 0)
        self.clock.post_tick(
            self.rank, self._now, staleness, quorum, late, delay, self._has_pending
        )
        self._clock_changed()
        where = f"tick after clock {self._now}"
        self._wait(
            where,
            lambda: self.clock.tick_answer(self.rank) is not None,
            lambda: self.clock.behind(self.rank),
        )
        # asked again, the clock answers at once
        return super().tick(staleness, quorum, late=late, delay=delay)

    def claim_step(self, limit: int, shared: bool) -> int | None:
        number = super().claim_step(limit, shared)
        self._clock_changed()
        return number

    def _spend(self, what: str, nbytes: int) -> None:
        self.world.spend(self.rank, self.world.cost(what, nbytes, 1), "exchange")

    def _nbytes(self, name: str, ids: Tensor | None) -> int:
        table = self._table(name)
        item = 4 if table.dtype == "float32" else 8
        if table.length is not None:
            return table.length * item
        count = ids_of(table, ids).size
        return count * (table.dim * item + 8)

    def _clock_changed(self) -> None:
        """Let ranks that wait for this go on now, before this rank's time does."""
        _changed_at[self.clock] = self.world.now[self.rank]
        self.world.spend(self.rank, 0.0, "exchange")

    def _wait(self, where: str, ready: Callable[[], bool], absent: Callable[[], list[int]]) -> None:
        since: list[float] = []

        def until() -> float | None:
            if not since and ready():
                since.append(_changed_at.get(self.clock, 0.0))
            return since[0] if since else None

        self.world.wait(self.rank, where, until, absent)
