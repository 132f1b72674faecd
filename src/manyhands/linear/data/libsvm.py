"""libsvm reader: text files of sparse rows (also called svmlight), whole or block by block.

    -1 3:1 11:0.25 14:1e-3  # label, then index:value with ascending indices

    block = read_libsvm("a9a")                  all rows
    for block in iter_libsvm("big.libsvm"):     a few megabytes of text at a time

The values are those of `sklearn.datasets.load_svmlight_file`, bit for bit. Files compressed by
gzip, bzip2 or xz are recognised by their first bytes. Indices in memory count from 0.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import lzma
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from manyhands.linear.data import libsvm_kernels as kernels
from manyhands.linear.data.blocks import LARGEST_INDEX, RowBlock, concatenate, value_type

BLOCK_BYTES = 8 << 20
COMPRESSED: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
SHOWN = 60  # characters of a field in an error

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
ZeroBased = bool | Literal["auto"]


def read_libsvm(
    path: Paths,
    n_features: int | None = None,
    zero_based: ZeroBased = "auto",
    dtype: Any = np.float64,
) -> RowBlock:
    """All rows of a file, or of several in order.

    The block's `n_features` is the number given, else the largest index + 1. For the other
    arguments see `iter_libsvm`.
    """
    options = (n_features, zero_based, dtype)
    block = concatenate(iter_libsvm(path, BLOCK_BYTES, *options), dtype, n_features)
    if n_features is not None:
        return block
    largest = int(block.indices.max(initial=-1))
    return RowBlock(block.indptr, block.indices, block.values, block.labels, 0, largest + 1)


def iter_libsvm(
    path: Paths,
    block_bytes: int = BLOCK_BYTES,
    n_features: int | None = None,
    zero_based: ZeroBased = "auto",
    dtype: Any = np.float64,
) -> Iterator[RowBlock]:
    """Rows in blocks of about `block_bytes` of text; at least one row a block.

    `path` is a file, a pattern such as "part-*", or several files. `zero_based="auto"` is
    scikit-learn's rule: indices count from 0 if any is 0, else from 1; to know it, the files are
    first searched for one, which costs a second pass. An index that is not below `n_features` is
    an error. So is anything that does not parse; the error names the file and the line.
    """
    files, dtype = find_files(path), value_type(dtype)
    if block_bytes < 1:
        raise ValueError(f"block_bytes={block_bytes} is given; 1 or more is needed")
    if n_features is not None and not 0 < n_features <= LARGEST_INDEX:
        raise ValueError(f"n_features={n_features} is given; 1 to {LARGEST_INDEX} is needed")
    if not (zero_based == "auto" or isinstance(zero_based, bool | np.bool_)):
        raise ValueError(f"zero_based={zero_based!r} is given; True, False or 'auto' is needed")
    return _blocks(files, block_bytes, n_features, zero_based, dtype)


def find_files(path: Paths) -> list[Path]:
    """The files that are named, or that match a pattern, by name."""
    if not isinstance(path, str | os.PathLike):
        return [file for each in path for file in find_files(each)]
    text = os.fspath(path)
    if os.path.exists(text):
        return [Path(text)]
    found = sorted(glob.glob(text))
    if not found:
        raise FileNotFoundError(f"{text}: there is no such file, and no file matches it")
    return [Path(name) for name in found]


def _blocks(
    files: list[Path],
    block_bytes: int,
    n_features: int | None,
    zero_based: ZeroBased,
    dtype: np.dtype,
) -> Iterator[RowBlock]:
    if zero_based == "auto":
        zero_based = any(
            kernels.has_index_zero(text, end)
            for file in files
            for text, end in _chunks(file, block_bytes)
        )
    base = 0 if zero_based else 1
    start = 0
    for file in files:
        line = 1
        for text, end in _chunks(file, block_bytes):
            block, lines = _parse(file, line, text, end, base, n_features, dtype, start)
            line += lines
            if block.rows:
                start += block.rows
                yield block


# -- text --


def _open(path: Path) -> tuple[IO[bytes], bool]:
    """The file's content as it was before compression, and whether it is compressed."""
    with open(path, "rb") as file:
        head = file.read(8)
    for mark, opener in COMPRESSED.items():
        if head.startswith(mark):
            return opener(path, "rb"), True
    return open(path, "rb", buffering=0), False


def _chunks(path: Path, block_bytes: int) -> Iterator[tuple[np.ndarray, int]]:
    """(text, end): text[:end] are whole lines; the array is used again for the next ones."""
    held, have, more = bytearray(block_bytes + 1), 0, True
    file, compressed = _open(path)
    with file:
        while more:
            if have == len(held) - 1:  # one line fills it
                held = held + bytearray(len(held))
            with memoryview(held) as view:
                while more and have < len(held) - 1:
                    got = _read_into(file, view[have:-1], path, compressed)
                    have, more = have + got, got > 0
            end = held.rfind(b"\n", 0, have) + 1
            if not more and end < have:  # the last line has no line end
                held[have] = kernels.NEWLINE
                end = have = have + 1
            if end:
                yield np.frombuffer(held, np.uint8), end
                held[: have - end] = held[end:have]
                have -= end


def _read_into(file: Any, view: memoryview, path: Path, compressed: bool) -> int:
    try:
        return file.readinto(view)
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as e:
        if not compressed or getattr(e, "errno", None) is not None:
            raise
        raise ValueError(f"{path} is damaged, it cannot be decompressed: {e}") from e


# -- rows --


def _parse(
    path: Path,
    line: int,
    text: np.ndarray,
    end: int,
    base: int,
    n_features: int | None,
    dtype: np.dtype,
    start: int,
) -> tuple[RowBlock, int]:
    """The rows of text[:end], whose first line has number `line`; and the number of lines."""
    lines, colons = kernels.count(text, end)
    labels, indptr = np.empty(lines), np.empty(lines + 1, np.int64)
    indices, values = np.empty(colons, np.int32), np.empty(colons, dtype)
    numbers = lines + colons
    odd = (np.empty(end, np.uint8), np.empty(numbers, np.int64), np.empty(numbers, np.int64))
    places = np.zeros(2, np.int64)
    limit = LARGEST_INDEX if n_features is None else n_features
    rows, nonzeros, fault, at = kernels.parse(
        text, end, base, limit, (labels, indptr, indices, values), odd, places
    )
    if places[1]:
        infinite = _fill_odd(odd, places, labels, values)
        if infinite >= 0:
            fault, at = -1, infinite
    if fault != kernels.SOUND:
        raise ValueError(_fault(path, line, text, end, at, fault, base, limit, dtype))
    block = RowBlock(
        indptr[: rows + 1], indices[:nonzeros], values[:nonzeros], labels[:rows], start, n_features
    )
    return block, lines


def _fill_odd(odd: Any, places: np.ndarray, labels: np.ndarray, values: np.ndarray) -> int:
    """Converts the numbers that were set aside; the place of one that is infinite, or -1.

    NumPy converts text as Python's float does: correctly rounded, whatever the locale.
    """
    text, slots, at = odd
    written, numbers = places
    slots, at = slots[:numbers], at[:numbers]
    converted = np.fromstring(text[:written].tobytes(), np.float64, sep=" ")
    assert len(converted) == numbers, "the kernel has let a malformed number pass"
    of_labels = slots < 0
    labels[-1 - slots[of_labels]] = converted[of_labels]
    with np.errstate(over="ignore"):
        converted[~of_labels] = converted[~of_labels].astype(values.dtype)
    values[slots[~of_labels]] = converted[~of_labels]
    infinite = np.flatnonzero(~np.isfinite(converted))
    return int(at[infinite[0]]) if len(infinite) else -1


# -- errors --


def _fault(
    path: Path,
    line: int,
    text: np.ndarray,
    end: int,
    at: int,
    fault: int,
    base: int,
    limit: int,
    dtype: np.dtype,
) -> str:
    raw = text[:end].tobytes()
    number = line + raw.count(b"\n", 0, at)
    here = raw[raw.rfind(b"\n", 0, at) + 1 : raw.find(b"\n", at)]
    before = here[: at - raw.rfind(b"\n", 0, at) - 1].split()
    if fault < 0 and before and at and raw[at - 1] == kernels.COLON:  # the value of a field
        at -= len(before.pop())
    field = raw[at : at + 4 * SHOWN].split(b"#")[0].split()[0].decode(errors="backslashreplace")
    if len(field) > SHOWN:
        field = field[:SHOWN] + "..."
    sentence = _sentence(field, before, fault, base, limit, dtype)
    return f"{path}, line {number}: {sentence}"


def _sentence(
    field: str, before: list[bytes], fault: int, base: int, limit: int, dtype: np.dtype
) -> str:
    number = field.rpartition(":")[2].lstrip("+-").lower()
    what = "Input X" if before else "Input y"
    if fault == -1:
        return f"{what} contains infinity or a value too large for {dtype!r}: {field!r}"
    if fault in (kernels.BAD_LABEL, kernels.BAD_FIELD) and number in ("nan", "inf", "infinity"):
        return f"{what} contains NaN or infinity: {field!r}; finite numbers are needed"
    if fault == kernels.BAD_LABEL:
        return _bad_label(field)
    index = field.partition(":")[0]
    if fault == kernels.BAD_INDEX:
        how = "indices count from 0" if base == 0 else "they are read as counting from 1"
        hint = "" if base == 0 or index.startswith("-") else ": pass zero_based=True or 'auto'"
        return f"Invalid index {index} in SVMlight/LibSVM data file; {how}{hint}"
    if fault == kernels.OUT_OF_ORDER:
        last = before[-1].decode().partition(":")[0]
        return (
            "Feature indices in SVMlight/LibSVM data file should be sorted and unique, but "
            f"{index} follows {last}"
        )
    if fault == kernels.BEYOND:
        counted = f"indices count from {base}"
        if limit == LARGEST_INDEX:
            return f"index {index} is too large ({counted}): at most {limit} columns are possible"
        return f"n_features was set to {limit}, but the line has index {index} ({counted})"
    if field.startswith("qid"):
        return (
            f"{field!r} is a query id, which only ranking uses and no linear model here reads; "
            "remove the qid fields"
        )
    return f"{field!r} does not parse; index:value, such as 3:0.5, is needed"


def _bad_label(field: str) -> str:
    if "," in field:
        return (
            f"the label {field!r} names several classes; multilabel files are not supported, one "
            "number is needed: write one file for each class"
        )
    if ":" in field:
        return f"the label is missing: the line begins with {field!r}; label index:value is needed"
    return f"could not convert the label to float: {field!r}"
