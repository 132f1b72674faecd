"""Stragglers: four workers, one of them five times slower; what a parameter server saves.

Every batch takes its worker 30 ms of pause besides what it computes, and the slow one 150 ms, so
that a machine with few cores measures waiting and not its own load. LeNet on Fashion-MNIST, batch
64 a worker, one server; BSP is `staleness=0`.

    async_vs_bsp        batches computed and applied a second, of `staleness=inf`, against BSP
    quorum_vs_bsp       steps of the model a second, of `quorum=3`, against BSP
    time_to_accuracy    seconds of training until 87% test accuracy, of `staleness=inf`, against
                        `merge=all_reduce`, which has no server, with the same slow worker,
                        optimizer and learning rate; evaluations count for neither
"""

from __future__ import annotations

import functools
import tempfile
import time
from pathlib import Path

import torch
from common import Claim, alternate, median
from torch import Tensor, nn

import manyhands as mh
from manyhands import datasets
from manyhands.core import Event
from manyhands.launch.environment import place
from manyhands.observe import events

WORKERS, SLOW, BATCH = 4, 3, 64
PAUSE_S, SLOWER = 0.03, 5
TARGET = 0.87
PLANS = {
    "bsp": "servers=1 staleness=0",
    "async": "servers=1 staleness=inf",
    "quorum": "servers=1 quorum=3",
}


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def paused(output: Tensor, target: Tensor) -> Tensor:
    """The loss; in training it takes its worker's time."""
    if torch.is_grad_enabled():
        time.sleep(PAUSE_S * (SLOWER if place().rank == SLOW else 1))
    return nn.functional.cross_entropy(output, target)


def task(tested: bool) -> mh.Task:
    _, train, test = datasets.images()
    return mh.Task(
        model=lenet,
        loss=paused,
        train=train,
        test=test if tested else None,
        metrics={"accuracy": mh.accuracy} if tested else {},
        batch=BATCH,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    )


def trained(words: str, tested: bool) -> list[Event]:
    with tempfile.TemporaryDirectory() as folder:
        plan = f"data={WORKERS} threads=1 device=cpu save=off {words}"
        mh.train(functools.partial(task, tested), plan, directory=f"{folder}/run", quiet=True)
        return events.read(Path(folder) / "run")


def rounds_per_s(words: str) -> dict[int, float]:
    """Of every worker, while all of them are at work."""
    found: dict[int, list[Event]] = {r: [] for r in range(WORKERS)}
    for event in trained(words, tested=False):
        if event.name == "round":
            found[event.rank].append(event)
    start = max(rounds[len(rounds) // 5].time_s for rounds in found.values())  # everybody is warm
    end = min(rounds[-1].time_s for rounds in found.values())
    return {
        r: sum(start <= e.time_s < end for e in rounds) / (end - start)
        for r, rounds in found.items()
    }


def seconds_to_target(words: str) -> tuple[float | None, float, int]:
    """Seconds of training until the target was reached, the best accuracy, and evaluations."""
    happened = trained(f"{words} until=accuracy:{TARGET}", tested=True)
    start = min(e.time_s for e in happened if e.name == "round")
    evaluations = [
        e for e in happened if e.name == "evaluate" and e.rank == 0 and isinstance(e.value, dict)
    ]
    accuracies = [e.value["accuracy"] for e in evaluations if isinstance(e.value, dict)]
    reached = next((i for i, a in enumerate(accuracies) if a >= TARGET), None)
    if reached is None:
        return None, max(accuracies, default=0.0), len(evaluations)
    before = sum(e.seconds for e in evaluations[:reached])
    return evaluations[reached].time_s - start - before, max(accuracies), len(evaluations)


def measure(quick: bool, only: list[str]) -> list[Claim]:
    claims = []
    chosen = [name for name in ("async", "quorum") if not only or f"{name}_vs_bsp" in only]
    if chosen:
        claims += _speeds(quick, chosen)
    if not only or "time_to_accuracy" in only:
        claims.append(_accuracy(quick))
    return claims


def _speeds(quick: bool, chosen: list[str]) -> list[Claim]:
    clocks = 10 if quick else 60
    steps = {
        "bsp": clocks,
        "async": 8 * clocks,
        "quorum": 8 * clocks,
    }  # of all workers, or each of one
    runs = {
        name: functools.partial(rounds_per_s, f"{PLANS[name]} steps={steps[name]}")
        for name in ("bsp", *chosen)
    }
    found = alternate(runs, 1 if quick else 3)
    claims = []
    for name, bar in (("async", 2.5), ("quorum", 2.0)):
        if name not in chosen:
            continue
        # a fast worker takes part in every step of the model; asynchronous, each batch of anybody
        # is one
        of = (lambda rates: sum(rates.values())) if name == "async" else (lambda rates: rates[0])
        all_runs = {k: [round(of(rates), 1) for rates in found[k]] for k in (name, "bsp")}
        ours, peer = median([of(r) for r in found[name]]), median([of(r) for r in found["bsp"]])
        unit = "batches/s" if name == "async" else "steps/s"
        detail = {
            "plan": PLANS[name],
            "all runs": all_runs,
            "slow worker, rounds/s": [round(r[SLOW], 1) for r in found[name]],
        }
        claims.append(Claim(f"{name}_vs_bsp", ours, peer, unit, ours / peer, bar, detail))
    return claims


def _accuracy(quick: bool) -> Claim:
    # a step of the one is four batches, of the other one: evaluated equally often, the same number
    # of samples at most
    every, most = (5, 10) if quick else (50, 2400)
    plans = {
        "ours": f"{PLANS['async']} evaluate={WORKERS * every} steps={WORKERS * most}",
        "all_reduce": f"evaluate={every} steps={most}",
    }
    found = {name: seconds_to_target(words) for name, words in plans.items()}
    ours, peer = found["ours"][0], found["all_reduce"][0]
    told = {
        name: f"best accuracy {best:.4f} in {count} evaluations"
        for name, (_, best, count) in found.items()
    }
    detail = {"plan": PLANS["async"], **told}
    ratio = peer / ours if ours and peer else 0.0  # not reached: no ratio
    return Claim("time_to_accuracy", ours or 0.0, peer or 0.0, "s to 87%", ratio, 1.0, detail)
