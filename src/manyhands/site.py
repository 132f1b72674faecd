"""Where one rank stands before there is a model: its device, its link to the others, the run's directory and recorder."""

from __future__ import annotations

import contextlib
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

from manyhands.core import Event, Group, Place, Plan
from manyhands.errors import PlanError
from manyhands.exchange import collective, hierarchical
from manyhands.exchange.observed import Observed
from manyhands.exchange.shared import SharedGroup
from manyhands.exchange.solo import SoloGroup
from manyhands.launch.memory import keep_freed_memory
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
    stands_for: int = 1  # verify: this one rank takes the union of so many ranks' batches as one batch
    base: str = "runs"
    callbacks: tuple[Callback, ...] = field(default=(), metadata={"json": False})


@dataclass
class Site:
    """This rank's surroundings: everything that exists before the model does."""

    place: Place
    plan: Plan
    options: Options
    store: dist.Store
    device: torch.device
    link: Observed
    allocate: Callable[[int, torch.dtype], Tensor]
    directory: Path
    recorder: Recorder
    checkpoints: Checkpoints
    owner: Any
    link_name: str
    closing: list[Callable[[], None]] = field(default_factory=list)  # what the run has opened since: loader processes, servers
    fate: Callable[[], str] = str  # what became of servers that this rank had started and that are gone; "": nothing

    @property
    def rank(self) -> int:
        return self.place.rank

    def notice(self, text: str) -> None:
        if self.rank == 0:
            self.recorder.emit(Event(time.time(), 0, self.link.round, "notice", value=text))

    def close(self) -> None:
        with contextlib.ExitStack() as rest:  # what fails to close keeps nothing else open
            if self.owner is not None:
                rest.callback(self.owner.close)
                self.owner = None
            for close in reversed([*self.closing, self.checkpoints.wait, self.recorder.close, self.link.close]):
                rest.callback(close)
            self.closing.clear()


def open_site(plan: Plan, place: Place, store: dist.Store, options: Options) -> Site:
    device = choose_device(plan, place)
    if device.type == "cpu":
        keep_freed_memory()
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    owner, path = _open_directory(place, store, options, plan.timeout_s)
    sinks = _sinks(path, place, options)
    recorder = Recorder(path, place.rank, sinks)
    inner, link_name = connect(plan, place, store, device)
    link = Observed(inner, recorder.emit)
    in_shared_memory = getattr(inner, "allocate", None)

    def allocate(numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=device) if in_shared_memory is None else in_shared_memory(numel, dtype)

    def report(name: str, seconds: float, nbytes: int, text: str) -> None:
        if place.rank == 0:
            recorder.emit(Event(time.time() - seconds, 0, link.round, name, seconds, nbytes, text))

    checkpoints = Checkpoints(path / "checkpoints", plan.keep, plan.best, report)
    return Site(place, plan, options, store, device, link, allocate, path, recorder, checkpoints, owner, link_name)


def connect(plan: Plan, place: Place, store: dist.Store, device: torch.device) -> tuple[Group, str]:
    """The fastest link that joins all ranks, or the one the plan names."""
    if place.size == 1:
        return SoloGroup(), "none"
    hosts = _gather(store, "host", place, place.host, plan.timeout_s)
    one_host, shares = len(set(hosts)) == 1, len(set(hosts)) < place.size
    kind = plan.link
    if kind == "auto":
        kind = "nccl" if device.type == "cuda" else "shared" if one_host else "hierarchical" if shares else "gloo"
    if kind == "shared" and not one_host:
        raise PlanError(
            f"link=shared joins processes of one host, but there are {len(set(hosts))}: {', '.join(sorted(set(hosts)))}; set link=hierarchical"
        )
    if kind == "nccl" and device.type != "cuda":
        raise PlanError("link=nccl moves bytes between GPUs, but this rank computes on the CPU; set link=auto")
    prefixed = dist.PrefixStore(f"link/{kind}", store)
    if kind == "shared":
        return SharedGroup(place.rank, place.size, prefixed, timeout_s=plan.timeout_s), kind
    if kind == "hierarchical":
        return hierarchical.connect(place.rank, place.size, hosts, prefixed, plan.timeout_s), kind
    return collective.connect(place.rank, place.size, prefixed, kind, plan.timeout_s, device), kind


def choose_device(plan: Plan, place: Place) -> torch.device:
    if plan.device == "cpu" or (plan.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise PlanError("device=cuda, but torch sees no GPU here; set device=cpu or install a CUDA build of torch")
    if place.local_rank >= torch.cuda.device_count():
        raise PlanError(
            f"{place.local_size} ranks on this host, but torch sees {torch.cuda.device_count()} GPUs; one rank a GPU is needed: "
            f"set data={torch.cuda.device_count()} or device=cpu"
        )
    torch.cuda.set_device(place.local_rank)
    # everything runs on one stream of our own: what is to be captured must not touch the default stream
    torch.cuda.set_stream(torch.cuda.Stream())
    return torch.device("cuda", place.local_rank)


# -- run directory and sinks --


def _open_directory(place: Place, store: dist.Store, options: Options, timeout_s: float) -> tuple[Any, Path]:
    """Rank 0 chooses and owns it, and tells the others; if it cannot, all of them hear why."""
    if place.rank == 0:
        try:
            path = directory.choose(Path(options.base), options.name, options.directory, options.resume)
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


def _sinks(path: Path, place: Place, options: Options) -> list[Sink]:
    if place.rank != 0:
        return []
    sinks: list[Sink] = []
    if not options.quiet:
        from manyhands.observe.progress import Progress

        sinks.append(Progress(sys.stdout))
    if options.tensorboard:
        from manyhands.observe.tensorboard import TensorBoard

        sinks.append(TensorBoard(path))
    return sinks


def _gather(store: dist.Store, key: str, place: Place, value: str, timeout_s: float) -> list[str]:
    store.set(f"{key}/{place.rank}", value)
    keys = [f"{key}/{r}" for r in range(place.size)]
    store.wait(keys, timedelta(seconds=timeout_s))
    return [store.get(k).decode() for k in keys]
