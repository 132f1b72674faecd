"""Synchronous data parallel training on CPU workers, one thread each, against torch's DDP.

And against the limit: the same number of independent processes that never communicate. All three
train on the same data through the same kind of loop; ours is the whole product path,
`manyhands.train`.
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


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


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
            optimizer=optimizer,
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


def by_hand(model: str, batch: int, steps: int, ddp: bool) -> dict[str, float]:
    """What a careful user writes without us."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = MODELS[model]()
    opt = optimizer(net.parameters())
    wrapped = DistributedDataParallel(net) if ddp else net
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


def peer(model: str, batch: int, workers: int, steps: int, ddp: bool) -> tuple[float, float]:
    body = functools.partial(by_hand, model, batch, steps, ddp)
    found = HostsLauncher().launch(Job(workers, bytes(cloudpickle.dumps(body)), threads=1))
    return found["samples_per_s"], found["peak_mb"]


def measure(quick: bool, only: list[str]) -> list[Claim]:
    table = [
        ("lenet_2", "lenet", 64, 2, 400, 1.15),
        ("mlp64_2", "mlp", 64, 2, 20, 1.3),
        ("mlp16_2", "mlp", 16, 2, 40, 1.5),
        ("lenet_16", "lenet", 64, 16, 200, 2.0),
        ("mlp64_16", "mlp", 64, 16, 15, 2.0),
    ]
    claims, memory = [], []
    for name, model, batch, workers, steps, bar in table:
        if only and name not in only and not (workers == 2 and "memory_2" in only):
            continue
        if cores() < workers:
            claims.append(Claim(name, skipped=f"{workers} cores needed, {cores()} here", bar=bar))
            continue
        steps, times = (5, 1) if quick else (steps, 5 if workers < 16 else 3)
        limit = functools.partial(peer, model, batch, workers, steps, False)
        runs = {
            "ours": functools.partial(ours, model, batch, workers, steps),
            "ddp": functools.partial(peer, model, batch, workers, steps, True),
        }
        # starting many processes takes long: the limit, which is no claim, is then measured once
        found = (
            alternate({**runs, "limit": limit}, times)
            if workers < 16
            else {**alternate(runs, times), "limit": [limit()]}
        )
        speed = {k: median([s for s, _ in v]) for k, v in found.items()}
        peak = {k: median([m for _, m in v]) for k, v in found.items()}
        detail = {
            "independent processes (the limit)": (
                f"{speed['limit']:,.0f} samples/s, "
                f"ours reaches {speed['ours'] / speed['limit']:.2f} of it"
            ),
            "peak memory of rank 0": f"ours {peak['ours']:.0f} MB, DDP {peak['ddp']:.0f} MB",
            "all runs": {k: [round(s) for s, _ in v] for k, v in found.items()},
        }
        claims.append(
            Claim(
                name,
                speed["ours"],
                speed["ddp"],
                "samples/s",
                speed["ours"] / speed["ddp"],
                bar,
                detail,
            )
        )
        if workers == 2:
            memory.append((peak["ddp"] / peak["ours"], peak["ours"], peak["ddp"]))
    if memory:
        ratio, mine, theirs = min(memory)  # the worst of the models
        claims.append(
            Claim(
                "memory_2",
                mine,
                theirs,
                "MB a worker",
                ratio,
                round(1 / 1.1, 3),
                {"worst of": "lenet, mlp64, mlp16 at 2 workers"},
            )
        )
    return claims
