"""Check of the Python version."""

from __future__ import annotations

import sys

from manyhands.cli.doctor.finding import Finding


def check() -> Finding:
    found = f"{sys.version.split()[0]} at {sys.executable}"
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        return Finding("fail", found, "use Python 3.11, 3.12 or 3.13")
    return Finding("ok", found)
