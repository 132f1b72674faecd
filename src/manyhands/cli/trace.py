"""manyhands trace RUN: one picture of what every rank did, for ui.perfetto.dev."""

from __future__ import annotations

from pathlib import Path

from manyhands.observe.trace import write_trace


def trace(run: Path, out: Path | None = None) -> Path:
    """Write the trace of a run, by default into its own directory; returns where."""
    return write_trace(run, out or run / "trace.json")
