"""The nouns of the system: read second, after `train.py`. Every room imports this file; it imports no room.

    split -> compute -> exchange -> merge          and around them: plan, recover, observe, launch

A `Replica` computes on its share of the data, a `Group` moves bytes between ranks, a `Store` holds tables for all of them, a
`Strategy` says how replicas agree.
They meet only as arguments of `Strategy.round`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypedDict, TypeVar, Unpack, runtime_checkable

from torch import Tensor

from manyhands.records import (
    DataShard,
    Emit,
    Event,
    Goal,
    Job,
    Launcher,
    Layout,
    Plan,
    Position,
    ProcessInfo,
    Snapshot,
    Tensors,
)

__all__ = [  # of records, which are nouns too
    "DataShard",
    "Emit",
    "Event",
    "Goal",
    "Job",
    "Launcher",
    "Layout",
    "Plan",
    "Position",
    "ProcessInfo",
    "Snapshot",
    "Tensors",
]

Rows = dict[str, Tensor | None]  # which rows of which table; None: all rows
Op = Literal["sum", "mean", "max"]
Cargo = Literal["gradients", "updates", "parameters"]
Late = Literal["drop", "keep"]
EXACT = "exact/"  # a tensor whose name starts so travels as it is, whatever wire the plan has


class Work(Protocol):
    """An exchange under way; the tensors given to it are valid again after `wait`."""

    def wait(self) -> None: ...


class Finished:
    """Work that was complete when it was handed out."""

    def wait(self) -> None: ...


OnReady = Callable[[Tensors], None]


class Replica(Protocol):
    """One copy of the model, its share of the data and its optimizer. Never talks to other replicas.

    `params` and `grads` are few long vectors. After `backward`, `grads` is proportional to a SUM over `count[0]`
    samples (by a factor that is the same on all ranks), so summing both over ranks and then calling `step`, which
    divides once, gives the gradient of the union batch however uneven the shares. (The rest of `count` says how many
    ranks used each parameter.) Where `updates_part`, `step` changes only the part of `params` that this rank owns.

    Without samples `step` changes nothing, so a rule may let ranks step by themselves however uneven their shares.
    """

    @property
    def own_count(self) -> int: ...  # samples of this rank behind the last loss, before merging
    @property
    def updates_part(self) -> bool: ...
    @property
    def params(self) -> Tensors: ...
    @property
    def grads(self) -> Tensors: ...
    @property
    def count(self) -> Tensor: ...
    @property
    def scale(self) -> Tensor:
        """`grads` = `scale` * mean gradient of the samples in `count`: what to multiply a term by that is added to them."""
        ...

    @property
    def lr(self) -> float: ...  # of the optimizer's first group, now
    @property
    def moments(self) -> Tensors:
        """What the optimizer remembers (momentum, Adam's averages), by name, the same names on every rank; to change in place."""
        ...

    def reset_moments(self) -> None: ...
    def steps(self, most: int) -> Iterator[int]:
        """0, 1, ... at most `most` of them: a block of steps ends early where the run does, on the same step on every rank."""
        ...

    @property
    def in_block(self) -> bool: ...  # between two of those steps

    def rows(self) -> Rows: ...
    def load(self, values: Tensors) -> None: ...
    def holding(self, values: Tensors | None) -> AbstractContextManager[None]:
        """Have `values` as parameters for a while, then its own again; None: stay as it is."""
        ...

    def backward(self, on_ready: OnReady | None = None) -> Tensor:
        """Compute the loss and gradient of the next batch; `on_ready` gets parts of `grads` as soon as they are final, in
        the same order on every rank."""
        ...

    def gradient(
        self,
    ) -> (
        Tensors
    ): ...  # the mean of the last batch, clipped as `step` would, for who makes the step elsewhere
    def stepped(self) -> None: ...  # elsewhere: only the schedule goes on
    def square_norm(self) -> Tensor | None:
        """Where `step` will clip and `updates_part`: the squared norm of the own part, to be summed before `step`."""
        ...

    def step(self) -> None: ...


class Student(Replica, Protocol):
    """A replica that can also learn from what other models say about its data."""

    def distil(self, teachers: Sequence[Tensors], weight: float, share: float) -> Tensor:
        """As `backward`, where for a `share` of the samples the loss is `weight` times its own plus the rest times the distance
        from the mean output of the `teachers`, given by their `params`."""
        ...


@runtime_checkable
class Group(Protocol):
    """Symmetric exchange: every rank calls the same method in the same order."""

    rank: int
    size: int

    def all_reduce(self, values: Tensors, op: Op = "sum") -> Work: ...
    def swap(self, values: Tensors, peers: Sequence[int]) -> list[Tensors]:
        """Give `values` to every peer and get theirs, in the order of `peers`. The relation must be symmetric."""
        ...

    def transfer(
        self, give: Mapping[int, Tensor], into: Mapping[int, Tensor], name: str = ""
    ) -> Work:
        """Point to point: send `give[r]` to rank r and receive from rank r into `into[r]`, contiguous tensors of which both
        ends know length and dtype. Only the ranks named take part; messages from one rank to another arrive in order.
        Nothing given may change, and nothing received be read, before `wait`. What has a `name` may be encoded by a wire."""
        ...

    def close(self) -> None: ...


class ReduceScatterGroup(Group, Protocol):
    """A group whose ranks own parts of its vectors: an all-reduce in two halves, with room for work between them."""

    def own(self, tensor: Tensor) -> list[slice]: ...
    def reduce_scatter(self, values: Tensors, op: Op = "sum") -> Work: ...
    def all_gather(self, values: Tensors) -> Work: ...


@dataclass(frozen=True)
class Table:
    """Table of a `Store`: its name, row width, server optimizer, first values and expiry.

    A sparse table has a row of `dim` numbers, and what its server optimizer keeps of them, for
    every int64 id. A row is made on first touch, as a function of (name, id, seed). A table with
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
    def stats(self) -> dict[str, float]:
        """Counters of this rank and the servers since the last call: rows, bytes, staleness."""
        ...

    def close(self) -> None: ...


L = TypeVar("L", Group, Store, contravariant=True)


class Strategy(Protocol[L]):
    """One distributed training algorithm: a frozen dataclass whose fields are its hyper-parameters. Rules inherit from this
    for what most of them share; `init` and `round` are theirs."""

    link: ClassVar[type]
    sends: ClassVar[Cargo] = "gradients"  # what travels decides which wires can carry it
    replicas_agree: ClassVar[bool] = (
        False  # between any two rounds, to the bit, so they may share memory and the update
    )
    swaps: ClassVar[bool] = False  # gradients go to named peers, so nobody sees their sum
    distils: ClassVar[bool] = False  # needs a `Student`
    on_server: ClassVar[Literal["optimizer", "sum"]] = (
        "optimizer"  # over a Store: what its tables do with a push
    )

    @property
    def shares_steps(self) -> bool:
        """Over a Store: whether ranks draw steps from one counter, each a batch of one rank; else all take part in every step."""
        return False

    def share(self, size: int) -> float:
        return (
            1 / size
        )  # where steps are so shared: what part of a step of the model one rank's batch is

    def check(self, size: int) -> None:
        """Raise PlanError where the hyper-parameters do not fit `size` ranks; called before anything starts."""
        return None

    def init(self, replica: Replica) -> Tensors: ...
    def round(self, replica: Replica, link: L, state: Tensors) -> Tensor: ...
    def consensus(self, replica: Replica, link: L, state: Tensors) -> Tensors | None:
        """The one model that all replicas stand for, to evaluate and to save; None: each of them holds it already. Every
        rank calls it; it changes neither replica nor state."""
        return None
