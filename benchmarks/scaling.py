"""Scaling on one machine: samples/s at 1, 2, 4, 8 and 16 workers, and where a step's time goes.

    lenet_N, mlp_N      data=N, N workers against N times one worker: the efficiency
    click_NwSs          the click model (examples/click.py), N workers and S servers, against one
                        worker and one server: the speed-up

A batch has 64 samples a worker (click: 512 a worker), one thread each. As many workers and servers
run as the machine has cores. `parts` splits a step of all workers, in ms:

    compute     the step of independent processes, as many at once: what the machine itself allows
    copy        in exchanges, by the rank that waits least in a round: nobody keeps it waiting
    wait        in exchanges beyond that, on average over ranks
    python      the rest: the loop around it
"""

from __future__ import annotations

import dataclasses
import functools
import runpy
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import data_parallel
from common import Claim, cores, median
from peers import tuning
from sparse import BATCH, EXAMPLE, WARM, Timed
from torch.nn.functional import cross_entropy

import manyhands as mh
from manyhands import datasets
from manyhands.observe.events import read

SIZES = (1, 2, 4, 8, 16)
STEPS = {"lenet": 300, "mlp": 20, "click": 300}
CLICK = [(1, 1), (2, 1), (4, 2), (8, 4), (12, 4)]  # workers, servers
BARS = {"lenet_16": 0.88, "click_8w4s": 6.5, "click_12w4s": 8.5}
EXCHANGES = {"all_reduce", "reduce_scatter", "all_gather", "barrier", "pull", "push", "flush"}


def dense(model: str, steps: int) -> mh.Task:
    first = data_parallel.WARM
    return mh.Task(
        model=data_parallel.MODELS[model](),
        loss=cross_entropy,
        train=datasets.images()[1],
        optimizer=functools.partial(tuning.sgd, how=tuning.AS_WRITTEN),
        batch=64,
        callbacks=(data_parallel.Timed(first, first + steps),),
    )


def click(steps: int) -> mh.Task:
    task = runpy.run_path(str(EXAMPLE))["task"]()
    timed = Timed(task, WARM, WARM + steps)
    return dataclasses.replace(
        task, test=None, metrics={}, batch=BATCH // 2, epochs=1000.0, callbacks=(timed,)
    )


def train(kind: str, workers: int, servers: int, steps: int) -> tuple[float, dict[str, float]]:
    """Samples/s, and milliseconds of a step by part."""
    make = functools.partial(
        click if kind == "click" else dense, *((steps,) if kind == "click" else (kind, steps))
    )
    first = WARM if kind == "click" else data_parallel.WARM
    batch = BATCH // 2 if kind == "click" else 64
    served = f"servers={servers}" if servers else ""
    words = f"data={workers} threads=1 steps={first + steps} save=off device=cpu {served}"
    with tempfile.TemporaryDirectory() as folder:
        found = mh.train(make, words, directory=f"{folder}/run", quiet=True).metrics
        parts = exchange_parts(Path(folder) / "run", first)
    parts["step"] = 1e3 * found["seconds"] / steps
    return steps * batch * workers / found["seconds"], parts


def exchange_parts(run: Path, first: int) -> dict[str, float]:
    """Milliseconds a step in exchanges: of the rank that waits least, and beyond it on average."""
    spent: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for event in read(run):
        if event.name in EXCHANGES and event.round > first:
            spent[event.round][event.rank] += event.seconds
    whole = [list(of.values()) for of in spent.values()]
    if not whole:
        return {"copy": 0.0, "wait": 0.0}
    least = sum(min(of) for of in whole) / len(whole)
    mean = sum(sum(of) / len(of) for of in whole) / len(whole)
    return {"copy": 1e3 * least, "wait": 1e3 * (mean - least)}


def measure(quick: bool, only: list[str]) -> list[Claim]:
    claims = []
    with tuning.loopback_control():
        for model in ("lenet", "mlp"):
            claims += _dense(model, quick, only)
        claims += _click(quick, only)
    return claims


def _dense(model: str, quick: bool, only: list[str]) -> list[Claim]:
    names = {size: f"{model}_{size}" for size in SIZES}
    wanted = [size for size in SIZES if not only or names[size] in only]
    steps, times = (5, 1) if quick else (STEPS[model], 3)
    claims: list[Claim] = []
    alone = None
    for size in wanted:
        if size > cores():
            reason = f"{size} cores needed, {cores()} here"
            claims.append(Claim(names[size], skipped=reason))
            continue
        if alone is None:
            alone = median([train(model, 1, 0, steps)[0] for _ in range(times)])
        found = [train(model, size, 0, steps) for _ in range(times)]
        limit = data_parallel.peer(model, 64, size, steps, False, tuning.TUNED)[0]
        speed = median([s for s, _ in found])
        claims.append(_claim(names[size], speed, alone * size, limit, 64 * size, found[-1][1]))
    return claims


def _claim(
    name: str, speed: float, ideal: float, limit: float, samples: int, parts: dict[str, float]
) -> Claim:
    compute = 1e3 * samples / limit
    rest = max(0.0, parts["step"] - compute - parts["copy"] - parts["wait"])
    told = {"compute": compute, **parts, "python": rest}
    detail = {
        "parts, ms": ", ".join(f"{k} {v:.2f}" for k, v in told.items()),
        "of independent processes": f"{speed / limit:.2f}",
    }
    return Claim(name, speed, ideal, "samples/s", speed / ideal, BARS.get(name, 0.0), detail)


def _click(quick: bool, only: list[str]) -> list[Claim]:
    steps, times = (5, 1) if quick else (STEPS["click"], 3)
    claims: list[Claim] = []
    alone: float | None = None
    for workers, servers in CLICK:
        name = f"click_{workers}w{servers}s"
        if only and name not in only:
            continue
        if workers + servers > cores():
            reason = f"{workers + servers} cores needed, {cores()} here"
            claims.append(Claim(name, skipped=reason))
            continue
        if alone is None:
            alone = median([train("click", 1, 1, steps)[0] for _ in range(times)])
        found = [train("click", workers, servers, steps) for _ in range(times)]
        speed, parts = median([s for s, _ in found]), found[-1][1]
        detail = {"parts, ms": ", ".join(f"{k} {v:.2f}" for k, v in parts.items())}
        ratio = speed / alone
        bar = BARS.get(name, 0.0)
        claims.append(Claim(name, speed, alone, "samples/s", ratio, bar, detail))
    return claims


def draw(found: dict[str, Any], path: Path) -> None:
    """Speed-up over workers, beside the ideal."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.2), layout="constrained")
    axes = figure.subplots()
    points: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for claim in found["claims"]:
        if "skipped" in claim:
            continue
        kind, _, size = claim["name"].partition("_")
        workers = int(size.partition("w")[0])
        gain = claim["ratio"] * (1 if kind == "click" else workers)
        points[kind].append((workers, gain))
    for kind, of in points.items():
        axes.plot(*zip(*sorted(of), strict=True), marker="o", label=kind)
    most = max((w for of in points.values() for w, _ in of), default=1)
    axes.plot([1, most], [1, most], color="grey", linestyle=":", label="ideal")
    axes.set(xlabel="workers", ylabel="times one worker", title="Samples/s over workers")
    axes.legend()
    figure.savefig(path, dpi=120)
