"""Row block: consecutive rows of sparse data in CSR form, with their labels.

    row i:  columns indices[indptr[i]:indptr[i+1]], ascending; values at the same places; labels[i]

Readers yield row blocks and `write_shards` takes them, so data of any size passes through a few
megabytes of memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from manyhands.kernels.compile import compiled

LARGEST_INDEX = 2**31 - 1  # of an int32
DTYPES = (np.dtype(np.float64), np.dtype(np.float32))


@dataclass(frozen=True)
class RowBlock:
    """Rows in CSR form: row i has columns indices[indptr[i]:indptr[i+1]] with those values."""

    indptr: np.ndarray  # int64, rows + 1, from 0
    indices: np.ndarray  # int32, ascending in a row, from 0
    values: np.ndarray  # float64 or float32
    labels: np.ndarray  # float64, one a row, as the file has them
    start: int = 0  # number of the first row in the whole data
    n_features: int | None = None  # columns of the whole data, where they are known

    @property
    def rows(self) -> int:
        return len(self.indptr) - 1

    @property
    def nonzeros(self) -> int:
        return len(self.indices)

    @property
    def nbytes(self) -> int:
        arrays = (self.indptr, self.indices, self.values, self.labels)
        return sum(array.nbytes for array in arrays)

    def row_slice(self, first: int, last: int) -> RowBlock:
        """Rows first to last - 1; indices, values and labels are views."""
        low, high = self.indptr[first], self.indptr[last]
        return RowBlock(
            self.indptr[first : last + 1] - low,
            self.indices[low:high],
            self.values[low:high],
            self.labels[first:last],
            self.start + first,
            self.n_features,
        )


def concatenate(blocks: Iterable[RowBlock], dtype: Any, n_features: int | None) -> RowBlock:
    """One block of all rows, in order; an empty one where there are none."""
    parts = list(blocks)
    counts = [np.diff(part.indptr) for part in parts]
    indptr = np.zeros(sum(map(len, counts)) + 1, np.int64)
    np.cumsum(np.concatenate([np.zeros(0, np.int64), *counts]), out=indptr[1:])
    return RowBlock(
        indptr,
        np.concatenate([np.zeros(0, np.int32), *(part.indices for part in parts)]),
        np.concatenate([np.zeros(0, dtype), *(part.values for part in parts)]),
        np.concatenate([np.zeros(0, np.float64), *(part.labels for part in parts)]),
        parts[0].start if parts else 0,
        n_features,
    )


def value_type(dtype: Any) -> np.dtype:
    """`dtype` as float64 or float32, or an error."""
    given = np.dtype(dtype)
    if given not in DTYPES:
        raise ValueError(f"dtype={given} is given; float64 or float32 is needed")
    return given


# -- checks --

SOUND, OUT_OF_ORDER, NEGATIVE, BEYOND, NOT_FINITE, BAD_LABEL = range(6)


@compiled
def _first_fault(indptr, indices, values, labels, n_features):
    """(row, place, what is wrong) of the first row that is not sound."""
    for row in range(indptr.size - 1):
        if not np.isfinite(labels[row]):
            return row, 0, BAD_LABEL
        before = np.int64(-1)
        for place in range(indptr[row], indptr[row + 1]):
            index = np.int64(indices[place])
            if index < 0:
                return row, place, NEGATIVE
            if index <= before:
                return row, place, OUT_OF_ORDER
            if index >= n_features:
                return row, place, BEYOND
            if not np.isfinite(values[place]):
                return row, place, NOT_FINITE
            before = index
    return -1, 0, SOUND


def check_rows(block: RowBlock, where: str, n_features: int | None = None) -> None:
    """Refuses a block whose rows are not sound; the error names `where` and the row."""
    indptr, ends = block.indptr, len(block.indices)
    if (
        not len(indptr)
        or (len(indptr) - 1, ends) != (len(block.labels), len(block.values))
        or (indptr[0], indptr[-1]) != (0, ends)
        or np.any(indptr[1:] < indptr[:-1])
    ):
        raise ValueError(
            f"{where}: {len(indptr)} entries of indptr, {ends} indices, {len(block.values)} values "
            f"and {len(block.labels)} labels do not make a CSR block: needed are rows + 1 entries "
            "of indptr that begin with 0, do not decrease and end with the number of indices; as "
            "many values as indices; and one label a row"
        )
    limit = LARGEST_INDEX if n_features is None else n_features
    row, place, fault = _first_fault(indptr, block.indices, block.values, block.labels, limit)
    if fault != SOUND:
        sentence = _sentence(block, row, place, fault, limit)
        raise ValueError(f"{where}, row {block.start + row}: {sentence}")


def _sentence(block: RowBlock, row: int, place: int, fault: int, limit: int) -> str:
    if fault == BAD_LABEL:
        return f"Input y contains NaN or infinity: {block.labels[row]}"
    index = block.indices[place]
    if fault == NEGATIVE:
        return f"Invalid index {index}; indices are 0 or more"
    if fault == OUT_OF_ORDER:
        return (
            f"Feature indices should be sorted and unique, but {index} follows "
            f"{block.indices[place - 1]}"
        )
    if fault == BEYOND:
        return f"index {index} is out of bounds for n_features={limit}"
    return (
        "Input X contains NaN, infinity or a value too large for "
        f"{block.values.dtype!r}: {block.values[place]} in column {index}"
    )
