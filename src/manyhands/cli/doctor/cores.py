"""Check of CPU cores: how many this process may use under its affinity and its cgroup."""

from __future__ import annotations

import os
from pathlib import Path

from manyhands.cli.doctor import cgroup
from manyhands.cli.doctor.finding import Finding


def check(root: Path = Path("/")) -> Finding:
    present = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else present
    quota = cgroup.cpu_quota(root)
    limit = f"{quota:g} by the cgroup" if quota else "no cgroup limit"
    found = f"{present} present, {allowed} allowed by affinity, {limit}"
    if min(allowed, quota or allowed) < 1:
        do = "less than one core: every timing will be uneven; raise the container's CPU limit"
        return Finding("warn", found, do)
    if quota and quota < allowed:
        most = int(quota)
        do = f"start at most {most} processes x threads here (data={most} threads=1)"
        return Finding("warn", found, do)
    return Finding("ok", found)
