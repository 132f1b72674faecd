"""Split by feature: each rank holds some columns of the data and of the first matrix.

    X = [X_1 ... X_K],  W = [W_1 ... W_K]
    scores = sum_k X_k W_k' + b;     dW_k = dscores' X_k

For linear models, and others that begin with a Linear, on data with very many columns: no rank
holds all of them, and each rank sees all samples. Everything behind the first scores is the same
on all ranks, so only the scores travel, whatever the number of columns.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from manyhands.core import DataShard
from manyhands.errors import PlanError
from manyhands.split.shard_spec import ShardSpec, bounds


def columns(total: int, index: int, size: int) -> DataShard:
    """All samples, and the near-equal run of columns of rank `index` of `size`."""
    if total < size:
        raise PlanError(
            f"split=by_feature over tensor={size} ranks, but the data has {total} columns; "
            f"set tensor={total} or fewer"
        )
    cut = bounds(total, size)
    return DataShard(index, size, cols=torch.arange(cut[index], cut[index + 1]))


def shard_specs(
    values: Iterable[tuple[str, Tensor]], weight: str, index: int, size: int
) -> dict[str, ShardSpec]:
    """Shard specs of rank `index`: its columns of `weight`, and all of the other `values`."""
    shapes = {name: tuple(value.shape) for name, value in values}
    return {
        name: ShardSpec(name, shape, 1, size, index) if name == weight else ShardSpec(name, shape)
        for name, shape in shapes.items()
    }
