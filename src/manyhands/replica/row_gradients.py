"""Row gradients: a step that reads and writes only the rows whose gradient is not zero.

    w[j] <- w[j] - eta g[j]    for rows j with g[j] != 0;    other rows are neither read nor written

A dense step writes every element, so on parameters that other ranks step at the same time it puts
back what they have just changed, also in rows that this gradient leaves as they are. So while the
optimizer steps, such a parameter, its gradient and its state are those rows alone; then they are
written back. An optimizer that treats every element by itself computes the same bits so.

Only optimizers under which a gradient of zero changes nothing can do without the other rows: SGD
without momentum and weight decay, Adagrad without weight decay. Sparse gradients have only their
rows anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.core import Tensors
from manyhands.errors import TaskError
from manyhands.replica.flat import FlatParameters
from manyhands.replica.update import has_sparse_gradients


@dataclass(frozen=True)
class _Whole:
    """A parameter of which only `rows` are stepped, with all that was taken out of its place."""

    parameter: nn.Parameter
    rows: Tensor
    value: Tensor
    grad: Tensor
    state: Tensors


class RowGradients:
    """Hooks around an optimizer's step, at work while the parameters are in common memory."""

    def __init__(self, flat: FlatParameters, optimizer: Optimizer):
        self._flat, self._optimizer = flat, optimizer
        self._whole: list[_Whole] = []
        after = optimizer.register_step_post_hook(self._after_step)
        self._hooks = [optimizer.register_step_pre_hook(self._before_step), after]
        # a user's hook after the step sees whole parameters
        optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._flat.in_common:
            return
        for group in optimizer.param_groups:
            if leaves_rows(optimizer, group):
                self._whole += [
                    narrow(p, rows, optimizer.state.get(p, {})) for p, rows in _partly_zero(group)
                ]

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        while self._whole:
            whole = self._whole.pop()
            write_back(whole, optimizer.state.get(whole.parameter, {}))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._after_step(self._optimizer, (), {})  # a step that failed has left its rows


def leaves_rows(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether a row whose gradient is zero keeps its value in a step of these parameters."""
    if type(optimizer) is torch.optim.SGD:
        return not group["momentum"] and not group["weight_decay"]
    return type(optimizer) is torch.optim.Adagrad and not group["weight_decay"]


def _partly_zero(group: dict[str, Any]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Parameters with rows of zeros in their dense gradient; the other rows."""
    for p in group["params"]:
        if p.grad is not None and not p.grad.is_sparse and p.ndim and p.numel():
            rows = p.grad.ne(0).reshape(len(p), -1).any(1).nonzero().view(-1)
            if len(rows) < len(p):
                yield p, rows


def narrow(p: nn.Parameter, rows: Tensor, state: dict[str, Any]) -> _Whole:
    """Make a parameter, its gradient and its state copies of these rows."""
    assert p.grad is not None
    kept = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.shape == p.shape}
    whole = _Whole(p, rows, p.data, p.grad, kept)
    for key, value in kept.items():
        state[key] = value[rows].contiguous()
    _put(p, p.data[rows].contiguous(), p.grad[rows].contiguous())
    return whole


def write_back(whole: _Whole, state: dict[str, Any]) -> None:
    """Put the whole tensors in place again, with the new values of the rows."""
    p, rows = whole.parameter, whole.rows
    for key, value in whole.state.items():
        state[key] = value.index_copy_(0, rows, state[key])
    _put(p, whole.value.index_copy_(0, rows, p.data), whole.grad)


def _put(p: nn.Parameter, value: Tensor, grad: Tensor) -> None:
    p.grad = None  # torch compares its shape with the value's
    p.data = value
    p.grad = grad


def check_rows(optimizer: Optimizer, module: nn.Module) -> None:
    """Refuse what would move rows that have no gradient."""
    moves = any(group.get("momentum") for group in optimizer.param_groups)
    if moves and has_sparse_gradients(module):
        raise TaskError(
            "an embedding with sparse=True, and momentum: it moves every row that ever had a "
            "gradient, in every step; give SGD momentum=0, or use Adagrad or SparseAdam"
        )
