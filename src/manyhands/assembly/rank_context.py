"""Where one rank stands before there is a model: its device, its link to the others, the run's directory and recorder."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.core import (
    Event,
    Group,
    Layout,
    Plan,
    ProcessInfo,
    Tensors,
)
from manyhands.errors import PlanError
from manyhands.exchange import collective, hierarchical
from manyhands.exchange.observed import ObservedGroup
from manyhands.exchange.shared import SharedGroup
from manyhands.exchange.solo import SoloGroup
from manyhands.launch.malloc import keep_freed_memory
from manyhands.observe.events import Recorder, Sink
from manyhands.recover import directory
from manyhands.recover.checkpoint import Checkpoints
from manyhands.task import Callback


@dataclass(frozen=True)
class Options:
    """What a run is called and where it leaves its traces; nothing here changes a number."""

    name: str = "run"
    directory: str | None = None
    resume: bool = False
    tensorboard: bool = False
    quiet: bool = False
    float64: bool = False
    anyway: bool = False  # also where memory will not do by forecast
    stands_for: int = (
        1  # verify: this one rank takes the union of so many ranks' batches as one batch
    )
    base: str = "runs"
    callbacks: tuple[Callback, ...] = field(default=(), metadata={"json": False})


@dataclass
class RankContext:
    """This rank's surroundings: everything that exists before the model does."""

    process: ProcessInfo
    plan: Plan
    options: Options
    store: dist.Store
    device: torch.device
    link: ObservedGroup  # between all ranks
    axes: dict[
        str, ObservedGroup
    ]  # between ranks that differ along one axis of the layout only: data, shard, pipe, tensor
    directory: Path
    recorder: Recorder
    checkpoints: Checkpoints
    owner: Any
    link_name: str
    closing: list[Callable[[], None]] = field(
        default_factory=list
    )  # what the run has opened since: loader processes, servers
    fate: Callable[[], str] = (
        str  # what became of servers that this rank had started and that are gone; "": nothing
    )

    @property
    def rank(self) -> int:
        return self.process.rank

    @property
    def merging(self) -> ObservedGroup:
        """Between replicas: the ranks that hold the same of the model."""
        return self.axes["data"]

    @property
    def feeds(self) -> int:
        """How many ranks, or groups of ranks that share a model, have data of their own."""
        return self.plan.layout.data * self.plan.layout.shard

    @property
    def feed(self) -> int:
        where = self.plan.layout.coordinates(self.rank)
        return where["data"] * self.plan.layout.shard + where["shard"]

    @property
    def stream(self) -> int:
        """Which random numbers are this rank's: those who split matrices among them draw the same."""
        return self.rank - self.plan.layout.coordinates(self.rank)["tensor"]

    @property
    def speaks(self) -> bool:
        """Whether this rank is the one that counts of those who share a model: it has the model's output."""
        where = self.plan.layout.coordinates(self.rank)
        first = where["tensor"] == 0 and (where["shard"] == 0 or not self.gathers)
        return first and where["pipe"] == self.plan.layout.pipe - 1

    @property
    def gathers(self) -> bool:
        """Whether ranks of the shard axis must run the model together: parameters come from peers when they are wanted."""
        return (
            self.axes["shard"].size > 1
            and self.plan.zero == 3
            and not isinstance(self.axes["shard"].group, SharedGroup)
        )

    @property
    def evaluates(self) -> tuple[int, int]:
        """Which part of the test data is this rank's, of how many."""
        return (self.merging.rank, self.merging.size) if self.gathers else (self.feed, self.feeds)

    def sum_over_feeds(self, values: Tensors) -> None:
        for axis in ("shard", "data"):
            if self.axes[axis].size > 1:
                self.axes[axis].all_reduce(values).wait()

    def mean_over_feeds(self, values: Tensors) -> None:
        for axis in ("shard", "data"):
            if self.axes[axis].size > 1:
                self.axes[axis].all_reduce(values, op="mean").wait()

    def micro_batch(self, batch: int) -> int:
        """How many samples of a rank's batch are computed at once."""
        union = self.options.stands_for
        return union * -(-(batch // union) // micro_batches(self.plan))

    @property
    def divided(self) -> bool:
        """Whether the model is split over ranks."""
        return self.process.size > self.plan.layout.data

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros, where replicas can merge them fastest."""
        return self.merging.allocate(numel, dtype, self.device)

    def notice(self, text: str) -> None:
        if self.rank == 0:
            self.recorder.emit(Event(time.time(), 0, self.link.round, "notice", value=text))

    def close(self) -> None:
        with contextlib.ExitStack() as rest:  # what fails to close keeps nothing else open
            if self.owner is not None:
                rest.callback(self.owner.close)
                self.owner = None
            links = {id(link): link.close for link in (*self.axes.values(), self.link)}
            for close in reversed(
                [*self.closing, self.checkpoints.wait, self.recorder.close, *links.values()]
            ):
                rest.callback(close)
            self.closing.clear()


def micro_batches(plan: Plan) -> int:
    """Into how many a rank's batch is cut; a pipeline needs several for all of its stages to work at the same time."""
    return plan.micro or (4 * plan.layout.pipe if plan.layout.pipe > 1 else 1)


def open_rank_context(
    plan: Plan, process: ProcessInfo, store: dist.Store, options: Options
) -> RankContext:
    device = choose_device(plan, process)
    if device.type == "cpu":
        keep_freed_memory()
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    owner, path = _open_directory(process, store, options, plan.timeout_s)
    sinks = _sinks(path, process, options)
    recorder = Recorder(path, process.rank, sinks)
    inner, link_name = connect(plan, process, store, device)
    link = ObservedGroup(inner, recorder.emit)
    axes = {axis: _axis(plan, process, store, device, link, axis) for axis in Layout.AXES}

    def report(name: str, seconds: float, nbytes: int, text: str) -> None:
        if process.rank == 0:
            recorder.emit(Event(time.time() - seconds, 0, link.round, name, seconds, nbytes, text))

    checkpoints = Checkpoints(path / "checkpoints", plan.keep, plan.best, report)
    return RankContext(
        process,
        plan,
        options,
        store,
        device,
        link,
        axes,
        path,
        recorder,
        checkpoints,
        owner,
        link_name,
    )


def _axis(
    plan: Plan,
    process: ProcessInfo,
    store: dist.Store,
    device: torch.device,
    link: ObservedGroup,
    axis: str,
) -> ObservedGroup:
    peers = plan.layout.peers(process.rank, axis)
    if len(peers) == process.size:
        return link
    if len(peers) == 1:
        return ObservedGroup(SoloGroup(), link.emit, beside=link)
    among = dataclasses.replace(process, rank=peers.index(process.rank), size=len(peers))
    inner, _ = connect(plan, among, dist.PrefixStore(f"{axis}/{peers[0]}", store), device)
    return ObservedGroup(inner, link.emit, beside=link)


def connect(
    plan: Plan, process: ProcessInfo, store: dist.Store, device: torch.device
) -> tuple[Group, str]:
    """The fastest link that joins all ranks, or the one the plan names."""
    if process.size == 1:
        return SoloGroup(), "none"
    hosts = _gather(store, "host", process, process.host, plan.timeout_s)
    one_host, shares = len(set(hosts)) == 1, len(set(hosts)) < process.size
    kind = plan.link
    if kind == "auto":
        kind = (
            "nccl"
            if device.type == "cuda"
            else "shared"
            if one_host
            else "hierarchical"
            if shares
            else "gloo"
        )
    if kind == "shared" and not one_host:
        raise PlanError(
            f"link=shared joins processes of one host, but there are {len(set(hosts))}: {', '.join(sorted(set(hosts)))}; set link=hierarchical"
        )
    if kind == "nccl" and device.type != "cuda":
        raise PlanError(
            "link=nccl moves bytes between GPUs, but this rank computes on the CPU; set link=auto"
        )
    prefixed = dist.PrefixStore(f"link/{kind}", store)
    if kind == "shared":
        return SharedGroup(process.rank, process.size, prefixed, timeout_s=plan.timeout_s), kind
    if kind == "hierarchical":
        return hierarchical.connect(
            process.rank, process.size, hosts, prefixed, plan.timeout_s
        ), kind
    return collective.connect(
        process.rank, process.size, prefixed, kind, plan.timeout_s, device
    ), kind


def choose_device(plan: Plan, process: ProcessInfo) -> torch.device:
    if plan.device == "cpu" or (plan.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise PlanError(
            "device=cuda, but torch sees no GPU here; set device=cpu or install a CUDA build of torch"
        )
    if process.local_rank >= torch.cuda.device_count():
        raise PlanError(
            f"{process.local_size} ranks on this host, but torch sees {torch.cuda.device_count()} GPUs; one rank a GPU is needed: "
            f"set data={torch.cuda.device_count()} or device=cpu"
        )
    torch.cuda.set_device(process.local_rank)
    # everything runs on one stream of our own: what is to be captured must not touch the default stream
    torch.cuda.set_stream(torch.cuda.Stream())
    return torch.device("cuda", process.local_rank)


# -- run directory and sinks --


def _open_directory(
    process: ProcessInfo, store: dist.Store, options: Options, timeout_s: float
) -> tuple[Any, Path]:
    """Rank 0 chooses and owns it, and tells the others; if it cannot, all of them hear why."""
    if process.rank == 0:
        try:
            path = directory.choose(
                Path(options.base), options.name, options.directory, options.resume
            )
            owner = directory.claim(path)
        except Exception as e:
            store.set("directory", json.dumps({"error": str(e)}))
            raise
        store.set("directory", json.dumps({"path": str(path)}))
        return owner, path
    store.wait(["directory"], timedelta(seconds=timeout_s))
    answer = json.loads(store.get("directory"))
    if "error" in answer:
        raise PlanError(answer["error"])
    return None, Path(answer["path"])


def _sinks(path: Path, process: ProcessInfo, options: Options) -> list[Sink]:
    if process.rank != 0:
        return []
    sinks: list[Sink] = []
    if not options.quiet:
        from manyhands.observe.progress import Progress

        sinks.append(Progress(sys.stdout))
    if options.tensorboard:
        from manyhands.observe.tensorboard import TensorBoard

        sinks.append(TensorBoard(path))
    return sinks


def _gather(
    store: dist.Store, key: str, process: ProcessInfo, value: str, timeout_s: float
) -> list[str]:
    store.set(f"{key}/{process.rank}", value)
    keys = [f"{key}/{r}" for r in range(process.size)]
    store.wait(keys, timedelta(seconds=timeout_s))
    return [store.get(k).decode() for k in keys]
