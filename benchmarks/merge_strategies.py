"""Every merge strategy, with its defaults, trains LeNet on Fashion-MNIST to 87% within ten epochs.

Four workers. Compression costs no accuracy. Accuracy is counted here, not time, so on a machine
with cores to spare several runs go on at once.

    <strategy>        epochs to 87% test accuracy, median of the seeds;
                      ratio = 10 / epochs of the worst seed, bar 1
    int8, powersgd    accuracy after ten epochs, mean of the seeds;
                      ratio = accuracy / (that of fp32 - half a point), bar 1
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import Claim, cores

from manyhands.core import Group
from manyhands.merge import STRATEGIES

LENET = Path(__file__).resolve().parents[1] / "examples" / "lenet.py"
WORKERS, TARGET, EPOCHS = 4, 0.87, 10
CODECS = {"fp32": "", "int8": "compress=int8", "powersgd": "compress=powersgd"}


def evaluations(words: str, seed: int, epochs: int) -> list[dict[str, float]]:
    """Train once, as a user would; what was found at each evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = f"data={WORKERS} threads=1 device=cpu save=off epochs={epochs} seed={seed}"
        plan = f"{fixed} {words}".split()
        command = [
            sys.executable,
            "-m",
            "manyhands",
            "run",
            str(LENET),
            *plan,
            "--dir",
            f"{folder}/run",
            "--quiet",
        ]
        done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
        if done.returncode:
            raise RuntimeError(f"{words} seed={seed} failed:\n{done.stderr[-2000:]}")
        lines = (Path(folder) / "run" / "events" / "rank-0.jsonl").read_text().splitlines()
    return [e["value"] for e in map(json.loads, lines) if e["name"] == "evaluate"]


def measure(quick: bool, only: list[str]) -> list[Claim]:
    seeds = range(1 if quick else 3)
    epochs = 1 if quick else EPOCHS
    # those over servers are measured by `stragglers`: some of them bear no momentum, and this task
    # has it
    strategies = [
        r for r, kind in STRATEGIES.items() if kind.link is Group and (not only or r in only)
    ]
    codecs = [
        w
        for w in CODECS
        if not only or w in only or (w == "fp32" and {"int8", "powersgd"} & set(only))
    ]
    jobs: dict[tuple[str, int], str] = {
        (r, s): f"merge={r} until=accuracy:{TARGET}" for r in strategies for s in seeds
    }
    jobs |= {(w, s): CODECS[w] for w in codecs for s in seeds}
    # a run waits a third of its time for its peers: a few more processes than cores
    with ThreadPoolExecutor(max(1, round(1.3 * cores() / WORKERS))) as pool:
        found = dict(
            zip(
                jobs,
                pool.map(lambda job: evaluations(jobs[job], job[1], epochs), jobs),
                strict=True,
            )
        )
    return [_strategy(r, [found[r, s] for s in seeds]) for r in strategies] + _codecs(
        {w: [found[w, s] for s in seeds] for w in codecs}
    )


def _strategy(name: str, runs: list[list[dict[str, float]]]) -> Claim:
    reached = [next((v["epoch"] for v in run if v["accuracy"] >= TARGET), None) for run in runs]
    best = [max(v["accuracy"] for v in run) for run in runs]
    detail: dict[str, Any] = {
        "epochs to 87%, by seed": [None if e is None else round(e, 2) for e in reached]
    }
    detail["best accuracy, by seed"] = [round(b, 4) for b in best]
    epochs = [float("inf") if e is None else e for e in reached]
    median = statistics.median(epochs)
    return Claim(
        name,
        median if median < 1e9 else 0.0,
        float(EPOCHS),
        "epochs to 87%",
        EPOCHS / max(epochs),
        1.0,
        detail,
    )


def _codecs(runs: dict[str, list[list[dict[str, float]]]]) -> list[Claim]:
    last = {w: [run[-1]["accuracy"] for run in found] for w, found in runs.items()}
    means = {w: statistics.mean(v) for w, v in last.items()}
    return [
        Claim(
            w,
            100 * means[w],
            100 * means["fp32"],
            "% accuracy",
            means[w] / (means["fp32"] - 0.005),
            1.0,
            {"by seed": last[w], "fp32": last["fp32"]},
        )
        for w in runs
        if w != "fp32"
    ]
