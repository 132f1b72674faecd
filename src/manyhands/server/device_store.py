"""A store for a rank that computes on a GPU: tables stand in main memory, so what is pulled and pushed is copied over."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from manyhands.core import (
    PushOptions,
    Rows,
    Store,
    Tensors,
    Tick,
    Work,
)


class DeviceStore:
    """The part of a `Store` that rules use; whoever else has the store itself."""

    def __init__(self, store: Store, device: torch.device):
        self.store, self.device = store, device
        self.rank, self.size = store.rank, store.size

    def pull(self, rows: Rows, into: Tensors | None = None, *, remember: bool = False) -> Tensors:
        got = self.store.pull(rows, remember=remember)
        if into is None:
            return {name: values.to(self.device) for name, values in got.items()}
        for name, values in got.items():
            into[name].copy_(values)
        return into

    def push(self, rows: Rows, updates: Tensors, **options: Unpack[PushOptions]) -> Work:
        return self.store.push(
            {k: _here(v) for k, v in rows.items()},
            {k: v.detach().cpu() for k, v in updates.items()},
            **options,
        )

    def tick(self, *when: Any, **how: Any) -> Tick:
        return self.store.tick(*when, **how)

    def flush(self) -> None:
        self.store.flush()


def _here(ids: Tensor | None) -> Tensor | None:
    return None if ids is None else ids.cpu()
