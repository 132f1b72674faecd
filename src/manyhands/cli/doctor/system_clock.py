"""Check of the system clock: its date, its resolution, and its skew to the file system's clock."""

from __future__ import annotations

import os
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from manyhands.cli.doctor.finding import Finding

EARLIEST = datetime(2026, 1, 1, tzinfo=UTC)  # this package is younger: an earlier date is wrong


def check() -> Finding:
    now = datetime.now(UTC)
    if now < EARLIEST:
        found = f"it shows {now:%Y-%m-%d %H:%M} UTC, before this package existed"
        return Finding("fail", found, "set the clock (timedatectl set-ntp true)")
    resolution_us = time.get_clock_info("perf_counter").resolution * 1e6
    with tempfile.NamedTemporaryFile(dir=Path.cwd()) as file:
        skew_s = abs(os.stat(file.name).st_mtime - time.time())
    found = (
        f"{now:%Y-%m-%d %H:%M:%S} UTC, resolution {resolution_us:g} us, "
        f"timestamps of files here differ by {skew_s:.2f} s"
    )
    if skew_s > 2:
        do = (
            "the file server's clock differs, so events of several machines will not line up: "
            "let NTP set both clocks"
        )
        return Finding("warn", found, do)
    return Finding("ok", found)
