"""What all benchmarks share: claims, alternating runs, medians, the report."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch


@dataclass
class Claim:
    """`ratio` > 1 means ours is better; `bar` is what we promise. A claim that cannot be measured
    here says why.
    """

    name: str
    ours: float | None = None
    peer: float | None = None
    unit: str = ""
    ratio: float | None = None
    bar: float | None = None
    detail: dict[str, Any] | None = None
    skipped: str | None = None


def alternate(runs: dict[str, Callable[[], Any]], times: int) -> dict[str, list[Any]]:
    """Run each in turn, again and again: a change of the machine's load then meets all of them."""
    results: dict[str, list[Any]] = {name: [] for name in runs}
    for i in range(times):
        for name in list(runs) if i % 2 == 0 else reversed(list(runs)):
            results[name].append(runs[name]())
    return results


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def median_round(turn: Callable[[int], object], seconds: float) -> float:
    """Median seconds of a turn; the first few only warm up."""
    at = [time.perf_counter()]
    while at[-1] < at[0] + seconds or len(at) < 8:
        turn(len(at) - 1)
        at.append(time.perf_counter())
    return median([b - a for a, b in pairwise(at[3:])])


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def report(name: str, claims: list[Claim], repository: Path) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=repository,
        capture_output=True,
        text=True,
    ).stdout.strip()
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in _lines("/proc/cpuinfo")
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    machine = f"{cores()} cores ({cpu}){gpu}, {platform.system()}, {versions}"
    rows = [{k: v for k, v in asdict(c).items() if v is not None} for c in claims]
    return {"bench": name, "commit": commit or "unknown", "machine": machine, "claims": rows}


def show(found: dict[str, Any]) -> None:
    print(f"\n{found['bench']}  at {found['commit']}  on {found['machine']}")
    for c in found["claims"]:
        if "skipped" in c:
            print(f"  {c['name']:<16} skipped: {c['skipped']}")
            continue
        mark = "" if "bar" not in c else "  ok" if c["ratio"] >= c["bar"] else "  BELOW"
        print(
            f"  {c['name']:<16} ours {c['ours']:>10,.5g}  peer {c['peer']:>10,.5g} "
            f"{c['unit']:<12} ratio {c['ratio']:.3f}  bar {c['bar']:g}{mark}"
        )
        for key, value in (c.get("detail") or {}).items():
            print(f"  {'':<16}   {key}: {value}")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
