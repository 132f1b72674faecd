"""Start of a large model: four ranks, each limited to 4 GB, and 3 GB of float32 parameters.

An MLP of square matrices trains two steps under `shard=4 zero=3` and plain SGD. Every rank stands
for a host: a control group of its own limits its memory, and ranks exchange over gloo. What is
limited is all memory that the kernel charges to the group: torch itself, slices, gathered blocks,
everything. What is measured is the most that was resident of a process.

    start    the most that a rank took, where `Task.model` is a function: ranks make only what they
             keep; against the same model given as a module, which every rank makes whole
    least    the lowest of a few limits under which each of the two still starts and steps
    shared   all four ranks in one group: the lowest of a few limits

A group for all four must have room for parameters, gradients and torch four times: gradients are
whole slices until the optimizer steps. It needs root and control groups of version 1 that are
writable (Linux); else it is skipped.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import Claim

GROUPS = Path("/sys/fs/cgroup/memory")
RANKS, WIDTH, STEPS = 4, 4096, 2
FULL_BYTES, QUICK_BYTES = 3 << 30, 3 << 27  # of parameters
LIMIT_GB = 4.0
BARS = {"start": 2.0, "least": 1.5, "shared": 1.0}


def task(layers: int, whole: bool) -> Any:
    import torch
    from torch import nn

    import manyhands as mh

    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))

    x = torch.randn(RANKS * STEPS, WIDTH)
    return mh.Task(
        model=model() if whole else model,
        loss=nn.functional.mse_loss,
        train=(x, x),
        batch=1,
        steps=STEPS,
        optimizer=lambda p: torch.optim.SGD(p, lr=1e-3),
    )


def train(layers: int, whole: bool, words: str, directory: str) -> None:
    """What every process of a run does."""
    import functools

    import manyhands as mh

    make = functools.partial(task, layers, whole)
    mh.train(make, words, directory=directory, quiet=True, argv=False)


# -- control groups --


def unavailable() -> str:
    """Why memory cannot be limited here; "": it can."""
    try:
        with limited(1 << 30):
            return ""
    except OSError as e:
        return f"control groups of version 1 cannot be written here ({e.strerror or e})"


@contextlib.contextmanager
def limited(nbytes: int) -> Iterator[Path]:
    """A new control group for so many bytes."""
    group = Path(tempfile.mkdtemp(prefix="manyhands-start-", dir=GROUPS))
    try:
        (group / "memory.limit_in_bytes").write_text(str(nbytes))
        yield group
    finally:
        group.rmdir()


@dataclass
class Outcome:
    """How a run under limits ended."""

    ended: bool
    peak_gb: float  # resident, of the process that took most
    said: str


def run(layers: int, whole: bool, limit_gb: float, one_group: bool) -> Outcome:
    """Four processes, as torchrun starts them, each in its control group or all in one."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="manyhands-start-"))
        number = 1 if one_group else RANKS
        groups = [stack.enter_context(limited(int(limit_gb * 1e9))) for _ in range(number)]
        # all of one group share what ranks of one host share
        words = f"shard={RANKS} zero=3 save=off" + ("" if one_group else " link=gloo")
        arguments = [str(layers), str(int(whole)), words, f"{folder}/run"]
        common = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS if one_group else 1),
            "OMP_NUM_THREADS": "1",
        }
        children = []
        for rank in range(RANKS):
            log = stack.enter_context(open(f"{folder}/{rank}.log", "w"))
            child = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), *arguments],
                env={
                    **common,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank if one_group else 0),
                    "MANYHANDS_HOST": "one" if one_group else f"host-{rank}",
                },
                preexec_fn=_into(groups[rank % number]),
                stdout=log,
                stderr=log,
            )
            children.append(child)
            stack.callback(_end, child)
        ends = [_ended(child) for child in children]
        codes, peak = [code for code, _ in ends], max(nbytes for _, nbytes in ends)
        ended = not any(codes)
        said = "" if ended else _last_lines(Path(folder), codes)
    return Outcome(ended, peak / 1e9, said)


def _into(group: Path) -> Callable[[], None]:
    return lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None


def _ended(child: subprocess.Popen[bytes]) -> tuple[int, int]:
    """The exit code, and the most bytes that were resident: the group's own figure would count
    files that the kernel could drop from its cache."""
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode, usage.ru_maxrss * 1024


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.kill()
    child.wait()


def _last_lines(folder: Path, codes: list[int]) -> str:
    first = next((i for i, code in enumerate(codes) if code == -9), 0)
    lines = (folder / f"{first}.log").read_text().splitlines()
    killed = "killed for memory" if codes[first] == -9 else ""
    return "; ".join(filter(None, [f"rank {first} {killed}".strip(), *lines[-1:]]))[:300]


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


# -- claims --


def least(layers: int, whole: bool, limits: list[float], one_group: bool) -> tuple[float, str]:
    """The lowest limit, from the highest on, under which a run ends; infinity: none of them."""
    found, said = float("inf"), ""
    for limit in sorted(limits, reverse=True):
        outcome = run(layers, whole, limit, one_group)
        if not outcome.ended:
            said = f"under {limit:g} GB: {outcome.said}"
            break
        found = limit
    return found, said


def measure(quick: bool = False, only: list[str] | None = None) -> list[Claim]:
    names = [n for n in BARS if not only or n in only]
    if why := unavailable():
        return [Claim(n, skipped=why) for n in names]
    nbytes = QUICK_BYTES if quick else FULL_BYTES
    layers = nbytes // (4 * WIDTH * WIDTH)
    size_gb = nbytes / 1e9
    claims = []
    if "start" in names:
        limit = LIMIT_GB * size_gb / (FULL_BYTES / 1e9) + (1 if quick else 0)
        ours, peer = run(layers, False, limit, False), run(layers, True, limit, False)
        detail = {
            "parameters": f"{size_gb:.2f} GB over {RANKS} ranks, limit {limit:.2f} GB a rank",
            "a function": "starts and steps" if ours.ended else ours.said,
            "a module": "starts and steps" if peer.ended else peer.said,
        }
        ratio = peer.peak_gb / ours.peak_gb if ours.ended else 0.0
        claims.append(
            Claim("start", ours.peak_gb, peer.peak_gb, "GB", ratio, BARS["start"], detail)
        )
    for name in [n for n in ("least", "shared") if n in names]:
        room = 0.4 * (RANKS if name == "shared" else 1)  # torch itself
        limits = [room + size_gb * share / 4 for share in range(3, 15)]
        if name == "shared":
            limits = [room + size_gb * share / 4 for share in range(5, 15)]
        ours_gb, why_not = least(layers, False, limits, name == "shared")
        peer_gb, peer_why = least(layers, True, limits, name == "shared")
        detail = {"a function": why_not, "a module": peer_why}
        claims.append(Claim(name, ours_gb, peer_gb, "GB", peer_gb / ours_gb, BARS[name], detail))
    return claims


if __name__ == "__main__":
    train(int(sys.argv[1]), sys.argv[2] == "1", sys.argv[3], sys.argv[4])
