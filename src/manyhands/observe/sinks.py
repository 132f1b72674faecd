"""Sinks of a run: where the rank that reports shows its events."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from manyhands.observe.events import Sink
from manyhands.observe.loggers.registry import open_loggers, require
from manyhands.observe.progress import Progress, Warnings


def loggers_of(log: str | None, tensorboard: bool) -> list[str]:
    """Names of the plan word log=, and --tensorboard, which is one of them."""
    given = [] if log is None else log.split("+")
    return [*given, *(["tensorboard"] if tensorboard and "tensorboard" not in given else [])]


def require_loggers(log: str | None, tensorboard: bool) -> None:
    """Refuse loggers whose package is not installed."""
    require(loggers_of(log, tensorboard))


def open_sinks(
    directory: Path,
    name: str,
    log: str | None,
    env: Mapping[str, str],
    *,
    tensorboard: bool,
    quiet: bool,
) -> list[Sink]:
    """The progress display, and loggers; `name` is the run's."""
    shown: Sink = Warnings(sys.stderr) if quiet else Progress(sys.stdout)
    return [shown, *open_loggers(loggers_of(log, tensorboard), directory, name, env)]
