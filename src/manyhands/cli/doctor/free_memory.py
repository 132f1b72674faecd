"""Check of free memory: what the machine has left, and what the cgroup still allows."""

from __future__ import annotations

import os
from pathlib import Path

from manyhands.cli.doctor import cgroup
from manyhands.cli.doctor.finding import GIB, Finding


def check(root: Path = Path("/")) -> Finding:
    free, limit = _available_bytes(), cgroup.memory_left(root)
    found = f"{free / GIB:.1f} GiB free"
    if limit is not None and limit < free:
        found += f", {limit / GIB:.1f} GiB left in the cgroup"
    if min(free, limit if limit is not None else free) < GIB:
        do = "below 1 GiB: fewer processes (data=), a smaller batch, or close other programs"
        return Finding("warn", found, do)
    return Finding("ok", found)


def _available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
        return int(kib) * 1024
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
