"""Two hosts with one worker each, joined by a slow network (`manyhands lab`), against torch's DDP.

    samples_1gbit       samples/s of an MLP of 20M parameters, batch 64 a worker, at 1 Gbit/s;
                        medians of alternating runs
    accuracy_1gbit      seconds of training until 88% test accuracy on Fashion-MNIST,
                        MLP 784-2048-2048-10, batch 64 a worker, three seeds
    accuracy_200mbit    the same at 200 Mbit/s

All train the same task through `manyhands race` in the same lab, plan after plan. DDP is measured
as people write it and with each of torch's own remedies that work over gloo: gradients in fp16,
PowerSGD, PostLocalSGD. The claims are against the fastest of them; plain DDP is told beside, with
one seed, since its steps do not depend on the rate and its time does.
"""

from __future__ import annotations

import functools
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
    with tuning.loopback_control() as control:  # the lab's hosts have it too
        if not only or "samples_1gbit" in only:
            claims.append(_samples(quick, control))
        for name, rate, bar in (
            ("accuracy_1gbit", "1gbit", 2.0),
            ("accuracy_200mbit", "200mbit", 4.0),
        ):
            if not only or name in only:
                claims.append(_accuracy(name, rate, bar, quick, control))
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


def _accuracy(name: str, rate: str, bar: float, quick: bool, control: str) -> Claim:
    target, width = ("accuracy=0.5", 256) if quick else ("accuracy=0.88", 2048)
    words = f"{WORDS} evaluate={16 if quick else 64} steps={64 if quick else 1100}"
    train = functools.partial(race, rate, width, 10_000, target=target, words=words)
    (plain,) = train(["ddp"], seeds=1)
    entries = dict(zip([OURS, *HOOKS], train([OURS, *HOOKS], seeds=1 if quick else 3), strict=True))
    never = float("inf")
    seconds = {plan: entry["time_s"] or never for plan, entry in entries.items()}
    best = min(HOOKS, key=lambda plan: seconds[plan])
    ours, peer, written = seconds[OURS], seconds[best], plain["time_s"] or never
    detail = {
        "plan": OURS,
        "peer": best,
        "DDP as people write it": f"{written:.1f} s, ratio {written / ours:.1f}",
        "congestion control": control,
        **{plan: [_told(run) for run in entry["runs"]] for plan, entry in entries.items()},
        "ddp": _told(plain["runs"][0]),
    }
    if never in (ours, peer):
        detail["not reached"] = "by all of its seeds, on one side: no ratio"
        return Claim(name, 0.0, 0.0, "s to 88%", 0.0, bar, detail)
    return Claim(name, ours, peer, "s to 88%", peer / ours, bar, detail)


def _told(run: dict[str, Any]) -> str:
    sent = f"{run['sent_bytes_per_rank'] / 1e6:,.0f} MB sent a rank"
    waiting = f"{run['wait_share']:.0%} of the time waiting"
    samples = f"{run['samples'] or 0:,.0f} samples at {run['samples_per_s']:.0f} a second"
    return f"{samples}, best {run['best']:.4f}, {sent}, {waiting}"
