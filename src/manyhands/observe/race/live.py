"""Live view of a race: progress of the current run, read from the event file of its rank 0.

A thread of the process that started the run reads the file twice a second; the run itself is
silent.
"""

from __future__ import annotations

import math
import threading
from pathlib import Path
from types import TracebackType
from typing import TextIO

import msgspec

from manyhands.core import Event, Goal
from manyhands.observe.progress import open_screen
from manyhands.observe.text import number

LOOK_S = 0.5
LINES_EVERY_S = 5.0  # between lines of evaluations
STYLES = {
    "race": "bold",
    "evaluate": "cyan",
    "failed": "bold red",
    "reached": "bold green",
    "ended": "yellow",
}


class RaceWatch:
    """Race watch: prints the progress of one run while entered. Without a stream it is silent."""

    def __init__(self, run: Path, target: Goal, stream: TextIO | None):
        self._path, self._target, self._stream = run / "events" / "rank-0.jsonl", target, stream
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="race watch", daemon=True)
        self._read = 0
        self._told_s = -math.inf

    def __enter__(self) -> RaceWatch:
        if self._stream is not None:
            self._screen = open_screen(self._stream)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._stream is not None:
            self._over.set()
            self._thread.join()

    def _follow(self) -> None:
        while not self._over.wait(LOOK_S):
            self._tell()
        self._screen.end()

    def _tell(self) -> None:
        for event in self._new():
            if event.name == "progress" and isinstance(event.value, dict):
                self._screen.progress(event.time_s, event.value)
            elif (
                event.name == "evaluate"
                and event.time_s - self._told_s >= LINES_EVERY_S
                and isinstance(event.value, dict)
            ):
                self._told_s = event.time_s
                at, value = (
                    event.value.get("epoch", math.nan),
                    event.value.get(self._target.name, math.nan),
                )
                text = f"{self._target.name} {number(value)} at epoch {at:.2f}"
                text += f", target {self._target.bound:g}"
                self._screen.line("evaluate", text, STYLES["evaluate"])
        self._screen.refresh()

    def _new(self) -> list[Event]:
        """The events of complete lines that were written since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                text = file.read()
        except OSError:
            return []  # the run has not begun yet
        text = text[: text.rfind(b"\n") + 1]
        self._read += len(text)
        found = []
        for line in text.splitlines():
            if b'"progress"' in line or b'"evaluate"' in line:
                raw = msgspec.json.decode(line)
                value = (
                    {k: math.nan if v is None else v for k, v in raw["value"].items()}
                    if raw["value"]
                    else None
                )
                found.append(
                    Event(raw["time_s"], raw["rank"], raw["round"], raw["name"], value=value)
                )
        return found


def line(stream: TextIO | None, label: str, text: str) -> None:
    if stream is not None:
        screen = open_screen(stream)
        screen.line(label, text, STYLES.get(label, ""))
        screen.refresh()
