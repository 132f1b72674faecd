"""A model split over two processes: words of a plan against torch's own parts put together by hand.

tensor   tensor=2               against parallelize_module (columns, then rows)
pipe     pipe=2 schedule=1f1b   against PipelineStage with Schedule1F1B, cut in the middle by hand
shard    shard=2 zero=3         against fully_shard of every block
shard_on_card   the same with both processes on one GPU, which nccl refuses: fully_shard exchanges
                over gloo, ours over what it takes there by itself

Both train on the same batches.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import Claim, alternate, cores, median

import manyhands as mh

PEER = Path(__file__).resolve().parent / "peers" / "gpt.py"
BATCH, MICRO = 16, 8
ON_CPU, ON_CARD = (4, 256, 64), (12, 768, 256)  # layers, width, context
BAR = 0.97
WORDS = {
    "tensor": "tensor=2 device=cpu",
    "pipe": f"pipe=2 micro={MICRO} schedule=1f1b device=cpu",
    "shard": "shard=2 zero=3 device=cpu",
    "shard_on_card": "shard=2 zero=3 device=cuda ranks_per_gpu=2",
}
DEADLINE_S = 300


class Timed(mh.Callback):
    """Seconds between two rounds, handed on as a metric."""

    def __init__(self, first: int, last: int):
        self.first, self.last = first, last

    def on_round(self, run: Any, round: int, loss: Any) -> None:
        if round == self.first:
            self.start = time.perf_counter()
        if round == self.last:
            seconds = (time.perf_counter() - self.start) / (self.last - self.first)
            run.trainer.metrics = {"seconds": seconds}


def task(kind: str, warm: int, steps: int) -> mh.Task:
    import runpy

    peer = runpy.run_path(str(PEER))
    torch.manual_seed(0)
    size = _size(kind)
    return mh.Task(
        model=peer["GPT"](*size),
        loss=peer["loss"],
        train=peer["rows"](
            (warm + steps) * BATCH * (1 if kind in ("tensor", "pipe") else 2), size[2]
        ),
        optimizer=peer["optimizer"],
        batch=BATCH,
        callbacks=(Timed(warm, warm + steps),),
    )


def ours(kind: str, warm: int, steps: int) -> float:
    plan = f"{WORDS[kind]} threads=1 steps={warm + steps} save=off"
    with tempfile.TemporaryDirectory() as folder:
        found = mh.train(
            functools.partial(task, kind, warm, steps), plan, directory=f"{folder}/run", quiet=True
        )
    return found.metrics["seconds"]


def by_hand(kind: str, warm: int, steps: int) -> float:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    numbers = map(str, (*_size(kind), BATCH, MICRO, warm, steps, port))
    kind, _, card = kind.partition("_on_")
    done = subprocess.run(
        [sys.executable, str(PEER), "cuda" if card else "cpu", kind, *numbers],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise RuntimeError(f"{PEER.name} failed:\n{done.stderr[-2000:]}")
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def _size(kind: str) -> tuple[int, int, int]:
    return ON_CARD if kind.endswith("on_card") else ON_CPU


def measure(quick: bool, only: list[str]) -> list[Claim]:
    wanted = [kind for kind in WORDS if not only or kind in only]
    if cores() < 2:
        return [Claim(kind, skipped=f"2 cores needed, {cores()} here", bar=BAR) for kind in wanted]
    warm, steps, times = (2, 4, 1) if quick else (5, 40, 5)
    claims = []
    for kind in wanted:
        if kind.endswith("on_card") and not torch.cuda.is_available():
            claims.append(Claim(kind, skipped="a GPU needed", bar=BAR))
            continue
        runs = {
            "ours": functools.partial(ours, kind, warm, steps),
            "torch": functools.partial(by_hand, kind, warm, steps),
        }
        found = alternate(runs, times)
        mine, theirs = median(found["ours"]), median(found["torch"])
        detail = {
            "words": WORDS[kind],
            "all runs, ms": {k: [round(1e3 * s, 1) for s in v] for k, v in found.items()},
        }
        claims.append(
            Claim(kind, 1e3 * mine, 1e3 * theirs, "ms a step", theirs / mine, BAR, detail)
        )
    return claims
