"""Received tensors: values of another rank as part of this rank's autograd graph.

A leaf would not do: a stage may change in place what it receives, as it could in the whole model,
and autograd does not allow that of a leaf. So a received tensor enters the graph as the output of a
function.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor


@dataclass
class ReceivedTensor:
    """A value from another rank; backward writes its gradient here."""

    value: Tensor | None
    grad: Tensor | None = None

    def enter_graph(self, anchor: Tensor) -> Tensor:
        """The value, computed from `anchor`, a scalar that requires a gradient; this object keeps
        no reference to it."""
        return cast(Tensor, _EnterGraph.apply(anchor, self))


class _EnterGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, received: ReceivedTensor) -> Tensor:
        ctx.received = received
        assert received.value is not None
        value, received.value = received.value.detach(), None
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        (ctx.received.grad,) = grads
        return None, None
