"""Compiled models: the module of a run as torch.compile makes it, or each model of several."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn


def compiled(module: nn.Module) -> nn.Module:
    if not isinstance(module, nn.ModuleDict):
        return cast(nn.Module, torch.compile(module))
    # the dict itself is never called
    return nn.ModuleDict({k: cast(nn.Module, torch.compile(m)) for k, m in module.items()})
