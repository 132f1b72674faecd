"""Start: from the command to the end of the first training step, and the memory of all processes.

    start_N     `manyhands run` of a tiny model with data=N, against torchrun with N ranks that
                train the same model in a tuned DistributedDataParallel; until the last of the
                ranks has ended its first step
    growth_8    eight ranks against one: how much of the start each rank pays for itself
    exec_8      eight ranks forked from a fork server, against eight that each import torch
    memory_8    proportional set size (PSS) of all processes of a run with eight ranks, torchrun's
                agent and our launcher and fork server included, against torchrun
    shared_8    the same against eight ranks that each import torch

Each command runs in a folder of its own. Ranks have as many threads as `manyhands run` gives them:
the cores divided by the ranks, at least one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Claim, alternate, cores, median

from manyhands.cli.chaos.run_processes import descendants

PEERS = Path(__file__).parent / "peers"
SIZES = (1, 2, 4, 8)
MOST = 8
GROWTH = 1.5  # the first step of eight ranks may take so many times that of one
BARS = {"start_1": 0.8, "start_2": 1.0, "start_4": 1.0, "start_8": 1.5, "memory_8": 1.5}
LIMIT_S, LOOK_S, ENDS_S = 300.0, 0.01, 60.0
FORKED, EXECUTED = "fork", "exec"
FOR_EVER = 10**9


def ours(ranks: int, steps: int) -> list[str]:
    words = [f"data={ranks}", f"steps={steps}", "save=off", "device=cpu"]
    main = "from manyhands.cli import main; main()"
    return [sys.executable, "-c", main, "run", str(PEERS / "start_ours.py"), *words, "--quiet"]


def torchrun(ranks: int, steps: int) -> list[str]:
    script = str(PEERS / "start_torchrun.py")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    return [*run, str(ranks), script, str(steps)]


def started(command: list[str], ranks: int, way: str = FORKED) -> float:
    """Seconds until every rank has ended its first step."""
    return _run(command, ranks, way, lambda pid: None)[0]


def memory(command: list[str], ranks: int, way: str = FORKED) -> float:
    """MB of all processes, once every rank has ended its first step."""
    return float(_run(command, ranks, way, _memory_mb)[1])


def _run(command: list[str], ranks: int, way: str, then: Callable[[int], Any]) -> tuple[float, Any]:
    threads = str(max(1, cores() // ranks))
    env = {**os.environ, "OMP_NUM_THREADS": threads, "MANYHANDS_START": way}
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/output", "w+b") as output:
        begun = time.time()
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=output, stderr=output, start_new_session=True
        )
        try:
            marks = [Path(folder) / f"first-{rank}" for rank in range(ranks)]
            _wait_for(marks, process, output.name)
            found = then(process.pid)
            seconds = max(float(mark.read_text()) for mark in marks) - begun
        finally:
            pids = descendants(process.pid)
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(ENDS_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for pid in pids:
                _end(pid)
    return seconds, found


def _wait_for(marks: list[Path], process: subprocess.Popen[bytes], output: str) -> None:
    until = time.monotonic() + LIMIT_S
    while not all(mark.exists() and mark.stat().st_size for mark in marks):
        if process.poll() not in (None, 0) or time.monotonic() > until:
            said = Path(output).read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{len(marks)} ranks made no first step:\n{said}")
        time.sleep(LOOK_S)


def _end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _memory_mb(pid: int) -> float:
    kilobytes = 0
    for each in (pid, *descendants(pid)):
        for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                kilobytes += int(line.split()[1])
    return kilobytes / 1024


def measure(quick: bool, only: list[str]) -> list[Claim]:
    if not sys.platform.startswith("linux"):
        return [Claim("start", skipped="memory is read from Linux's /proc")]
    sizes, times = ((1, 2), 1) if quick else (SIZES, 5)
    claims: list[Claim] = []
    seconds: dict[int, float] = {}
    for n in sizes:
        if only and f"start_{n}" not in only and not ("growth_8" in only and n in (1, MOST)):
            continue
        runs: dict[str, Callable[[], float]] = {
            "ours": lambda n=n: started(ours(n, 50), n),  # type: ignore[misc]
            "peer": lambda n=n: started(torchrun(n, 50), n),  # type: ignore[misc]
        }
        found = alternate(runs, times)
        claims.append(_claim(f"start_{n}", found, "s"))
        seconds[n] = median(found["ours"])
    if 1 in seconds and MOST in seconds:
        one, eight = seconds[1], seconds[MOST]
        claims.append(Claim(f"growth_{MOST}", eight, one, "s", one / eight, round(1 / GROWTH, 3)))
    if not quick:
        claims += _of_most(times, only)
    return claims


def _of_most(times: int, only: list[str]) -> list[Claim]:
    command = ours(MOST, FOR_EVER)
    wanted: dict[str, tuple[Callable[[], float], Callable[[], float], str]] = {
        f"exec_{MOST}": (
            lambda: started(ours(MOST, 50), MOST),
            lambda: started(ours(MOST, 50), MOST, EXECUTED),
            "s",
        ),
        f"memory_{MOST}": (
            lambda: memory(command, MOST),
            lambda: memory(torchrun(MOST, FOR_EVER), MOST),
            "MB",
        ),
        f"shared_{MOST}": (
            lambda: memory(command, MOST),
            lambda: memory(command, MOST, EXECUTED),
            "MB",
        ),
    }
    claims = []
    for name, (run, peer, unit) in wanted.items():
        if not only or name in only:
            claims.append(_claim(name, alternate({"ours": run, "peer": peer}, times), unit))
    return claims


def _claim(name: str, found: dict[str, list[float]], unit: str) -> Claim:
    mine, peer = median(found["ours"]), median(found["peer"])
    spread = {k: ", ".join(f"{x:.4g}" for x in sorted(v)) for k, v in found.items()}
    return Claim(name, mine, peer, unit, peer / mine, BARS.get(name, 1.0), spread)
