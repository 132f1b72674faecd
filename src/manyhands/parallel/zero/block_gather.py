"""Parameters that are here only while their block runs: gathered before its forward and its backward pass, let go after each.

    forward     gather(k); gather(k + 1) begins; run k; let k go
    backward    gather(k); gather(k - 1) begins; run k; let k go, and its gradient is on its way to the owners

A parameter is the same object all the time; only its memory comes and goes, and views of it that autograd keeps come back with it.
While its memory is away it reads as NaN, in its shape. When the next gather begins follows from the order of the last forward
pass, and when a gradient leaves from where the block's inputs get theirs: alike on all ranks, whatever parameters each has used.
Who looks at a parameter outside its block (a functional use, a call that goes around the model's own forward) gets its block
gathered there and then, until the pass is over. The root's parameters stay from its forward pass to the end of the backward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from manyhands.core import Group, Work
from manyhands.parallel.zero.spans import Span, Unit


class Gathering:
    """`send` hands over a span whose gradients are complete; `watch` is told when memory has come."""

    def __init__(
        self,
        module: nn.Module,
        units: list[Unit],
        group: Group,
        send: Callable[[Span], None],
        watch: Callable[[], None],
        ahead: bool = True,
    ):
        self.module, self.units, self.group = module, units, group
        self._send, self._watch, self._ahead = send, watch, ahead
        self.open = False  # whether a look at a parameter may gather: all ranks run the model
        self._coming: dict[Unit, list[Work]] = {}
        self._trail: list[Unit] = []  # units in the order of this forward pass
        self._next: dict[Unit, Unit] = {}  # of the last one
        self._before: dict[Unit, Unit] = {}
        self._last: Unit | None = None
        self._backward = False  # a backward pass is under way
        self._views: dict[int, Tensor] = {}
        self._away: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        self._watched: list[tuple[nn.Module, dict[str, Any]]] = []
        for unit in units:
            self._cut(unit)
            self._hooks += [
                unit.module.register_forward_pre_hook(self._before_forward(unit), with_kwargs=True),
                unit.module.register_forward_hook(
                    self._after_forward(unit), with_kwargs=True, always_call=False
                ),
            ]
        of = {id(p.parameter): unit for unit in units for s in unit.spans for p in s.places}
        for part in module.modules():
            mine = {
                n: of[id(p)] for n, p in part._parameters.items() if p is not None and id(p) in of
            }
            if mine:
                self._watched.append((part, part._parameters))
                part.__dict__["_parameters"] = _Looked(part._parameters, mine, self)

    def close(self) -> None:
        """Leave the module as a plain one, with all parameters away."""
        self.release_all()
        for hook in self._hooks:
            hook.remove()
        for part, plain in self._watched:
            part.__dict__["_parameters"] = plain

    def _cut(self, unit: Unit) -> None:
        """From whole parameters to this rank's slices, span by span, so that memory never holds more than one block twice."""
        for span in unit.spans:
            span.full = torch.zeros(
                span.length, dtype=span.dtype, device=span.places[0].parameter.device
            )
            for place in span.places:
                span.view(span.full, place).copy_(place.parameter.data)
            span.value.copy_(span.full[span.own])
            span.full = torch.empty(span.length, dtype=span.wire, device=span.full.device)
            for place in span.places:
                nothing = float("nan") if span.wire.is_floating_point else 0
                self._away[id(place.parameter)] = torch.full(
                    (), nothing, dtype=span.wire, device=span.full.device
                ).expand(place.shape)
                self._views[id(place.parameter)] = span.view(span.full, place)
                place.parameter.data = self._away[id(place.parameter)]
            span.full.untyped_storage().resize_(0)

    # -- memory that comes and goes --

    def begin(self, unit: Unit) -> None:
        if unit.here or unit in self._coming:
            return
        works = []
        for span in unit.spans:
            span.full.untyped_storage().resize_(span.full.nbytes)
            span.full[span.own].copy_(span.value)
            works.append(self.group.all_gather({span.key: span.full}))
        self._coming[unit] = works
        self._watch()

    def need(self, unit: Unit) -> None:
        if unit.here:
            return
        self.begin(unit)
        for work in self._coming.pop(unit):
            work.wait()
        for span in unit.spans:
            for place in span.places:
                place.parameter.data = self._views[id(place.parameter)]
        unit.here = True
        if not self._backward and (not self._trail or self._trail[-1] is not unit):
            self._trail.append(unit)

    def release(self, unit: Unit) -> None:
        for work in self._coming.pop(unit, ()):
            work.wait()
        for span in unit.spans:
            for place in span.places:
                place.parameter.data = self._away[id(place.parameter)]
            span.full.untyped_storage().resize_(0)
        unit.here = False

    def release_all(self) -> None:
        for unit in self.units:
            if unit.here or unit in self._coming:
                self.release(unit)

    def start(self) -> None:
        """A new step: nothing is left of the one before, not even where a backward pass never came."""
        self.release_all()
        self._backward = False
        for unit in self.units:
            unit.uses, unit.in_backward = 0, False
        self._trail = []

    def finish(self) -> None:
        """A backward pass is over: what did not leave by itself leaves now, the last block first."""
        for unit in reversed(self.units):
            for span in unit.spans:
                if span.trains and (
                    not span.sent or any(p.parameter.grad is not None for p in span.places)
                ):
                    self._send(span)
        self.start()

    # -- hooks --

    def _before_forward(self, unit: Unit) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if unit is self.units[0] and not self._backward:
                self._trail = []
            self.need(unit)
            if self._ahead and not self._backward and unit in self._next:
                self.begin(self._next[unit])
            if self._backward or not torch.is_grad_enabled() or unit is self.units[0]:
                return None
            return self._marked(unit, args, kwargs)

        return hook

    def _marked(self, unit: Unit, args: Any, kwargs: Any) -> Any:
        """The same inputs, with a mark in the graph: when backward passes it, the block is over."""
        flat, shape = pytree.tree_flatten((args, kwargs))
        waiting = [i for i, x in enumerate(flat) if isinstance(x, Tensor) and x.requires_grad]
        if not waiting:
            return None
        unit.uses += 1
        left = set(waiting)

        def over(i: int) -> None:
            left.discard(i)
            if not left:
                self._leave(unit)

        for i in waiting:
            flat[i] = flat[i].view_as(flat[i])
            flat[i].grad_fn.register_hook(lambda *_, i=i: over(i))
        return pytree.tree_unflatten(flat, shape)

    def _after_forward(self, unit: Unit) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
            trains = torch.is_grad_enabled()
            if unit is self.units[0]:
                if not self._backward:
                    self._note_order()
                    if not trains:
                        self.release_all()
                return
            if trains:  # also where it is computed once more: a reentrant checkpoint goes back through what that made
                for x in pytree.tree_leaves(outputs):
                    if isinstance(x, Tensor) and x.requires_grad:
                        x.register_hook(lambda grad: self._enter(unit))
                if unit is self._last and not self._backward:
                    return  # backward begins with it
            if not unit.in_backward:  # else it was only computed once more
                self.release(unit)

        return hook

    def _note_order(self) -> None:
        order = [u for u in self._trail if u is not self.units[0]]
        pairs = [(a, b) for a, b in itertools.pairwise(order) if a is not b]
        self._next, self._before = dict(pairs), {b: a for a, b in pairs}
        if order:
            self._next[self.units[0]] = order[0]
            self._last = order[-1]

    def _enter(self, unit: Unit) -> None:
        self._backward = True
        if unit.in_backward and unit.here:
            return
        unit.in_backward = True
        self.need(unit)
        if self._ahead and unit in self._before:
            self.begin(self._before[unit])

    def _leave(self, unit: Unit) -> None:
        unit.uses -= 1
        unit.in_backward = False
        self.release(unit)
        if unit.uses == 0:
            for span in unit.spans:
                if span.trains:
                    self._send(span)


class _Looked(dict[str, Any]):
    """A module's parameters: to look at one is to need it."""

    def __init__(self, plain: dict[str, Any], units: dict[str, Unit], gathering: Gathering):
        super().__init__(plain)
        self._units, self._gathering = units, gathering

    def __getitem__(self, name: str) -> Any:
        unit = self._units.get(name)
        if unit is not None and not unit.here and self._gathering.open:
            self._gathering.need(unit)
        return super().__getitem__(name)
