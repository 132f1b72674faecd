"""1-bit codec: the sign of each value, and per block the means of its positive and negative values.

    p = g + e;   q = mean of p >= 0, or mean of p < 0;   e = p - q      (Seide et al. 2014)

A 32nd of the bytes, plus 8/block of the elements for means. The error is as large as the values, so
what is lost must be fed back, and the same values must be sent again: gradients or updates, not
parameters. Start with a small learning rate or a few uncompressed steps; with Adam let the variance
settle first. The paper's columns are blocks here, because the group sees long vectors.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manyhands.core import Cargo
from manyhands.errors import PlanError
from manyhands.exchange.compression.codec import DIFFERENCES
from manyhands.exchange.compression.quantised import Quantised
from manyhands.kernels import codec_kernels


@dataclass(frozen=True)
class OneBit(Quantised):
    block: int = 2048

    carries: ClassVar[frozenset[Cargo]] = DIFFERENCES

    def __post_init__(self) -> None:
        if self.block < 8 or self.block % 8:
            raise PlanError(
                f"compress.block={self.block}: a multiple of 8 is needed, whole bytes of signs; "
                "2048 is the default"
            )

    def uses_error_feedback(self, sends: Cargo) -> bool:
        return True

    def nbytes(self, numel: int) -> int:
        return 8 * -(-numel // self.block) + -(-numel // 8)

    def pack(self, x: Tensor, into: Tensor, error: Tensor | None, seed: int) -> None:
        means, signs = self._parts(into, x.numel())
        error = torch.zeros_like(x) if error is None else error
        if x.device.type != "cpu":
            self._pack(x, means, signs, error)
            return
        codec_kernels.onebit_encode(
            x.numpy(), error.numpy(), means.numpy(), signs.numpy(), self.block
        )

    def unpack(self, packed: Tensor, into: Tensor) -> None:
        self._spread(packed, into, add=False)

    def unpack_add(self, packed: Tensor, total: Tensor) -> None:
        self._spread(packed, total, add=True)

    def _spread(self, packed: Tensor, out: Tensor, add: bool) -> None:
        means, signs = self._parts(packed, out.numel())
        if out.device.type == "cpu":
            codec_kernels.onebit_decode(means.numpy(), signs.numpy(), out.numpy(), self.block, add)
            return
        values = self._unpack(means, signs, out.numel())
        out.add_(values) if add else out.copy_(values)

    def _parts(self, packed: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        at = 8 * -(-numel // self.block)
        return packed[:at].view(torch.float32).view(-1, 2), packed[at:]

    # -- the same in torch's own operations, on any device --

    def _pack(self, x: Tensor, means: Tensor, signs: Tensor, error: Tensor) -> None:
        p = error.add_(x)
        beyond = means.shape[0] * self.block - p.numel()
        blocks = torch.nn.functional.pad(p, (0, beyond)).view(-1, self.block)
        there = torch.nn.functional.pad(torch.ones_like(p), (0, beyond)).view(-1, self.block)
        positive = (blocks >= 0) * there
        count = positive.sum(1)
        plain, absolute = blocks.sum(1), blocks.abs().sum(1)
        means[:, 0] = (absolute + plain) / (2 * count.clamp(min=1))
        means[:, 1] = (plain - absolute) / (2 * (there.sum(1) - count).clamp(min=1))
        weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], device=x.device, dtype=torch.uint8)
        signs.copy_(
            (positive.view(-1, 8).to(torch.uint8) * weights).sum(1, dtype=torch.uint8)[
                : signs.numel()
            ]
        )
        error.sub_(self._unpack(means, signs, p.numel())).nan_to_num_(0.0, 0.0, 0.0)

    def _unpack(self, means: Tensor, signs: Tensor, numel: int) -> Tensor:
        weights = torch.tensor(
            [1, 2, 4, 8, 16, 32, 64, 128], device=signs.device, dtype=torch.uint8
        )
        positive = (signs[:, None] & weights).view(-1)[:numel] != 0
        high, low = means.repeat_interleave(self.block, 0)[:numel].unbind(1)
        return torch.where(positive, high, low)
