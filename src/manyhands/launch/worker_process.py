"""Worker processes, as their launcher holds them: send them work, wait for, stop and end them."""

from __future__ import annotations

import contextlib
import json
import multiprocessing.connection
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from manyhands.launch import run_token
from manyhands.launch.fork_server.forked_rank import ForkedRank


@dataclass
class WorkerProcess:
    rank: int
    process: subprocess.Popen[bytes] | ForkedRank
    tail: list[str]
    pump: threading.Thread | None
    ended_by_us: bool = False
    handle: int | None = None  # pidfd, where the system has such: readable at its end


def process_handle(process: subprocess.Popen[bytes] | ForkedRank) -> int | None:
    """A pidfd of one's own, where the system has such."""
    if isinstance(process, ForkedRank):
        return os.dup(process.pidfd)
    return os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None


def said_by(store: dist.Store, key: str, token: str) -> dict[str, Any] | None:
    """What a rank of this run has put into the store; None: nothing, or somebody else did."""
    value = run_token.verify(token, key, bytes(store.get(key))) if store.check([key]) else None
    return None if value is None else dict(json.loads(value))


def wait_for_an_end(workers: list[WorkerProcess], timeout_s: float) -> None:
    """Sleep until a worker ends, a signal comes or the time is over; polling would take a core from
    the workers."""
    handles = [w.handle for w in workers if w.handle is not None and w.process.returncode is None]
    if handles:
        multiprocessing.connection.wait(handles, timeout_s)
    else:
        time.sleep(min(timeout_s, 0.05))


def ask_to_stop(workers: list[WorkerProcess]) -> float:
    """Returns when that was."""
    for w in workers:
        w.process.send_signal(signal.SIGTERM)
    return time.monotonic()


def send(
    process: subprocess.Popen[bytes] | ForkedRank,
    payload: bytes,
    variables: Mapping[str, str] | None = None,
) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died while starting: `_watch` will notice
        for part in (json.dumps(dict(variables or {})).encode(), payload):
            process.stdin.write(struct.pack("<Q", len(part)))
            process.stdin.write(part)
        process.stdin.flush()  # stays open: the worker ends when this pipe does


def end(workers: list[WorkerProcess]) -> None:
    for w in workers:
        if w.process.poll() is None:
            w.ended_by_us = True
        kill_session(w.process.pid)
    for w in workers:
        w.process.wait()
        if w.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                w.process.stdin.close()
        if w.handle is not None:
            os.close(w.handle)
            w.handle = None
        if w.pump is not None:
            w.pump.join(timeout=2.0)
    if workers and is_real(sys.stdout) and sys.stdout.isatty():
        # a progress display that was killed may have hidden the cursor
        print("\x1b[?25h", end="", flush=True)


def kill_session(pid: int) -> None:
    """Kill the worker and what it started (data loaders), also if the worker itself has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def pump(worker: WorkerProcess) -> None:
    """Pass the worker's lines on until it ends; then close the pipe."""
    assert worker.process.stdout is not None
    with worker.process.stdout as lines:
        for raw in lines:
            line = raw.decode(errors="replace")
            worker.tail.append(line)
            del worker.tail[:-50]
            # the rank as it is now: in an elastic run it may become another
            prefix = f"[rank{worker.rank}]: " if worker.rank else ""
            print(f"{prefix}{line}", end="", flush=True)


def is_real(stream: Any) -> bool:
    """Whether children that inherit our standard output write to `stream` (not so in a
    notebook)."""
    try:
        return bool(stream.fileno() == 1)
    except (AttributeError, OSError, ValueError):
        return False
