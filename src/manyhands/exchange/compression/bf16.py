"""bf16 codec: values are sent as bfloat16, rounded to nearest even; sums are in float32.

    |q - x| <= 2^-8 |x|   over the whole range of float32

Halves the bytes, keeps no state, cannot overflow: the compression to try first.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.exchange.compression.quantised import Quantised


@dataclass(frozen=True)
class Bf16(Quantised):
    def nbytes(self, numel: int) -> int:
        return 2 * numel

    def pack(self, x: Tensor, into: Tensor, error: Tensor | None, seed: int) -> None:
        into.view(torch.bfloat16).copy_(x)  # torch's own cast runs at the speed of memory

    def unpack(self, packed: Tensor, into: Tensor) -> None:
        into.copy_(packed.view(torch.bfloat16))

    def unpack_add(self, packed: Tensor, total: Tensor) -> None:
        total.add_(packed.view(torch.bfloat16))
