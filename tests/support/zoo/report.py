"""The zoo as a table: every public model under every layout, `python -m support.zoo.report`.

    PYTHONPATH=src:tests python -m support.zoo.report --jobs 16 --results zoo.jsonl
    PYTHONPATH=src:tests python -m support.zoo.report --results zoo.jsonl --only-write --write

Every outcome is one line of JSON in --results as soon as it is known; pairs that have a line there
are not run again, so that a run that was ended goes on where it was. --jobs counts rank processes
that may run at the same time. Ranks are forked from this process, which imports every package once.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from manyhands.plan import words
from support.paths import REPOSITORY
from support.zoo import markdown, torchvision_ops
from support.zoo.forked import forked_ranks
from support.zoo.matrix import LAYOUTS, RAW, Outcome, outcome
from support.zoo.public_models import MODELS, installed, task_of

PACKAGES = ("torch", "transformers", "timm", "torchvision")
PAGE = REPOSITORY / "docs" / "zoo.md"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the zoo compares in float64, on CPUs
    os.environ["OMP_NUM_THREADS"] = "1"
    options.results.parent.mkdir(parents=True, exist_ok=True)
    names = [n for n in MODELS if chosen(n, options.model) and installed(n)]
    pairs = [(n, w) for w in LAYOUTS if chosen(w, options.layout) for n in names]
    if not options.only_write:
        done = {(o.model, o.layout) for o in read(options.results)}
        rest = [p for p in pairs if p not in done]
        preload(names)
        run(rest, options.results, options.jobs, options.timeout)
    found = read(options.results)
    if options.write is not None:
        options.write.write_text(markdown.page(found, read_versions(options.results)))
    print(markdown.summary(found))
    return 0 if all(o.good for o in found) else 1


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--results", type=Path, default=Path("runs/zoo.jsonl"))
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds of one pair")
    parser.add_argument("--model", help="only models whose name has this in it; commas between")
    parser.add_argument("--layout", help="only layouts that have this in it; commas between")
    parser.add_argument("--only-write", action="store_true", help="run nothing")
    parser.add_argument(
        "--write", type=Path, nargs="?", const=PAGE, help="write the page of the docs"
    )
    return parser.parse_args(arguments)


def chosen(name: str, wanted: str | None) -> bool:
    return wanted is None or any(part.strip() in name for part in wanted.split(","))


# -- running --


def preload(names: Iterable[str]) -> None:
    """Import what the models need, here and once, without computing anything on several threads."""
    torch.set_num_threads(1)
    torchvision_ops.declare_missing()
    for name in names:
        task_of(name)


def run(pairs: Sequence[tuple[str, str]], results: Path, jobs: int, timeout_s: float) -> None:
    """Run pairs, each in a process of its own; the large ones first, so that none is left last."""
    if pairs:
        append(results, {"versions": versions()})
    waiting = sorted(pairs, key=lambda p: -ranks(p[1]))
    running: dict[int, tuple[tuple[str, str], float]] = {}
    number = 0
    while waiting or running:
        used = sum(min(ranks(p[1]), jobs) for p, _ in running.values())
        pair = next((p for p in waiting if used + min(ranks(p[1]), jobs) <= jobs), None)
        if pair is not None:
            waiting.remove(pair)
            running[start(pair, results)] = (pair, time.monotonic() + timeout_s)
            continue
        ended = wait_for_one(running, timeout_s)
        pair, _ = running.pop(ended[0])
        number += 1
        if ended[1] is not None:
            append(results, dataclasses.asdict(Outcome(*pair, RAW, text=ended[1])))
        last = [o for o in read(results) if (o.model, o.layout) == pair][-1]
        print(
            f"{number}/{number + len(waiting) + len(running)} {last.seconds:5.1f} s  "
            f"{last.model}, {last.layout}: {last.kind} {last.text.splitlines()[-1:]}",
            flush=True,
        )


def ranks(layout: str) -> int:
    return words.parse(layout).layout.size


def start(pair: tuple[str, str], results: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        try:
            with forked_ranks():
                found = outcome(*pair)
        except Exception:  # of the zoo itself: nobody would see it
            found = Outcome(*pair, RAW, text=traceback.format_exc())
        append(results, dataclasses.asdict(found))
        code = 0
    finally:
        os._exit(code)


def wait_for_one(
    running: dict[int, tuple[tuple[str, str], float]], timeout_s: float
) -> tuple[int, str | None]:
    """The process that ended, and what was wrong with how it did."""
    while True:
        for pid, (_, deadline) in running.items():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return pid, None if code == 0 else f"the process ended with exit code {code}"
            if time.monotonic() > deadline:
                # its ranks end by themselves when the process that launched them does
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return pid, f"no result after {timeout_s:g} s"
        time.sleep(0.05)


# -- results --


def append(results: Path, line: dict[str, object]) -> None:
    """One write of one line: processes that append at the same time do not mix."""
    handle = os.open(results, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, (json.dumps(line) + "\n").encode())
    finally:
        os.close(handle)


def read(results: Path) -> list[Outcome]:
    """The last outcome of every pair, in the order of the tables."""
    found = {}
    for line in lines(results):
        if "versions" not in line:
            made = Outcome(**line)
            found[made.model, made.layout] = made
    return [found[m, w] for m in MODELS for w in LAYOUTS if (m, w) in found]


def read_versions(results: Path) -> dict[str, str]:
    known = [line["versions"] for line in lines(results) if "versions" in line]
    return known[-1] if known else versions()


def lines(results: Path) -> list[dict]:
    if not results.exists():
        return []
    return [json.loads(line) for line in results.read_text().splitlines() if line]


def versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            # carried as a folder, without metadata
            if importlib.util.find_spec(package) is not None:
                found[package] = importlib.import_module(package).__version__
    return found


if __name__ == "__main__":
    sys.exit(main())
