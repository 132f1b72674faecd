"""Update: applies the merged gradient with the user's optimizer, whole or by slices.

`WholeUpdate` leaves the optimizer on the module's parameters. `SliceUpdate` gives it, instead of
each parameter, the slices of it that this rank owns. For optimizers that treat every element by
itself this changes no bit of the result, but each of M ranks does 1/M of the work and keeps 1/M of
the optimizer's state. Both save state by parameter name, so checkpoints of the two are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.core import Tensors
from manyhands.errors import TaskError
from manyhands.replica import state
from manyhands.replica.flat import FlatParameters, ParameterView
from manyhands.replica.lbfgs.lbfgs import LBFGS
from manyhands.replica.several_optimizers.named_optimizers import NamedOptimizers, members

FUSED_ON_CPU = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
FUSED_ON_CUDA = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
# treat each element by itself, have no state before the first step
ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
# their state per element; a rank that owns nothing cannot know which of them are in use
PER_ELEMENT = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")

Sum = Callable[[Tensors], None]  # over ranks, in place


class Update(Protocol):
    """Applies the merged gradient; saves and loads optimizer state by parameter name."""

    optimizer: Optimizer
    slice_only: bool  # each rank updates only the slices that it owns
    placed: list[int]  # the views whose gradients the last `place` returned

    def place(self, used: list[bool], in_flat: bool) -> list[Tensor]:
        """Hand merged gradients to the optimizer's parameters and return them.

        A parameter that no rank used gets none, as in plain torch. `in_flat`: the gradients are in
        the flat vectors, not at the parameters.
        """
        ...

    def save(self, sum_over_ranks: Sum) -> tuple[Tensors, dict[str, Any]]: ...

    def load(self, tensors: Tensors, meta: dict[str, Any]) -> None: ...


class WholeUpdate:
    """Every rank updates all parameters."""

    slice_only = False

    def __init__(self, flat: FlatParameters, module: nn.Module, optimizer: Optimizer):
        self.flat, self.module, self.optimizer = flat, module, optimizer
        self.placed: list[int] = []
        if not has_sparse_gradients(module):
            fuse(optimizer, flat.count.device)

    def place(self, used: list[bool], in_flat: bool) -> list[Tensor]:
        grads, self.placed = [], []
        for i, (view, is_used) in enumerate(zip(self.flat.views, used, strict=True)):
            if in_flat and is_used:
                view.parameter.grad = view.grad
            if view.parameter.grad is not None:
                grads.append(view.parameter.grad)
                self.placed.append(i)
        complete_momentum(self.optimizer)
        return grads

    def save(self, sum_over_ranks: Sum) -> tuple[Tensors, dict[str, Any]]:
        return state.optimizer_state(self.module, self.optimizer)

    def load(self, tensors: Tensors, meta: dict[str, Any]) -> None:
        state.load_optimizer(self.module, self.optimizer, tensors, meta)


@dataclass(frozen=True)
class ParameterSlice:
    """The consecutive elements of one parameter, in memory order, that this rank owns."""

    view: int
    parameter: nn.Parameter  # a view of the values
    grad: Tensor
    start: int  # within the view
    stop: int


class SliceUpdate:
    """Each rank updates the slices it owns.

    `own(vector)` lists them for a flat vector; they are the same for values and gradients.
    """

    slice_only = True

    def __init__(
        self,
        flat: FlatParameters,
        module: nn.Module,
        optimizer: Optimizer,
        own: Callable[[Tensor], list[slice]],
    ):
        self.flat, self.module, self.optimizer = flat, module, optimizer
        self.placed: list[int] = []
        # the user's own parameters, for the names in checkpoints
        self._groups = [list(g["params"]) for g in optimizer.param_groups]
        self.slices: list[ParameterSlice] = []
        for key, values in flat.values.items():
            for owned in own(values):
                self._cut(key, owned)
        by_parameter: dict[int, list[nn.Parameter]] = {}
        for s in self.slices:
            by_parameter.setdefault(id(flat.views[s.view].parameter), []).append(s.parameter)
        for group, whole in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = [s for p in whole for s in by_parameter.get(id(p), [])]
        fuse(optimizer, flat.count.device)
        self._state_guard = StateGuard(optimizer)

    def _cut(self, key: str, owned: slice) -> None:
        for i, view in enumerate(self.flat.views):
            if view.vector != key:
                continue
            first, last = (
                max(owned.start, view.start),
                min(owned.stop, view.start + view.parameter.numel()),
            )
            if first < last:
                own = nn.Parameter(self.flat.values[key][first:last])
                self.slices.append(
                    ParameterSlice(
                        i,
                        own,
                        self.flat.grads[key][first:last],
                        first - view.start,
                        last - view.start,
                    )
                )

    def place(self, used: list[bool], in_flat: bool) -> list[Tensor]:
        if has_step_hooks(self.optimizer):
            raise TaskError(
                "a hook was registered on the optimizer's step after the start, but each rank "
                "updates slices of the parameters, and the hook would see those alone; register "
                "it before the start"
            )
        for s in self.slices:
            s.parameter.grad = s.grad if used[s.view] else None
        complete_momentum(self.optimizer)
        self.placed = [s.view for s in self.slices if used[s.view]]
        return [s.grad for s in self.slices if used[s.view]]

    def save(self, sum_over_ranks: Sum) -> tuple[Tensors, dict[str, Any]]:
        views = self.flat.views
        per_element = keys_per_element(self.optimizer)
        present = torch.zeros(len(per_element) + 1, len(views), dtype=torch.float64)
        for s in self.slices:
            entries = self.optimizer.state.get(s.parameter, {})
            for k, key in enumerate(per_element):
                present[k, s.view] = float(isinstance(entries.get(key), Tensor))
            if s.start == 0:  # the rank with the first element gives the step
                present[-1, s.view] = float(entries["step"]) if "step" in entries else -1.0
        sum_over_ranks({"present": present})
        found: Tensors = {}
        for k, key in enumerate(per_element):
            whole = {
                i: torch.zeros(p.parameter.numel(), dtype=p.value.dtype)
                for i, p in enumerate(views)
                if present[k, i] > 0
            }
            for s in self.slices:
                if s.view in whole:
                    whole[s.view][s.start : s.stop] = self.optimizer.state[s.parameter][key]
            sum_over_ranks({str(i): v for i, v in whole.items()})
            for i, values in whole.items():
                p = views[i]
                found[f"{p.name}/{key}"] = torch.as_strided(
                    values, p.value.shape, p.value.stride()
                ).contiguous()
        for i, p in enumerate(views):
            if present[-1, i] >= 0:
                found[f"{p.name}/step"] = present[-1, i].float()
        return found, {
            "groups": state.plain_groups(self.module, self.optimizer, self._groups),
            "numbers": {},
        }

    def load(self, tensors: Tensors, meta: dict[str, Any]) -> None:
        mine: Tensors = {}
        keys: dict[str, list[str]] = {}
        for name in tensors:
            parameter, _, key = name.rpartition("/")
            keys.setdefault(parameter, []).append(key)
        for n, s in enumerate(self.slices):
            view = self.flat.views[s.view]
            for key in keys.get(view.name, []):
                whole = tensors[f"{view.name}/{key}"]
                if key != "step":
                    memory = torch.empty(view.parameter.numel(), dtype=whole.dtype)
                    torch.as_strided(memory, view.value.shape, view.value.stride()).copy_(whole)
                    whole = memory[s.start : s.stop]
                mine[f"{n}/{key}"] = whole.clone()  # each slice counts its own steps
        names = {id(s.parameter): str(n) for n, s in enumerate(self.slices)}
        with self._state_guard.open():
            state.load_named(self.optimizer, names, mine, meta)


class StateGuard:
    """Refuses user code the state_dict of an optimizer that holds only this rank's slices."""

    def __init__(self, optimizer: Optimizer):
        self._open = False
        for each in {id(o): o for o in (optimizer, *members(optimizer))}.values():
            each.register_state_dict_pre_hook(self._save)
            each.register_load_state_dict_pre_hook(self._load)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Inside, our own checkpoints load the slices."""
        self._open = True
        try:
            yield
        finally:
            self._open = False

    def _save(self, optimizer: Optimizer) -> None:
        if not self._open:
            raise TaskError(
                "optimizer.state_dict() would give the slices that this rank updates, not the "
                "state of all parameters; the run's checkpoints hold it (save=, --resume)"
            )

    def _load(self, optimizer: Optimizer, saved: dict[str, Any]) -> None:
        if not self._open:
            raise TaskError(
                "optimizer.load_state_dict() was called after the start, when each rank updates "
                "slices of the parameters; call it before the start (run.prepare), or --resume"
            )


def complete_momentum(optimizer: Optimizer) -> None:
    """Start momentum for parameters whose first gradient comes later than others'.

    torch's fused SGD needs a buffer of all parameters or of none. Where some thaw after others, a
    buffer of zero gives the same first step, unless dampening scales it; then the step is unfused.
    """
    plain = [o for o in members(optimizer) if type(o) is torch.optim.SGD]
    for group in (g for o in plain for g in o.param_groups):
        if not (group["momentum"] and group.get("fused")):
            continue
        stepped = [p for p in group["params"] if p.grad is not None]
        new = [p for p in stepped if "momentum_buffer" not in optimizer.state.get(p, {})]
        if not 0 < len(new) < len(stepped):
            continue
        if group["dampening"]:
            group["fused"] = False
            continue
        for p in new:
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether user code runs before or after a step, and may look at all gradients at once."""
    return any(
        o._optimizer_step_pre_hooks or o._optimizer_step_post_hooks
        for o in (optimizer, *members(optimizer))
    )


def moments(views: Sequence[ParameterView], optimizer: Optimizer) -> Tensors:
    """Optimizer state of a parameter's shape, with the same names on all ranks."""
    prime(optimizer)
    return {
        f"{view.name}/{key}": value
        for view in views
        for key, value in optimizer.state.get(view.parameter, {}).items()
        if isinstance(value, Tensor)
        and value.is_floating_point()
        and value.shape == view.parameter.shape
        and value.ndim
    }


def prime(optimizer: Optimizer) -> list[nn.Parameter]:
    """Make the optimizer state of parameters that have had no gradient yet; returns these.

    An optimizer makes it in a parameter's first step. That step is taken with a value and a
    gradient of zero, in memory of its own: other ranks may have the parameter in common.
    """
    held = [p for g in optimizer.param_groups for p in g["params"]]
    new = [p for p in held if p not in optimizer.state]
    values, kept = [p.data for p in new], [p.grad for p in held]
    for p in held:
        p.grad = None
    for p in new:
        p.data = torch.zeros_like(p)  # weight decay of 0 is 0, so it leaves nothing in the state
        p.grad = torch.zeros_like(p)
    for member in members(optimizer):
        fresh = [p for g in member.param_groups for p in g["params"] if p.grad is not None]
        for p in fresh if isinstance(member, torch.optim.SparseAdam) else ():
            p.grad = p.grad.to_sparse(1)
        if fresh:
            member.step()
    for p, value in zip(new, values, strict=True):
        p.data = value
    for p, grad in zip(held, kept, strict=True):
        p.grad = grad
    for p in new:
        # makes an empty entry if the optimizer keeps no state, so that p is not new next time
        entries = optimizer.state[p]
        if "step" in entries:
            entries["step"] = (
                torch.zeros_like(entries["step"]) if isinstance(entries["step"], Tensor) else 0
            )
    return new


def keys_per_element(optimizer: Optimizer) -> tuple[str, ...]:
    """Keys of the state of an optimizer that can be sliced, but for its step count."""
    return optimizer.per_element if isinstance(optimizer, LBFGS) else PER_ELEMENT


def can_slice(optimizer: Optimizer) -> bool:
    """Whether the optimizer treats each element by itself, but for sums over all that it knows how
    to make (`LBFGS.dot`), keeps known state, and has none yet."""
    chosen = any(g.get("foreach") or g.get("differentiable") for g in optimizer.param_groups)
    known = all(type(o) in ELEMENTWISE for o in members(optimizer)) or type(optimizer) is LBFGS
    known = known and not optimizer.state
    return known and not chosen and not has_step_hooks(optimizer)


def has_sparse_gradients(module: nn.Module) -> bool:
    return any(isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse for m in module.modules())


def fuse(optimizer: Optimizer, device: torch.device) -> None:
    """Use torch's fused kernel for all parameters, if it has one and the user chose none."""
    if isinstance(optimizer, NamedOptimizers):
        for member in members(optimizer):
            fuse(member, device)
        return
    kinds = FUSED_ON_CPU if device.type == "cpu" else FUSED_ON_CUDA
    if type(optimizer) not in kinds or any(
        not p.is_floating_point() for g in optimizer.param_groups for p in g["params"]
    ):
        return
    for group in optimizer.param_groups:
        if (
            group.get("fused") is None
            and group.get("foreach") is None
            and not group.get("differentiable")
        ):
            group["fused"] = True
