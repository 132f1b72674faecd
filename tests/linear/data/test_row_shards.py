"""Row shards: any source is read back as it was, within three buffers; damage is named."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse

from manyhands.linear.data import (
    RowBlock,
    RowShards,
    SyntheticRows,
    read_libsvm,
    write_libsvm,
    write_parquet,
    write_shards,
)
from manyhands.linear.data import shards as shards_module
from manyhands.linear.data.blocks import concatenate

ROWS = SyntheticRows(2000, 400, 7, seed=5)


@pytest.fixture(scope="module")
def whole() -> RowBlock:
    return concatenate(ROWS.blocks(), np.float64, 400)


@pytest.fixture
def shards(tmp_path: Path) -> RowShards:
    """About 20 shards."""
    return write_shards(ROWS.blocks(333), tmp_path / "shards", shard_bytes=10_000)


def same(block: RowBlock, other: RowBlock) -> None:
    for name in ("indptr", "indices", "values", "labels"):
        np.testing.assert_array_equal(getattr(block, name), getattr(other, name))
        assert getattr(block, name).dtype == getattr(other, name).dtype


def csr(block: RowBlock):
    shape = (block.rows, 400)
    return scipy.sparse.csr_array((block.values, block.indices, block.indptr), shape)


# -- sources --


def as_libsvm(whole: RowBlock, folder: Path):
    write_libsvm([whole], folder / "rows", digits=15)
    return folder / "rows", {"n_features": 400}


def as_pattern(whole: RowBlock, folder: Path):
    for n in range(4):
        write_libsvm([whole.row_slice(500 * n, 500 * (n + 1))], folder / f"part-{n}", digits=15)
    return f"{folder}/part-*", {"n_features": 400}


def as_list_of_paths(whole: RowBlock, folder: Path):
    as_pattern(whole, folder)
    return [folder / f"part-{n}" for n in range(4)], {"n_features": 400}


def as_parquet(whole: RowBlock, folder: Path):
    write_parquet([whole], folder / "rows.parquet")
    return folder / "rows.parquet", {}


def as_parquet_folder(whole: RowBlock, folder: Path):
    (folder / "set").mkdir()
    write_parquet([whole.row_slice(0, 900)], folder / "set" / "0.parquet")
    write_parquet([whole.row_slice(900, 2000)], folder / "set" / "1.parquet")
    return str(folder / "set"), {}


def as_block(whole: RowBlock, folder: Path):
    return whole, {}


def as_generator(whole: RowBlock, folder: Path):
    return ROWS.blocks(77), {}


def as_csr(whole: RowBlock, folder: Path):
    return csr(whole), {"labels": whole.labels}


def as_unsorted_csr(whole: RowBlock, folder: Path):
    """Each row from right to left, and every value in two halves."""
    order = np.arange(len(whole.indices)).reshape(2000, 7)[:, ::-1].ravel()
    data, indices = (np.repeat(a[order], 2) for a in (whole.values / 2, whole.indices))
    matrix = scipy.sparse.csr_matrix((data, indices, 2 * whole.indptr), (2000, 400))
    return matrix, {"labels": list(whole.labels)}


def as_coo(whole: RowBlock, folder: Path):
    return csr(whole).tocoo(), {"labels": whole.labels}


def as_dense(whole: RowBlock, folder: Path):
    return csr(whole).toarray(), {"labels": whole.labels}


def as_memory_map(whole: RowBlock, folder: Path):
    np.save(folder / "x.npy", csr(whole).toarray())
    return np.load(folder / "x.npy", mmap_mode="r"), {"labels": whole.labels}


SOURCES = [
    as_libsvm,
    as_pattern,
    as_list_of_paths,
    as_parquet,
    as_parquet_folder,
    as_block,
    as_generator,
    as_csr,
    as_unsorted_csr,
    as_coo,
    as_dense,
    as_memory_map,
]


@pytest.mark.parametrize("make", SOURCES)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_every_source_is_read_back(whole: RowBlock, tmp_path: Path, make, dtype) -> None:
    source, options = make(whole, tmp_path)
    written = write_shards(source, tmp_path / "out", 25_000, dtype, **options)
    opened = RowShards.open(tmp_path / "out")
    assert opened == written and len(opened.shards) > 5
    assert all(shard.nbytes <= 25_000 for shard in opened.shards)
    assert (opened.n_rows, opened.n_features, opened.n_nonzeros) == (2000, 400, 14_000)
    blocks = list(opened.blocks())
    expected = read_libsvm(tmp_path / "rows", 400) if make is as_libsvm else whole
    if make in (as_pattern, as_list_of_paths):
        expected = read_libsvm(sorted(tmp_path.glob("part-*")), 400)
    values = expected.values.astype(dtype)
    same(
        concatenate(blocks, dtype, 400),
        RowBlock(whole.indptr, whole.indices, values, whole.labels),
    )
    np.testing.assert_array_equal(opened.labels(), whole.labels)
    assert [b.start for b in blocks] == list(np.cumsum([0] + [b.rows for b in blocks])[:-1])
    assert all(b.n_features == 400 for b in blocks)


def test_the_number_of_columns_is_given_known_or_counted(tmp_path: Path) -> None:
    block = RowBlock(np.array([0, 0, 1]), np.array([3], np.int32), np.ones(1), np.zeros(2))
    assert write_shards([block], tmp_path / "a").n_features == 4
    assert write_shards([block], tmp_path / "b", n_features=9).n_features == 9
    empty = RowBlock(np.zeros(3, np.int64), np.zeros(0, np.int32), np.zeros(0), np.zeros(2))
    only_labels = write_shards([empty], tmp_path / "c", n_features=5)
    assert (only_labels.n_rows, only_labels.n_nonzeros) == (2, 0)
    same(next(only_labels.blocks()), empty)
    with pytest.raises(ValueError, match="no row has a value"):
        write_shards([empty], tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_a_row_longer_than_a_shard_has_a_shard_of_its_own(tmp_path: Path, whole: RowBlock) -> None:
    shards = write_shards([whole.row_slice(0, 20)], tmp_path / "shards", shard_bytes=1)
    assert [shard.rows for shard in shards.shards] == [1] * 20
    same(concatenate(shards.blocks(), np.float64, 400), whole.row_slice(0, 20))


BAD_SOURCES = {
    "object": (lambda: 3, {}, TypeError, "int is given; a path, paths, a scipy matrix"),
    "rows": (lambda: [[1.0, 2.0]], {}, TypeError, "item 0 of the source is list; a RowBlock"),
    "no paths": (lambda: [], {}, ValueError, "an empty list is given"),
    "no blocks": (lambda: iter([]), {}, ValueError, "the source has no rows"),
    "no labels": (lambda: np.ones((2, 2)), {}, ValueError, "without labels="),
    "one dimension": (lambda: np.ones(2), {"labels": [1, 1]}, ValueError, "Expected 2D array"),
    "text labels": (lambda: np.ones((1, 2)), {"labels": ["a"]}, ValueError, "are not numbers"),
    "labels too few": (
        lambda: np.ones((2, 2)),
        {"labels": [1]},
        ValueError,
        "inconsistent numbers",
    ),
    "labels of blocks": (ROWS.blocks, {"labels": [1]}, ValueError, "hold their own"),
    "objects": (
        lambda: np.array([["a"]], object),
        {"labels": [1]},
        ValueError,
        "real numbers are needed",
    ),
    "complex": (lambda: np.ones((1, 1), complex), {"labels": [1]}, ValueError, "real numbers"),
    "n_features": (
        ROWS.blocks,
        {"n_features": 300},
        ValueError,
        "out of bounds for n_features=300",
    ),
    "n_features of an array": (
        lambda: np.ones((1, 3)),
        {"labels": [1], "n_features": 2},
        ValueError,
        "the array has 3 columns",
    ),
    "nan": (
        lambda: np.array([[1, 0], [1, np.nan]]),
        {"labels": [1, 1]},
        ValueError,
        "row 1: Input X contains NaN.* in column 1",
    ),
    "nan label": (lambda: np.ones((1, 1)), {"labels": [np.nan]}, ValueError, "Input y contains"),
    "too large": (
        lambda: np.array([[1e39]]),
        {"labels": [1], "dtype": np.float32},
        ValueError,
        r"too large for dtype\('float32'\)",
    ),
    "dtype": (ROWS.blocks, {"dtype": np.float16}, ValueError, "dtype=float16 is given"),
    "no file": (lambda: "nowhere/*.libsvm", {}, FileNotFoundError, "no file matches"),
    "bad block": (
        lambda: [RowBlock(np.array([0, 5, 2]), np.zeros(2, np.int32), np.ones(2), np.ones(2))],
        {},
        ValueError,
        "do not make a CSR block",
    ),
    "unsorted block": (
        lambda: [RowBlock(np.array([0, 2]), np.array([1, 0]), np.ones(2), np.ones(1))],
        {},
        ValueError,
        "row 0: Feature indices should be sorted and unique, but 0 follows 1",
    ),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_a_bad_source_is_refused_and_leaves_no_folder(tmp_path: Path, case: str) -> None:
    make, options, error, message = BAD_SOURCES[case]
    with pytest.raises(error, match=message):
        write_shards(make(), tmp_path / "shards", shard_bytes=1000, **options)
    assert not list(tmp_path.iterdir())


def test_a_failure_half_way_leaves_no_folder_or_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    write_libsvm(ROWS.blocks(), path)
    with open(path, "a") as file:
        file.write("1 3:oops\n")
    with pytest.raises(ValueError, match=r"rows, line 2001: '3:oops' does not parse"):
        write_shards(path, tmp_path / "shards", shard_bytes=1000)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="line 2001"):
        write_shards(path, tmp_path / "empty", shard_bytes=1000)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["empty", "rows"]
    assert not list((tmp_path / "empty").iterdir())


# -- ranks --


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_ranks_share_the_shards_in_order_and_evenly(shards: RowShards, size: int) -> None:
    runs = [shards.assigned(rank, size) for rank in range(size)]
    assert [n for run in runs for n in run] == list(range(len(shards.shards)))
    loads = [sum(shards.shards[n].nonzeros for n in run) for run in runs]
    largest = max(shard.nonzeros for shard in shards.shards)
    assert max(loads) <= shards.n_nonzeros / size + largest
    for rank in range(size):
        blocks = list(shards.blocks(rank, size))
        rows = shards.row_range(rank, size)
        assert (blocks[0].start, sum(b.rows for b in blocks)) == (rows.start, len(rows))
        labels = np.concatenate([b.labels for b in blocks])
        np.testing.assert_array_equal(shards.labels(rank, size), labels)


@pytest.mark.parametrize("nonzeros", [[1, 1, 1, 1000], [1000, 1, 1, 1], [0, 0, 0, 0], [5, 1, 9, 2]])
def test_every_rank_has_a_shard_however_uneven_they_are(tmp_path: Path, nonzeros) -> None:
    files = tuple(shards_module.ShardFile(str(n), 1, n, 0, 0) for n in nonzeros)
    shards = RowShards(tmp_path, 3, np.dtype(np.float64), files)
    for size in (1, 2, 3, 4):
        runs = [shards.assigned(rank, size) for rank in range(size)]
        assert all(runs) and [n for run in runs for n in run] == [0, 1, 2, 3]


def test_ranks_and_orders_that_do_not_fit_are_refused(shards: RowShards) -> None:
    count = len(shards.shards)
    with pytest.raises(ValueError, match=rf"has {count} shards, too few for size=99 ranks"):
        shards.blocks(0, 99)
    with pytest.raises(ValueError, match="rank=2 of size=2"):
        shards.blocks(2, 2)
    with pytest.raises(ValueError, match=r"names shards \[0\] of other ranks"):
        shards.blocks(1, 2, order=[0])
    with pytest.raises(ValueError, match="names a shard twice"):
        shards.blocks(order=[0, 0])
    with pytest.raises(ValueError, match="names shards"):
        shards.blocks(order=[-1])


def test_shards_come_in_the_order_asked_for(shards: RowShards) -> None:
    order = np.random.default_rng(0).permutation(shards.assigned(1, 2))
    starts = {b.start: n for n, b in enumerate(shards.blocks())}
    assert [starts[b.start] for b in shards.blocks(1, 2, order)] == list(order)
    assert list(shards.blocks(order=[])) == []


# -- memory and threads --


def test_at_most_three_buffers_are_used_and_a_block_that_is_kept_stays_as_it_is(
    shards: RowShards, whole: RowBlock, monkeypatch
) -> None:
    made = []
    empty = np.empty
    monkeypatch.setattr(
        shards_module.np, "empty", lambda *a: made.append(a) or empty(*a)
    )  # counts; memory is real
    for block in shards.blocks():
        assert block.rows
    assert 1 <= len(made) <= 3 < len(shards.shards)
    made.clear()
    kept = list(shards.blocks())
    assert len(made) >= len(kept)
    same(concatenate(kept, np.float64, 400), whole)


def readers() -> list[str]:
    return [t.name for t in threading.enumerate() if "shard-reader" in t.name]


def test_leaving_early_ends_the_thread(shards: RowShards) -> None:
    blocks = shards.blocks()
    assert not readers()  # nothing starts before the first block
    next(blocks)
    assert len(readers()) == 1
    blocks.close()
    assert not readers()
    for _ in shards.blocks():
        break  # the iterator is dropped
    assert not readers()
    with pytest.raises(ZeroDivisionError):
        for block in shards.blocks():
            block.rows / 0
    assert not readers()


def test_what_fails_in_the_thread_reaches_the_caller(shards: RowShards) -> None:
    (shards.directory / shards.shards[2].file).unlink()
    blocks = shards.blocks()
    next(blocks), next(blocks)
    with pytest.raises(FileNotFoundError, match=shards.shards[2].file):
        next(blocks)
    assert not readers()


def test_two_iterations_and_other_processes_read_side_by_side(shards: RowShards) -> None:
    for a, b in zip(shards.blocks(), shards.blocks(), strict=True):
        same(a, b)
    assert pickle.loads(pickle.dumps(shards)) == shards


# -- damage --


def test_a_flipped_bit_is_found_at_the_first_read(shards: RowShards) -> None:
    path = shards.directory / shards.shards[3].file
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    opened = RowShards.open(shards.directory)
    with pytest.raises(ValueError, match=rf"checksum of {path.name} is not that of its manifest"):
        list(opened.blocks())


def damage(shards: RowShards, how: str) -> None:
    first = shards.directory / shards.shards[0].file
    manifest = shards.directory / "manifest.json"
    content = json.loads(manifest.read_text())
    if how == "short":
        os.truncate(first, 100)
    elif how == "missing":
        first.unlink()
    elif how == "no manifest":
        manifest.unlink()
    elif how == "half a manifest":
        manifest.write_text(manifest.read_text()[:200])
    elif how == "rows":
        manifest.write_text(json.dumps({**content, "n_rows": 7}))
    elif how == "sizes":
        content["shards"][0]["nbytes"] += 8
        manifest.write_text(json.dumps(content))
    elif how == "format":
        manifest.write_text(json.dumps({**content, "format": "other"}))
    elif how == "byte order":
        manifest.write_text(json.dumps({**content, "byte_order": "middle"}))
    elif how == "fields":
        manifest.write_text(json.dumps({"format": content["format"]}))
    elif how == "folder":
        shutil.rmtree(shards.directory)


DAMAGES = {
    "short": r"damaged: shard-00000\.bin has 100 bytes",
    "missing": r"damaged: shard-00000\.bin is missing",
    "no manifest": r"holds no complete row shards: it has no manifest\.json",
    "half a manifest": r"damaged: manifest\.json does not parse",
    "rows": r"damaged: manifest\.json says \(7, 14000\)",
    "sizes": r"gives shard-00000\.bin a size that its rows do not have",
    "format": r"its format is 'other'",
    "byte order": r"middle-endian",
    "fields": r"does not parse \(KeyError",
    "folder": r"there is no such folder",
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_folder_is_refused_by_name(shards: RowShards, how: str) -> None:
    damage(shards, how)
    with pytest.raises((ValueError, FileNotFoundError), match=DAMAGES[how]) as caught:
        RowShards.open(shards.directory)
    assert str(shards.directory) in str(caught.value)


def test_a_file_cut_after_opening_is_found(shards: RowShards) -> None:
    os.truncate(shards.directory / shards.shards[0].file, 100)
    with pytest.raises(ValueError, match=r"shard-00000\.bin ends too early"):
        next(shards.blocks())
    with pytest.raises(ValueError, match=r"shard-00000\.bin ends too early"):
        shards.labels()


def test_a_folder_with_content_is_not_written_over(shards: RowShards, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        write_shards(ROWS.blocks(), shards.directory)
    with pytest.raises(ValueError, match="holds row shards already"):
        write_shards(shards.directory, tmp_path / "other")
    again = write_shards(shards.blocks(), tmp_path / "other", shard_bytes=50_000)
    assert again.n_rows == shards.n_rows and len(again.shards) < len(shards.shards)


def test_a_file_that_cannot_grow_names_the_folder_and_leaves_none(tmp_path: Path) -> None:
    """The limit of file sizes makes write() fail as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match=r"row shards could not be written to .*shards") as caught:
            write_shards(ROWS.blocks(), tmp_path / "shards", shard_bytes=50_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno and str(tmp_path / "shards") in str(caught.value)
    assert not list(tmp_path.iterdir())


KILLED = """
import os, signal, sys
from manyhands.linear.data import SyntheticRows, write_shards

def blocks():
    for n, block in enumerate(SyntheticRows(5000, 50, 5).blocks(100)):
        if n == 30:
            os.kill(os.getpid(), signal.SIGKILL)
        yield block

write_shards(blocks(), sys.argv[1], shard_bytes=10_000)
"""


def test_what_a_killed_writer_leaves_is_refused(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "shards")])
    assert done.returncode == -9 and len(list((tmp_path / "shards").iterdir())) > 5
    with pytest.raises(ValueError, match=r"no complete row shards: .* writing was interrupted"):
        RowShards.open(tmp_path / "shards")
    with pytest.raises(FileExistsError, match="is not empty"):
        write_shards(ROWS.blocks(), tmp_path / "shards")
