"""Row sources: whatever holds rows (files, sparse matrices, dense arrays) as row blocks.

"a9a", "part-*.libsvm", ["day1", "day2"]    libsvm files
"clicks.parquet", "clicks/"                 parquet files, their label in the column `label`
a scipy matrix or array, a dense array      with labels=
row blocks, or any iterable of them         as they are; for options of the readers above
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.linear.data.blocks import LARGEST_INDEX, RowBlock, value_type
from manyhands.linear.data.libsvm import iter_libsvm
from manyhands.linear.data.parquet import iter_parquet

PARQUET_MARK = b"PAR1"
CHUNK_BYTES = 8 << 20  # of an array, converted at a time


def row_blocks(
    source: Any, labels: Any = None, n_features: int | None = None, dtype: Any = np.float64
) -> Iterator[RowBlock]:
    """The rows of `source` in blocks; `labels` belong to an array, which has none itself."""
    dtype = value_type(dtype)
    sparse, dense = hasattr(source, "tocsr"), isinstance(source, np.ndarray)
    if not (sparse or dense or isinstance(source, str | os.PathLike | RowBlock)):
        if hasattr(source, "__array__"):  # a data frame
            source, dense = np.asarray(source), True
        elif not isinstance(source, Iterable):
            raise TypeError(
                f"{type(source).__name__} is given; a path, paths, a scipy matrix, an array or "
                "row blocks are needed"
            )
    if sparse or dense:
        return _array_blocks(source, _checked_labels(source, labels), n_features, dtype)
    if labels is not None:
        raise ValueError("labels are given, but files and row blocks hold their own: leave it out")
    if isinstance(source, RowBlock):
        return iter([source])
    if isinstance(source, list | tuple) and not source:
        raise ValueError("an empty list is given; paths or row blocks are needed")
    if isinstance(source, str | os.PathLike):
        return _file_blocks([source], n_features, dtype)
    if isinstance(source, list | tuple) and isinstance(source[0], str | os.PathLike):
        return _file_blocks(list(source), n_features, dtype)
    return _given_blocks(source)


def _given_blocks(blocks: Iterable[Any]) -> Iterator[RowBlock]:
    for number, block in enumerate(blocks):
        if not isinstance(block, RowBlock):
            raise TypeError(
                f"item {number} of the source is {type(block).__name__}; a RowBlock is needed. "
                "Give a list of rows as np.asarray(rows), with labels"
            )
        yield block


# -- files --


def _file_blocks(
    paths: list[str | os.PathLike[str]], n_features: int | None, dtype: np.dtype
) -> Iterator[RowBlock]:
    files = []
    for path in paths:
        named = os.fspath(path)
        found = [named] if os.path.exists(named) else sorted(glob.glob(named))
        if not found:
            raise FileNotFoundError(f"{named}: there is no such file, and no file matches it")
        files += [Path(name) for name in found]
    kinds = {_is_parquet(file) for file in files}
    if len(kinds) > 1:
        raise ValueError(
            f"libsvm and parquet files are given together ({', '.join(map(str, files[:8]))}); "
            "give files of one kind"
        )
    if kinds == {True}:
        return iter_parquet(files, n_features=n_features, dtype=dtype)
    return iter_libsvm(files, n_features=n_features, dtype=dtype)


def _is_parquet(path: Path) -> bool:
    if path.is_dir():
        if (path / "manifest.json").exists():
            raise ValueError(
                f"{path} holds row shards already; open it with RowShards.open, and pass its "
                "blocks() to write it anew"
            )
        return True
    with open(path, "rb") as file:
        return file.read(len(PARQUET_MARK)) == PARQUET_MARK


# -- arrays --


def _checked_labels(source: Any, labels: Any) -> np.ndarray:
    if len(source.shape) != 2:
        raise ValueError(
            f"Expected 2D array, got an array of shape {source.shape}: rows and columns are needed"
        )
    if labels is None:
        raise ValueError("an array is given without labels=; one number a row is needed")
    try:
        numbers = np.asarray(labels, np.float64)
    except (TypeError, ValueError) as e:
        raise ValueError(f"labels are not numbers ({e}); encode them as numbers first") from e
    if numbers.shape != (source.shape[0],):
        raise ValueError(
            f"Found input variables with inconsistent numbers of samples: {source.shape[0]} rows, "
            f"labels of shape {numbers.shape}"
        )
    return numbers


def _array_blocks(
    source: Any, labels: np.ndarray, n_features: int | None, dtype: np.dtype
) -> Iterator[RowBlock]:
    rows, columns = source.shape
    n_features = columns if n_features is None else n_features
    if not columns <= n_features <= LARGEST_INDEX:
        raise ValueError(
            f"n_features={n_features}, but the array has {columns} columns; {columns} to "
            f"{LARGEST_INDEX} is needed"
        )
    if not (np.issubdtype(source.dtype, np.number) or source.dtype == bool) or np.issubdtype(
        source.dtype, np.complexfloating
    ):
        raise ValueError(f"an array of {source.dtype} is given; real numbers are needed")
    sparse = hasattr(source, "tocsr")
    if sparse:
        source = source.tocsr()
    row_bytes = 12 * source.nnz // max(rows, 1) if sparse else 8 * columns
    step = max(1, CHUNK_BYTES // max(1, row_bytes))
    for first in range(0, rows, step):
        part = source[first : first + step]
        with np.errstate(over="ignore"):  # found when the block is checked
            if sparse:
                if not part.has_canonical_format:
                    part = part.copy()
                    part.sum_duplicates()
                arrays = (part.indptr.astype(np.int64), part.indices, part.data.astype(dtype))
            else:
                arrays = _dense_rows(np.asarray(part).astype(dtype))
        yield RowBlock(*arrays, labels[first : first + step], first, n_features)


def _dense_rows(dense: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    places, columns = np.nonzero(dense)
    indptr = np.zeros(len(dense) + 1, np.int64)
    np.cumsum(np.bincount(places, minlength=len(dense)), out=indptr[1:])
    return indptr, columns.astype(np.int32), dense[places, columns]
