"""Composite optimizer: several named optimizers, of which a step makes one step, or all do.

Its parameter groups are those of all of them, and so is its state: the same objects, not copies.
So flat parameters, sliced updates, loss scaling and checkpoints see one optimizer. Names are taken
in alphabetical order, so that a checkpoint fits however the dict that gave them is ordered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from manyhands.errors import TaskError
from manyhands.replica.lbfgs.lbfgs import LBFGS


class NamedOptimizers(Optimizer):
    """`active`: the name of the optimizer that `step` steps; None: all of them."""

    def __init__(self, named: Mapping[str, Optimizer]):
        self.named = {name: named[name] for name in sorted(named)}
        self.active: str | None = None
        super().__init__([g for o in self.named.values() for g in o.param_groups], {})
        for optimizer in self.named.values():
            self.state.update(optimizer.state)
        self._share()
        for optimizer in self.named.values():
            own_state(self, optimizer)

    def _share(self) -> None:
        """Give every optimizer our state, and those of our groups that are its own."""
        first = 0
        for optimizer in self.named.values():
            stop = first + len(optimizer.param_groups)
            optimizer.param_groups, optimizer.state = self.param_groups[first:stop], self.state
            first = stop

    def adopt(self, member: Optimizer) -> None:
        """Take over groups and state that one of the optimizers has loaded."""
        for group in member.param_groups:
            for p in group["params"]:
                self.state.pop(p, None)
        self.state.update(member.state)
        self.param_groups[:] = [g for o in self.named.values() for g in o.param_groups]
        self._share()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise TaskError("several optimizers take no closure; leave it out")
        for name, optimizer in self.named.items():
            if self.active in (None, name):
                optimizer.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()
        for optimizer in self.named.values():
            held = [p for g in optimizer.param_groups for p in g["params"] if p in self.state]
            # each completes what it has loaded, and would stumble over the state of others
            own = defaultdict(dict, {p: self.state[p] for p in held})
            optimizer.__setstate__({"state": own})
            optimizer.state = self.state

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "named": self.named, "active": self.active}


def own_state(composite: NamedOptimizers, member: Any) -> None:
    """Let a member's state_dict have its own state, of all that they share, as if it were alone."""
    kind: Any = type(member)

    def state_dict() -> dict[str, Any]:
        shared = member.state
        held = [p for group in member.param_groups for p in group["params"]]
        member.state = defaultdict(dict, {p: shared[p] for p in held if p in shared})
        try:
            return cast(dict[str, Any], kind.state_dict(member))
        finally:
            member.state = shared

    def load_state_dict(state_dict: dict[str, Any]) -> None:
        kind.load_state_dict(member, state_dict)
        composite.adopt(member)

    member.state_dict, member.load_state_dict = state_dict, load_state_dict


def named(optimizer: Optimizer) -> dict[str, Optimizer]:
    """The optimizers that step, by name: those of a composite; or this one itself, as ""."""
    return optimizer.named if isinstance(optimizer, NamedOptimizers) else {"": optimizer}


def members(optimizer: Optimizer) -> list[Optimizer]:
    return list(named(optimizer).values())


def owners(optimizer: Optimizer) -> dict[int, str]:
    """By id of each parameter, the name of its optimizer; of one without a name: {}."""
    if not isinstance(optimizer, NamedOptimizers):
        return {}
    return {
        id(p): name
        for name, member in optimizer.named.items()
        for group in member.param_groups
        for p in group["params"]
    }


def kind(optimizer: Optimizer) -> str:
    """The name of its class; of a composite, those of its optimizers by name."""
    if not isinstance(optimizer, NamedOptimizers):
        return type(optimizer).__qualname__
    return ", ".join(f"{name}: {kind(o)}" for name, o in optimizer.named.items())


def named_optimizers(
    model: nn.Module, make: Mapping[str, Callable[[Any], Optimizer]]
) -> NamedOptimizers:
    """Make each optimizer over the parameters of the part of `model` that has its name."""
    made: dict[str, Optimizer] = {}
    for name, function in make.items():
        # a list: a function that goes through them twice would find a generator empty
        optimizer = function(list(part(model, name).parameters()))
        if not isinstance(optimizer, Optimizer):
            raise TaskError(
                f"the optimizer {name!r} returned a {type(optimizer).__name__}, but one "
                "torch.optim.Optimizer is needed"
            )
        made[name] = optimizer
    return combined(model, made)


def combined(model: nn.Module, optimizers: Mapping[str, Optimizer]) -> NamedOptimizers:
    """One composite of `optimizers`, in which each parameter that trains is in exactly one."""
    names = {id(p): name for name, p in model.named_parameters()}
    owner: dict[int, str] = {}
    for name, optimizer in optimizers.items():
        if isinstance(optimizer, torch.optim.LBFGS | LBFGS):
            raise TaskError(
                f"the optimizer {name!r} is {type(optimizer).__name__}, which evaluates the loss "
                "several times a step; use SGD, Adam, AdamW, or mh.LBFGS as the only optimizer"
            )
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if id(p) in owner:
                twice = names.get(id(p), f"a tensor of shape {tuple(p.shape)}")
                raise TaskError(
                    f"the parameter {twice} is in two optimizers, {owner[id(p)]!r} and {name!r}, "
                    "which would both step it; give it to one of them"
                )
            owner[id(p)] = name
    left = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in owner]
    if left:
        more = f" and {len(left) - 1} more are" if len(left) > 1 else " is"
        raise TaskError(
            f"the parameter {left[0]}{more} in none of the optimizers {', '.join(optimizers)}, so "
            "nobody would train it; name the part of the model that it is in (in a loop of your "
            "own: give it to one), or set requires_grad=False"
        )
    return NamedOptimizers(optimizers)


def part(model: nn.Module, name: str) -> nn.Module:
    """The submodule that an optimizer is named after."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        known = ", ".join(n for n, _ in model.named_children()) or "none"
        raise TaskError(
            f"optimizer={{{name!r}: ...}} names no part of the model; its parts are {known}"
        ) from None
