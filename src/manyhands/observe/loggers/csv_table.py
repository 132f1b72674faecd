"""CSV logger: one line for each step that has numbers, in metrics.csv of the run directory.

    step,epoch,train/loss,train/samples_per_s,evaluate/accuracy
    100,0.5,0.4132,12843.4,
    200,1.0,0.3911,12850.1,0.8812

A column that comes later is added to the whole file. A resumed run repeats steps: its lines take
the place of those that the run before wrote for them.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any, TextIO

from manyhands.errors import ManyhandsError
from manyhands.observe.loggers.scalars import LoggedPoint

FIRST = ["step", "epoch"]


class CsvTable:
    """CSV logger: writes `directory`/metrics.csv."""

    def __init__(self, directory: Path):
        self._path = Path(directory) / "metrics.csv"
        self._columns = list(FIRST)
        self._row: dict[str, Any] = {}  # of the newest step: what comes at one step is one line
        self._file: TextIO | None = None

    def begin(self, config: dict[str, Any]) -> None: ...

    def log(self, point: LoggedPoint) -> None:
        if self._file is None:
            self._open(point.step)
        if self._row and self._row["step"] != point.step:
            self._write()
        epoch = {} if point.epoch is None else {"epoch": point.epoch}
        self._row |= {"step": point.step, **epoch, **point.values}

    def end(self, finished: bool) -> None:
        if self._file is not None:
            self._write()
            self._file.close()
            self._file = None

    def _open(self, step: int) -> None:
        """Keep the lines of earlier steps."""
        columns, rows = self._read()
        self._columns = columns or self._columns
        self._rewrite([row for row in rows if int(float(row["step"])) < step])

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        if not self._path.exists():
            return [], []
        with self._path.open(newline="") as file:
            reader = csv.DictReader(file)
            columns = list(reader.fieldnames or [])
            if columns and columns[:2] != FIRST:
                raise ManyhandsError(
                    f"{self._path} begins with {', '.join(columns[:2])} and is no table of a run; "
                    "move it away"
                )
            return columns, [row for row in reader if row["step"] and row["epoch"] is not None]

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        if self._file is not None:
            self._file.close()
        part = self._path.with_suffix(".part")
        with part.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns, restval="")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(part, self._path)
        self._file = self._path.open("a", newline="")

    def _write(self) -> None:
        if not self._row:
            return
        if new := [name for name in self._row if name not in self._columns]:
            _, rows = self._read()
            self._columns += new
            self._rewrite(rows)
        assert self._file is not None
        csv.DictWriter(self._file, self._columns, restval="").writerow(self._row)
        self._file.flush()
        self._row = {}
