"""The exchanges of tensor parallelism, each with its own backward.

A plain tensor has the same value on all ranks of the axis, and its gradient is the whole gradient, the same on all of them.
A share is different on each; its gradient is that of the share. So

    enter     plain -> used with shares      forward nothing            backward sum over ranks
    reduce    partial sums -> plain          forward sum over ranks     backward nothing
    gather    shares -> plain                forward gather             backward take the own share
    scatter   plain -> shares                forward take the share     backward gather
    spread    partial sums -> shares         forward reduce-scatter     backward gather                 } sequence
    collect   shares -> used with shares     forward gather             backward reduce-scatter         } parallel

and a parameter that no rank cuts gets equal gradients everywhere without an exchange of its own.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from manyhands.core import Group, Op


@lru_cache(maxsize=4096)
def starts(length: int, size: int) -> tuple[int, ...]:
    """Where the shares of `length` elements begin, and the end: as even as can be, larger ones first."""
    least, more = divmod(length, size)
    return tuple(i * least + min(i, more) for i in range(size + 1))


class TensorAxis:
    """The ranks that hold one model together, and this rank's place among them. Without a group it is an axis of the mind:
    shapes are right and values are not, which is what deriving a plan on meta tensors needs.

    `gathers` counts by name the functions that had to see a whole tensor because there is no rule for shares.
    """

    def __init__(self, group: Group | None, index: int, size: int, sequence: bool = False):
        self.group, self.index, self.size, self.sequence = group, index, size, sequence
        self.gathers: Counter[str] = Counter()
        self._last: dict[str, tuple[Tensor, tuple[int, ...], Tensor]] = {}

    def once(
        self, what: str, x: Tensor, how: tuple[int, ...], make: Callable[[], Tensor]
    ) -> Tensor:
        """What was made of x last, again: q, k and v read one input, which enters or is collected once for all of them."""
        if x.is_inference():
            return make()
        how = (*how, x._version, x.data_ptr(), torch.is_grad_enabled())
        last = self._last.get(what)
        if last is not None and last[0] is x and last[1] == how:
            return last[2]
        made = make()
        self._last[what] = (x, how, made)
        return made

    # -- shares --

    def share(self, length: int, groups: int = 1, index: int | None = None) -> int:
        """How many of `length` elements, cut in `groups` blocks, a rank holds."""
        cut, i = starts(length // groups, self.size), self.index if index is None else index
        return groups * (cut[i + 1] - cut[i])

    def first(self, length: int) -> int:
        return starts(length, self.size)[self.index]

    def take(self, whole: Tensor, dim: int, groups: int = 1, index: int | None = None) -> Tensor:
        """The share of `whole`: a view where it is one block."""
        i = self.index if index is None else index
        cut = starts(whole.shape[dim] // groups, self.size)
        if groups == 1:
            return whole.narrow(dim, cut[i], cut[i + 1] - cut[i])
        return (
            whole.unflatten(dim, (groups, -1))
            .narrow(dim + 1, cut[i], cut[i + 1] - cut[i])
            .flatten(dim, dim + 1)
        )

    # -- exchange, outside autograd --

    def all_reduce(self, values: Tensor, op: Op = "sum") -> Tensor:
        if self.group is not None and self.size > 1:
            self.group.all_reduce({"tensor": values}, op).wait()
        return values

    def all_gather(self, local: Tensor, dim: int, length: int, groups: int = 1) -> Tensor:
        if self.size == 1:
            return local
        shape = list(local.shape)
        if self.group is None:
            shape[dim] = length
            return local.new_zeros(shape)
        pieces, mine = [], local.contiguous()
        for r in range(self.size):
            shape[dim] = self.share(length, groups, r)
            pieces.append(mine if r == self.index else local.new_empty(shape))
        others = [r for r in range(self.size) if r != self.index]
        give = {r: mine for r in others if mine.numel()}
        self.group.transfer(
            give, {r: pieces[r] for r in others if pieces[r].numel()}, "tensor"
        ).wait()
        if groups == 1:
            return torch.cat(pieces, dim)
        return torch.cat([p.unflatten(dim, (groups, -1)) for p in pieces], dim + 1).flatten(
            dim, dim + 1
        )

    def reduce_scatter(self, partial: Tensor, dim: int, groups: int = 1) -> Tensor:
        """The own share of the sum over ranks."""
        mine = self.take(partial, dim, groups)
        if self.size == 1 or self.group is None:
            return mine.clone()
        others = [r for r in range(self.size) if r != self.index]
        give = {r: self.take(partial, dim, groups, r).contiguous() for r in others}
        came = {r: mine.new_empty(mine.shape) for r in others}
        if mine.numel() == 0:
            came = {}
        self.group.transfer({r: v for r, v in give.items() if v.numel()}, came, "tensor").wait()
        came[self.index] = mine
        total = came[0].clone() if 0 in came else mine.clone()
        for r in range(1, self.size):  # in the order of ranks, as an all-reduce sums
            if r in came:
                total += came[r]
        return total

    # -- randomness --

    @contextmanager
    def apart(self, device: torch.device) -> Iterator[None]:
        """Random numbers of this rank's own, drawn for a share. Their seed is drawn from the stream that all ranks have in
        common, so that a recomputation which restores that stream meets the same numbers again."""
        if device.type == "meta":
            yield
            return
        seed = int(torch.randint(2**62, ()))
        common = (
            torch.default_generator
            if device.type == "cpu"
            else torch.cuda.default_generators[device.index or 0]
        )
        state = common.get_state()
        common.manual_seed(seed + self.index + 1)
        try:
            yield
        finally:
            common.set_state(state)

    # -- what had no rule --

    def had_to_gather(self, name: str, value: Any) -> None:
        if not self.gathers[name]:
            warnings.warn(
                f"tensor={self.size}: {name} has no rule for a tensor of which each rank holds a share, so it is gathered first: "
                "right, but slower. To avoid it keep the module whole: Task(tensor={'its.name': 'replicate'})",
                stacklevel=6,
            )
        self.gathers[name] += 1

    # -- what only who derives a plan wants to know --

    def had_to_scatter(self, plain: Tensor, dim: int, value: Any, name: str) -> None:
        """In `name` a whole tensor met shares, and each rank takes its own of it."""

    def could_not_view(self, value: Any, shape: tuple[int, ...]) -> None:
        """A view, after which the cut would lie across a dimension."""

    def could_not_split(self, value: Any, pieces: int) -> None:
        """Pieces of which some ranks would hold more than others."""

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorAxis:
        return self  # a copy of a module lives on the same ranks


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        # clone: autograd may have given the same tensor to somebody else
        return ctx.axis.all_reduce(grad.clone(memory_format=torch.contiguous_format)), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, axis: TensorAxis) -> Tensor:
        ctx.mark_dirty(partial)
        return axis.all_reduce(partial)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, axis: TensorAxis, dim: int, length: int, groups: int
    ) -> Tensor:
        ctx.how = axis, dim, groups
        return axis.all_gather(local, dim, length, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        axis, dim, groups = ctx.how
        return axis.take(grad, dim, groups), None, None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis, dim: int, groups: int) -> Tensor:
        ctx.how = axis, dim, x.shape[dim], groups
        return axis.take(x, dim, groups).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        axis, dim, length, groups = ctx.how
        return axis.all_gather(grad, dim, length, groups), None, None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, axis: TensorAxis, dim: int, groups: int) -> Tensor:
        ctx.how = axis, dim, partial.shape[dim], groups
        return axis.reduce_scatter(partial, dim, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        axis, dim, length, groups = ctx.how
        return axis.all_gather(grad, dim, length, groups), None, None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, axis: TensorAxis, dim: int, length: int, groups: int
    ) -> Tensor:
        ctx.how = axis, dim, groups
        return axis.all_gather(local, dim, length, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        axis, dim, groups = ctx.how
        return axis.reduce_scatter(grad, dim, groups), None, None, None, None


def _learns(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def enter(x: Tensor, axis: TensorAxis) -> Tensor:
    if not _learns(x):
        return x
    return axis.once("enter", x, (), lambda: _Enter.apply(x, axis))


def reduce(partial: Tensor, axis: TensorAxis) -> Tensor:
    """In place: `partial` must be the caller's own, and nothing that backward has saved."""
    partial = partial.contiguous()
    return _Reduce.apply(partial, axis) if _learns(partial) else axis.all_reduce(partial)


def gather(local: Tensor, axis: TensorAxis, dim: int, length: int, groups: int) -> Tensor:
    if _learns(local):
        return _Gather.apply(local, axis, dim, length, groups)
    return axis.all_gather(local, dim, length, groups)


def scatter(x: Tensor, axis: TensorAxis, dim: int, groups: int) -> Tensor:
    return _Scatter.apply(x, axis, dim, groups) if _learns(x) else axis.take(x, dim, groups)


def spread(partial: Tensor, axis: TensorAxis, dim: int, groups: int) -> Tensor:
    if _learns(partial):
        return _Spread.apply(partial, axis, dim, groups)
    return axis.reduce_scatter(partial, dim, groups)


def collect(local: Tensor, axis: TensorAxis, dim: int, length: int, groups: int) -> Tensor:
    def make() -> Tensor:
        if _learns(local):
            return _Collect.apply(local, axis, dim, length, groups)
        return axis.all_gather(local, dim, length, groups)

    # a parameter may change where nobody sees it, and this is a copy
    return make() if local.is_leaf else axis.once("collect", local, (dim, length, groups), make)
