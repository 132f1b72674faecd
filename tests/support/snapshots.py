"""Snapshots of a small run, the same numbers for the same step and seed."""

from __future__ import annotations

import torch

from manyhands.core import Position, Snapshot


def snapshot(round: int, seed: int = 0, numel: int = 64) -> Snapshot:
    g = torch.Generator().manual_seed(seed + round)
    return Snapshot(
        round,
        params={
            "a.weight": torch.randn(numel, generator=g),
            "b": torch.randn(3, 4, generator=g, dtype=torch.float64),
            "empty": torch.zeros(0, 2),
        },
        optimizer={
            "a.weight/exp_avg": torch.randn(numel, generator=g).to(torch.bfloat16),
            "a.weight/step": torch.tensor(float(round)),
        },
        state={"anchor/x": torch.arange(5)},
        position=Position(round // 10, round * 3, round),
        rng={
            "0/torch": torch.arange(7, dtype=torch.uint8),
            "1/torch": torch.arange(7, dtype=torch.uint8),
        },
        meta={
            "global_batch": 32,
            "schedule": {"last_epoch": round, "rates": [0.1, None]},
            "plan": "data=2",
        },
    )
