"""Parquet reader and writer: rows as numeric columns, or as lists of indices and values.

    columns   label: number, and any number of numeric columns; 0 is not stored in the rows read
    lists     label: number, indices: list<int> ascending from 0, values: list<float>

    for block in iter_parquet("clicks/", label="clicked"):
        ...

Files are read page by page, one thread, so memory is bounded by `block_rows` and a page of each
column, however large the file's row groups are. Needs pyarrow: pip install 'manyhands[parquet]'.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.linear.data.blocks import LARGEST_INDEX, RowBlock, check_rows, value_type

BLOCK_ROWS = 1 << 14
LISTS = ("indices", "values")
READ_BUFFER = 1 << 20  # bytes read at a time from each column, instead of the column's whole chunk
SHOWN = 20  # names in an error

AnyPath = str | os.PathLike[str]


def iter_parquet(
    path: AnyPath | Iterable[AnyPath],
    label: str = "label",
    columns: Sequence[str] | None = None,
    block_rows: int = BLOCK_ROWS,
    n_features: int | None = None,
    dtype: Any = np.float64,
) -> Iterator[RowBlock]:
    """Rows of a file, of a folder's .parquet files by name, or of several files, in blocks.

    `columns` are the columns to read, in this order, or the two columns of lists. By default they
    are `indices` and `values` where these hold lists, else all columns but the label. `n_features`
    is the number of columns that lists may have; with numeric columns it is their number.
    """
    _pyarrow()
    files, dtype = parquet_files(path), value_type(dtype)
    if block_rows < 1:
        raise ValueError(f"block_rows={block_rows} is given; 1 or more is needed")
    if n_features is not None and not 0 < n_features <= LARGEST_INDEX:
        raise ValueError(f"n_features={n_features} is given; 1 to {LARGEST_INDEX} is needed")
    layout = _layout(files[0], label, columns)
    if not layout.lists:
        if n_features not in (None, len(layout.columns)):
            raise ValueError(
                f"n_features={n_features} is given, but {files[0]} has {len(layout.columns)} "
                "numeric columns beside the label; leave n_features out, or choose columns"
            )
        n_features = len(layout.columns)
    for file in files[1:]:
        other = _layout(file, label, columns)
        if other != layout:
            raise ValueError(
                f"{file} has the columns {_names(other.columns)}, but {files[0]} has "
                f"{_names(layout.columns)}; files of one data set need the same columns, or pass "
                "columns=[...]"
            )
    return _blocks(files, layout, block_rows, n_features, dtype)


def parquet_files(path: AnyPath | Iterable[AnyPath]) -> list[Path]:
    """The files named, and those in folders named, by name; not hidden ones, nor _metadata."""
    if not isinstance(path, str | os.PathLike):
        files = [file for each in path for file in parquet_files(each)]
        if not files:
            raise ValueError("no parquet file is given")
        return files
    given = Path(path)
    if not given.exists():
        raise FileNotFoundError(f"{given}: there is no such file or folder")
    if not given.is_dir():
        return [given]
    found = [
        file
        for file in sorted(given.rglob("*.parquet"))
        if not any(part.startswith(("_", ".")) for part in file.relative_to(given).parts)
    ]
    if not found:
        raise FileNotFoundError(f"{given}: no file of this folder ends with .parquet")
    return found


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as e:
        raise ImportError(
            f"parquet files are read by pyarrow, which cannot be imported ({e}); "
            "pip install 'manyhands[parquet]'"
        ) from e
    return pyarrow


# -- layout --


@dataclass(frozen=True)
class _Layout:
    label: str
    columns: tuple[str, ...]
    lists: bool


def _layout(file: Path, label: str, columns: Sequence[str] | None) -> _Layout:
    """What to read of `file`, from its schema; or an error that names columns and types."""
    arrow = _pyarrow()
    if isinstance(columns, str):
        raise ValueError(f"columns={columns!r} is given; a list of names is needed")
    with _opened(file) as opened:
        schema = opened.schema_arrow
    if columns is None:
        lists = all(n in schema.names and _is_list(schema.field(n).type) for n in LISTS)
        columns = LISTS if lists else [n for n in schema.names if n != label]
    missing = [n for n in (label, *columns) if n not in schema.names]
    if missing:
        raise ValueError(
            f"{file}: the columns {_names(missing)} are missing; it has {_names(schema.names)}"
        )
    repeated = sorted({n for n in (label, *columns) if (label, *columns).count(n) > 1})
    repeated += sorted({n for n in (label, *columns) if schema.names.count(n) > 1})
    if repeated or not columns:
        what = f"the columns {_names(repeated)} are named twice" if repeated else "has no columns"
        raise ValueError(f"{file}: {what}; a label and other columns are needed, each once")
    types = {n: schema.field(n).type for n in (label, *columns)}
    listed = [n for n in columns if _is_list(types[n])]
    if listed:
        indices, values = (types[n].value_type for n in listed) if len(listed) == 2 else (0, 0)
        if len(listed) != len(columns) or not indices:
            raise ValueError(
                f"{file}: the columns {_names(listed)} of {_names(columns)} hold lists; either no "
                "column holds lists, or there are two, of indices and of values: choose columns"
            )
        if not arrow.types.is_integer(indices) or not _is_number(values):
            raise ValueError(
                f"{file}: {listed[0]!r} is {types[listed[0]]} and {listed[1]!r} is "
                f"{types[listed[1]]}; list<int> of indices and list<float> of values are needed"
            )
    wrong = {n: t for n, t in types.items() if not _is_number(t) and n not in listed}
    if wrong:
        shown = ", ".join(f"{n!r} is {t}" for n, t in list(wrong.items())[:SHOWN])
        raise ValueError(
            f"{file}: {shown}; numbers are needed: encode these columns, or leave them out with "
            "columns=[...]"
        )
    return _Layout(label, tuple(columns), bool(listed))


def _is_list(kind: Any) -> bool:
    types = _pyarrow().types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _is_number(kind: Any) -> bool:
    types = _pyarrow().types
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)


def _names(names: Iterable[str]) -> str:
    given = list(names)
    more = f" and {len(given) - SHOWN} more" if len(given) > SHOWN else ""
    return ", ".join(map(repr, given[:SHOWN])) + more


def _opened(file: Path) -> Any:
    arrow = _pyarrow()
    try:
        return arrow.parquet.ParquetFile(
            file, buffer_size=READ_BUFFER, pre_buffer=False, page_checksum_verification=True
        )
    except arrow.ArrowInvalid as e:
        raise ValueError(f"{file} is not a parquet file, or is damaged: {e}") from e


# -- rows --


def _blocks(
    files: list[Path], layout: _Layout, block_rows: int, n_features: int | None, dtype: np.dtype
) -> Iterator[RowBlock]:
    arrow = _pyarrow()
    start = 0
    for file in files:
        with _opened(file) as opened:
            names = [layout.label, *layout.columns]
            batches = opened.iter_batches(block_rows, columns=names, use_threads=False)
            first = start
            while True:
                try:
                    batch = next(batches, None)
                except (arrow.ArrowException, OSError) as e:
                    raise ValueError(f"{file} is damaged near its row {start - first}: {e}") from e
                if batch is None:
                    break
                where = (file, start - first)
                labels = _numbers(batch.column(layout.label), layout.label, np.float64, where)
                rows = _list_rows if layout.lists else _column_rows
                parts = rows(batch, layout.columns, dtype, where)
                yield _checked(parts, labels, start, n_features, where)
                start += batch.num_rows


Where = tuple[Path, int]


def _refuse_nulls(array: Any, name: str, where: Where) -> None:
    if array.null_count:
        row = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
        raise ValueError(
            f"{where[0]}: column {name!r} is null in row {where[1] + row}; fill or drop nulls first"
        )


def _numbers(array: Any, name: str, dtype: Any, where: Where) -> np.ndarray:
    """A numeric column as `dtype`, every number finite."""
    _refuse_nulls(array, name, where)
    given = array.to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):
        numbers = given.astype(dtype)
    finite = np.isfinite(numbers)
    if not finite.all():
        row = int(np.argmin(finite))
        raise ValueError(
            f"{where[0]}: column {name!r} contains NaN, infinity or a value too large for "
            f"{np.dtype(dtype)!r} in row {where[1] + row}: {given[row]}"
        )
    return numbers


Parts = tuple[np.ndarray, np.ndarray, np.ndarray]


def _column_rows(batch: Any, names: tuple[str, ...], dtype: np.dtype, where: Where) -> Parts:
    dense = np.empty((batch.num_rows, len(names)), dtype)
    for j, name in enumerate(names):
        dense[:, j] = _numbers(batch.column(name), name, dtype, where)
    rows, columns = np.nonzero(dense)
    indptr = np.zeros(batch.num_rows + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=batch.num_rows), out=indptr[1:])
    return indptr, columns.astype(np.int32), dense[rows, columns]


def _list_rows(batch: Any, names: tuple[str, ...], dtype: np.dtype, where: Where) -> Parts:
    lengths, flat = [], []
    for name in names:
        array = batch.column(name)
        _refuse_nulls(array, name, where)
        lengths.append(array.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64))
        flat.append(array.flatten())
    if not np.array_equal(*lengths):
        row = int(np.argmax(lengths[0] != lengths[1]))
        raise ValueError(
            f"{where[0]}: in row {where[1] + row} {names[0]!r} has {lengths[0][row]} entries and "
            f"{names[1]!r} has {lengths[1][row]}; one value an index is needed"
        )
    indptr = np.zeros(batch.num_rows + 1, np.int64)
    np.cumsum(lengths[0], out=indptr[1:])
    for name, array in zip(names, flat, strict=True):
        if array.null_count:
            place = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
            row = where[1] + int(np.searchsorted(indptr, place, "right")) - 1
            raise ValueError(
                f"{where[0]}: a list of column {name!r} holds a null in row {row}; "
                "fill or drop nulls first"
            )
    indices, values = (array.to_numpy(zero_copy_only=False) for array in flat)
    with np.errstate(over="ignore"):
        return indptr, indices, values.astype(dtype)


def _checked(
    parts: Parts, labels: np.ndarray, start: int, n_features: int | None, where: Where
) -> RowBlock:
    """The block, its indices as int32; rows in errors are those of the file."""
    indptr, indices, values = parts
    if indices.dtype != np.int32:
        indices = indices.astype(np.int64)
    check_rows(RowBlock(indptr, indices, values, labels, where[1]), str(where[0]), n_features)
    return RowBlock(indptr, indices.astype(np.int32, copy=False), values, labels, start, n_features)


# -- writing --


def write_parquet(blocks: Iterable[RowBlock], path: AnyPath, compression: str = "snappy") -> int:
    """Writes rows as lists, one row group a block; returns the number of rows.

    Columns: label (double), indices (list<int32>), values (list of the blocks' type). The file
    appears under its name when it is complete; until then it is called `path`.partial.
    """
    arrow = _pyarrow()
    partial = Path(f"{os.fspath(path)}.partial")
    writer, rows = None, 0
    try:
        for block in blocks:
            if block.nonzeros > LARGEST_INDEX:
                raise ValueError(
                    f"{path}: a block has {block.nonzeros} non-zeros; at most {LARGEST_INDEX} can "
                    "be written as lists, so give smaller blocks"
                )
            offsets = arrow.array(block.indptr.astype(np.int32))
            table = arrow.table(
                {
                    "label": block.labels,
                    "indices": arrow.ListArray.from_arrays(offsets, arrow.array(block.indices)),
                    "values": arrow.ListArray.from_arrays(offsets, arrow.array(block.values)),
                }
            )
            if writer is None:
                writer = arrow.parquet.ParquetWriter(
                    partial,
                    table.schema,
                    compression=compression,
                    use_dictionary=False,
                    write_page_checksum=True,
                )
            writer.write_table(table)
            rows += block.rows
        if writer is None:
            raise ValueError(f"{path}: no rows are given")
        writer.close()
        os.replace(partial, path)
    except BaseException:
        if writer is not None:
            writer.close()
        partial.unlink(missing_ok=True)
        raise
    return rows
