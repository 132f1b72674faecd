"""Synchronous data parallel training on CPU workers, one thread each, against torch's DDP.

And against the limit: the same number of independent processes that never communicate. All train
on the same data through the same kind of loop; ours is the whole product path, `manyhands.train`.
DDP is measured twice: as people write it, and tuned as ours tunes itself (`peers/tuning.py`).
Claims are against the tuned one, and the limit is tuned alike.
"""

from __future__ import annotations

import functools
import resource
import tempfile
import time
from typing import Any

import cloudpickle
import torch
from common import Claim, alternate, cores, median
from peers import tuning
from peers.tuning import AS_WRITTEN, TUNED
from torch import nn
from torch.nn.functional import cross_entropy

import manyhands as mh
from manyhands import datasets
from manyhands.core import Job
from manyhands.launch.hosts import HostsLauncher


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 4096),
        nn.ReLU(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, 10),
    )


MODELS = {"lenet": lenet, "mlp": mlp}
WARM = 5


class Timed(mh.Callback):
    """Seconds between two rounds, and this rank's largest memory at the second one."""

    def __init__(self, first: int, last: int):
        self.first, self.last = first, last

    def on_round(self, run: Any, round: int, loss: Any) -> None:
        if round == self.first:
            self.start = time.perf_counter()
        if round == self.last:
            self.found = {"seconds": time.perf_counter() - self.start, "peak_mb": peak_mb()}
            run.trainer.metrics = self.found

    def on_epoch(self, run: Any, epoch: int, metrics: Any) -> None:
        run.trainer.metrics = getattr(
            self, "found", {}
        )  # where the last round ends an epoch, its evaluation came after


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ours(model: str, batch: int, workers: int, steps: int) -> tuple[float, float]:
    def task() -> mh.Task:
        return mh.Task(
            model=MODELS[model](),
            loss=cross_entropy,
            train=datasets.images()[1],
            optimizer=functools.partial(tuning.sgd, how=AS_WRITTEN),  # ours fuses it itself
            batch=batch,
        )

    with tempfile.TemporaryDirectory() as folder:
        words = f"data={workers} threads=1 steps={WARM + steps} save=off device=cpu"
        result = mh.train(
            task,
            words,
            directory=f"{folder}/run",
            quiet=True,
            callbacks=(Timed(WARM, WARM + steps),),
        )
    return steps * batch * workers / result.metrics["seconds"], result.metrics["peak_mb"]


def by_hand(model: str, batch: int, steps: int, ddp: bool, how: str) -> dict[str, float]:
    """What a careful user writes without us."""
    import torch.distributed as dist

    tuning.settle(how)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = MODELS[model]()
    opt = tuning.sgd(net.parameters(), how)
    wrapped = tuning.ddp(net, how) if ddp else net
    x, y = datasets.images()[1]
    order, at = torch.randperm(len(x)), rank * batch
    start = 0.0
    for step in range(WARM + steps):
        if step == WARM:
            dist.barrier()
            start = time.perf_counter()
        if at + batch > len(x):
            order, at = torch.randperm(len(x)), rank * batch
        index = order[at : at + batch]
        at += batch * size
        opt.zero_grad()
        cross_entropy(wrapped(x.index_select(0, index)), y.index_select(0, index)).backward()
        opt.step()
    dist.barrier()
    seconds = time.perf_counter() - start
    found = {"samples_per_s": steps * batch * size / seconds, "peak_mb": peak_mb()}
    dist.destroy_process_group()
    return found


def peer(
    model: str, batch: int, workers: int, steps: int, ddp: bool, how: str
) -> tuple[float, float]:
    body = functools.partial(by_hand, model, batch, steps, ddp, how)
    found = HostsLauncher().launch(Job(workers, bytes(cloudpickle.dumps(body)), threads=1))
    return found["samples_per_s"], found["peak_mb"]


# name: model, batch a worker, workers, steps; the bar against tuned DDP, and of the tuned limit
TABLE = {
    "lenet_2": ("lenet", 64, 2, 400, 1.3, 0.93),
    "mlp64_2": ("mlp", 64, 2, 20, 1.45, 0.98),
    "mlp16_2": ("mlp", 16, 2, 40, 1.8, 0.85),
    "lenet_16": ("lenet", 64, 16, 200, 2.0, 0.88),
    "mlp64_16": ("mlp", 64, 16, 15, 2.2, None),
}


def measure(quick: bool, only: list[str]) -> list[Claim]:
    claims: list[Claim] = []
    memory: list[tuple[float, float, float]] = []
    with tuning.loopback_control() as control:
        for name, row in TABLE.items():
            limited = f"{name}_of_limit"
            if only and not {name, limited} & {*only} and not (row[2] == 2 and "memory_2" in only):
                continue
            if cores() < row[2]:
                reason = f"{row[2]} cores needed, {cores()} here"
                claims.append(Claim(name, skipped=reason, bar=row[4]))
                continue
            claims += _of(name, row, quick, control, memory)
    if memory:
        ratio, mine, theirs = min(memory)  # the worst of the models
        worst = {"worst of": "lenet, mlp64, mlp16 at 2 workers, against DDP as written"}
        bar = round(1 / 1.1, 3)
        claims.append(Claim("memory_2", mine, theirs, "MB a worker", ratio, bar, worst))
    return claims


def _of(
    name: str, row: tuple[Any, ...], quick: bool, control: str, memory: list[Any]
) -> list[Claim]:
    model, batch, workers, steps, bar, of_limit = row
    steps, times = (5, 1) if quick else (steps, 5 if workers < 16 else 3)
    by = functools.partial(peer, model, batch, workers, steps)
    runs = {
        "ours": functools.partial(ours, model, batch, workers, steps),
        "ddp": functools.partial(by, True, TUNED),
    }
    others = {
        "ddp as written": functools.partial(by, True, AS_WRITTEN),
        "limit": functools.partial(by, False, TUNED),
    }
    # starting many processes takes long: what is no claim is then measured once
    found = (
        alternate({**runs, **others}, times)
        if workers < 16
        else {**alternate(runs, times), **{k: [run()] for k, run in others.items()}}
    )
    speed = {k: median([s for s, _ in v]) for k, v in found.items()}
    peak = {k: median([m for _, m in v]) for k, v in found.items()}
    mine, theirs, limit = speed["ours"], speed["ddp"], speed["limit"]
    detail = {
        "DDP as people write it": (
            f"{speed['ddp as written']:,.0f} samples/s, ratio {mine / speed['ddp as written']:.2f}"
        ),
        "independent processes, tuned (the limit)": (
            f"{limit:,.0f} samples/s, ours reaches {mine / limit:.2f} of it"
        ),
        "peak memory of rank 0": ", ".join(f"{k} {mb:.0f} MB" for k, mb in peak.items()),
        "congestion control": control,
        "all runs": {k: [round(s) for s, _ in v] for k, v in found.items()},
    }
    if workers == 2:
        written = peak["ddp as written"]
        memory.append((written / peak["ours"], peak["ours"], written))
    claims = [Claim(name, mine, theirs, "samples/s", mine / theirs, bar, detail)]
    if of_limit is not None:
        claims.append(Claim(f"{name}_of_limit", mine, limit, "samples/s", mine / limit, of_limit))
    return claims
