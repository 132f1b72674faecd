"""int8 codec: eight bits per value and one scale per block.

    s = max|x| / 127;   q = round(x / s);   x ~ s q;   |error| <= s/2 (nearest), < s (stochastic)

A quarter of the bytes, plus 4/block of the elements for scales. `rounding=nearest` feeds its error
back into the next step, unless parameters are sent: the error of a parameter has no next step that
could correct it. `stochastic` rounds up with the probability that makes the mean exact; it keeps no
state and has twice the error. A block of zeros stays zero; one that holds NaN or infinity arrives
as NaN.

Papers: Dettmers 2016 (arXiv:1511.04561); stochastic: Alistarh et al. 2017 (QSGD,
arXiv:1610.02132).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from manyhands.core import Cargo
from manyhands.errors import PlanError
from manyhands.exchange.compression.quantised import Quantised
from manyhands.kernels import codec_kernels

TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Int8(Quantised):
    block: int = 256
    rounding: Literal["nearest", "stochastic"] = "nearest"
    feedback: bool = True

    def __post_init__(self) -> None:
        if self.block < 1:
            raise PlanError(
                f"compress.block={self.block}: at least 1 value per scale is needed; "
                "256 is the default"
            )
        if self.rounding not in ("nearest", "stochastic"):
            raise PlanError(f"compress.rounding={self.rounding}: nearest or stochastic is needed")

    def uses_error_feedback(self, sends: Cargo) -> bool:
        return self.feedback and self.rounding == "nearest" and sends != "parameters"

    def rounds_stochastically(self) -> bool:
        return self.rounding == "stochastic"

    def nbytes(self, numel: int) -> int:
        return 4 * -(-numel // self.block) + numel

    def pack(self, x: Tensor, into: Tensor, error: Tensor | None, seed: int) -> None:
        scales, codes = self._parts(into, x.numel())
        if x.device.type != "cpu":
            self._pack(x, scales, codes, error, seed)
            return
        given, parts = x.numpy(), (scales.numpy(), codes.numpy(), self.block)
        if self.rounds_stochastically():
            codec_kernels.int8_encode_stochastic(given, *parts, seed)
        elif error is not None:
            codec_kernels.int8_encode_feedback(given, error.numpy(), *parts)
        else:
            codec_kernels.int8_encode(given, *parts)

    def unpack(self, packed: Tensor, into: Tensor) -> None:
        scales, codes = self._parts(packed, into.numel())
        if into.device.type != "cpu":
            into.copy_(self._unpack(scales, codes))
            return
        codec_kernels.int8_decode(scales.numpy(), codes.numpy(), into.numpy(), self.block)

    def unpack_add(self, packed: Tensor, total: Tensor) -> None:
        scales, codes = self._parts(packed, total.numel())
        if total.device.type != "cpu":
            total.add_(self._unpack(scales, codes))
            return
        codec_kernels.int8_decode_add(scales.numpy(), codes.numpy(), total.numpy(), self.block)

    def _parts(self, packed: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        at = 4 * -(-numel // self.block)
        return packed[:at].view(torch.float32), packed[at:].view(torch.int8)

    # -- the same in torch's own operations, on any device --

    def _pack(
        self, x: Tensor, scales: Tensor, codes: Tensor, error: Tensor | None, seed: int
    ) -> None:
        p = x if error is None else error.add_(x)
        blocks = torch.nn.functional.pad(p, (0, scales.numel() * self.block - p.numel())).view(
            -1, self.block
        )
        scale = blocks.abs().amax(1).div_(127)
        scale = torch.where(scale.isfinite(), scale * (scale >= TINY), torch.nan)
        steps = blocks / torch.where(scale > 0, scale, torch.inf)[:, None]
        if self.rounds_stochastically() and x.device.type != "meta":
            steps.add_(
                torch.rand(
                    steps.shape,
                    device=x.device,
                    generator=torch.Generator(x.device).manual_seed(seed),
                )
            ).floor_()
            steps.clamp_(-127, 127)
        else:
            steps.round_()
        scales.copy_(scale)
        codes.copy_(steps.nan_to_num_(0.0, 0.0, 0.0).view(-1)[: p.numel()])
        if error is not None:
            error.sub_(self._unpack(scales, codes)).nan_to_num_(0.0, 0.0, 0.0)

    def _unpack(self, scales: Tensor, codes: Tensor) -> Tensor:
        return codes * scales.repeat_interleave(self.block)[: codes.numel()]
