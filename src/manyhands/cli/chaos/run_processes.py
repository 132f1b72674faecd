"""Processes of a run: the descendants of its launcher, and which of them are its workers."""

from __future__ import annotations

import contextlib
from pathlib import Path

from manyhands.launch.fork_server.client import NAME
from manyhands.launch.process_state import named

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
        word, _, rank = named(pid).partition(" ")
        if word == "rank" and rank.isdecimal() and _started_by(launcher, pid):
            found[int(rank)] = pid
    return found


def _started_by(launcher: int, pid: int) -> bool:
    """The launcher itself has started a process, or its fork server has."""
    parent = _parent(pid)
    return parent == launcher or (named(parent) == NAME and _parent(parent) == launcher)


def _parent(pid: int) -> int:
    """0: it has ended."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    return 0
