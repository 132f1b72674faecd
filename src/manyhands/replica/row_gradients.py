"""Row gradients: a step that reads and writes only the rows whose gradient is not zero.

    w[j] <- w[j] - eta g[j]    for rows j with g[j] != 0;    other rows are neither read nor written

A dense step writes every element, so on parameters that other ranks step at the same time it may
put back what they have just changed, also in rows that this gradient leaves as they are. So while
the optimizer steps, it has parts of such a parameter, with their gradients and state:

    few runs of neighbouring rows (a layer, some of whose units are off)    views, stepped in place
    else (a table, some of whose rows are in the batch)                     one copy of the rows

The copy is written back; where another rank has stepped an element meanwhile, as a difference. An
optimizer that treats every element by itself computes the same bits so.

Only optimizers under which a gradient of zero changes nothing can do without the other rows: SGD
without momentum and weight decay, Adagrad without weight decay. Sparse gradients have only their
rows anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.errors import TaskError
from manyhands.replica.flat import FlatParameters
from manyhands.replica.update import has_sparse_gradients

FEW = 32  # runs of rows: a view costs some microseconds


class RowGradients:
    """Hooks around an optimizer's step, at work while the parameters are in common memory."""

    def __init__(self, flat: FlatParameters, optimizer: Optimizer):
        self._flat, self._optimizer = flat, optimizer
        self._groups: list[list[nn.Parameter]] = []  # of the optimizer, while it has parts
        self._parted: list[PartedParameter] = []
        after = optimizer.register_step_post_hook(self._after_step)
        self._hooks = [optimizer.register_step_pre_hook(self._before_step), after]
        # a user's hook after the step sees whole parameters
        hooks: Any = optimizer._optimizer_step_post_hooks  # an OrderedDict
        hooks.move_to_end(after.id, last=False)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore()  # after a step that failed
        if not self._flat.in_common:
            return
        self._groups = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            if leaves_rows(optimizer, group):
                group["params"] = [part for p in group["params"] for part in self._parts(p)]

    def _parts(self, p: nn.Parameter) -> list[nn.Parameter]:
        rows = _rows(p)
        if rows is None:
            return [p]
        self._parted.append(PartedParameter(p, rows, self._optimizer))
        return self._parted[-1].parts

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for parted in self._parted:
            parted.join(optimizer)
        self._restore()

    def _restore(self) -> None:
        optimizer = self._optimizer
        for group, whole in zip(optimizer.param_groups, self._groups, strict=False):
            group["params"] = whole
        for parted in self._parted:
            for part in parted.parts:
                optimizer.state.pop(part, None)
        self._groups, self._parted = [], []

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._restore()


class PartedParameter:
    """A parameter for one step: `parts` of it that have all rows with a gradient."""

    def __init__(self, whole: nn.Parameter, rows: Tensor, optimizer: Optimizer):
        self._whole, self._rows = whole, rows
        self._before: Tensor | None = None  # the rows as they were; None: the parts are views
        grad, state = whole.grad, optimizer.state.get(whole, {})
        assert grad is not None
        self._elementwise = [
            k for k, v in state.items() if isinstance(v, Tensor) and v.shape == whole.shape
        ]
        runs = _runs(rows)
        # else a run of rows has gaps in memory, or there is none: the step counts all the same
        in_place = 0 < len(runs) <= FEW and whole.stride(0) * len(whole) == whole.numel()
        if not in_place:
            self._before = whole.data[rows].contiguous()
        self.parts: list[nn.Parameter] = []
        for where in runs if in_place else [rows]:
            value = whole.data[where] if self._before is None else self._before.clone()
            part = nn.Parameter(value, requires_grad=False)
            part.grad = _part_of(grad, where, in_place)
            self.parts.append(part)
            if state:
                optimizer.state[part] = {
                    k: _part_of(v, where, in_place) if k in self._elementwise else _own(v)
                    for k, v in state.items()
                }

    def join(self, optimizer: Optimizer) -> None:
        """Bring the rows and their state back."""
        part, rows = self.parts[0], self._rows
        stepped, state = optimizer.state.get(part, {}), optimizer.state.get(self._whole, {})
        for key in state:
            if key not in self._elementwise:
                state[key] = stepped[key]  # the count of steps
            elif self._before is not None:
                state[key].index_copy_(0, rows, stepped[key])
        if self._before is None:
            return
        value = self._whole.data
        now, after = value[rows], part.data
        kept = now == self._before
        value.index_copy_(0, rows, torch.where(kept, after, now + (after - self._before)))


def leaves_rows(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether a row whose gradient is zero keeps its value in a step of these parameters."""
    if type(optimizer) is torch.optim.SGD:
        return not group["momentum"] and not group["weight_decay"]
    return type(optimizer) is torch.optim.Adagrad and not group["weight_decay"]


def _rows(p: nn.Parameter) -> Tensor | None:
    """The rows with a gradient; None: all of them, or those of a sparse one."""
    grad = p.grad
    if grad is None or grad.is_sparse or not p.ndim or not p.numel():
        return None
    rows = grad.abs().reshape(len(p), -1).amax(1).nonzero().view(-1)
    return rows if len(rows) < len(p) else None


def _runs(rows: Tensor) -> list[slice]:
    """Neighbouring rows together; where there are many such runs, only the first of them."""
    if not len(rows):
        return []
    last = (rows.diff() != 1).nonzero().view(-1)[: FEW + 1]
    starts = [int(rows[0]), *rows[last + 1].tolist()]
    stops = [*rows[last].tolist(), int(rows[-1])]
    return [slice(start, stop + 1) for start, stop in zip(starts, stops, strict=True)]


def _part_of(value: Tensor, where: slice | Tensor, in_place: bool) -> Tensor:
    return value[where] if in_place else value[where].contiguous()


def _own(value: Any) -> Any:
    """Each part counts its own steps."""
    return value.clone() if isinstance(value, Tensor) else value


def check_rows(optimizer: Optimizer, module: nn.Module) -> None:
    """Refuse what would move rows that have no gradient."""
    moves = any(group.get("momentum") for group in optimizer.param_groups)
    if moves and has_sparse_gradients(module):
        raise TaskError(
            "an embedding with sparse=True, and momentum: it moves every row that ever had a "
            "gradient, in every step; give SGD momentum=0, or use Adagrad or SparseAdam"
        )
