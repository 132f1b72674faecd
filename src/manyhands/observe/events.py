"""Event recorder: collects events in memory, writes them twice a second, reads them from files.

    emit(event)   append to a list
    flush()       write <run>/events/rank-<r>.jsonl, then call every sink
    read(run)     the events of all ranks, by time

Each line is one event and each rank has its own file: no rank waits for another, and the files of a
crashed run can be read. Observing never ends training: a sink that fails is dropped, with a
message.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from manyhands.core import Event
from manyhands.errors import ManyhandsError

# of one rank's file; a thousand tiny rounds a second reach it in about ten minutes
SPANS_LIMIT_BYTES = 256 << 20


class Sink(Protocol):
    """Sink: receives the events of a rank, such as the terminal, TensorBoard, a file."""

    def write(self, events: list[Event]) -> None: ...
    def close(self) -> None: ...


class Recorder:
    """Recorder of one rank: `emit` appends to a list, `flush` does everything slow."""

    def __init__(
        self,
        directory: Path,
        rank: int,
        sinks: list[Sink] | None = None,
        spans_limit_bytes: int = SPANS_LIMIT_BYTES,
    ):
        path = Path(directory) / "events" / f"rank-{rank}.jsonl"
        self._pending: list[Event] = []
        # the thread that watches for stalls writes too, while the training thread waits
        self._flushing = threading.Lock()
        self._sinks: list[Sink] = [EventFile(path, spans_limit_bytes), *(sinks or [])]

    def add(self, sinks: list[Sink]) -> None:
        """Show events in more places from here on."""
        self._sinks += sinks

    def remove(self, sinks: list[Sink]) -> None:
        """Close sinks that were added."""
        self.flush()
        for sink in sinks:
            if sink in self._sinks:
                self._sinks.remove(sink)
                with suppress(Exception):
                    sink.close()

    def emit(self, event: Event) -> None:
        self._pending.append(event)

    def flush(self) -> None:
        # Copy, then delete that many: an event that another thread (writing a checkpoint) emits in
        # between stays for the next flush.
        with self._flushing:
            events = self._pending[:]
            del self._pending[: len(events)]
            if events:
                self._each(lambda sink: sink.write(events))

    def close(self) -> None:
        """Write the remaining events and close all sinks; safe to call twice."""
        self.flush()
        self._each(lambda sink: sink.close())
        self._sinks.clear()

    def _each(self, act: Callable[[Sink], None]) -> None:
        for sink in self._sinks[:]:
            try:
                act(sink)
            except Exception as error:
                self._sinks.remove(sink)
                with suppress(Exception):
                    sink.close()
                say(
                    f"{type(sink).__name__} stopped ({type(error).__name__}: {error}); "
                    "training goes on without it"
                )


class EventFile:
    """Event file: the JSONL file of one rank. Resuming a run appends to it."""

    def __init__(self, path: Path, spans_limit_bytes: int):
        self._path = path
        self._spans_limit_bytes = spans_limit_bytes
        self._file: BinaryIO | None = None
        self._full = False

    def write(self, events: list[Event]) -> None:
        # opened here, not before: a disk that cannot be written must not stop the start
        if self._file is not None and os.fstat(self._file.fileno()).st_nlink == 0:
            say(f"{self._path} was deleted while this run wrote to it; from here on in a new file")
            self._file.close()
            self._file = None
        if self._file is None:
            self._file = open_lines(self._path)
        if self._full or self._file.tell() > self._spans_limit_bytes:
            events = [event for event in events if event.value is not None]
            if not self._full:
                say(f"{self._path} holds {self._file.tell() >> 20} MiB; from here on without spans")
            self._full = True
        self._file.write(_encoder.encode_lines(events))
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def open_lines(path: Path) -> BinaryIO:
    """Open for appending at the start of a line, also when the last one was torn by a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+b")
    if file.tell():
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return file


def read(run_dir: Path) -> list[Event]:
    """All events of a run, of all ranks, by time; lines torn by a crash are left out."""
    run_dir = Path(run_dir)
    folder = run_dir / "events"
    if not folder.is_dir():
        missing = "has no events/ in it" if run_dir.is_dir() else "does not exist"
        raise ManyhandsError(
            f"{run_dir} is no run directory: it {missing}; "
            "give the directory that the run printed at its start"
        )
    events = [event for path in sorted(folder.glob("rank-*.jsonl")) for event in _parse(path)]
    if not events:
        raise ManyhandsError(
            f"{folder} holds no events: the run ended before its first flush; start it again"
        )
    return sorted(events, key=lambda event: event.time_s)


def say(text: str) -> None:
    with suppress(Exception):  # stderr may be closed
        print(f"manyhands: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class _Line:
    """An event as the file has it: JSON has no NaN, so a NaN was written as null."""

    time_s: float
    rank: int
    round: int
    name: str
    seconds: float = 0.0
    nbytes: int = 0
    value: Any = None


def _parse(path: Path) -> Iterator[Event]:
    with path.open("rb") as file:
        for line in file:
            try:
                x = _decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue  # torn: the process died while writing; a resumed run went on after it
            yield Event(x.time_s, x.rank, x.round, x.name, x.seconds, x.nbytes, _value(x.value))


def _value(raw: Any) -> float | str | dict[str, float] | None:
    if isinstance(raw, dict):
        return {
            k: math.nan if v is None else v
            for k, v in raw.items()
            if v is None or isinstance(v, int | float)
        }
    return raw if isinstance(raw, int | float | str) else None


def _plain(x: Any) -> Any:
    """A logged value as a number if it can be one (a numpy scalar, say), else as text."""
    try:
        return float(x)
    except (TypeError, ValueError):
        return str(x)


_encoder = msgspec.json.Encoder(enc_hook=_plain)
_decoder = msgspec.json.Decoder(_Line)
