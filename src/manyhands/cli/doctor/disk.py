"""Check of the disk: space in the current folder, and whether a file can be written there."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from manyhands.cli.doctor.finding import GIB, Finding


def check() -> Finding:
    here = Path.cwd()
    usage = shutil.disk_usage(here)
    found = f"{usage.free / GIB:.1f} GiB free in {here}"
    try:
        with tempfile.TemporaryFile(dir=here) as file:
            file.write(b"checkpoint")
    except OSError as e:
        found += f", but a file cannot be written: {e.strerror}"
        return Finding("fail", found, "run from a folder you may write to")
    if usage.free < GIB:
        do = "runs and checkpoints go here: make room, or run from another disk"
        return Finding("warn", found, do)
    return Finding("ok", found)
