"""Records: plain data types of a run that all packages share and that import nothing of ours.

Plan, Layout        what to run, and on which ranks
Position, Goal      how far training is, and what it is to reach
Event, Snapshot     one thing that happened; the whole state at the end of a round
Result              how a run ended
ProcessInfo, Job    this process among all; the processes to start
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

if TYPE_CHECKING:  # a command that only reads a plan does not wait for torch
    from torch import Tensor

Tensors = dict[str, "Tensor"]  # named, same order on every rank, updated in place


@dataclass(frozen=True)
class Position:
    """Position in the data, counted over all ranks and independent of their number."""

    epoch: int = 0
    offset: int = 0  # samples of this epoch already consumed
    steps: int = 0  # global batches consumed since the start


@dataclass(frozen=True)
class Goal:
    """Goal: a number to reach. `accuracy:0.88` is at least that, `-loss:0.3` at most.

    `epoch:5` and `step:1000` are goals too.
    """

    name: str
    bound: float
    at_most: bool = False

    @classmethod
    def parse(cls, text: str) -> Goal:
        name, colon, bound = text.rpartition(":")
        if not colon or not name.lstrip("-"):
            raise ValueError(
                "NAME:NUMBER is needed, such as epoch:5, accuracy:0.88 or -loss:0.3 (at most)"
            )
        return cls(name.lstrip("-"), float(bound), name.startswith("-"))

    def __str__(self) -> str:
        return f"{'-' if self.at_most else ''}{self.name}:{repr(self.bound).removesuffix('.0')}"

    def reached(self, values: Mapping[str, float]) -> bool:
        value = values.get(self.name, math.nan)
        return value <= self.bound if self.at_most else value >= self.bound


@dataclass
class Snapshot:
    """Snapshot: the whole state of a run at the end of a round, by parameter name.

    It depends on no layout, world size or buffer. `params` is the merged model of all ranks. State
    that each rank has for itself (its model where replicas differ, its momentum, its error
    feedback) is in `ranks` under "<rank>/<kind>/<name>", or "*/..." where all ranks have the same.
    """

    round: int
    params: Tensors
    optimizer: Tensors
    state: Tensors
    position: Position
    rng: Tensors = field(default_factory=dict)  # "<rank>/<generator>" -> bytes
    # plain JSON: hyper-parameters, schedule, scaler, plan
    meta: dict[str, Any] = field(default_factory=dict)
    ranks: Tensors = field(default_factory=dict)


@dataclass
class Result:
    """How a run ended."""

    directory: str
    rounds: int
    epochs: float
    seconds: float
    samples_per_s: float
    metrics: dict[str, float]
    stopped: int = 0  # the number of the signal that ended it early
    checkpoint: str | None = None
    ranks: int = 1  # processes that trained
    stopped_by: str = ""  # what asked it to stop: the signal's name, or a file
    launched: bool = False  # in processes of its own, not in that which called
    stop_reason: str | None = None  # given to `run.stop`; None: nobody called it


@dataclass(frozen=True)
class Event:
    """Event: one thing that happened on one rank.

    Text, JSONL, TensorBoard and traces are sinks of the same events.
    """

    time_s: float
    rank: int
    round: int
    name: str
    seconds: float = 0.0
    nbytes: int = 0
    value: float | str | dict[str, float] | None = None


Emit = Callable[[Event], None]


@dataclass(frozen=True)
class DataShard:
    """Data shard: the rows and/or columns of the data that one rank owns; None: all of them."""

    rank: int
    size: int
    rows: Tensor | None = None
    cols: Tensor | None = None


@dataclass(frozen=True)
class Layout:
    """Layout: ranks on named axes.

    `data` is outermost: neighbours on the inner axes are neighbouring ranks.
    """

    data: int = 1
    shard: int = 1
    pipe: int = 1
    tensor: int = 1

    AXES: ClassVar[tuple[str, ...]] = ("data", "shard", "pipe", "tensor")

    @property
    def size(self) -> int:
        return self.data * self.shard * self.pipe * self.tensor

    def coordinates(self, rank: int) -> dict[str, int]:
        where: dict[str, int] = {}
        for axis in reversed(self.AXES):
            rank, where[axis] = divmod(rank, getattr(self, axis))
        return {axis: where[axis] for axis in self.AXES}

    def peers(self, rank: int, axis: str) -> list[int]:
        """The ranks that differ from `rank` only along `axis`, itself included, in order."""
        here = self.coordinates(rank)
        return [
            r for r in range(self.size) if {**self.coordinates(r), axis: 0} == {**here, axis: 0}
        ]


@dataclass(frozen=True)
class Plan:
    """Plan: what to run; `plan.words` parses it from a line of `key=value` words and prints it."""

    layout: Layout
    strategy: Any  # a `core.Strategy`
    merge: str = "all_reduce"
    then: str | None = None  # the merge strategy to change to when `at` is reached
    next_strategy: Any = None
    at: Goal | None = None
    compress: str = "none"
    codec: Any = None  # one of exchange.compression, where compress= names one
    algorithm: str = "native"
    split: str = "auto"  # as the DataLoader says, shuffled otherwise
    batch: int | None = None  # samples of one micro-batch on one rank; None: the task's
    # micro-batches of a rank's batch; None: as many as a pipeline needs, else 1
    micro: int | None = None
    accumulate: int = 1
    epochs: float | None = None
    steps: int | None = None
    until: Goal | None = None  # stop as soon as an evaluation reaches it
    evaluate: str = "epoch"  # or every so many steps besides
    seed: int | None = None
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    batchnorm: Literal["auto", "sync", "local"] = "auto"  # sync where ranks merge every gradient
    clip: float | None = None
    link: Literal["auto", "shared", "gloo", "nccl", "hierarchical"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    ranks_per_gpu: int = 1  # ranks of a host that compute on one card
    # the order in which a pipeline's stages compute
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    # stages of a pipeline: balanced by measurement; graph: any dataflow; or the modules at which a
    # stage begins: a,b,c
    cut: str = "auto"
    # under tensor=: activations between split layers are split along the sequence
    sequence: bool = False
    # what shard= splits: the optimizer's state, gradients too, parameters too
    zero: Literal[1, 2, 3] = 3
    recompute: bool = False  # drop activations, and compute them again in backward
    servers: int = 0  # processes that store tables
    shards: int = 1  # of each server
    server_memory: str | None = None  # of each server, such as 8GiB; None: no limit
    replicas: int = 1  # servers that hold each shard
    # a push is acknowledged when all of them have it, or when the first has it
    ack: Literal["all", "primary"] = "all"
    # when all servers of a shard are lost: end the run, or go on from its last checkpoint
    on_loss: Literal["stop", "restore"] = "stop"
    # where the coordinator keeps its state: None: in the run's directory; or etcd://host:port
    membership: str | None = None
    # least:most replicas: one that dies is left out and replaced; None: then the run ends
    elastic: str | None = None
    respawn: bool = True  # start a process in place of one that died
    # processes started in place of dead ones, or starts of the whole run where it is not elastic,
    # within `restart_window_s`; None: 3 of an elastic run, else 0
    restarts: int | None = None
    restart_window_s: float = 600.0
    spares: int = 0  # processes that wait, ready to take the place of one that dies
    wait_s: float = 60.0  # for replicas to come back, where fewer than the least are left
    grace_s: float = 60.0  # to save and leave, after Ctrl-C, SIGTERM or a notice of preemption
    # a file whose appearance is a notice of preemption, as SIGTERM and SIGUSR1 are
    preempt_file: str | None = None
    stall_s: float = 10.0  # beyond the usual length of a round: then a line names who is stuck
    hang: Literal["wait", "exclude"] = "wait"  # for a rank that hangs
    straggler: Literal["report", "exclude", "rebalance"] = "report"
    # batches whose rows are prefetched while one computes; 0: none
    lookahead: int = 1
    cache: int = 0  # rows of each table that a worker keeps, at most `cache_age` steps old
    cache_age: int = 8
    # rows with this share of a server's accesses are copied to all servers; 0: none
    hot_rows: float = 0.0
    hot_age: float = 0.1  # seconds that such a copy may be old
    # async: rows are updated push by push; sync: those of all ranks and one step together
    embeddings: Literal["async", "sync"] = "async"
    threads: int | None = None
    bucket_mb: float = 8.0
    loaders: int | None = None
    compile: bool = False
    capture: Literal["auto", "off"] = "auto"
    save: str = "epoch"
    keep: int = 3
    best: str | None = None
    log: str | None = None  # loggers, several by +: csv+wandb
    # rows of embeddings in a checkpoint: all, or those that changed since the one before
    save_tables: Literal["full", "incremental"] = "full"
    # of rows that resume under another server optimizer: drop keeps their values alone
    table_state: Literal["keep", "drop"] = "keep"
    timeout_s: float = 600.0
    # without a heartbeat for so long, a worker is taken for dead; None: timeout_s, with elastic=
    # at most 60
    lease_s: float | None = None
    forecast: dict[str, float] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProcessInfo:
    """Process info: rank, world size and host; `launch.environment` reads it from the launcher."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = "localhost"
    started_by: Literal["alone", "manyhands", "torchrun", "slurm", "mpi"] = "alone"
    # which machine and which shared memory; two machines may have one name. "": unknown
    machine: str = field(default="", compare=False)


@dataclass(frozen=True)
class ElasticJob:
    """Elastic job: its processes may die; the launcher replaces them, and keeps its servers."""

    least: int  # processes that must be at work
    respawns: int  # processes that may be started in place of dead ones, within `window_s`
    servers: int
    timeout_s: float
    server_options: Any = None  # a `launch.servers.ServerOptions`
    # of a run between ranks, without servers:
    most: int = 0  # replicas
    inner: int = 1  # ranks of a replica
    window_s: float = 600.0  # within which `respawns` are counted
    spares: int = 0
    wait_s: float = 60.0  # for the least to be there again
    lease_s: float = 10.0  # without a heartbeat for so long, a process is taken for cut off
    directory: str = ""  # of the run
    needs: dict[str, Any] = field(default_factory=dict)  # what a process from outside must have


@dataclass(frozen=True)
class Job:
    """Job: what a launcher starts, `size` processes that each unpickle `payload` and call it."""

    size: int
    payload: bytes
    threads: int | None = None  # of each process; None: the cores divided by the processes
    port: int = 0  # of the rendezvous; 0: any free one
    elastic: ElasticJob | None = None  # None: the job ends with the first process that dies
    grace_s: float = 60.0  # to save and leave, when asked to stop
    preempt_file: str | None = None  # whose appearance is such a request
    preload: tuple[str, ...] = ()  # modules that every process will need


class Launcher(Protocol):
    """Launcher: starts the processes of a job."""

    def launch(self, job: Job) -> dict[str, Any]:
        """Run to the end and return what rank 0 returned.

        Raises LaunchError with the message of the first rank that failed.
        """
        ...
