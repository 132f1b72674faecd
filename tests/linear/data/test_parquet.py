"""Parquet files: numeric columns and lists are the rows they hold; bad columns are named."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from manyhands.linear.data import RowBlock, SyntheticRows, iter_parquet, write_parquet
from manyhands.linear.data.blocks import concatenate

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def table(folder: Path, columns: dict, name: str = "rows.parquet", **options) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), path, **options)
    return path


def rows_of(path, dtype=np.float64, **options) -> RowBlock:
    blocks = list(iter_parquet(path, dtype=dtype, **options))
    assert [b.start for b in blocks] == [
        sum(b.rows for b in blocks[:i]) for i in range(len(blocks))
    ]
    return concatenate(blocks, dtype, blocks[0].n_features)


def dense(block: RowBlock) -> np.ndarray:
    found = np.zeros((block.rows, block.n_features))
    rows = np.repeat(np.arange(block.rows), np.diff(block.indptr))
    found[rows, block.indices] = block.values
    return found


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_numeric_columns_are_columns_in_their_order(tmp_path: Path, dtype) -> None:
    random = np.random.default_rng(0)
    X = random.normal(size=(1000, 5)) * (random.random((1000, 5)) < 0.4)
    X[:, 2], X[:, 3] = random.integers(0, 9, 1000), random.integers(0, 2, 1000)
    columns = {
        "a": X[:, 0].astype(np.float32),
        "y": random.integers(0, 2, 1000),
        "b": X[:, 1],
        "c": X[:, 2].astype(np.uint8),
        "d": X[:, 3].astype(bool),
        "e": X[:, 4],
    }
    X[:, 0] = columns["a"]
    path = table(tmp_path, columns, row_group_size=300)
    block = rows_of(path, dtype, label="y", block_rows=128)
    assert block.values.dtype == dtype and block.indices.dtype == np.int32
    np.testing.assert_array_equal(dense(block), X.astype(dtype))
    np.testing.assert_array_equal(block.labels, columns["y"])
    assert np.all(block.values != 0)
    chosen = rows_of(path, dtype, label="y", columns=["e", "a"])
    np.testing.assert_array_equal(dense(chosen), X[:, [4, 0]].astype(dtype))


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list])
def test_lists_of_indices_and_values_in_a_folder_of_files(tmp_path: Path, kind) -> None:
    rows = SyntheticRows(700, 60, 5, seed=1)
    whole = concatenate(rows.blocks(), np.float64, 60)
    (tmp_path / "set" / "_metadata").mkdir(parents=True)
    for first, last, name in ((0, 300, "a"), (300, 700, "b")):
        part = whole.row_slice(first, last)
        lists = np.split(part.indices, part.indptr[1:-1]), np.split(part.values, part.indptr[1:-1])
        columns = {
            "at": pa.array(list(lists[0]), kind(pa.int64())),
            "clicked": part.labels,
            "x": pa.array(list(lists[1]), kind(pa.float64())),
            "ignored": ["text"] * part.rows,
        }
        table(tmp_path / "set", columns, f"{name}.parquet", row_group_size=110)
    options = {"label": "clicked", "columns": ["at", "x"], "block_rows": 90, "n_features": 60}
    block = rows_of(tmp_path / "set", **options)
    for name in ("indptr", "indices", "values", "labels"):
        np.testing.assert_array_equal(getattr(block, name), getattr(whole, name))
    with pytest.raises(
        ValueError, match=r"a\.parquet, row \d+: index \d+ is out of bounds for n_f"
    ):
        rows_of(tmp_path / "set", **{**options, "n_features": 7})


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_what_is_written_is_read_again(tmp_path: Path, dtype) -> None:
    rows = SyntheticRows(1000, 5000, 9, seed=2, dtype=dtype)
    path = tmp_path / "rows.parquet"
    assert write_parquet(rows.blocks(300), path) == 1000
    block, whole = rows_of(path, dtype, n_features=5000), concatenate(rows.blocks(), dtype, 5000)
    for name in ("indptr", "indices", "values", "labels"):
        np.testing.assert_array_equal(getattr(block, name), getattr(whole, name))
    assert pq.ParquetFile(path).num_row_groups == 4
    with pytest.raises(ValueError, match="no rows are given"):
        write_parquet([], tmp_path / "none.parquet")
    assert list(tmp_path.iterdir()) == [path]


GOOD_LISTS = {
    "label": [1.0, 0.0, 1.0],
    "indices": [[0, 2], [], [1]],
    "values": [[1.0, 2.0], [], [3.0]],
}
BAD = {
    "missing label": ({"a": [1.0]}, {}, r"the columns 'label' are missing; it has 'a'"),
    "missing columns": (
        {"label": [1], "a": [1.0]},
        {"columns": ["b", "a", "c"]},
        r"the columns 'b', 'c' are missing; it has 'label', 'a'",
    ),
    "label alone": ({"label": [1.0]}, {}, r"has no columns"),
    "column twice": ({"label": [1], "a": [1]}, {"columns": ["a", "a"]}, r"'a' are named twice"),
    "string": ({"label": [1], "city": ["x"]}, {}, r"'city' is (large_)?string; numbers are needed"),
    "string label": ({"label": ["yes"], "a": [1]}, {}, r"'label' is (large_)?string"),
    "name as columns": ({"label": [1], "a": [1]}, {"columns": "a"}, r"a list of names is needed"),
    "null": (
        {"label": [1] * 5, "a": [1.0] * 5, "b": [1.0, 2.0, 3.0, None, None]},
        {},
        r"rows\.parquet: column 'b' is null in row 3",
    ),
    "null label": ({"label": [1, None], "a": [1, 2]}, {}, r"column 'label' is null in row 1"),
    "nan": (
        {"label": [1] * 3, "a": [1, 2, np.nan]},
        {},
        r"column 'a' contains NaN.* in row 2: nan",
    ),
    "too large": (
        {"label": [1], "a": [1e39]},
        {"dtype": np.float32},
        r"too large for dtype\('float32'\) in row 0: 1e\+39",
    ),
    "wrong n_features": ({"label": [1], "a": [1]}, {"n_features": 3}, r"has 1 numeric columns"),
    "null list": (
        {**GOOD_LISTS, "values": [[1.0, 2.0], None, [3.0]]},
        {},
        r"column 'values' is null in row 1",
    ),
    "null in a list": (
        {**GOOD_LISTS, "indices": [[0, 2], [], [None]]},
        {},
        r"a list of column 'indices' holds a null in row 2",
    ),
    "lengths": (
        {**GOOD_LISTS, "values": [[1.0, 2.0], [], [3.0, 4.0]]},
        {},
        r"in row 2 'indices' has 1 entries and 'values' has 2",
    ),
    "order": (
        {**GOOD_LISTS, "indices": [[2, 0], [], [1]]},
        {},
        r"row 0: .*unique, but 0 follows 2",
    ),
    "negative": ({**GOOD_LISTS, "indices": [[0, 2], [], [-1]]}, {}, r"row 2: Invalid index -1"),
    "too large an index": (
        {**GOOD_LISTS, "indices": [[0, 2], [], [2**31]]},
        {},
        r"row 2: index 2147483648 is out of bounds",
    ),
    "inf in a list": (
        {**GOOD_LISTS, "values": [[1.0, 2.0], [], [np.inf]]},
        {},
        r"row 2: Input X contains NaN, infinity .*: inf in column 1",
    ),
    "lists and numbers": (
        {**GOOD_LISTS, "a": [1, 2, 3]},
        {"columns": ["a", "values"]},
        r"hold lists",
    ),
    "floats as indices": (
        GOOD_LISTS,
        {"columns": ["values", "indices"]},
        r"'values' is list<.*double>.* list<int> of indices",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_columns_are_named(tmp_path: Path, case: str) -> None:
    columns, options, message = BAD[case]
    path = table(tmp_path, columns, row_group_size=2)
    with pytest.raises(ValueError, match=message):
        rows_of(path, block_rows=2, **options)


def test_rows_in_errors_are_those_of_the_file_and_blocks_count_on(tmp_path: Path) -> None:
    table(tmp_path, {"label": [1, 2], "a": [1, 2]}, "1.parquet")
    table(tmp_path, {"label": [1, 2], "a": [1, None]}, "2.parquet")
    blocks = iter_parquet(tmp_path)
    assert next(blocks).start == 0
    with pytest.raises(ValueError, match=r"2\.parquet: column 'a' is null in row 1"):
        next(blocks)
    table(tmp_path, {"label": [1, 2], "a": [1, 2]}, "2.parquet")
    assert [b.start for b in iter_parquet(tmp_path)] == [0, 2]


def test_files_of_one_set_have_the_same_columns(tmp_path: Path) -> None:
    table(tmp_path, {"label": [1], "a": [1], "b": [1]}, "1.parquet")
    table(tmp_path, {"label": [1], "b": [1], "a": [1]}, "2.parquet")
    with pytest.raises(ValueError, match=r"2\.parquet has the columns 'b', 'a', but"):
        iter_parquet(tmp_path)
    assert rows_of(tmp_path, columns=["a", "b"]).rows == 2


def test_what_is_no_parquet_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("1 1:1\n" * 10)
    with pytest.raises(ValueError, match=r"text\.parquet is not a parquet file, or is damaged"):
        iter_parquet(tmp_path / "text.parquet")
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        iter_parquet(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no file of this folder ends with \.parquet"):
        iter_parquet(tmp_path / "empty")


def test_a_damaged_page_is_found_by_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write_parquet(SyntheticRows(2000, 500, 9).blocks(), path)
    content = bytearray(path.read_bytes())
    content[100_000] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"rows\.parquet is damaged near its row 0"):
        rows_of(path)


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "pyarrow"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as an import of what is not installed
    with pytest.raises(ImportError, match=r"pip install 'manyhands\[parquet\]'"):
        iter_parquet(tmp_path)
