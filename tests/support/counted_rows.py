"""A model that counts: each sample adds 1 to its own rows.

Of a table with sparse gradients, of one with dense gradients and of a vector; several rows lie in
one cache line. A lost update, a sample that was left out and one that came twice all show.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import manyhands as mh

SAMPLES, BATCH = 205, 4
ROWS = ("sparse.weight", "dense.weight", "vector")


class Count(nn.Module):
    def __init__(self, samples: int = SAMPLES, sparse: bool = True):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(37))
        self.sparse = nn.Embedding(samples, 3, sparse=sparse)
        self.dense = nn.Embedding(samples, 2)
        self.vector = nn.Parameter(torch.zeros(samples))
        nn.init.zeros_(self.sparse.weight)
        nn.init.zeros_(self.dense.weight)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.sparse(ids).sum() + self.dense(ids).sum() + self.vector[ids].sum()
        return found


def minus_sum(model: nn.Module, batch: Any) -> Tensor:
    found: Tensor = -model(batch[0])
    return found


def count(sparse: bool = True, **given: Any) -> mh.Task:
    known: dict[str, Any] = {
        "model": Count(sparse=sparse),
        "step": minus_sum,
        "reduction": "sum",
        "train": (torch.arange(SAMPLES),),
        "optimizer": lambda p: torch.optim.SGD(p, lr=1.0),
        "schedule": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10**6),
        "batch": BATCH,
    }
    return mh.Task(**{**known, **given})
