"""Two hosts with one worker each, joined by a slow network (`manyhands lab`), against torch's DDP.

    samples_1gbit       samples/s of an MLP of 20M parameters, batch 64 a worker, at 1 Gbit/s;
                        medians of alternating runs
    accuracy_1gbit      seconds of training until 88% test accuracy on Fashion-MNIST,
                        MLP 784-2048-2048-10, batch 64 a worker, three seeds
    accuracy_200mbit    the same at 200 Mbit/s

All train the same task through `manyhands race` in the same lab, plan after plan. DDP is measured
as people write it and with each of torch's own remedies that work over gloo: gradients in fp16,
PowerSGD, PostLocalSGD. The claims are against the fastest of them, by three seeds. Which one that
is, and what the others take, one seed tells: samples to the target by whole runs at 1 Gbit/s, which
the rate of the network does not change, over the samples/s of a short run at the rate in question.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import Claim, median
from peers import tuning

OURS = "merge=local_sgd merge.period=16 compress=int8"
HOOKS = ["ddp compress=fp16", "ddp compress=powersgd", "ddp merge=local_sgd merge.period=16"]
TASK = """
import torch
from torch import nn
import manyhands as mh
from manyhands import datasets

def task():
    _, train, (x, y) = datasets.images()
    return mh.Task(
        model=nn.Sequential(
            nn.Flatten(), nn.Linear(784, {width}), nn.ReLU(),
            nn.Linear({width}, {width}), nn.ReLU(), nn.Linear({width}, 10)),
        loss=nn.functional.cross_entropy, train=train, test=(x[:{tested}], y[:{tested}]),
        metrics={{"accuracy": mh.accuracy}}, batch=64,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.08, momentum=0.9),
        schedule=lambda o: torch.optim.lr_scheduler.LambdaLR(
            o, lambda step: max(0.0, 1 - step / 1100)),
    )
"""
RATES = {"accuracy_1gbit": ("1gbit", 2.0), "accuracy_200mbit": ("200mbit", 4.0)}  # and the bar
WORDS = "data=2 threads=1 device=cpu"


def race(
    rate: str, width: int, tested: int, plans: list[str], target: str, words: str, seeds: int
) -> list[dict[str, Any]]:
    """What `manyhands race` found in a lab of two hosts: one entry a plan, in their order."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "mlp.py"
        script.write_text(TASK.format(width=width, tested=tested))
        command = [
            *(
                sys.executable,
                "-m",
                "manyhands",
                "lab",
                "--hosts",
                "2",
                "--rate",
                rate,
                "--",
                "race",
                str(script),
                *plans,
            ),
            *(
                "--target",
                target,
                "--with",
                words,
                "--seeds",
                str(seeds),
                "--dir",
                f"{folder}/race",
                "--quiet",
            ),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode not in (0, 3):  # 3: ran, but did not reach the target
            raise RuntimeError(
                f"race in the lab failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            )
        found = json.loads((Path(folder) / "race" / "results.json").read_text())
    entries: dict[str, dict[str, Any]] = {e["given"]: e for e in found["plans"]}
    return [entries[plan] for plan in plans]


def measure(quick: bool, only: list[str]) -> list[Claim]:
    if sys.platform != "linux":
        return [Claim(n, skipped="the lab needs Linux") for n in ("samples_1gbit", *RATES)]
    claims = []
    needed: dict[str, float] = {}
    with tuning.loopback_control() as control:  # the lab's hosts have it too
        if not only or "samples_1gbit" in only:
            claims.append(_samples(quick, control))
        for name in RATES:
            if not only or name in only:
                needed = needed or _samples_to_target(quick)
                claims.append(_accuracy(name, needed, quick, control))
    return claims


def _samples(quick: bool, control: str) -> Claim:
    steps = {OURS: 16 if quick else 160, "ddp": 3 if quick else 24}
    plans = [
        f"{plan} steps={steps.get(plan, 16 if quick else 64)}" for plan in (OURS, "ddp", *HOOKS)
    ]
    # a target out of reach: every plan makes all its steps
    found = race("1gbit", 4096, 64, plans, "accuracy=2", WORDS, 1 if quick else 3)
    runs = {
        plan: [run["samples_per_s"] for run in entry["runs"]]
        for plan, entry in zip((OURS, "ddp", *HOOKS), found, strict=True)
    }
    speed = {plan: median(values) for plan, values in runs.items()}
    mine, best = speed[OURS], max(HOOKS, key=lambda plan: speed[plan])
    detail = {
        "plan": OURS,
        "peer": best,
        "DDP as people write it": f"{speed['ddp']:,.0f} samples/s, ratio {mine / speed['ddp']:.1f}",
        "congestion control": control,
        "all runs": {k: [round(v) for v in values] for k, values in runs.items()},
    }
    return Claim("samples_1gbit", mine, speed[best], "samples/s", mine / speed[best], 2.0, detail)


def _samples_to_target(quick: bool) -> dict[str, float]:
    """Of every plan of DDP's, by one seed; infinite where it was not reached."""
    plans = ["ddp", *HOOKS]
    found = _train("1gbit", plans, 1, quick)
    return {
        plan: entry["runs"][0]["samples"] or float("inf")
        for plan, entry in zip(plans, found, strict=True)
    }


def _train(rate: str, plans: list[str], seeds: int, quick: bool) -> list[dict[str, Any]]:
    target, width = ("accuracy=0.5", 256) if quick else ("accuracy=0.88", 2048)
    words = f"{WORDS} evaluate={16 if quick else 64} steps={64 if quick else 1100}"
    return race(rate, width, 10_000, plans, target, words, seeds)


def _accuracy(name: str, needed: dict[str, float], quick: bool, control: str) -> Claim:
    (rate, bar), never = RATES[name], float("inf")
    steps, width = (16, 256) if quick else (48, 2048)
    probed = race(rate, width, 64, list(needed), "accuracy=2", f"{WORDS} steps={steps}", 1)
    speed = [entry["runs"][0]["samples_per_s"] for entry in probed]
    told = {plan: needed[plan] / s for plan, s in zip(needed, speed, strict=True)}
    best = min(HOOKS, key=lambda plan: told[plan])
    mine, theirs = _train(rate, [OURS, best], 1 if quick else 3, quick)
    ours, peer = mine["time_s"] or never, theirs["time_s"] or never
    detail = {
        "plan": OURS,
        "peer": best,
        "DDP as people write it": f"{told['ddp']:.1f} s, ratio {told['ddp'] / ours:.1f}",
        "one seed of each, s": {plan: round(s, 1) for plan, s in told.items() if s < never},
        "congestion control": control,
        OURS: [_told(run) for run in mine["runs"]],
        best: [_told(run) for run in theirs["runs"]],
    }
    if never in (ours, peer):
        detail["not reached"] = "by all of its seeds, on one side: no ratio"
        return Claim(name, 0.0, 0.0, "s to 88%", 0.0, bar, detail)
    return Claim(name, ours, peer, "s to 88%", peer / ours, bar, detail)


def _told(run: dict[str, Any]) -> str:
    sent = f"{run['sent_bytes_per_rank'] / 1e6:,.0f} MB sent a rank"
    waiting = f"{run['wait_share']:.0%} of the time waiting"
    samples = f"{run['samples'] or 0:,.0f} samples at {run['samples_per_s']:.0f} a second"
    return f"{run['time_s'] or 0:.1f} s, {samples}, best {run['best']:.4f}, {sent}, {waiting}"
