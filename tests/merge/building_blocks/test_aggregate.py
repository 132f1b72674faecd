"""Robust aggregation on rows that can be worked out by hand."""

from __future__ import annotations

import torch

from manyhands.merge.building_blocks import aggregate


def test_krum_counts_the_n_minus_f_minus_2_nearest_others_no_more_and_no_fewer() -> None:
    """Squared distances to the nearest 1, 2 and 3 others, of n = 5 rows with f = 1:

    row      1 nearest    2 nearest    3 nearest
    0            1           26           75
    1            1           17           53
    5            4           20           36   <- least of 3
    7            4            8   <- of 2  44
    9            4           20           84
    """
    rows = [{"x": torch.tensor([float(v)])} for v in (0, 1, 5, 7, 9)]
    assert aggregate.krum(rows, f=1)["x"].tolist() == [7.0]
    best_four = aggregate.krum(rows, f=1, best=4)["x"]
    assert best_four.tolist() == [(1 + 5 + 7 + 9) / 4], "without row 0; of 3 it would be row 9"
