"""Collectives of tensor parallelism, each with its backward pass.

    name      input -> output               forward           backward
    enter     replicated -> replicated      -                 all-reduce
    reduce    partial sums -> replicated    all-reduce        -
    gather    sharded -> replicated         all-gather        own slice
    scatter   replicated -> sharded         own slice         all-gather
    spread    partial sums -> sharded       reduce-scatter    all-gather         } sequence
    collect   sharded -> replicated         all-gather        reduce-scatter     } parallel

A replicated tensor has the same value on all ranks of the axis, and so has its gradient. A sharded
one is different on each rank, and its gradient is that of the slice. `enter` and `collect` come
before local work, whose gradients are partial sums. So a replicated parameter gets equal gradients
on all ranks without an exchange of its own.

`enter` and `reduce` are f and g of Shoeybi et al. 2019, "Megatron-LM" (arXiv:1909.08053);
`collect` and `spread` those of Korthikanti et al. 2022, "Reducing activation recomputation"
(arXiv:2205.05198).
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
from manyhands.errors import TaskError
from manyhands.parallel.tensor.running_module import ModuleNames, running_module
from manyhands.split.shard_spec import bounds


@lru_cache(maxsize=4096)
def starts(length: int, size: int) -> tuple[int, ...]:
    """As `split.shard_spec.bounds`, remembered: every operator asks for it."""
    return tuple(bounds(length, size))


class TensorAxis:
    """Tensor axis: the ranks that hold one model together, and this rank's index among them.

    Without a group nothing is exchanged: shapes are right and values are not, as a dry run needs
    it. `gathers` counts by name the functions that got a gathered tensor, since no sharding rule
    fits.
    """

    def __init__(self, group: Group | None, index: int, size: int, sequence: bool = False):
        self.group, self.index, self.size, self.sequence = group, index, size, sequence
        self.gathers: Counter[str] = Counter()
        self.names: ModuleNames = ModuleNames()  # of the modules that are cut, for messages
        self._last: dict[str, tuple[Tensor, tuple[int, ...], Tensor]] = {}

    def reuse(
        self, what: str, x: Tensor, how: tuple[int, ...], make: Callable[[], Tensor]
    ) -> Tensor:
        """The last result for x, again: q, k and v read one input, which enters once for all."""
        if x.is_inference():
            return make()
        how = (*how, x._version, x.data_ptr(), torch.is_grad_enabled())
        last = self._last.get(what)
        if last is not None and last[0] is x and last[1] == how:
            return last[2]
        made = make()
        self._last[what] = (x, how, made)
        return made

    # -- slices --

    def local_length(self, length: int, groups: int = 1, index: int | None = None) -> int:
        """Elements of the local tensor, of `length` elements cut in `groups` blocks."""
        cut, i = starts(length // groups, self.size), self.index if index is None else index
        return groups * (cut[i + 1] - cut[i])

    def local_start(self, length: int) -> int:
        """The first element of this rank's slice of `length` elements."""
        return starts(length, self.size)[self.index]

    def shard(self, full: Tensor, dim: int, groups: int = 1, index: int | None = None) -> Tensor:
        """A rank's slice of `full`: a view where it is one block."""
        i = self.index if index is None else index
        cut = starts(full.shape[dim] // groups, self.size)
        if groups == 1:
            return full.narrow(dim, cut[i], cut[i + 1] - cut[i])
        return (
            full.unflatten(dim, (groups, -1))
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
        slices, mine = [], local.contiguous()
        for r in range(self.size):
            shape[dim] = self.local_length(length, groups, r)
            slices.append(mine if r == self.index else local.new_empty(shape))
        others = [r for r in range(self.size) if r != self.index]
        give = {r: mine for r in others if mine.numel()}
        self.group.transfer(
            give, {r: slices[r] for r in others if slices[r].numel()}, "tensor"
        ).wait()
        if groups == 1:
            return torch.cat(slices, dim)
        return torch.cat([s.unflatten(dim, (groups, -1)) for s in slices], dim + 1).flatten(
            dim, dim + 1
        )

    def reduce_scatter(self, partial: Tensor, dim: int, groups: int = 1) -> Tensor:
        """This rank's slice of the sum over ranks."""
        mine = self.shard(partial, dim, groups)
        if self.size == 1 or self.group is None:
            return mine.clone()
        others = [r for r in range(self.size) if r != self.index]
        give = {r: self.shard(partial, dim, groups, r).contiguous() for r in others}
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
    def own_random(self, device: torch.device) -> Iterator[None]:
        """Random numbers of this rank's own, for a local tensor.

        Their seed comes from the generator that all ranks have in common, so that a recomputation
        that restores that generator draws the same numbers again."""
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

    # -- no sharding rule --

    def had_to_gather(self, name: str, value: Any) -> None:
        if not self.gathers[name]:
            warnings.warn(
                f"tensor={self.size}: {name} has no sharding rule for this operand{self.where()}, "
                "so the operand is gathered first: right, but slower. To avoid it "
                f"{self.remedy()}",
                stacklevel=7,
            )
        self.gathers[name] += 1

    def needs_memory(self, name: str, value: Any) -> None:
        raise TaskError(
            f"{name} needs the memory of {value!r}{self.where()}, and no rank has all of it; "
            f"{self.remedy()}"
        )

    def undispatched(self, name: str, value: Any) -> None:
        raise TaskError(
            f"{name} is called on {value!r}{self.where()} by code that does not go through torch's "
            f"Python functions, so it cannot run on slices; {self.remedy()}"
        )

    def where(self) -> str:
        """For messages: the module whose forward runs."""
        name = running_module(self.names)
        return "" if name is None else f" in module {name!r}"

    def remedy(self) -> str:
        """For messages: how the operand stays whole."""
        name = running_module(self.names) or "its.name"
        keep = f"keep the module whole: Task(tensor={{{name!r}: 'replicate'}})"
        return f"use sequence=false, or {keep}" if self.sequence else keep

    # -- for dry runs, which override these --

    def enters_call(self, name: str) -> None:
        """What is gathered next goes into `name`, which torch does not dispatch."""

    def had_to_scatter(self, plain: Tensor, dim: int, value: Any, name: str) -> None:
        """`name` has a replicated operand beside a sharded one; each rank takes its slice of it."""

    def could_not_view(self, value: Any, shape: tuple[int, ...]) -> None:
        """A view after which no single dimension would be cut."""

    def could_not_split(self, value: Any, chunks: int) -> None:
        """A split into chunks of which some ranks would hold more than others."""

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorAxis:
        return self  # a copy of a module is on the same ranks


# Each backward pass is made of the functions below, so it can be differentiated again (a penalty on
# gradients); where it is not, these exchange without autograd.


class _Collective(torch.autograd.Function):
    @classmethod
    def apply(cls, *args: Any) -> Any:
        """As `Function.apply`, without its look at signatures: there are many calls in a step."""
        if torch._C._are_functorch_transforms_active():
            axis = next(a for a in args if isinstance(a, TensorAxis))
            raise TaskError(
                f"a transform of torch.func (vmap, grad){axis.where()} meets a parameter or an "
                f"activation that tensor={axis.size} cuts over ranks, and an exchange between "
                f"ranks cannot be transformed; {axis.remedy()}"
            )
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


class _Enter(_Collective):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        # clone: autograd may have passed the same tensor to another node
        return reduce(grad.clone(memory_format=torch.contiguous_format), ctx.axis), None


class _Reduce(_Collective):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        ctx.mark_dirty(partial)
        return axis.all_reduce(partial)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return enter(grad, ctx.axis), None


class _Gather(_Collective):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, axis: TensorAxis, dim: int, length: int, groups: int
    ) -> Tensor:
        ctx.how = axis, dim, groups
        return axis.all_gather(local, dim, length, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return scatter(grad, *ctx.how), None, None, None, None


class _Scatter(_Collective):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis, dim: int, groups: int) -> Tensor:
        ctx.how = axis, dim, x.shape[dim], groups
        return axis.shard(x, dim, groups).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return gather(grad, *ctx.how), None, None, None


class _Spread(_Collective):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, axis: TensorAxis, dim: int, groups: int) -> Tensor:
        ctx.how = axis, dim, partial.shape[dim], groups
        return axis.reduce_scatter(partial, dim, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return collect(grad, *ctx.how), None, None, None


class _Collect(_Collective):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, axis: TensorAxis, dim: int, length: int, groups: int
    ) -> Tensor:
        ctx.how = axis, dim, groups
        return axis.all_gather(local, dim, length, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return spread(grad, *ctx.how), None, None, None, None


def _needs_grad(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def enter(x: Tensor, axis: TensorAxis) -> Tensor:
    if not _needs_grad(x):
        return x
    return axis.reuse("enter", x, (), lambda: _Enter.apply(x, axis))


def reduce(partial: Tensor, axis: TensorAxis) -> Tensor:
    """In place: `partial` must be the caller's own, and no tensor that backward has saved."""
    partial = partial.contiguous()
    return _Reduce.apply(partial, axis) if _needs_grad(partial) else axis.all_reduce(partial)


def gather(local: Tensor, axis: TensorAxis, dim: int, length: int, groups: int) -> Tensor:
    if _needs_grad(local):
        return _Gather.apply(local, axis, dim, length, groups)
    return axis.all_gather(local, dim, length, groups)


def scatter(x: Tensor, axis: TensorAxis, dim: int, groups: int) -> Tensor:
    return _Scatter.apply(x, axis, dim, groups) if _needs_grad(x) else axis.shard(x, dim, groups)


def spread(partial: Tensor, axis: TensorAxis, dim: int, groups: int) -> Tensor:
    if _needs_grad(partial):
        return _Spread.apply(partial, axis, dim, groups)
    return axis.reduce_scatter(partial, dim, groups)


def collect(local: Tensor, axis: TensorAxis, dim: int, length: int, groups: int) -> Tensor:
    def make() -> Tensor:
        if _needs_grad(local):
            return _Collect.apply(local, axis, dim, length, groups)
        return axis.all_gather(local, dim, length, groups)

    # a leaf (parameter) may change without a new version, and this would be a stale copy
    return make() if local.is_leaf else axis.reuse("collect", local, (dim, length, groups), make)
