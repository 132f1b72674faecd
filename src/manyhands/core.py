"""The types that connect the rooms. Read this second, after `train.py`.

    Replica     one copy of the model: computes gradients and makes steps on its part of the data
    Group       symmetric exchange between ranks: all-reduce, swap, transfer
    Store       the parameter server: tables that any rank pulls from and pushes to
    Strategy    how replicas agree: `round(replica, group or store, state)` is one round of training

Every room imports this file; it imports no room. Strategies (`merge/`) see a replica and a group
or store only through the protocols below. `Replica` is split by who needs what: the base for every
strategy, small extensions for some strategies, and `LoopReplica` for the training loop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypedDict, TypeVar, Unpack, runtime_checkable

import torch
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

__all__ = [  # re-exported from records
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

Rows = dict[str, Tensor | None]  # table -> ids of the rows meant; None: all rows
Op = Literal["sum", "mean", "max"]
Cargo = Literal["gradients", "updates", "parameters"]  # what a strategy sends
Late = Literal["drop", "keep"]  # what becomes of a push that missed its commit
EXACT = "exact/"  # a tensor whose name starts with this is never compressed


class Work(Protocol):
    """An exchange in flight. Its tensors may be read and written again after `wait`."""

    def wait(self) -> None: ...


class Finished:
    """Work that is already complete."""

    def wait(self) -> None: ...


OnReady = Callable[[Tensors], None]  # gets one finished bucket of the gradient, by its name


class Replica(Protocol):
    """One copy of the model with its optimizer and its part of the data. It knows no other replica.

    Every strategy may use what is here. A replica spread over several ranks (tensor=, pipe=,
    shard=) looks the same. `step` without any samples changes nothing, so ranks may take steps of
    their own however uneven their data.
    """

    @property
    def params(self) -> Tensors:
        """All parameters, as few long vectors; a strategy changes them in place."""
        ...

    @property
    def count(self) -> Tensor:
        """Element 0: samples behind the gradient. The others: how many ranks used each parameter."""
        ...

    @property
    def own_count(self) -> int:
        """Samples of this rank behind the last loss, before any merge."""
        ...

    @property
    def lr(self) -> float:
        """Learning rate of the optimizer's first parameter group, now."""
        ...

    @property
    def moments(self) -> Tensors:
        """Optimizer state of a parameter's shape (momentum, Adam's averages), to change in place.

        The names are the same on every rank.
        """
        ...

    def reset_moments(self) -> None:
        """Drop all optimizer state, so that the next step starts from none."""
        ...

    def steps(self, most: int) -> Iterator[int]:
        """0, 1, ... for a block of at most `most` local steps.

        A block ends early where the run ends, on the same step on every rank.
        """
        ...

    def backward(self, on_ready: OnReady | None = None) -> Tensor:
        """Mean loss of the next batch; computes the gradient too.

        `on_ready` gets each bucket of the gradient as soon as it is final, in the same order on
        every rank, and may all-reduce it in place.
        """
        ...

    def step(self) -> None:
        """One step of the optimizer, by the gradient sum divided by `count[0]`, and of the schedule."""
        ...


class GradientReplica(Replica, Protocol):
    """A replica for strategies that read or change the gradient between `backward` and `step`.

        grads = scale * mean gradient of the count[0] samples

    Up to a factor that is the same on all ranks, `grads` is a SUM over samples. Summing `grads` and
    `count` over ranks and then calling `step`, which divides once, gives the gradient of the union
    of all batches, however uneven they are.
    """

    @property
    def grads(self) -> Tensors:
        """The gradient, in vectors like `params`."""
        ...

    @property
    def scale(self) -> Tensor:
        """What to multiply a term by before adding it to `grads`."""
        ...


class PartialStepReplica(Replica, Protocol):
    """A replica whose `step` may update only the slice of `params` that this rank owns (`all_reduce`)."""

    @property
    def updates_slice(self) -> bool:
        """Whether it does; the strategy then gathers `params` after `step`."""
        ...

    def square_norm(self) -> Tensor | None:
        """Squared gradient norm of the owned slice, to be summed over ranks before `step`.

        None where `step` does not clip or updates everything.
        """
        ...


class ServedReplica(Replica, Protocol):
    """A replica for strategies over a `Store`, where the server makes the optimizer step."""

    def gradient(self) -> Tensors:
        """Mean gradient of the last batch, clipped as `step` would clip it."""
        ...

    def stepped(self) -> None:
        """Note that the server made this step: only the learning-rate schedule goes on."""
        ...


class Student(Replica, Protocol):
    """A replica that can also learn from the outputs of other models (distillation)."""

    def distil(self, teachers: Sequence[Tensors], weight: float, share: float) -> Tensor:
        """As `backward`, with the teachers' mean output beside the labels.

        `teachers` are `params` of other models. For a `share` of the samples the loss is `weight`
        times its own plus (1 - weight) times the distance from the teachers' mean output.
        """
        ...


class LoopReplica(Replica, Protocol):
    """What the training loop needs of a replica beside what strategies need."""

    closing: bool  # the run is over: further steps only end a block and do not move the schedule

    @property
    def in_block(self) -> bool:
        """Whether a strategy is between two steps of `steps`."""
        ...

    def load(self, values: Tensors) -> None:
        """Copy `values` into `params`."""
        ...

    def holding(self, values: Tensors | None) -> AbstractContextManager[None]:
        """Have `values` as `params` inside the `with` block; None: keep the own ones."""
        ...


@runtime_checkable
class Group(Protocol):
    """Process group: ranks that exchange symmetrically. Every rank makes the same calls in the same order.

    Groups inherit from this for what most of them share: `allocate` and `clock`.
    """

    rank: int
    size: int

    def all_reduce(self, values: Tensors, op: Op = "sum") -> Work: ...
    def reduce_scatter(self, values: Tensors, op: Op = "sum") -> Work:
        """The first half of an all-reduce: sum into the part that each rank owns; the rest of `values`
        keeps what it had. For contiguous vectors, in some groups only for those from `allocate`."""
        ...

    def all_gather(self, values: Tensors) -> Work:
        """The second half of an all-reduce: copy the part that each rank owns to all others."""
        ...

    def own(self, tensor: Tensor) -> list[slice]:
        """Which elements of a vector this rank owns in `reduce_scatter` and `all_gather`."""
        ...

    def broadcast(self, values: Tensors, source: int = 0) -> Work:
        """Copy the `values` of rank `source` into those of all other ranks: same names, shapes and
        dtypes everywhere."""
        ...

    def barrier(self) -> None:
        """Return when every rank has called it."""
        ...

    def swap(self, values: Tensors, peers: Sequence[int]) -> list[Tensors]:
        """Send `values` to every peer and return theirs, in the order of `peers`. If a rank names
        another one as its peer, that one must name it too."""
        ...

    def transfer(
        self, give: Mapping[int, Tensor], into: Mapping[int, Tensor], name: str = ""
    ) -> Work:
        """Point to point: send `give[r]` to rank r and receive from rank r into `into[r]`, contiguous
        tensors of which both ends know length and dtype. Only the ranks named take part; messages
        from one rank to another arrive in order. Nothing given may change, and nothing received be
        read, before `wait`. A message with a `name` may be compressed."""
        ...

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> Tensor:
        """A zeroed vector on `device`, in memory that the group reduces without a copy if it has such
        memory. Every rank must allocate the same vectors in the same order."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def clock(self) -> float:
        """Seconds on the clock that measures this group's calls: real time, or a simulation's."""
        return time.perf_counter()

    def close(self) -> None: ...


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


R = TypeVar("R", bound=Replica, contravariant=True)
L = TypeVar("L", Group, Store, contravariant=True)


class Strategy(Protocol[R, L]):
    """Merge strategy: one distributed training algorithm, a frozen dataclass of hyper-parameters.

    `R` is the kind of replica it needs, `L` what it exchanges over: `Strategy[Replica, Group]`. A
    strategy inherits from this class for the defaults; `init` and `round` it must write.
    """

    link: ClassVar[type]  # Group or Store: what `round` exchanges over
    sends: ClassVar[Cargo] = "gradients"  # decides which compression may be used
    # replicas are equal to the bit between any two rounds, so they may share memory and the update
    replicas_agree: ClassVar[bool] = False
    swaps: ClassVar[bool] = False  # sends to single peers, so no rank sees a sum over all
    distils: ClassVar[bool] = False  # needs a `Student`
    thins: ClassVar[bool] = False  # needs a replica that can leave units out (`merge/skeleton.py`)
    # over a Store: what a table does with a push
    on_server: ClassVar[Literal["optimizer", "sum"]] = "optimizer"

    @property
    def shares_steps(self) -> bool:
        """Over a Store: ranks claim steps from one counter, and a step is one rank's batch.

        Otherwise every rank takes part in every step.
        """
        return False

    def share(self, size: int) -> float:
        """With `shares_steps`: how large a part of one step of the model one rank's batch is."""
        return 1 / size

    def check(self, size: int) -> None:
        """Raise PlanError where the hyper-parameters do not fit `size` ranks; runs before training."""
        return None

    def init(self, replica: R, /) -> Tensors:
        """The strategy's own state, which checkpoints save."""
        ...

    def round(self, replica: R, link: L, state: Tensors, /) -> Tensor:
        """One round: compute, exchange, merge. Returns the mean loss of this rank's samples."""
        ...

    def consensus(self, replica: R, link: L, state: Tensors, /) -> Tensors | None:
        """The one model that all replicas represent, to evaluate and save; None: each holds it.

        Every rank calls it. It changes neither the replica nor the state.
        """
        return None
