"""Codecs on a GPU, where they are torch operations, give what the CPU's kernels give.

Run by hand: pytest -m gpu.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

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

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

CODECS: dict[str, Any] = {
    "fp16": Fp16(),
    "bf16": Bf16(),
    "int8": Int8(),
    "int8 stochastic": Int8(rounding="stochastic"),
    "onebit": OneBit(),
    "topk": TopK(density=0.05),
    "dgc": TopK(density=0.05, momentum=0.5, warmup=4),
    "randomk": RandomK(density=0.1),
    "powersgd": PowerSGD(rank=4),
}


def reduced(codec: Any, device: str, bad_step: int = -1) -> list[list[Tensor]]:
    def body(group: Any) -> list[Tensor]:
        over, got = CompressedGroup(group, codec), []
        for step in range(6):
            x = torch.randn(
                10_001, generator=torch.Generator().manual_seed(100 * group.rank + step)
            )
            x[77] = torch.nan if (group.rank, step) == (1, bad_step) else x[77]
            x = x.to(device)
            over.all_reduce({"x": x}).wait()
            got.append(x.clone())
        assert all(v.device.type == device or "steps" in k for k, v in over.state.items())
        return got

    return World(3).run(body)


@pytest.mark.parametrize("name", CODECS)
def test_ranks_on_a_gpu_hold_the_same_bits_and_those_of_the_cpu_up_to_rounding(name: str) -> None:
    gpu, cpu = reduced(CODECS[name], "cuda"), reduced(CODECS[name], "cpu")
    for theirs in gpu[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gpu[0], theirs, strict=True))
    for step, (a, b) in enumerate(zip(gpu[0], cpu[0], strict=True)):
        # a value on the edge between two codes may fall to either side, and what was not sent then
        # follows later
        near = torch.isclose(a.cpu(), b, rtol=1e-2, atol=0.15 if "stochastic" in name else 0.06)
        assert near.float().mean() > (0.98 if name in ("topk", "dgc", "onebit") else 0.999), step


@pytest.mark.parametrize("name", CODECS)
def test_what_is_not_finite_on_a_gpu_comes_out_and_does_not_stay(name: str) -> None:
    for step, x in enumerate(reduced(CODECS[name], "cuda", bad_step=2)[0]):
        assert bool(x.isfinite().all()) == (step != 2), step
