"""Two hosts with one worker each, joined by a slow network (`manyhands lab`), against torch's DDP.

    samples_1gbit       samples/s of an MLP of 20M parameters, batch 64 a worker, at 1 Gbit/s;
                        medians of alternating runs
    accuracy_1gbit      seconds of training until 88% test accuracy on Fashion-MNIST,
                        MLP 784-2048-2048-10, batch 64 a worker
    accuracy_200mbit    the same at 200 Mbit/s

Both sides train the same task through `manyhands race` in the same lab, plan after plan; DDP's own
steps do not depend on the rate, its time does.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import Claim, median

OURS = "merge=local_sgd merge.period=16 compress=int8"
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
        return [
            Claim(n, skipped="the lab needs Linux")
            for n in ("samples_1gbit", "accuracy_1gbit", "accuracy_200mbit")
        ]
    claims = []
    if not only or "samples_1gbit" in only:
        claims.append(_samples(quick))
    for name, rate, bar in (("accuracy_1gbit", "1gbit", 3.0), ("accuracy_200mbit", "200mbit", 8.0)):
        if not only or name in only:
            claims.append(_accuracy(name, rate, bar, quick))
    return claims


def _samples(quick: bool) -> Claim:
    ours, ddp = f"{OURS} steps={16 if quick else 160}", f"ddp steps={3 if quick else 24}"
    # a target out of reach: every plan makes all its steps
    mine, theirs = race("1gbit", 4096, 64, [ours, ddp], "accuracy=2", WORDS, 1 if quick else 3)
    runs = {
        name: [run["samples_per_s"] for run in entry["runs"]]
        for name, entry in (("ours", mine), ("ddp", theirs))
    }
    speed, peer = median(runs["ours"]), median(runs["ddp"])
    detail = {
        "plan": OURS,
        "all runs": {k: [round(v) for v in values] for k, values in runs.items()},
    }
    return Claim("samples_1gbit", speed, peer, "samples/s", speed / peer, 3.0, detail)


def _accuracy(name: str, rate: str, bar: float, quick: bool) -> Claim:
    target = "accuracy=0.5" if quick else "accuracy=0.88"
    words = f"{WORDS} evaluate={16 if quick else 64} steps={64 if quick else 1100}"
    mine, theirs = race(rate, 256 if quick else 2048, 10_000, [OURS, "ddp"], target, words, 1)
    detail = {"plan": OURS, "ours": _told(mine["runs"][0]), "ddp": _told(theirs["runs"][0])}
    ours, ddp = mine["time_s"], theirs["time_s"]
    ratio = ddp / ours if ours and ddp else 0.0  # not reached: no ratio
    return Claim(name, ours or 0.0, ddp or 0.0, "s to 88%", ratio, bar, detail)


def _told(run: dict[str, Any]) -> str:
    sent = f"{run['sent_bytes_per_rank'] / 1e6:,.0f} MB sent a rank"
    waiting = f"{run['wait_share']:.0%} of the time waiting"
    samples = f"{run['samples'] or 0:,.0f} samples at {run['samples_per_s']:.0f} a second"
    return f"{samples}, best {run['best']:.4f}, {sent}, {waiting}"
