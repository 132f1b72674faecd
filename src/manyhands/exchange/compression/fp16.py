"""fp16 codec: values are sent in half precision; sums are in float32.

    |q - x| <= 2^-11 |x|      for 6e-5 < |x| < 65504
    infinite                  above, which is noticed
    |q - x| <= 3e-8           below

Halves the bytes and keeps no state. Eight times finer than bf16, but gradients above 65504 or below
6e-8 are lost. Use it where values are known to be near 1 (a loss scaler helps); else use bf16.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.exchange.compression.quantised import Quantised


@dataclass(frozen=True)
class Fp16(Quantised):
    def nbytes(self, numel: int) -> int:
        return 2 * numel

    def pack(self, x: Tensor, into: Tensor, error: Tensor | None, seed: int) -> None:
        into.view(torch.float16).copy_(x)

    def unpack(self, packed: Tensor, into: Tensor) -> None:
        into.copy_(packed.view(torch.float16))

    def unpack_add(self, packed: Tensor, total: Tensor) -> None:
        total.add_(packed.view(torch.float16))
