"""Open runs of a process: a script joins one, and it is closed when the script ends."""

from __future__ import annotations

import atexit
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from manyhands.assembly.rank_context import RankContext
from manyhands.core import Result
from manyhands.errors import ManyhandsError
from manyhands.launch import environment
from manyhands.launch.signals import Stop
from manyhands.observe import curves
from manyhands.own_loop.run import Run, joined_runs
from manyhands.own_loop.script import script_text
from manyhands.replica.checks import step_guard


def opened(context: RankContext, stop: Stop) -> Run:
    """A run that is closed when the script ends."""
    guard = step_guard.install(context.process.size)
    guard.joined = True
    run = Run(context, stop, guard)
    joined_runs.append(run)
    if run.size > 1 and not dist.is_initialized() and "is_initialized()" in script_text():
        context.warn(
            "torch.distributed has no default process group in this run, so that code under "
            "`if dist.is_initialized():` is left out; use run.rank, run.size and run.sum(value)"
        )
    if context.process.started_by != "manyhands":
        atexit.register(_close_at_exit)
    return run


def _close_at_exit() -> None:
    try:
        close_joined()
    except ManyhandsError as e:  # Python would print it and exit with 0
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(2)


def close_joined(draw: bool = True) -> dict[str, Any] | None:
    """Close the run that the script has joined, if any; how it ended."""
    if not joined_runs:
        return None
    run = joined_runs.pop()
    if getattr(sys, "last_value", None) is not None:
        run._abandon()
    result = run.close()
    if result is not None and run.rank == 0 and draw:
        draw_curves(result, run._context.options.quiet)
    return None if result is None else dataclasses.asdict(result)


def draw_curves(result: Result, quiet: bool) -> None:
    """Draw the run's picture; under our launcher, the launcher does."""
    if environment.process_info().started_by == "manyhands":
        return
    try:
        picture = curves.draw(Path(result.directory))
    except Exception as e:  # a picture must never fail a run
        print(f"no picture: {e}", file=sys.stderr)
        return
    if not quiet:
        print(f"{'picture':<12}{picture}")
