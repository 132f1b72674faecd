"""Prediction file: predictions as Parquet, CSV, NumPy or PyTorch file, written batch by batch.

    .parquet, .csv    a column for each number of a row: outputs_0, outputs_1, ..., targets
    .npz, .pt         an array for each: outputs, targets

It is written beside its place under a hidden name, and moved there when it is complete.
"""

from __future__ import annotations

import contextlib
import csv
import glob
import importlib
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from manyhands.errors import LaunchError, PlanError, TaskError

MOST_COLUMNS = 1024

Arrays = Mapping[str, "np.ndarray[Any, Any]"]


class _Format(Protocol):
    def write(self, arrays: Arrays) -> None: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...


class PredictionFile:
    """The file `out`, of the format that its name ends with."""

    def __init__(self, out: Path, overwrite: bool = False):
        check_out(out, overwrite)
        self.out, self.rows = out, 0
        self._part = out.with_name(f".{out.name}.writing-{os.getpid()}")
        self._kinds: dict[str, tuple[Any, ...]] = {}
        with self._written():
            self._format = FORMATS[out.suffix](self._part)

    def write(self, columns: Mapping[str, Tensor]) -> None:
        arrays = {name: value.numpy() for name, value in columns.items()}
        kinds = {name: (a.shape[1:], a.dtype.str) for name, a in arrays.items()}
        self._kinds = self._kinds or kinds
        if kinds != self._kinds:
            raise TaskError(
                f"rows of the shapes and types {_said(kinds)} follow rows of {_said(self._kinds)}, "
                "which one file cannot hold; let predict= pad them to one length"
            )
        with self._written():
            self._format.write(arrays)
        self.rows += len(next(iter(arrays.values())))

    def finish(self) -> None:
        with self._written():
            self._format.finish()
            os.replace(self._part, self.out)

    def abandon(self) -> None:
        """Leave nothing behind."""
        with contextlib.suppress(Exception):
            self._format.close()
        for left in self.out.parent.glob(f"{glob.escape(self._part.name)}*"):
            left.unlink(missing_ok=True)

    @contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise LaunchError(
                f"{self.out} could not be written ({e.strerror or e}), and nothing of it was kept; "
                "free space or permit writing there, or give another file"
            ) from e


def check_out(out: Path, overwrite: bool = False) -> None:
    """Refuse a file that cannot be, before anything is computed for it."""
    if out.suffix not in FORMATS:
        raise PlanError(f"{out}: a file name that ends with {', '.join(FORMATS)} is needed")
    if out.is_dir() or (out.exists() and not overwrite):
        raise PlanError(
            f"{out} exists; give another file, or --overwrite (overwrite=True) to replace it"
        )
    if not out.parent.is_dir():
        raise PlanError(f"{out}: the folder {out.parent} does not exist; make it first")
    if out.suffix == ".parquet":
        try:
            importlib.import_module("pyarrow.parquet")
        except ImportError:
            raise PlanError(
                f"{out} needs pyarrow: pip install 'manyhands[parquet]', or give a .csv or .npz"
            ) from None


class _Csv:
    def __init__(self, path: Path):
        self._file = path.open("w", newline="")
        self._rows = csv.writer(self._file)
        self._begun = False

    def write(self, arrays: Arrays) -> None:
        columns = single_columns(arrays)
        if not self._begun:
            self._rows.writerow(columns)
            self._begun = True
        self._rows.writerows(zip(*(c.astype(str) for c in columns.values()), strict=True))
        self._file.flush()

    def finish(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        self._file.close()


class _Parquet:
    def __init__(self, path: Path):
        self._arrow = importlib.import_module("pyarrow")
        self._parquet = importlib.import_module("pyarrow.parquet")
        self._file = path.open("wb")
        self._writer: Any = None

    def write(self, arrays: Arrays) -> None:
        table = self._arrow.table(single_columns(arrays))
        if self._writer is None:
            self._writer = self._parquet.ParquetWriter(self._file, table.schema)
        self._writer.write_table(table)

    def finish(self) -> None:
        self._writer.close()
        self._file.close()

    def close(self) -> None:
        self._file.close()


class _Arrays:
    """Arrays in raw files, each at the end in one file of its format."""

    def __init__(self, path: Path, whole: Callable[[Path, dict[str, _RawArray]], None]):
        self._path, self._whole = path, whole
        self._arrays: dict[str, _RawArray] = {}
        path.touch()

    def write(self, arrays: Arrays) -> None:
        for i, (name, array) in enumerate(arrays.items()):
            if name not in self._arrays:
                path = self._path.with_name(f"{self._path.name}.{i}")
                self._arrays[name] = _RawArray(path, array.dtype, array.shape[1:])
            self._arrays[name].write(array)

    def finish(self) -> None:
        self.close()
        self._whole(self._path, self._arrays)
        for array in self._arrays.values():
            array.path.unlink()

    def close(self) -> None:
        for array in self._arrays.values():
            array.file.close()


class _RawArray:
    def __init__(self, path: Path, dtype: np.dtype[Any], row: tuple[int, ...]):
        self.path, self.dtype, self.row, self.rows = path, dtype, row, 0
        self.file: IO[bytes] = path.open("wb")

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, *self.row)

    def write(self, array: np.ndarray[Any, Any]) -> None:
        self.file.write(np.ascontiguousarray(array).tobytes())
        self.rows += len(array)


def _npz(path: Path) -> _Arrays:
    def whole(path: Path, arrays: dict[str, _RawArray]) -> None:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for name, array in arrays.items():
                header = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
                with (
                    archive.open(f"{name}.npy", "w", force_zip64=True) as entry,
                    array.path.open("rb") as raw,
                ):
                    np.lib.format.write_array_header_1_0(entry, header)
                    shutil.copyfileobj(raw, entry, 1 << 20)

    return _Arrays(path, whole)


def _torch(path: Path) -> _Arrays:
    def whole(path: Path, arrays: dict[str, _RawArray]) -> None:
        mapped = {
            name: torch.from_numpy(np.memmap(array.path, array.dtype, "r+", shape=array.shape))
            for name, array in arrays.items()
        }
        with path.open("wb") as file:
            torch.save(mapped, file)

    return _Arrays(path, whole)


FORMATS: dict[str, Callable[[Path], _Format]] = {
    ".parquet": _Parquet,
    ".csv": _Csv,
    ".npz": _npz,
    ".pt": _torch,
}


def single_columns(arrays: Arrays) -> dict[str, np.ndarray[Any, Any]]:
    """A column for each number of a row."""
    found = {}
    for name, array in arrays.items():
        if array.ndim == 1:
            found[name] = array
            continue
        if array.ndim > 2 or array.shape[1] > MOST_COLUMNS:
            raise TaskError(
                f"{name} have rows of shape {array.shape[1:]}, but a table holds at most "
                f"{MOST_COLUMNS} numbers in a row; write .npz or .pt, or let predict= choose"
            )
        found |= {f"{name}_{i}": array[:, i] for i in range(array.shape[1])}
    return found


def _said(kinds: Mapping[str, tuple[Any, ...]]) -> str:
    return ", ".join(f"{name} {shape} {dtype}" for name, (shape, dtype) in kinds.items())
