"""State of another process of this machine: stopped, sleeping, gone; and its Python stack.

A process whose GIL is held answers no thread of its own. It can register a signal whose handler
(`faulthandler`, no Python) writes the stack of its main thread into a memory file; a neighbour
sends the signal and reads the file through /proc. Linux only; elsewhere nothing is known.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import time
from pathlib import Path

from manyhands.launch import environment

DUMP = signal.SIGUSR2
ANSWER_S = 0.3  # for a signal handler to have written
FRAMES = 8


def state(pid: int) -> str:
    """The letter of /proc/PID/stat (T: stopped); "gone": no such process; "": not known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone" if Path("/proc/self/stat").exists() else ""
    except (OSError, IndexError):
        return ""


def name_this_process(name: str) -> None:
    """As `ps` shows it and `named` finds it; at most 15 letters, on Linux. The command line and the
    variables that /proc has of a forked process are those of the one that forked it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def named(pid: int) -> str:
    """The name that a process of this machine has given itself; "": not known."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


@functools.cache
def register_dump() -> int:
    """From now on `DUMP` writes this process's stack into the file of the number returned; -1: the
    signal is taken, or this system has no such files. Once a process, and for its whole life: a
    signal that came after its handler is gone would end the process."""
    if not hasattr(os, "memfd_create") or signal.getsignal(DUMP) is not signal.SIG_DFL:
        return -1
    file = os.memfd_create(_dump_name())
    faulthandler.register(DUMP, file=file, all_threads=False)
    return file


def dumped_stack(pid: int, file: int) -> list[str]:
    """The stack of a rank of this job, innermost last; empty where it is not to be had."""
    if file < 0 or not _answers(pid, file):
        return []
    path = Path(f"/proc/{pid}/fd/{file}")
    try:
        before = path.stat().st_size
        os.kill(pid, DUMP)
        deadline = time.monotonic() + ANSWER_S
        while path.stat().st_size == before and time.monotonic() < deadline:
            time.sleep(0.02)
        text = path.read_bytes()[before:].decode(errors="replace")
    except OSError:
        return []
    frames = [line.strip() for line in text.splitlines() if line.startswith("  File")]
    return frames[:FRAMES][::-1]


def _answers(pid: int, file: int) -> bool:
    """Whether a process is a rank of this job that has registered the signal: anybody may write
    numbers into the store, and the signal ends a process that does not expect it."""
    try:
        return os.readlink(f"/proc/{pid}/fd/{file}") == f"/memfd:{_dump_name()} (deleted)"
    except OSError:
        return False


def _dump_name() -> str:
    return f"stack {environment.variables().get('MASTER_PORT', '')}"
