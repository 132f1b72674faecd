"""What is written down of a run: where it stands, what it is to reach, what happened, and all of it at the end of a round."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor

Tensors = dict[str, Tensor]  # named, same order on every rank, updated in place


@dataclass(frozen=True)
class Position:
    """Where training stands in the data, counted over all ranks: free of how many ranks there are."""

    epoch: int = 0
    offset: int = 0  # samples of this epoch already consumed
    steps: int = 0  # global batches consumed since the start


@dataclass(frozen=True)
class Goal:
    """A number to reach: `accuracy:0.88` is at least that, `-loss:0.3` at most; `epoch:5` and `step:1000` are goals too."""

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
    """All of a run at the end of a round, by parameter name: free of layout, world size and buffers.

    `params` is the one model that the ranks stand for. What is a rank's own (its model where replicas differ, its
    momentum, its error feedback) stands in `ranks` under "<rank>/<kind>/<name>", or "*/..." where all ranks have the same.
    """

    round: int
    params: Tensors
    optimizer: Tensors
    state: Tensors
    position: Position
    rng: Tensors = field(default_factory=dict)  # "<rank>/<generator>" -> bytes
    meta: dict[str, Any] = field(
        default_factory=dict
    )  # plain JSON: hyper-parameters, schedule, scaler, plan
    ranks: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    """One thing that happened on one rank. Text, JSONL, TensorBoard and traces are sinks of the same events."""

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
    """What one rank owns after a split: rows and/or columns of the data; None: all of them."""

    rank: int
    size: int
    rows: Tensor | None = None
    cols: Tensor | None = None


@dataclass(frozen=True)
class Layout:
    """Ranks on named axes. `data` is outermost: neighbours on the inner axes are neighbouring ranks."""

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
    """What to run. One line of `key=value` words resolves to this; `plan.words` parses and prints it."""

    layout: Layout
    strategy: Any  # a `core.Strategy`
    merge: str = "all_reduce"
    then: str | None = None  # the rule to change to when `at` is reached
    next_strategy: Any = None
    at: Goal | None = None
    compress: str = "none"
    codec: Any = None  # one of exchange.compression, where compress= names one
    algorithm: str = "native"
    split: str = "shuffled"
    batch: int | None = None  # samples of one micro-batch on one rank; None: the task's
    micro: int | None = (
        None  # micro-batches that a rank's batch is cut into; None: as many as a pipeline needs, else 1
    )
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
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = (
        "1f1b"  # in which order a pipeline's stages work
    )
    cut: str = "auto"  # of a pipeline: balanced by measurement; graph: any dataflow; or the modules at which a stage begins: a,b,c
    sequence: bool = (
        False  # under tensor=: what lies between split layers is split along the sequence
    )
    zero: Literal[1, 2, 3] = (
        3  # what shard= splits: the optimizer's state, gradients too, parameters too
    )
    recompute: bool = False  # forget activations, and compute them again in backward
    servers: int = 0  # processes that hold tables
    lookahead: int = 1  # batches whose rows are fetched while one computes; 0: each fetches its own when it comes
    cache: int = 0  # rows of each table that a worker keeps, at most `cache_age` steps old
    cache_age: int = 8
    embeddings: Literal["async", "sync"] = (
        "async"  # each rank's rows are updated as it comes, or all ranks' of a step at once
    )
    threads: int | None = None
    bucket_mb: float = 8.0
    loaders: int | None = None
    compile: bool = False
    capture: Literal["auto", "off"] = "auto"
    save: str = "epoch"
    keep: int = 3
    best: str | None = None
    timeout_s: float = 600.0
    forecast: dict[str, float] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProcessInfo:
    """Where this process stands among all processes; `launch.environment` reads it from whoever started us."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = "localhost"
    started_by: Literal["alone", "manyhands", "torchrun", "slurm", "mpi"] = "alone"


@dataclass(frozen=True)
class Job:
    """What a launcher starts: `size` processes that each unpickle `payload` and call it."""

    size: int
    payload: bytes
    threads: int | None = None  # of each process; None: the cores divided by the processes
    port: int = 0  # of the rendezvous; 0: any free one


class Launcher(Protocol):
    def launch(self, job: Job) -> dict[str, Any]:
        """Run to the end and return what rank 0 returned; raise LaunchError with the first failing rank's words."""
        ...
