"""Processes of a run: the descendants of its launcher, and which of them are its workers."""

from __future__ import annotations

import contextlib
from pathlib import Path

from manyhands.launch.lifeline import WORKER

PROC = Path("/proc")


def descendants(pid: int) -> list[int]:
    """All processes that a process has started, and those that they have started."""
    children: dict[int, list[int]] = {}
    for path in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            status = (path / "stat").read_text().rpartition(")")[2].split()
            if status[0] not in "ZX":
                children.setdefault(int(status[1]), []).append(int(path.name))
    found, todo = [], [pid]
    while todo:
        here = children.get(todo.pop(), [])
        found += here
        todo += here
    return found


def workers(launcher: int) -> dict[int, int]:
    """Rank -> pid. Processes that a worker started itself are left out."""
    found = {}
    for pid in descendants(launcher):
        with contextlib.suppress(OSError, ValueError):
            parent = int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
            line = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
            if parent == launcher and WORKER.encode() in line:
                found[int(_variable(pid, "RANK"))] = pid
    return found


def _variable(pid: int, name: str) -> str:
    for each in (PROC / str(pid) / "environ").read_bytes().split(b"\0"):
        key, _, value = each.decode(errors="replace").partition("=")
        if key == name:
            return value
    raise ValueError(f"process {pid} has no {name}")
