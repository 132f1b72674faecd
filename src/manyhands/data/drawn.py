"""Drawn data: the user's script draws its own batches, and a run counts steps and no samples.

    step n    one batch of each rank: of an epoch that never ends, those numbered from n * ranks on

So positions, claims of asynchronous ranks and checkpoints are those of any other data.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from manyhands.data.sampling import Sampling

ENDLESS_EPOCH = 2**48  # batches; no run comes so far


@dataclass
class DrawnSource:
    """In place of a data set: nothing is fetched but the numbers of batches, which nobody reads."""

    device: torch.device
    samples: int = ENDLESS_EPOCH
    sampling: Sampling = field(default_factory=lambda: Sampling(in_order=True))
    loaders: int = 0

    def order(self, epoch: int) -> Tensor:
        return torch.zeros(1, dtype=torch.long).expand(self.samples)  # one number in memory

    def fetch(self, indices: Tensor) -> Tensor:
        return indices

    def digest(self) -> str:
        return ""  # each rank has its own data

    def first(self, most: int) -> Tensor:
        return self.order(0)[:most]

    def cast(self, dtype: torch.dtype) -> None: ...
