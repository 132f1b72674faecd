"""Own buffers: those of a model that its forward pass may change, BatchNorm's excepted."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn


class OwnBuffers:
    """Small buffers of a module that are neither BatchNorm's nor a parametrization's, as they were
    when this was made."""

    MOST = 1 << 16  # numbers; larger ones are tables of constants

    def __init__(self, module: nn.Module):
        self._module = module
        self._before = {name: value.clone() for name, value in self._find()}

    def changed(self) -> list[str]:
        return [name for name, x in self._find() if not torch.equal(x, self._before.get(name, x))]

    def _find(self) -> Iterator[tuple[str, Tensor]]:
        for path, module in self._module.named_modules():
            # spectral norm's vectors follow from the weights, which are alike on all ranks
            known = isinstance(module, nn.modules.batchnorm._NormBase)
            if known or type(module).__module__.startswith("torch.nn.utils"):
                continue
            for name, value in module.named_buffers(path, recurse=False):
                if value.numel() <= self.MOST and not value.is_meta:
                    yield name, value
