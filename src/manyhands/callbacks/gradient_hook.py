"""Gradient hook: calls `on_gradient` between merging and the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from manyhands.core import Tensors
from manyhands.errors import TaskError


class GradientHook:
    """Of one rank; `views` are those of its flat parameters, `call` calls the callbacks."""

    def __init__(self, views: Sequence[Any], call: Callable[[], None]):
        self._views, self._call = views, call
        self._open = False

    def __call__(self) -> None:
        self._open = True
        try:
            self._call()
        finally:
            self._open = False

    def gradients(self) -> Tensors:
        """By parameter name; what is written into them is what the optimizer steps by."""
        if not self._open:
            raise TaskError(
                "run.gradients() has merged gradients within a callback's on_gradient(run), and "
                "nowhere else"
            )
        grads = {view.name: view.parameter.grad for view in self._views}
        return {name: grad for name, grad in grads.items() if grad is not None}
