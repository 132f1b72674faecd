"""Check of shared memory: the free space where ranks of one host keep their segments."""

from __future__ import annotations

import shutil

from manyhands.cli.doctor.finding import GIB, Finding
from manyhands.exchange import segments


def check() -> Finding:
    folder = segments.directory()
    usage = shutil.disk_usage(folder)
    found = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free in {folder}"
    if usage.free < GIB // 4:
        do = (
            "parameters and gradients live there: "
            "enlarge it (docker: --shm-size=2g) or set link=gloo"
        )
        return Finding("warn", found, do)
    return Finding("ok", found)
