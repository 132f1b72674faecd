"""Random rounding: every operation's result moves by up to one rounding (Monte Carlo arithmetic).

    y = f(x)    becomes    y (1 + eps u),    u uniform in [-1, 1], eps of the dtype of y

Another order of summation changes the last bit of some results; this changes the last bit of all of
them, forward and backward, each in the precision in which it was computed. How far the end of a run
moves is how far it is determined at all: by 1e-15 where all is float64, by 1e-8 where a part is
float32, by more where training amplifies it. A perturbation of the parameters alone would not do:
one rounding of float64 rarely survives a conversion to float32.

Paper: Parker 1997, Monte Carlo Arithmetic: exploiting randomness in floating-point arithmetic.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

ROUNDED = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.complex128,
    torch.complex64,
)
# results that are one of the operands: nothing is rounded, and backward looks for the very number
CHOOSES = frozenset(
    "amax amin aminmax max min maximum minimum fmax fmin median nanmedian mode kthvalue sort topk "
    "cummax cummin clamp clamp_min clamp_max clone".split()
)


class RandomRounding(TorchDispatchMode):
    """Within it, results are rounded at random; `coarsest` is the dtype that rounded most."""

    def __init__(self, seed: int):
        super().__init__()
        self.coarsest: torch.dtype | None = None
        self._seed = seed
        # of each device; the task's own random numbers stay what they are
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return tree_map_only(Tensor, self._rounded, result) if _rounds(func) else result

    def _rounded(self, value: Tensor) -> Tensor:
        if value.dtype not in ROUNDED or value.layout is not torch.strided or not value.numel():
            return value
        eps = torch.finfo(value.dtype).eps
        real = value.real.dtype
        factor = torch.rand(
            value.shape, dtype=real, device=value.device, generator=self._generator(value.device)
        )
        factor = factor.mul_(2 * eps).add_(1 - eps)
        if not value.is_complex():
            # masks, counts and indices are exact, and a program may rely on it
            whole = value == value.trunc()
            if (self.coarsest is None or eps > torch.finfo(self.coarsest).eps) and not whole.all():
                self.coarsest = real
            factor.masked_fill_(whole, 1)
        elif self.coarsest is None or eps > torch.finfo(self.coarsest).eps:
            self.coarsest = real
        return value * factor

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


@functools.cache
def _rounds(func: Any) -> bool:
    """Whether an operator makes new numbers: no view, not in place, not one of its operands."""
    schema = func._schema
    name = schema.name.rpartition("::")[2]
    return name not in CHOOSES and all(r.alias_info is None for r in schema.returns)
