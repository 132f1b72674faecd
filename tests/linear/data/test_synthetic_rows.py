"""Synthetic rows: what they promise of columns, values and labels; the same for the same seed."""

from __future__ import annotations

import numpy as np
import pytest

from manyhands.linear.data import RowBlock, SyntheticRows
from manyhands.linear.data.blocks import check_rows, concatenate


def whole(rows: SyntheticRows, block_rows: int = 1 << 16) -> RowBlock:
    block = concatenate(rows.blocks(block_rows), rows.dtype, rows.n_features)
    check_rows(block, "synthetic", rows.n_features)  # ascending, distinct, within bounds
    return block


def test_rows_depend_on_the_seed_and_not_on_the_blocks() -> None:
    rows = SyntheticRows(1000, 300, 11, seed=4, popularity=0.3)
    a, b = whole(rows), whole(rows, 37)
    for name in ("indptr", "indices", "values", "labels"):
        assert getattr(a, name).tobytes() == getattr(b, name).tobytes()
    other = whole(SyntheticRows(1000, 300, 11, seed=5, popularity=0.3))
    assert np.mean(a.indices == other.indices) < 0.2 and np.mean(a.values == other.values) < 0.01
    assert len(set(a.values.tolist())) == len(a.values)  # no row is another's copy


@pytest.mark.parametrize("k", [1, 2, 49, 50])
@pytest.mark.parametrize("popularity", [0.0, 0.9])
def test_every_row_has_k_distinct_columns(k: int, popularity: float) -> None:
    block = whole(SyntheticRows(200, 50, k, popularity=popularity, dtype=np.float32))
    np.testing.assert_array_equal(np.diff(block.indptr), k)
    assert block.values.dtype == np.float32


def test_columns_are_uniform_or_fall_like_a_power() -> None:
    n, d, k = 20_000, 1000, 10
    counts = np.bincount(whole(SyntheticRows(n, d, k)).indices, minlength=d)
    assert np.all(np.abs(counts - n * k / d) < 6 * np.sqrt(n * k / d))
    popular = np.bincount(whole(SyntheticRows(n, d, k, popularity=0.5)).indices, minlength=d)
    share = popular.reshape(10, 100).sum(1) / popular.sum()
    edges = np.linspace(0, 1, 11) ** 0.5
    np.testing.assert_allclose(share, np.diff(edges), atol=0.02)


def test_values_are_normal_and_labels_follow_the_logistic_model() -> None:
    rows = SyntheticRows(40_000, 500, 20, signal=2.0, informative=0.3)
    block = whole(rows)
    scaled = block.values * np.sqrt(20)
    assert abs(scaled.mean()) < 0.01 and abs(scaled.std() - 1) < 0.01
    assert abs(np.mean(scaled**4) - 3) < 0.1
    assert abs(np.mean(rows.weights != 0) - 0.3) < 0.1
    margin = (block.values * rows.weights[block.indices]).reshape(-1, 20).sum(1)
    assert abs(margin.std() - 2.0) < 0.3
    assert set(block.labels) == {-1.0, 1.0}
    chance = 1 / (1 + np.exp(-margin))
    for low in np.arange(0, 1, 0.1):
        inside = (chance >= low) & (chance < low + 0.1)
        expected, found = chance[inside].mean(), (block.labels[inside] > 0).mean()
        assert abs(found - expected) < 5 * np.sqrt(0.25 / inside.sum())


@pytest.mark.parametrize(
    "options",
    [
        {"n_rows": 0},
        {"n_features": 0},
        {"nonzeros_per_row": 11},
        {"popularity": 1.0},
        {"informative": 0.0},
        {"signal": -1.0},
        {"seed": -1},
        {"dtype": np.int64},
    ],
)
def test_impossible_options_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=r"is given; .* is needed"):
        SyntheticRows(**{"n_rows": 5, "n_features": 10, "nonzeros_per_row": 3, **options})
