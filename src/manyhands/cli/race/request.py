"""Race request: what is raced, as `race.json` keeps it, and the directory it is kept in."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from manyhands.errors import CheckpointError, PlanError, RunBusy
from manyhands.launch import environment
from manyhands.observe.race.results import parse_target
from manyhands.recover import directory

RACE = "race.json"


def choose_directory(base: Path, name: str, folder: Path | None, resume: bool) -> Path:
    """The race directory: a new one, the given one, or, to resume, the newest of this script."""
    if folder is not None:
        if not resume and (folder / RACE).exists():
            raise RunBusy(
                f"{folder} holds an earlier race; continue it (--resume), or give another directory"
            )
        if resume and not (folder / RACE).exists():
            raise CheckpointError(f"there is no race to resume in {folder}: it has no {RACE}")
        return folder
    if not resume:
        return directory.choose(base, f"{name}-race", None, resume=False)
    stamped = re.compile(re.escape(name) + r"-race-(\d{8}-\d{6})(?:-(\d+))?")
    found = [
        (m[1], int(m[2] or 1), p)
        for p in base.glob("*/")
        if (m := stamped.fullmatch(p.name)) and (p / RACE).exists()
    ]
    if not found:
        raise CheckpointError(
            f"there is no race of {name!r} to resume in {base}/; "
            "give its directory with --dir, or start one"
        )
    return max(found)[-1]


def resolve_request(
    earlier: Path | None,
    script: Path,
    plans: Sequence[str],
    target: str | None,
    seeds: int | None,
    common: Sequence[str],
    arguments: Sequence[str] = (),
) -> dict[str, Any]:
    """The request as `race.json` keeps it.

    A resumed race has its request already; only the number of seeds may change, because every seed
    is a run of its own.
    """
    digest = hashlib.sha256(script.read_bytes()).hexdigest()[:16]
    request = {
        "script": str(script),
        "sha256": digest,
        "plans": list(plans),
        "with": " ".join(common),
        "target": target,
        "seeds": seeds,
        "arguments": list(arguments),
    }
    if earlier is not None:
        before = {"arguments": [], **json.loads((earlier / RACE).read_text())}
        if before["sha256"] != digest:
            raise PlanError(
                f"{script} has changed since the race in {earlier} began, "
                "so its times would not compare; start a new race"
            )
        words = {"plans": "plans", "target": "--target", "with": "--with", "arguments": "arguments"}
        for key, word in words.items():
            if request[key] and request[key] != before[key]:
                raise PlanError(
                    f"{earlier} is a race of other {word}: {_list(before[key])}, "
                    f"not {_list(request[key])}; leave them out to continue it, "
                    "or give another directory"
                )
        return {**before, "seeds": seeds or before["seeds"]}
    if not plans:
        raise PlanError(
            "no plan is given; one or more are needed, each one word of the shell, such as: "
            'ddp "data=2 merge=local_sgd"'
        )
    if target is None:
        raise PlanError(
            "no --target is given; METRIC=NUMBER is needed, such as --target accuracy=0.88"
        )
    parse_target(target)
    return {
        **request,
        "seeds": seeds or 1,
        "command": shlex.join(["manyhands", *sys.argv[1:]]),
        "machine": machine(),
    }


def machine() -> dict[str, str]:
    """This machine and its software, for the report."""
    processor = next(
        (
            line.partition(":")[2].strip()
            for line in _lines("/proc/cpuinfo")
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    memory = next(
        (
            int(line.split()[1]) / 2**20
            for line in _lines("/proc/meminfo")
            if line.startswith("MemTotal")
        ),
        math.nan,
    )
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "machine": f"{processor or platform.machine()}, {environment.cores()} cores"
        + (f", {memory:.0f} GB" if math.isfinite(memory) else ""),
        **({"gpus": ", ".join(gpus)} if gpus else {}),
        "software": f"torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.release()}",
        "begun": time.strftime("%Y-%m-%d %H:%M"),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _list(given: Any) -> str:
    return given if isinstance(given, str) else " | ".join(given)
