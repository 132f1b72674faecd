"""Try a model's forward on an axis of the mind: which parameters could be cut, and where a cut could not go on.

Every call of the model passes here. A layer that gets a plain tensor is cut on its outputs, one that gets shares on its inputs; what
goes with them (biases, BatchNorm) follows. Where shares meet something that needs all of them, the layers they came from are
written down as `failed`, with the reason.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from manyhands.errors import PlanError, TaskError
from manyhands.parallel.tensor.attention import opened
from manyhands.parallel.tensor.elementwise import broadcast
from manyhands.parallel.tensor.sharding_rules import RULES, ShardedValue, TensorAxis
from manyhands.parallel.tensor.views import viewed
from manyhands.split.tensor import DryRunResult

SMALL = 20  # an embedding with less than this fraction of the model is not worth an exchange of what it gives
REAL, REAL_NUMEL = (
    4e9,
    2e7,
)  # multiplications, and parameters, up to which a trial with real numbers is the quicker one
MULTIPLIES = ("matmul", "bmm", "mm", "scaled_dot_product_attention")
LINEAR = {
    F.linear: (0, 1, 2, 0),
    torch.addmm: (1, 2, 0, 1),
    torch.matmul: (0, 1, None, 1),
    torch.Tensor.matmul: (0, 1, None, 1),
}
CONV = (F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d)
BATCH_NORM = ("running_mean", "running_var", "weight", "bias")


class _Axis(TensorAxis):
    def __init__(self, trial: _Trial, size: int):
        super().__init__(None, 0, size)
        self.trial = trial

    def had_to_gather(self, name: str, value: Any) -> None:
        if name.endswith(".apply"):
            self.trial.consumer = name
        if self.sequence and not self.trial.from_(value) and name.endswith(".apply"):
            raise PlanError(
                f"sequence=true splits what goes into {name} along the sequence, and a function with a backward of its own cannot see "
                "that; use sequence=false"
            )
        self.trial.fail(
            value,
            f"what it gives goes into {self.trial.consumer or name.strip('_')}, which needs all of it",
        )

    def had_to_scatter(self, plain: Tensor, dim: int, value: Any, name: str) -> None:
        if (whose := self.trial.names.get(id(plain))) is not None:
            if whose not in self.trial.whole:
                self.trial.tried.cuts.setdefault(whose, (dim, value.groups))
        elif plain.requires_grad and name not in MULTIPLIES:
            self.trial.fail(value, f"what it gives meets whole tensors in {name}")

    def could_not_view(self, value: Any, shape: tuple[int, ...]) -> None:
        self.trial.unviewed(value, shape)

    def could_not_split(self, value: Any, pieces: int) -> None:
        if pieces and value.groups == 1:
            for name in self.trial.from_(value):
                self.trial.tried.blocks[name] = pieces


class _Trial(TorchFunctionMode):
    watches = True  # methods of a ShardedValue pass here too

    def __init__(
        self,
        module: nn.Module,
        size: int,
        whole: Mapping[str, str],
        blocks: Mapping[str, int],
        wishes: Mapping[str, str],
    ):
        super().__init__()
        self.tried, self.axis, self.size = DryRunResult(), _Axis(self, size), size
        self.whole, self.blocks, self.wishes = dict(whole), blocks, wishes
        self.names: dict[int, str] = {}
        self.held: list[Tensor] = []  # kept, so that no id is given to another tensor
        self.shared: set[str] = set()
        for name, value in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ):
            if id(value) in self.names:
                self.shared.add(self.names[id(value)])
            self.names.setdefault(id(value), name)
            self.held.append(value)
        self.total = sum(p.numel() for p in module.parameters())
        self.consumed: set[str] = set()
        self.current: frozenset[str] = frozenset()
        self.consumer, self.ends = "", False
        for name, m in module.named_modules():
            if isinstance(m, nn.MultiheadAttention):
                self.multi_head(name, m)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.consumer, self.ends, added = "", False, frozenset[str]()
        if func in LINEAR:
            added = self.linear(func, args, kwargs)
        elif func in CONV:
            added = self.weighed(
                args[0],
                args[1],
                args[2] if len(args) > 2 else kwargs.get("bias"),
                0,
                1,
                kwargs,
                args,
            )
        elif func is F.embedding:
            added = self.embedding(args, kwargs)
        elif func is F.batch_norm and isinstance(args[0], ShardedValue) and args[0].along == 1:
            given = dict(zip(("input", *BATCH_NORM), args, strict=False)) | kwargs
            for key in BATCH_NORM:
                if (
                    name := self.names.get(id(given.get(key)))
                ) is not None and name not in self.whole:
                    self.tried.cuts.setdefault(name, (0, args[0].groups))
        args, kwargs = self.exposed(args), {k: self.exposed(v) for k, v in kwargs.items()}
        came = [v for v in _flat((args, kwargs)) if isinstance(v, ShardedValue)]
        if len(came) > 1 and RULES.get(func) is broadcast:
            for v in came:
                if v.sources & self.consumed and any(v.sources != o.sources for o in came):
                    self.fail(
                        v,
                        "what it gives is needed again after the layer that follows (a residual stream)",
                    )
        self.current = frozenset().union(*(v.sources for v in came))
        if func is F.multi_head_attention_forward:
            with self:
                return opened(*args, **kwargs)
        ends = self.ends  # what a row layer gives is nobody's share any more, also where it is cut along the sequence
        out = (
            ShardedValue.__torch_function__(func, (), args, kwargs)
            if came
            else func(*args, **kwargs)
        )
        for v in _flat(out):
            if isinstance(v, ShardedValue):
                v.sources = frozenset() if ends else self.current | added | v.sources
        return out

    def exposed(self, value: Any) -> Any:
        """A cut parameter is given as what it stands for."""
        if isinstance(value, Tensor):
            if (cut := self.tried.cuts.get(self.names.get(id(value), ""))) is None:
                return value
            dim, groups = cut
            return ShardedValue(
                self.axis.take(value, dim, groups), dim, value.shape[dim], self.axis, groups
            )
        return (
            type(value)(self.exposed(v) for v in value) if type(value) in (list, tuple) else value
        )

    # -- decisions --

    def linear(self, func: Any, args: Any, kwargs: Any) -> frozenset[str]:
        x_at, w_at, b_at, gives = LINEAR[func]
        named = ("input", "weight", "bias")
        given = (
            list(args) + [kwargs.get(n) for n in named[len(args) :]]
            if func is F.linear
            else list(args)
        )
        if len(given) <= max(x_at, w_at):
            return frozenset()
        return self.weighed(
            given[x_at], given[w_at], None if b_at is None else given[b_at], gives, -1, {}, ()
        )

    def weighed(
        self, x: Any, w: Any, bias: Any, gives: int, features: int, kwargs: Any, args: Any
    ) -> frozenset[str]:
        """A product of x, along its dimension `features`, with w, whose dimension `gives` is that of the outputs."""
        name = self.names.get(id(w))
        if name is None:
            return frozenset()
        self.consumer = _module(name)
        wish, cut = self.wish(name), self.tried.cuts.get(name)
        takes = 1 - gives
        if cut is None and name not in self.whole and w.ndim >= 2:
            if (kwargs.get("groups") or (args[6] if len(args) > 6 else 1)) != 1:
                self.tried.small[name] = "a convolution in groups is not cut"
                return frozenset()
            shares = isinstance(x, ShardedValue) and x.along == features % x.ndim
            if wish == "row" or (shares and wish is None):
                cut = (takes, x.groups if shares else 1)
                self.long_enough(name, w.shape[takes], wish, cut[1])
            elif (self.is_everybodys(x) and wish != "row") or wish in ("column", "heads"):
                groups = self.blocks.get(name, 1)
                if self.long_enough(name, w.shape[gives], wish, groups):
                    cut = (gives, groups)
        if cut is None:
            return frozenset()
        self.tried.cuts[name] = cut
        if cut[0] == takes:
            self.consumed |= x.sources if isinstance(x, ShardedValue) else set()
            self.ends = True
            return frozenset()
        self.tried.columns.add(name)
        if (b := self.names.get(id(bias))) is not None:
            self.tried.cuts.setdefault(b, (0, cut[1]))
        return frozenset((name,))

    def is_everybodys(self, x: Any) -> bool:
        """Plain, or cut only along the sequence."""
        return not isinstance(x, ShardedValue) or (self.axis.sequence and not x.sources)

    def embedding(self, args: Any, kwargs: Any) -> frozenset[str]:
        w = args[1] if len(args) > 1 else kwargs["weight"]
        name = self.names.get(id(w))
        if name is None or name in self.tried.cuts or name in self.whole:
            return frozenset()
        wish = self.wish(name)
        if wish in ("column", "heads"):
            if self.long_enough(name, w.shape[1], wish, 1):
                self.tried.cuts[name] = (1, 1)
                return frozenset((name,))
        elif wish == "vocabulary" or (
            wish is None and (name in self.shared or w.numel() * SMALL >= self.total)
        ):
            if self.long_enough(name, w.shape[0], wish, 1):
                self.tried.cuts[name] = (0, 1)
        else:
            self.tried.small[name] = (
                f"a table of {w.shape[0]} rows is cheaper to hold than to exchange"
            )
        return frozenset()

    def multi_head(self, where: str, m: nn.MultiheadAttention) -> None:
        prefix, size = f"{where}." if where else "", self.size
        wish = self.wishes.get(where)
        mine = [
            n for n in (f"{prefix}{k}" for k, _ in m.named_parameters()) if n in self.names.values()
        ]
        asked = wish == "replicate" or any(n in self.whole for n in mine)
        if asked or m.num_heads % size:
            if not asked:
                self.tried.heads[f"{prefix}in_proj_weight"] = (m.num_heads, where)
            self.whole |= dict.fromkeys(mine, "its attention stays whole")  # all of it or nothing
            return
        made = {
            "in_proj_weight": (0, 3),
            "in_proj_bias": (0, 3),
            "out_proj.weight": (1, 1),
            "bias_k": (2, 1),
            "bias_v": (2, 1),
        }
        made |= {f"{x}_proj_weight": (0, 1) for x in "qkv"}
        for key, cut in made.items():
            if f"{prefix}{key}" in mine:
                self.tried.cuts[f"{prefix}{key}"] = cut
                self.tried.columns |= {f"{prefix}{key}"} if cut[0] == 0 else set()

    def wish(self, name: str) -> str | None:
        return self.wishes.get(_module(name))

    def long_enough(self, name: str, length: int, wish: str | None, groups: int) -> bool:
        if length // groups >= self.size and length % groups == 0:
            return True
        if wish is not None:
            raise PlanError(
                f"Task(tensor={{'{_module(name)}': '{wish}'}}) asks to cut {length} elements of {name} over tensor={self.size} ranks; "
                f"at least one a rank is needed: use tensor={max(1, length // groups)} or less, or 'replicate'"
            )
        self.tried.small[name] = f"{length} outputs are too few for {self.size} ranks"
        return False

    # -- failures --

    def from_(self, value: ShardedValue) -> frozenset[str]:
        return value.sources or (frozenset() if self.axis.sequence else self.current)

    def fail(self, value: ShardedValue, reason: str) -> None:
        for name in self.from_(value):
            self.tried.failed.setdefault(name, reason)

    def unviewed(self, value: ShardedValue, shape: tuple[int, ...]) -> None:
        at = next(
            (i for i, (a, b) in enumerate(zip(value.shape, shape, strict=False)) if a != b),
            len(shape),
        )
        new = shape[at:]
        for name in self.from_(value):
            layer = _module(name)
            if (
                value.groups == 1
                and len(new) > 1
                and new[0] <= 8
                and (len(new) > 2 or "att" not in layer.lower())
            ):
                tmp = ShardedValue(value.local, value.along, value.length, self.axis, new[0])
                if value.length % new[0] == 0 and viewed(tmp, shape) is not None:
                    self.tried.blocks[name] = new[0]
                    continue
            if "att" in layer.lower() and len(new) > 1:
                count = new[1] if len(new) > 2 and new[0] <= 4 else new[0]
                self.tried.heads[name] = (count, layer.rpartition(".")[0] or layer)


def attempt(
    module: nn.Module,
    example: Sequence[Any],
    size: int,
    loss: Callable[[Any, Any], Any] | None = None,
    target: Any = None,
    sequence: bool = False,
    call: Callable[..., Any] | None = None,
) -> Callable[[Mapping[str, str], Mapping[str, int], Mapping[str, str]], DryRunResult]:
    """A function that tries the forward of `module` on `example` (or `call(module, *example)`), and `loss` on what it gives and `target`, with some parameters
    `whole`, some in `blocks`, and `wishes` by module. It runs on a copy: of meta tensors, or of real ones where those are few,
    which is faster and can look at its values."""

    numel = sum(p.numel() for p in module.parameters())
    work = numel * max(
        (v.numel() for v in _flat(list(example)) if isinstance(v, Tensor)), default=1
    )
    devices = ("cpu", "meta") if work < REAL and numel < REAL_NUMEL else ("meta", "cpu")

    def tries(
        whole: Mapping[str, str], blocks: Mapping[str, int], wishes: Mapping[str, str]
    ) -> DryRunResult:
        trouble: Exception | None = None
        for device in devices:  # a model that looks at its values can only be tried with real ones
            copied = _copy(module, device)
            inputs, goal = tree_map(
                lambda v, to=device: v.detach().to(to) if isinstance(v, Tensor) else v,
                (tuple(example), target),
            )
            trial = _Trial(copied, size, whole, blocks, wishes)
            trial.axis.sequence = sequence
            try:
                with (
                    torch.random.fork_rng(devices=[]),
                    torch.enable_grad(),
                    trial,
                    _functions_seen(),
                ):
                    out = copied(*inputs) if call is None else call(copied, *inputs)
                    if loss is not None:
                        loss(out, goal)
                return trial.tried
            except PlanError:
                raise
            except Exception as e:
                trouble = trouble or e
        raise TaskError(
            f"the model does not run on an example of its data, so tensor={size} cannot be derived: {trouble}"
        ) from trouble

    return tries


@contextmanager
def _functions_seen() -> Iterator[None]:
    """An autograd.Function does not ask its arguments what to do: shares that go in would come out without a gradient."""
    apply = torch.autograd.Function.__dict__["apply"]

    def watched(cls: Any, *args: Any, **kwargs: Any) -> Any:
        for v in args:
            if isinstance(v, ShardedValue):
                v.axis.had_to_gather(f"{cls.__name__}.apply", v)
        return apply.__get__(None, cls)(
            *(v.gather() if isinstance(v, ShardedValue) else v for v in args), **kwargs
        )

    torch.autograd.Function.apply = classmethod(watched)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]


def _copy(module: nn.Module, device: str) -> nn.Module:
    memo: dict[int, Any] = {}
    for p in module.parameters():
        made = (
            torch.empty_like(p, device=device)
            if device == "meta"
            else p.detach().to(device, copy=True)
        )
        memo[id(p)] = nn.Parameter(made, requires_grad=p.requires_grad)
    for b in module.buffers():
        memo[id(b)] = (
            torch.empty_like(b, device=device)
            if device == "meta"
            else b.detach().to(device, copy=True)
        )
    return copy.deepcopy(module, memo)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for v in value:
            yield from _flat(v)
    elif isinstance(value, dict):
        for v in value.values():
            yield from _flat(v)
    else:
        yield value
