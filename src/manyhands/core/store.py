"""Store: the parameter server as its clients see it: tables that ranks pull from and push to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict, Unpack, runtime_checkable

from torch import Tensor

from manyhands.core.group import Work
from manyhands.records import Tensors

Rows = dict[str, Tensor | None]  # table -> ids of the rows meant; None: all rows
Late = Literal["drop", "keep"]  # what becomes of a push that missed its commit


@dataclass(frozen=True)
class Table:
    """Table of a `Store`: its name, row width, server optimizer, first values and expiry.

    A sparse table has a row of `dim` numbers, and what its server optimizer keeps of them, for
    every int64 id. A row is made by its first push, as a function of (name, id, seed). A table with
    `length` is dense instead: one vector, cut into blocks, that starts from given values.
    """

    name: str
    dim: int = 1
    length: int | None = None
    dtype: Literal["float32", "float64"] = "float32"
    # the server optimizer: a name of the server's, or "module:Class" of one's own
    optimizer: str = "sgd"
    options: Mapping[str, float] = field(default_factory=dict)  # of the optimizer: lr, eps, ...
    init: Literal["zeros", "uniform", "normal"] = "uniform"
    scale: float = 0.01  # uniform: half the width; normal: the deviation
    seed: int = 0
    # a row is made when its id was pushed so many times; before that it reads as its first values
    admit_after: int = 1
    admit_share: float = 1.0  # ... and with this probability, decided by the id
    # forget rows that none of the table's last so many pushes touched
    expire_after: int | None = None
    expire_count: int | None = None  # forget, at an expiry, rows pushed fewer times than this
    expire_norm: float | None = None  # forget, at an expiry, rows whose length is below this

    def __new__(cls, *_: Any, **given: Any) -> Table:
        if "rule" in given:  # the old name
            raise TypeError(f"Table(rule={given['rule']!r}) is now optimizer={given['rule']!r}")
        return super().__new__(cls)


@dataclass(frozen=True)
class Tick:
    """Answer to `Store.tick`: the clock that this rank begins now."""

    clock: int
    counted: bool = True  # False: its pending pushes of the clock before came too late: dropped


class PushOptions(TypedDict, total=False):
    """Options of `Store.push`.

    A TypedDict rather than a frozen dataclass: callers write `push(rows, grads, lr=0.1)`, every
    store passes `**options` on as it is, and no object is built for a push.
    """

    lr: float | None  # of this push, by the worker's own schedule; None: the table's own
    # apply nothing until a tick commits this rank's clock, then together with the pending pushes
    # of other ranks: their mean by `weight`, or where that is None their sum
    pending: bool
    weight: float | None
    adapt: bool  # divide lr by the number of updates since this rank's pull
    # lambda of DC-ASGD, for dense tables: add lambda g*g*(w - what this rank remembered); with
    # `decay`, lambda is divided by the root of a running mean of g*g that forgets at this rate
    compensate: float | None
    decay: float | None


@runtime_checkable
class Store(Protocol):
    """Parameter store as merge strategies use it: asymmetric exchange at each rank's own pace.

    `rows` names tables: with ids (int64, one axis, repeats allowed) of a sparse one, with None all
    of a dense one. A push is applied exactly once, also where it had to be sent again. Repeated
    ids are summed before the server optimizer sees them.
    """

    rank: int
    size: int

    def pull(self, rows: Rows, into: Tensors | None = None, *, remember: bool = False) -> Tensors:
        """Rows as they are now, with all that this rank pushed before. `remember`: the store keeps
        what this rank now sees, for pushes that `compensate`."""
        ...

    def push(self, rows: Rows, updates: Tensors, **options: Unpack[PushOptions]) -> Work:
        """Hand updates to the server optimizers of their tables."""
        ...

    def tick(
        self,
        staleness: float = math.inf,
        quorum: int | None = None,
        *,
        late: Late = "drop",
        delay: int | None = None,
    ) -> Tick:
        """End this rank's clock; return when the slowest rank is at most `staleness` clocks behind.
        Where pushes are pending: return when `quorum` ranks (None: all) have brought theirs and
        none has stayed away for `delay` commits; these are committed together. A push that comes
        later is dropped, or with late="keep" counts in the next commit."""
        ...

    def flush(self) -> None:
        """Return when everything pushed so far has arrived."""
        ...


class Reply(Protocol):
    """Rows that were asked for; `result` waits for them."""

    def result(self) -> Tensors: ...


@dataclass(frozen=True)
class CompleteReply:
    """Reply of a store that answers at once."""

    rows: Tensors

    def result(self) -> Tensors:
        return self.rows


class TableSnapshot(Protocol):
    """A snapshot of tables that is being written."""

    @property
    def base(self) -> str: ...  # the tag it adds to; "": a full one
    def finish(self) -> Mapping[str, Sequence[tuple[str, int, str]]]:
        """Wait until it is written; its files by table: name, bytes, sha256."""
        ...

    def end(self, good: bool) -> None:
        """It is part of a checkpoint now (`good`), or was given up."""
        ...


@runtime_checkable
class TableStore(Store, Protocol):
    """Store as the run uses it: tables, requests in the background, the step counter, checkpoints.

    Every store has all of it. Where `background` is False, `pull_async` and `exchange` have done
    everything when they return.
    """

    background: bool  # whether a push gains by waiting for the next request (`exchange`)

    def create(
        self, table: Table, values: Tensor | None = None, state: Tensors | None = None
    ) -> None:
        """Make a table. Every rank calls it with the same arguments; the first call makes the
        table, and a table that differs is refused. A dense table starts from `values` and `state`
        (what its optimizer keeps, by name) of rank 0."""
        ...

    def pull_async(
        self, rows: Rows, into: Tensors | None = None, *, remember: bool = False
    ) -> Reply:
        """A pull that travels while this rank computes."""
        ...

    def push_buffers(self, rows: Rows) -> Tensors:
        """Memory for the updates of these rows, from which a push is not copied where that is
        possible. Its content is undefined, also after the push."""
        ...

    def exchange(
        self, rows: Rows, updates: Tensors, *, wants: Rows, **options: Unpack[PushOptions]
    ) -> Reply:
        """A push and, after it, a pull of `wants`, in one request where the store can."""
        ...

    def claim_step(self, limit: int, shared: bool) -> int | None:
        """Claim the next step to compute, below `limit`: from one counter of all ranks (`shared`),
        or from this rank's own. None: a sync point; until its next claim no rank waits for this
        one."""
        ...

    def request_sync(self) -> None:
        """Request a sync point: the next claims of all ranks soon give None, at one step."""
        ...

    def dump(self, name: str) -> Tensors:
        """All of a table: `ids` (sparse), `values`, `state/<name>`; what `restore` takes."""
        ...

    def restore(self, name: str, content: Tensors) -> None: ...
    def snapshot(
        self,
        names: Sequence[str],
        folder: Path,
        tag: str,
        base: str = "",
        incremental: bool = False,
    ) -> TableSnapshot:
        """Save tables as they are now to files in `folder`, while pushes go on. With `base`, only
        what changed since the snapshot of that tag; where that is not known any more, all of it.
        One rank calls it, while no other pushes. `incremental`: the next one may add to this."""
        ...

    def restore_pieces(self, name: str, contents: Iterable[Mapping[str, Any]]) -> None:
        """Restore a sparse table from bounded pieces, arrays by the names of `dump`."""
        ...

    def stats(self) -> dict[str, float]:
        """Counters of this rank and the servers since the last call: rows, bytes, staleness."""
        ...

    def close(self) -> None: ...
