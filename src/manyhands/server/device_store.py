"""Device store: a store for a rank that computes on a GPU.

Tables are in main memory, so rows are copied to the device when they are pulled, and updates to the
host when they are pushed.
"""

from __future__ import annotations

import math
from typing import Unpack

import torch
from torch import Tensor

from manyhands.core import Late, PushOptions, Rows, Store, Tensors, Tick, Work


class DeviceStore:
    """A `Store` for merge strategies; everything else uses the store behind it."""

    def __init__(self, store: Store, device: torch.device):
        self.store, self.device = store, device
        self.rank, self.size = store.rank, store.size

    def pull(self, rows: Rows, into: Tensors | None = None, *, remember: bool = False) -> Tensors:
        got = self.store.pull({k: _to_host(v) for k, v in rows.items()}, remember=remember)
        if into is None:
            return {name: values.to(self.device) for name, values in got.items()}
        for name, values in got.items():
            into[name].copy_(values.view(into[name].shape))
        return into

    def push(self, rows: Rows, updates: Tensors, **options: Unpack[PushOptions]) -> Work:
        return self.store.push(
            {k: _to_host(v) for k, v in rows.items()},
            {k: v.detach().cpu() for k, v in updates.items()},
            **options,
        )

    def tick(
        self,
        staleness: float = math.inf,
        quorum: int | None = None,
        *,
        late: Late = "drop",
        delay: int | None = None,
    ) -> Tick:
        return self.store.tick(staleness, quorum, late=late, delay=delay)

    def flush(self) -> None:
        self.store.flush()


def _to_host(ids: Tensor | None) -> Tensor | None:
    return ids.cpu() if isinstance(ids, Tensor) else ids  # the store says what else is wrong
