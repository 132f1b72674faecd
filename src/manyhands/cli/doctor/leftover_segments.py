"""Check of leftover shared-memory segments: removes those whose process is dead."""

from __future__ import annotations

from manyhands.cli.doctor.finding import Finding
from manyhands.exchange import segments


def check() -> Finding:
    gone = segments.sweep()
    if not gone:
        return Finding("ok", f"none in {segments.directory()}")
    names = ", ".join([*gone[:3], *(["..."] if gone[3:] else [])])
    return Finding("ok", f"removed {len(gone)} shared-memory segments of dead processes: {names}")
