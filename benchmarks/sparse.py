"""The click model (examples/click.py) with two workers and one server.

Rows are on the server, the network is merged by all-reduce. Against TensorFlow's
ParameterServerStrategy and against the same by hand on torch.distributed.rpc, on the same rows and
batches; and, for what is learned, against one process. A ratio is the median over turns of ours to
the peer's run next to it: turns take a minute, in which the machine's load changes. TensorFlow is
no dependency: it runs under the interpreter that $MANYHANDS_TF_PYTHON names, or under this one
where that has it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Claim, alternate, cores, median
from torch import Tensor

import manyhands as mh

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parent / "examples" / "click.py"
WORKERS, BATCH, WARM = 2, 1024, 30
TOGETHER = 10  # steps that TensorFlow makes in one call
DEADLINE_S = 300

Found = dict[str, float]


class Timed(mh.Callback):
    """Seconds between two rounds, and what the model makes of the rows that were held out after the
    second: handed on as metrics.
    """

    def __init__(self, task: mh.Task, first: int, last: int):
        self.task, self.first, self.last = task, first, last

    def on_round(self, run: Any, round: int, loss: Any) -> None:
        if round == self.first:
            self.start = time.perf_counter()
        if round == self.last:
            run.trainer.evaluator = HeldOut(self.task, time.perf_counter() - self.start)


class HeldOut:
    """An evaluator for the last evaluation of a run: log-loss of the rows that were held out."""

    has_data = True

    def __init__(self, task: mh.Task, seconds: float):
        self.task, self.seconds = task, seconds

    def evaluate(self) -> Found:
        return {"seconds": self.seconds, "log_loss": self.log_loss()}

    def average_buffers(self) -> None: ...

    def log_loss(self) -> float:
        model, (*inputs, label) = self.task.model, self.task.test
        model.eval()
        with torch.no_grad():
            return float(self.task.loss(model(*inputs), label))


def timed(batch: int, first: int, last: int) -> mh.Task:
    """The example, without the evaluations at the end of each epoch."""
    task = runpy.run_path(str(EXAMPLE))["task"]()
    return dataclasses.replace(
        task,
        test=None,
        metrics={},
        batch=batch,
        epochs=1000.0,
        callbacks=(Timed(task, first, last),),
    )


def ours(workers: int, steps: int, words: str) -> Found:
    task = functools.partial(timed, BATCH * WORKERS // workers, WARM, WARM + steps)
    with tempfile.TemporaryDirectory() as folder:
        plan = f"data={workers} threads=1 steps={WARM + steps} save=off device=cpu {words}"
        found = mh.train(task, plan, directory=f"{folder}/run", quiet=True).metrics
    return {
        "samples_per_s": steps * BATCH * WORKERS / found["seconds"],
        "log_loss": found["log_loss"],
    }


# -- peers: scripts of their own, which read the same rows from a file --


def peer(python: str, script: str, data: Path, steps: int, *more: int) -> Found:
    command = [
        python,
        str(HERE / "peers" / script),
        str(data),
        *map(str, (BATCH, WARM, steps, _ports(), *more)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode:
        raise RuntimeError(f"{script} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def write(path: Path) -> None:
    """With ids renumbered from 0, which peers need to keep rows in one array."""
    task = runpy.run_path(str(EXAMPLE))["task"]()
    columns: dict[str, Any] = {}
    for i, (name, count) in enumerate((("ids", "deep_rows"), ("crossed", "wide_rows"))):
        train, test = task.train[i], task.test[i]
        known, number = torch.cat([train.reshape(-1), test.reshape(-1)]).unique(return_inverse=True)
        columns[name], columns[f"test_{name}"] = (
            number[: train.numel()].view(train.shape),
            number[train.numel() :].view(test.shape),
        )
        columns[count] = torch.tensor(len(known))
    for i, name in ((2, "numbers"), (3, "label")):
        columns[name], columns[f"test_{name}"] = task.train[i], task.test[i]
    np.savez(path, **{k: v.numpy() for k, v in columns.items() if isinstance(v, Tensor)})


def tensorflow() -> str | None:
    """An interpreter that has it."""
    named = os.environ.get("MANYHANDS_TF_PYTHON")
    if named is None:
        return sys.executable if importlib.util.find_spec("tensorflow") else None
    there = subprocess.run(
        [named, "-c", "import importlib.util as u; assert u.find_spec('tensorflow')"],
        capture_output=True,
    )
    return named if there.returncode == 0 else None


def _ports() -> int:
    """The first of five that are free."""
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
        try:
            for i in range(1, 5):
                with socket.socket() as one:
                    one.bind(("127.0.0.1", port + i))
            return port
        except (OSError, OverflowError):
            continue


def measure(quick: bool, only: list[str]) -> list[Claim]:
    if cores() < WORKERS:
        return [
            Claim(name, skipped=f"{WORKERS} cores needed, {cores()} here", bar=bar)
            for name, bar in (("vs_tf", 3.0), ("vs_rpc", 2.0))
        ]
    steps, times = (40, 1) if quick else (400, 7)
    python = tensorflow()
    wanted = lambda name: not only or name in only
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "rows.npz"
        write(data)
        runs: dict[str, Callable[[], Found]] = {
            "ours": functools.partial(ours, WORKERS, steps, "servers=1")
        }
        if wanted("vs_rpc"):
            runs["rpc"] = functools.partial(peer, sys.executable, "click_rpc.py", data, steps)
        if wanted("vs_tf") and python is not None:
            runs["tf"] = functools.partial(peer, python, "click_tf.py", data, steps, TOGETHER)
        found = alternate(runs, times)
        found["one process"] = [ours(1, steps, "")]
        if "tf" in runs:  # how much they gain by it
            assert python is not None
            found["tf, one step a call"] = [peer(python, "click_tf.py", data, steps // 4, 1)]
    speed = {k: median([f["samples_per_s"] for f in v]) for k, v in found.items()}
    learned = {
        k: [round(f["log_loss"], 4) for f in v]
        for k, v in found.items()
        if k != "tf, one step a call"
    }
    detail = {
        "held-out log-loss": learned,
        "one process, all of it": f"{speed['one process']:,.0f} samples/s",
        "all runs": {k: [round(f["samples_per_s"]) for f in v] for k, v in found.items()},
    }
    claims = []
    ahead = lambda peer: median(
        [
            a["samples_per_s"] / b["samples_per_s"]
            for a, b in zip(found["ours"], found[peer], strict=True)
        ]
    )
    if "rpc" in speed:
        claims.append(
            Claim("vs_rpc", speed["ours"], speed["rpc"], "samples/s", ahead("rpc"), 2.0, detail)
        )
    if "tf" in speed:
        claims.append(
            Claim("vs_tf", speed["ours"], speed["tf"], "samples/s", ahead("tf"), 3.0, detail)
        )
    elif wanted("vs_tf"):
        reason = (
            "TensorFlow is not installed: pip install tensorflow, here or where "
            "MANYHANDS_TF_PYTHON points"
        )
        claims.append(Claim("vs_tf", skipped=reason, bar=3.0))
    return claims
