"""Row gradients: a step that writes only the rows whose gradient is not zero.

    w[j] <- w[j] - eta g[j]    for rows j with g[j] != 0;    other rows are neither read nor written

A dense step reads and writes every element, so on parameters that other ranks step at the same time
it puts back what they have just changed, also in rows that this gradient leaves as they are. Before
the optimizer's step, each dense gradient with rows of zeros becomes a sparse one of the other rows.
Only optimizers under which a gradient of zero changes nothing can do without those rows: SGD
without momentum and weight decay, Adagrad without weight decay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.errors import TaskError
from manyhands.replica.flat import FlatParameters
from manyhands.replica.update import has_sparse_gradients


class RowGradients:
    """The hook before an optimizer's step, at work while the parameters are in common memory."""

    def __init__(self, flat: FlatParameters, optimizer: Optimizer):
        self._flat, self._optimizer = flat, optimizer
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._flat.in_common:
            return
        for group in optimizer.param_groups:
            if not leaves_rows(optimizer, group):
                continue
            for p in group["params"]:
                if p.grad is not None and not p.grad.is_sparse and p.ndim and p.numel():
                    p.grad = of_rows(p.grad)

    def close(self) -> None:
        self._hook.remove()


def leaves_rows(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether a row whose gradient is zero keeps its value in a step of these parameters."""
    if type(optimizer) is torch.optim.SGD:
        return not group["momentum"] and not group["weight_decay"]
    return type(optimizer) is torch.optim.Adagrad and not group["weight_decay"]


def of_rows(grad: Tensor) -> Tensor:
    """The same gradient, sparse, without its rows of zeros; as it is where there are none."""
    rows = grad.detach().abs().reshape(len(grad), -1).amax(1).nonzero().view(-1)
    if len(rows) == len(grad):
        return grad
    # torch adds sparse values by their address, whatever their strides (channels_last)
    values = grad[rows].contiguous()
    # and it adds coalesced scalars to a view at twice the view's offset; else they are coalesced
    coalesced = grad.ndim > 1
    return torch.sparse_coo_tensor(
        rows[None], values, grad.shape, is_coalesced=coalesced, check_invariants=False
    )


def check_rows(optimizer: Optimizer, module: torch.nn.Module) -> None:
    """Refuse what would write rows that it was not to write."""
    for group in optimizer.param_groups:
        if leaves_rows(optimizer, group) and group.get("fused"):
            raise TaskError(
                f"{type(optimizer).__name__}(fused=True) rewrites every row of the parameters, "
                "which ranks have in common: it would undo steps of other ranks on rows that it "
                "has no gradient for; leave fused=True out"
            )
    sparse = has_sparse_gradients(module)
    if sparse and any(group.get("momentum") for group in optimizer.param_groups):
        raise TaskError(
            "an embedding with sparse=True, and momentum: it moves every row that ever had a "
            "gradient, in every step; give SGD momentum=0, or use Adagrad or SparseAdam"
        )
