"""Cast: a module's forward pass in lower precision, in a loop that calls the module itself."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.replica.forward import autocast


class Cast:
    """Forward in the plan's precision; outputs in fp32, so that the user's loss is.

    By hooks: the model keeps its methods and the names in its state_dict."""

    def __init__(self, precision: str, device: torch.device):
        self._precision, self._device = precision, device
        self._entered: list[AbstractContextManager[Any]] = []

    def over(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self._enter)
        # also after an error inside: the next forward must not be in two of them
        module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        context = autocast(self._precision, self._device)
        context.__enter__()
        self._entered.append(context)

    def _leave(self, module: nn.Module, inputs: Any, out: Any) -> Any:
        if self._entered:
            self._entered.pop().__exit__(None, None, None)
        return out.float() if isinstance(out, Tensor) and out.is_floating_point() else out
