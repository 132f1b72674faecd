"""Wires to test, and ranks that exchange vectors everybody knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from manyhands.core import Cargo, Op
from manyhands.exchange.compression import (
    Bf16,
    CompressedGroup,
    Fp16,
    Int8,
    OneBit,
    PowerSGD,
    RandomK,
    TopK,
)
from manyhands.exchange.inproc import World

ALL: dict[str, Any] = {
    "fp16": Fp16(),
    "bf16": Bf16(),
    "int8": Int8(block=32),
    "int8 stochastic": Int8(rounding="stochastic"),
    "onebit": OneBit(block=64),
    "topk": TopK(density=0.05),
    "dgc": TopK(density=0.05, momentum=0.5, warmup=6),
    "randomk": RandomK(density=0.1),
    "randomk unbiased": RandomK(density=0.5, feedback=False),
    "powersgd": PowerSGD(rank=2),
    "powersgd later": PowerSGD(rank=2, start_after=2),
}
FED_BACK = ("int8", "onebit", "topk", "randomk", "powersgd")


def given(rank: int, step: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(
        numel, generator=torch.Generator().manual_seed(1000 * rank + step), dtype=torch.float64
    ).to(dtype)


def total(size: int, step: int, numel: int) -> Tensor:
    return torch.stack([given(r, step, numel, torch.float64) for r in range(size)]).sum(0)


def run(
    size: int,
    codec: Any,
    body: Callable[[CompressedGroup], Any],
    sends: Cargo = "gradients",
    **more: Any,
) -> list[Any]:
    return World(size).run(
        lambda group: body(CompressedGroup(group, codec, sends, **{"smallest": 1, **more}))
    )


def reduced(
    group: CompressedGroup,
    steps: Sequence[int],
    numel: int,
    dtype: torch.dtype = torch.float32,
    op: Op = "sum",
) -> list[Tensor]:
    got = []
    for step in steps:
        x = given(group.rank, step, numel, dtype)
        group.all_reduce({"x": x}, op).wait()
        got.append(x)
    return got
