"""Scalar sink: gives a logger the plan at the start, and the numbers of events as they come.

A run that is resumed finds in `loggers.json` of its directory what its logger needs to go on.
"""

from __future__ import annotations

import json
import os
import threading
import tomllib
from pathlib import Path
from typing import Any, Protocol

from manyhands.core import Event
from manyhands.observe.loggers.scalars import LoggedPoint, Scalars

KEPT = "loggers.json"
_keeping = threading.Lock()  # each logger may have a thread of its own


class Logger(Protocol):
    """Logger: where numbers of a run go."""

    def begin(self, config: dict[str, Any]) -> None:
        """`config`: the resolved plan, by its words."""
        ...

    def log(self, point: LoggedPoint) -> None: ...

    def end(self, finished: bool) -> None:
        """`finished`: the run came to its end; else it failed or was stopped."""
        ...


class ScalarSink:
    """Scalar sink: a sink of events around a logger."""

    def __init__(self, directory: Path, logger: Logger):
        self._directory, self._logger = Path(directory), logger
        self._scalars = Scalars()
        self._begun = self._finished = False

    def write(self, events: list[Event]) -> None:
        for event in events:
            if event.name in ("start", "finish"):
                self._finished = event.name == "finish"
                self._begin()
            elif (point := self._scalars.of(event)) is not None:
                self._begin()
                self._logger.log(point)

    def close(self) -> None:
        if self._begun:
            self._begun = False
            self._logger.end(self._finished)

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._logger.begin(_plan(self._directory))


def _plan(directory: Path) -> dict[str, Any]:
    """The words of the resolved plan, which is in the run directory before its first event."""
    try:
        return tomllib.loads((directory / "plan.toml").read_text())
    except (OSError, tomllib.TOMLDecodeError):
        return {}


def recall(directory: Path, name: str) -> dict[str, str]:
    """What a logger has kept of the run in this directory; {}: nothing."""
    return dict(_kept(directory).get(name, {}))


def keep(directory: Path, name: str, values: dict[str, str]) -> None:
    """Keep what a logger needs when the run is resumed."""
    path = Path(directory) / KEPT
    part = path.with_suffix(".part")
    with _keeping:
        part.write_text(json.dumps({**_kept(directory), name: values}, indent=1))
        os.replace(part, path)


def _kept(directory: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((Path(directory) / KEPT).read_text()))
    except (OSError, ValueError):
        return {}
