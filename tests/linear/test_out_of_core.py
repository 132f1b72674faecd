"""Fits on files and shards: what is read into memory, what is converted, and how much memory."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")

import scipy.sparse as sparse

from manyhands.linear import LinearSVC, LogisticRegression, Ridge, shard_source
from manyhands.linear.catalogue import SOLVERS
from manyhands.linear.data import SyntheticRows, write_libsvm, write_parquet, write_shards
from manyhands.linear.data.blocks import concatenate
from manyhands.linear.passes.rows import Rows

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")

ROWS = SyntheticRows(600, 40, 8, seed=2)
BLOCK = concatenate(ROWS.blocks(), np.float64, 40)
X = sparse.csr_array((BLOCK.values, BLOCK.indices, BLOCK.indptr), shape=(600, 40))
Y = BLOCK.labels


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of more than 4 kB are large."""
    monkeypatch.setattr(shard_source, "IN_MEMORY_BYTES", 4096)


def written(folder: Path, kind: str) -> Path:
    path = folder / f"rows.{kind}"
    {"libsvm": write_libsvm, "parquet": write_parquet}[kind](ROWS.blocks(), path)
    return path


@pytest.mark.parametrize("kind", ["libsvm", "parquet"])
def test_a_small_file_is_read_into_memory(tmp_path: Path, kind: str) -> None:
    rows, labels = shard_source.stored_rows(written(tmp_path, kind))
    assert isinstance(rows, Rows) and len(os.listdir(tmp_path)) == 1
    np.testing.assert_array_equal(labels, Y)
    model = LogisticRegression(solver="newton").fit(tmp_path / f"rows.{kind}")
    whole = LogisticRegression(solver="newton").fit(X, Y)
    np.testing.assert_allclose(model.coef_, whole.coef_, rtol=1e-4, atol=1e-5)  # text has 6 digits


@pytest.mark.parametrize("kind", ["libsvm", "parquet"])
def test_a_large_file_is_converted_once(
    tmp_path: Path, kind: str, small_limit: None, capfd: pytest.CaptureFixture[str]
) -> None:
    path, model = written(tmp_path, kind), LogisticRegression(solver="newton", tol=1e-9)
    first = model.fit(str(path)).coef_
    assert "is converted to row shards" in capfd.readouterr().err
    assert sorted(os.listdir(tmp_path)) == [path.name, f"{path.name}.shards"]
    whole = LogisticRegression(solver="newton", tol=1e-9).fit(X, Y)
    np.testing.assert_allclose(first, whole.coef_, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(model.fit(path).coef_, first)
    assert capfd.readouterr().err == ""
    write = {"libsvm": write_libsvm, "parquet": write_parquet}[kind]
    write(SyntheticRows(500, 40, 8, seed=3).blocks(), path)
    assert (model.fit(path).coef_ != first).any()
    assert "is converted to row shards" in capfd.readouterr().err
    assert sorted(os.listdir(tmp_path)) == [path.name, f"{path.name}.shards"]


def test_a_folder_of_somebody_else_is_not_replaced(tmp_path: Path, small_limit: None) -> None:
    path = written(tmp_path, "libsvm")
    (tmp_path / "rows.libsvm.shards").mkdir()
    (tmp_path / "rows.libsvm.shards" / "mine.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="holds no row shards of this conversion"):
        LogisticRegression().fit(path)
    assert (tmp_path / "rows.libsvm.shards" / "mine.txt").read_text() == "precious"
    assert len(os.listdir(tmp_path)) == 2


def test_a_file_that_does_not_parse_leaves_nothing(tmp_path: Path, small_limit: None) -> None:
    path = tmp_path / "bad.libsvm"
    path.write_text("1 1:2 2:3\n" * 1000 + "1 oops\n")
    with pytest.raises(ValueError, match="line 1001"):
        LogisticRegression().fit(path)
    assert os.listdir(tmp_path) == ["bad.libsvm"]


def reads_shards(name: str) -> bool:
    can = SOLVERS[name]
    return can.shards and 0 in can.losses and name != "ftrl"


@pytest.mark.parametrize("name", [name for name in SOLVERS if reads_shards(name)])
def test_a_solver_finds_the_same_minimum_from_shards(tmp_path: Path, name: str) -> None:
    shards = write_shards(ROWS.blocks(), tmp_path / "shards", shard_bytes=20_000)
    assert len(shards.shards) > 3
    options: dict[str, Any] = {"C": 1.0, "tol": 1e-5, "max_iter": 1000, "random_state": 1}
    best = LogisticRegression(solver="newton", **{**options, "tol": 1e-10}).fit(X, Y)
    found = LogisticRegression(solver=name, **options).fit(shards)
    assert found.objective_ < best.objective_ * (1.0 + 2e-3)
    if SOLVERS[name].needs_l2 or name in ("newton", "newton_cg", "lbfgs"):
        assert found.objective_ - best.objective_ <= 2e-5 * len(Y)


def test_what_needs_all_rows_in_memory_refuses_shards(tmp_path: Path) -> None:
    shards = write_shards(ROWS.blocks(), tmp_path / "shards", shard_bytes=20_000)
    with pytest.raises(ValueError, match="Solver scd needs all rows in memory, got shards"):
        LogisticRegression(solver="scd", l1_ratio=1.0).fit(shards)
    with pytest.raises(ValueError, match="leave y out"):
        LogisticRegression().fit(shards, Y)
    assert Ridge().fit(str(tmp_path / "shards")).n_features_in_ == 40
    assert LinearSVC().fit(shards).coef_.shape == (1, 40)


@pytest.mark.parametrize("solver", ["sdca", "lbfgs", "newton_cg", "ftrl"])
def test_memory_is_bounded_by_shards_and_not_by_the_data(tmp_path: Path, solver: str) -> None:
    rows = SyntheticRows(20_000, 1000, 100, seed=4)
    shards = write_shards(rows.blocks(4096), tmp_path / "shards", shard_bytes=1 << 20)
    model = LogisticRegression(solver=solver, max_iter=3)
    model.fit(shards)  # compiled loops are loaded
    tracemalloc.start()
    try:
        model.fit(shards)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert shards.nbytes > 24_000_000
    # three shards, and a dozen vectors of 20,000 rows
    assert peak < 8_000_000
