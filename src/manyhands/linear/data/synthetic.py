"""Synthetic sparse logistic data: rows of k non-zeros whose labels follow a logistic model.

    u_1 < ... < u_k   uniform and sorted;   column j_i = floor(d u_i^(1/(1-a))), made distinct
    x_j ~ N(0, 1/k);  w_j ~ N(0, s^2) for a part of the columns, else 0
    P(y = +1) = 1 / (1 + exp(-x.w));   y in {-1, +1}

s is such that the margin x.w has standard deviation `signal`. With popularity a > 0 the share of
column j falls like (j+1)^-a, as words do: low columns are the popular ones. Sorted uniform numbers
come from sums of exponential ones, so a row costs k draws whatever k and d are. A row depends on
the seed and its number only, not on the blocks it is generated in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from manyhands.kernels.compile import U64, compiled, inlined
from manyhands.linear.data.blocks import LARGEST_INDEX, RowBlock, value_type

GOLDEN = U64(0x9E3779B97F4A7C15)
TO_UNIT = 1.0 / (1 << 53)


@inlined
def _uniform(state):
    """The next number in (0, 1] of splitmix64."""
    state[0] += GOLDEN
    z = state[0]
    z = (z ^ (z >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> U64(27))) * U64(0x94D049BB133111EB)
    z ^= z >> U64(31)
    return (np.float64(z >> U64(11)) + 1.0) * TO_UNIT


@inlined
def _columns(state, k, d, power, sums, columns):
    """k distinct columns, ascending."""
    total = 0.0
    for i in range(k):
        total -= np.log(_uniform(state))
        sums[i] = total
    total -= np.log(_uniform(state))
    before = np.int64(-1)
    for i in range(k):
        u = sums[i] / total
        column = np.int64(d * (u if power == 1.0 else u**power))
        before = max(column, before + 1)
        columns[i] = before
    for i in range(k - 1, -1, -1):  # those that were moved past the end
        last = d - k + i
        if columns[i] <= last:
            break
        columns[i] = last


@compiled
def _generate(seed, first, k, d, power, weights, indices, values, labels):
    state, sums = np.empty(1, np.uint64), np.empty(k)
    scale = 1.0 / np.sqrt(k)
    for row in range(labels.size):
        state[0] = seed
        _uniform(state)  # mixes the seed before the row's number is added
        state[0] = (state[0] ^ U64(first + row)) * U64(0xD1342543DE82EF95)
        _uniform(state)
        place, margin = row * k, 0.0
        _columns(state, k, d, power, sums, indices[place : place + k])
        for i in range(0, k, 2):  # two normal numbers at a time (Box and Muller)
            radius = np.sqrt(-2.0 * np.log(_uniform(state))) * scale
            angle = 2.0 * np.pi * _uniform(state)
            values[place + i] = radius * np.cos(angle)
            margin += values[place + i] * weights[indices[place + i]]
            if i + 1 < k:
                values[place + i + 1] = radius * np.sin(angle)
                margin += values[place + i + 1] * weights[indices[place + i + 1]]
        positive = _uniform(state) <= 1.0 / (1.0 + np.exp(-margin))
        labels[row] = 1.0 if positive else -1.0


@dataclass(frozen=True)
class SyntheticRows:
    """Rows of the logistic model above; the same seed gives the same rows and weights."""

    n_rows: int
    n_features: int
    nonzeros_per_row: int = 50
    seed: int = 0
    popularity: float = 0.0  # a, 0 (uniform) to less than 1
    informative: float = 0.1  # part of the columns whose weight is not 0
    signal: float = 3.0  # standard deviation of the margin
    dtype: Any = np.float64

    def __post_init__(self) -> None:
        value_type(self.dtype)
        if self.n_rows < 1:
            raise ValueError(f"n_rows={self.n_rows} is given; 1 or more is needed")
        if not 1 <= self.n_features <= LARGEST_INDEX:
            raise ValueError(
                f"n_features={self.n_features} is given; 1 to {LARGEST_INDEX} is needed"
            )
        if not 1 <= self.nonzeros_per_row <= self.n_features:
            raise ValueError(
                f"nonzeros_per_row={self.nonzeros_per_row} is given; 1 to "
                f"n_features={self.n_features} is needed"
            )
        if not 0 <= self.popularity < 1:
            raise ValueError(f"popularity={self.popularity} is given; 0 to less than 1 is needed")
        if not 0 < self.informative <= 1:
            raise ValueError(f"informative={self.informative} is given; above 0 to 1 is needed")
        if not 0 <= self.signal < np.inf:
            raise ValueError(f"signal={self.signal} is given; 0 or more is needed")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} is given; 0 to 2^63 - 1 is needed")

    @cached_property
    def weights(self) -> np.ndarray:
        """w of the model, one number a column."""
        random = np.random.default_rng(self.seed)
        chosen = random.random(self.n_features) < self.informative
        size = self.signal / np.sqrt(self.informative)
        return np.where(chosen, random.normal(0.0, size, self.n_features), 0.0)

    def blocks(self, block_rows: int = 1 << 16) -> Iterator[RowBlock]:
        k = self.nonzeros_per_row
        for start in range(0, self.n_rows, block_rows):
            rows = min(block_rows, self.n_rows - start)
            indices, labels = np.empty(rows * k, np.int32), np.empty(rows)
            values = np.empty(rows * k, value_type(self.dtype))
            power, seed = 1.0 / (1.0 - self.popularity), U64(self.seed)
            options = (seed, start, k, self.n_features, power, self.weights)
            _generate(*options, indices, values, labels)
            indptr = np.arange(0, rows * k + 1, k, dtype=np.int64)
            yield RowBlock(indptr, indices, values, labels, start, self.n_features)
