"""Server child: one parameter-server process that this rank has started.

Standard input is the child's lifeline, as it is a worker's (`launch.worker`): when its rank is
gone, however it ended, reading ends and so does the server. The child has a session of its own:
Ctrl-C is handled by the launcher, and a server must outlive the last push.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from manyhands.errors import LaunchError
from manyhands.launch import environment

MODULE = "manyhands.server.process"  # by name: launch may not import server
GRACE_S = 5.0  # for a child after its lifeline was closed, to answer requests in flight
TAIL_LINES = 20
COORDINATOR = -1  # the index of a coordinator without tables


@dataclass
class Child:
    """One server process and its last lines of output."""

    index: int  # COORDINATOR: it holds no tables
    process: subprocess.Popen[bytes]
    tail: list[str]
    pumps: list[threading.Thread]
    answers: queue.Queue[bytes]  # the first line it printed; b"": it ended without one

    @property
    def name(self) -> str:
        return "coordinator" if self.index == COORDINATOR else f"server {self.index}"

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def fate(self) -> str:
        """How it ended, with its last lines of output; "": it is running."""
        code = self.process.poll()
        if code is None:
            return ""
        for pump in self.pumps:
            pump.join(timeout=1.0)  # its last lines may still be in the pipe
        ended = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )
        hint = "; the kernel does so when memory runs out" if code == -signal.SIGKILL else ""
        said = "".join(f"\n  {line.rstrip()}" for line in self.tail)
        return f"{self.name} (pid {self.process.pid}) {ended}{hint}{said}"


def spawn(index: int) -> Child:
    env = {
        **environment.variables(),
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "PYTHONUNBUFFERED": "1",
        # it computes on the CPU, and must not take memory of the rank's GPU
        "CUDA_VISIBLE_DEVICES": "",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
        start_new_session=True,
    )
    tail: list[str] = []
    label = "coordinator" if index == COORDINATOR else f"server{index}"
    answers: queue.Queue[bytes] = queue.Queue()
    pumps = [
        threading.Thread(
            target=_pump,
            args=(pipe, f"[{label}]: ", tail, first),
            name=f"server {index}",
            daemon=True,
        )
        for pipe, first in ((process.stdout, answers), (process.stderr, None))
    ]
    for pump in pumps:
        pump.start()
    return Child(index, process, tail, pumps, answers)


def begin(child: Child, request: Mapping[str, Any], deadline: float) -> str:
    """Send it its configuration; returns its address."""
    process = child.process
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died at once; its output follows
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()  # and stay open: the server lives as long as this pipe
    try:
        line = child.answers.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        raise LaunchError(
            f"{child.name} (pid {process.pid}) did not publish its address in time; raise timeout_s"
        ) from None
    try:
        answer = json.loads(line)
        return str(answer["address"])
    except (ValueError, KeyError, TypeError):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        fate = (
            child.fate()
            or f"{child.name} (pid {process.pid}) printed {line!r} instead of its address"
        )
        raise LaunchError(f"a parameter server could not start: {fate}") from None


def _pump(pipe: IO[bytes], prefix: str, tail: list[str], first: queue.Queue[bytes] | None) -> None:
    if first is not None:
        first.put(pipe.readline())
    for raw in pipe:
        line = raw.decode(errors="replace")
        tail.append(line)
        del tail[:-TAIL_LINES]
        # our stderr may be closed, and the server must not stall for that
        with contextlib.suppress(Exception):
            sys.stderr.write(f"{prefix}{line}")
            sys.stderr.flush()


def end(children: Sequence[Child]) -> None:
    for child in children:
        assert child.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            child.process.stdin.close()
    deadline = time.monotonic() + GRACE_S
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
        for pump in child.pumps:
            pump.join(timeout=1.0)
        for pipe in (child.process.stdout, child.process.stderr):
            assert pipe is not None
            pipe.close()
