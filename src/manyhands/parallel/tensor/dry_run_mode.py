"""Dry-run mode: cuts every layer that a forward pass reaches, and notes which cuts failed.

    input of a layer      cut of its weight
    replicated            column: its outputs are cut, and what it returns is sharded
    sharded               row: its inputs are cut, and partial sums are reduced

Biases and BatchNorm are cut with the layers they belong to. Where a sharded value goes into an
operator that needs all of it, the parameters it comes from are noted as `failed`, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from manyhands.errors import PlanError
from manyhands.parallel.tensor.attention import inlined_multi_head
from manyhands.parallel.tensor.elementwise import broadcast
from manyhands.parallel.tensor.running_module import named
from manyhands.parallel.tensor.sharding_rules import SHARDING_RULES, ShardedValue, TensorAxis
from manyhands.parallel.tensor.views import cut_after_view
from manyhands.split.tensor import DryRunResult

# an embedding with less than 1/SMALL of the model is not worth an exchange of what it returns
SMALL = 20
MULTIPLIES = ("matmul", "bmm", "mm", "einsum", "scaled_dot_product_attention")
# function -> positions of input, weight and bias, and the weight's dimension of outputs
LINEAR = {
    F.linear: (0, 1, 2, 0),
    torch.addmm: (1, 2, 0, 1),
    torch.matmul: (0, 1, None, 1),
    torch.Tensor.matmul: (0, 1, None, 1),
    torch.Tensor.__matmul__: (0, 1, None, 1),
}
CONV = (F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d)
BATCH_NORM = ("running_mean", "running_var", "weight", "bias")
FUSED_ATTENTION = {  # of nn.MultiheadAttention: (dimension, groups)
    "in_proj_weight": (0, 3),
    "in_proj_bias": (0, 3),
    "out_proj.weight": (1, 1),
    "bias_k": (2, 1),
    "bias_v": (2, 1),
    **{f"{x}_proj_weight": (0, 1) for x in "qkv"},
}


class DryRunAxis(TensorAxis):
    """Tensor axis of a dry run: no group, and every gather is noted as a failure."""

    def __init__(self, mode: DryRunMode, size: int):
        super().__init__(None, 0, size)
        self.mode = mode
        self.names = named(mode.module)

    def had_to_gather(self, name: str, value: Any) -> None:
        mode = self.mode
        mode.fail(
            value,
            f"its output goes into {mode.consumer or name.strip('_')}, which needs all of it",
        )

    def enters_call(self, name: str) -> None:
        self.mode.consumer = name

    def needs_memory(self, name: str, value: Any) -> None:
        if self.sequence and not self.mode.sources_of(value):
            raise PlanError(
                f"sequence=true splits {value!r}{self.where()} along the sequence, and {name} "
                "needs its memory; use sequence=false"
            )
        self.had_to_gather(name, value)

    def undispatched(self, name: str, value: Any) -> None:
        self.enters_call(name)
        self.had_to_gather(name, value)
        super().undispatched(name, value)

    def had_to_scatter(self, plain: Tensor, dim: int, value: Any, name: str) -> None:
        mode = self.mode
        if (parameter := mode.names.get(id(plain))) is not None:
            if parameter not in mode.replicated:
                mode.result.cuts.setdefault(parameter, (dim, value.groups))
        elif plain.requires_grad and name not in MULTIPLIES:
            mode.fail(value, f"what it gives meets whole tensors in {name}")

    def could_not_view(self, value: Any, shape: tuple[int, ...]) -> None:
        self.mode.note_view(value, shape)

    def could_not_split(self, value: Any, chunks: int) -> None:
        if chunks and value.groups == 1:
            for name in self.mode.sources_of(value):
                self.mode.result.blocks[name] = chunks


class DryRunMode(TorchFunctionMode):
    """Function mode of one dry run of `module`; `result` has its findings.

    replicated   parameters that are not cut, and why
    blocks       parameters that are cut in several blocks
    requested    cuts that the task requests, by module
    """

    def __init__(
        self,
        module: nn.Module,
        size: int,
        replicated: Mapping[str, str],
        blocks: Mapping[str, int],
        requested: Mapping[str, str],
        sequence: bool = False,
    ):
        super().__init__()
        self.module, self.size = module, size
        self.result, self.axis = DryRunResult(), DryRunAxis(self, size)
        self.axis.sequence = sequence
        self.replicated, self.blocks, self.requested = dict(replicated), blocks, requested
        self.names: dict[int, str] = {}
        self._kept: list[Tensor] = []  # so that no id is used again
        self._tied: set[str] = set()
        for name, value in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ):
            if id(value) in self.names:
                self._tied.add(self.names[id(value)])
            self.names.setdefault(id(value), name)
            self._kept.append(value)
        self._total = sum(p.numel() for p in module.parameters())
        self._consumed: set[str] = set()  # cut parameters whose outputs a row layer has summed
        # of the call that runs:
        self._sources: frozenset[str] = frozenset()  # parameters that its operands come from
        self.consumer = ""  # its layer
        self._sums = False  # it is a row layer
        for name, m in module.named_modules():
            if isinstance(m, nn.MultiheadAttention):
                self._cut_attention(name, m)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.consumer, self._sums = "", False
        added = self._decide(func, args, kwargs)
        args, kwargs = self._sharded(args), {k: self._sharded(v) for k, v in kwargs.items()}
        given = [v for v in flat_values((args, kwargs)) if isinstance(v, ShardedValue)]
        if len(given) > 1 and SHARDING_RULES.get(func) is broadcast:
            for v in given:
                if v.sources & self._consumed and any(v.sources != o.sources for o in given):
                    self.fail(
                        v,
                        "what it gives is needed again after the layer that follows "
                        "(a residual stream)",
                    )
        self._sources = frozenset().union(*(v.sources for v in given))
        if func is F.multi_head_attention_forward:
            with self:
                return inlined_multi_head(*args, **kwargs)
        # what a row layer returns comes from no cut parameter, also where it is cut over the
        # sequence
        sums = self._sums
        out = (
            ShardedValue.__torch_function__(func, (), args, kwargs)
            if given
            else func(*args, **kwargs)
        )
        for v in flat_values(out):
            if isinstance(v, ShardedValue):
                v.sources = frozenset() if sums else self._sources | added | v.sources
        return out

    def _sharded(self, value: Any) -> Any:
        """A cut parameter as a sharded value."""
        if isinstance(value, Tensor):
            if (cut := self.result.cuts.get(self.names.get(id(value), ""))) is None:
                return value
            dim, groups = cut
            return ShardedValue(
                self.axis.shard(value, dim, groups), dim, value.shape[dim], self.axis, groups
            )
        return (
            type(value)(self._sharded(v) for v in value) if type(value) in (list, tuple) else value
        )

    # -- decisions: each returns the parameters that make the call's output sharded --

    def _decide(self, func: Any, args: Any, kwargs: Any) -> frozenset[str]:
        if func in LINEAR:
            return self._cut_linear(func, args, kwargs)
        if func in CONV:
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            groups = kwargs.get("groups") or (args[6] if len(args) > 6 else 1)
            return self._cut_weight(args[0], args[1], bias, 0, 1, groups)
        if func is F.embedding:
            return self._cut_embedding(args, kwargs)
        if func is F.batch_norm and isinstance(args[0], ShardedValue) and args[0].shard_dim == 1:
            given = dict(zip(("input", *BATCH_NORM), args, strict=False)) | kwargs
            for key in BATCH_NORM:
                name = self.names.get(id(given.get(key)))
                if name is not None and name not in self.replicated:
                    self.result.cuts.setdefault(name, (0, args[0].groups))
        return frozenset()

    def _cut_linear(self, func: Any, args: Any, kwargs: Any) -> frozenset[str]:
        x_at, w_at, b_at, outputs = LINEAR[func]
        named = ("input", "weight", "bias")
        given = (
            list(args) + [kwargs.get(n) for n in named[len(args) :]]
            if func is F.linear
            else list(args)
        )
        if len(given) <= max(x_at, w_at):
            return frozenset()
        bias = None if b_at is None else given[b_at]
        return self._cut_weight(given[x_at], given[w_at], bias, outputs, -1)

    def _cut_weight(
        self, x: Any, w: Any, bias: Any, outputs: int, features: int, conv_groups: int = 1
    ) -> frozenset[str]:
        """A product of x, over its dimension `features`, with w, whose dimension of outputs is
        `outputs`."""
        name = self.names.get(id(w))
        if name is None:
            return frozenset()
        self.consumer = _module(name)
        request, cut = self._request(name), self.result.cuts.get(name)
        inputs = 1 - outputs
        if cut is None and name not in self.replicated and w.ndim >= 2:
            if torch._C._are_functorch_transforms_active():
                self.result.small[name] = "it runs inside a transform of torch.func"
                return frozenset()
            if conv_groups != 1:
                self.result.small[name] = "a convolution in groups is not cut"
                return frozenset()
            sharded = isinstance(x, ShardedValue) and x.shard_dim == features % x.ndim
            if request == "row" or (sharded and request is None):
                cut = (inputs, x.groups if sharded else 1)
                self._long_enough(name, w.shape[inputs], request, cut[1])
            elif (self._replicated_rows(x) and request != "row") or request in ("column", "heads"):
                groups = self.blocks.get(name, 1)
                if self._long_enough(name, w.shape[outputs], request, groups):
                    cut = (outputs, groups)
        if cut is None:
            return frozenset()
        self.result.cuts[name] = cut
        if cut[0] == inputs:
            self._consumed |= x.sources if isinstance(x, ShardedValue) else set()
            self._sums = True
            return frozenset()
        self.result.columns.add(name)
        if (b := self.names.get(id(bias))) is not None:
            self.result.cuts.setdefault(b, (0, cut[1]))
        return frozenset((name,))

    def _replicated_rows(self, x: Any) -> bool:
        """Whether x is replicated, or sharded only over the sequence."""
        return not isinstance(x, ShardedValue) or (self.axis.sequence and not x.sources)

    def _cut_embedding(self, args: Any, kwargs: Any) -> frozenset[str]:
        w = args[1] if len(args) > 1 else kwargs["weight"]
        name = self.names.get(id(w))
        if name is None or name in self.result.cuts or name in self.replicated:
            return frozenset()
        if torch._C._are_functorch_transforms_active():
            self.result.small[name] = "it runs inside a transform of torch.func"
            return frozenset()
        request = self._request(name)
        if request in ("column", "heads"):
            if self._long_enough(name, w.shape[1], request, 1):
                self.result.cuts[name] = (1, 1)
                return frozenset((name,))
        elif request == "vocabulary" or (
            request is None and (name in self._tied or w.numel() * SMALL >= self._total)
        ):
            if self._long_enough(name, w.shape[0], request, 1):
                self.result.cuts[name] = (0, 1)
        else:
            self.result.small[name] = (
                f"a table of {w.shape[0]} rows is cheaper to hold than to exchange"
            )
        return frozenset()

    def _cut_attention(self, where: str, m: nn.MultiheadAttention) -> None:
        """All of an nn.MultiheadAttention by heads, or nothing of it."""
        prefix = f"{where}." if where else ""
        names = [
            n for n in (f"{prefix}{k}" for k, _ in m.named_parameters()) if n in self.names.values()
        ]
        requested = self.requested.get(where) == "replicate"
        kept = requested or any(n in self.replicated for n in names)
        if kept or m.num_heads % self.size:
            if not kept:
                self.result.heads[f"{prefix}in_proj_weight"] = (m.num_heads, where)
            self.replicated |= dict.fromkeys(names, "its attention stays whole")
            return
        for key, cut in FUSED_ATTENTION.items():
            if (name := f"{prefix}{key}") in names:
                self.result.cuts[name] = cut
                self.result.columns |= {name} if cut[0] == 0 else set()

    def is_requested(self, parameter: str) -> bool:
        """Whether the task requests a cut of it."""
        return self._request(parameter) is not None

    def _request(self, name: str) -> str | None:
        return self.requested.get(_module(name))

    def _long_enough(self, name: str, length: int, request: str | None, groups: int) -> bool:
        """Whether every rank gets an element; raises where the task requests the cut."""
        if length // groups >= self.size and length % groups == 0:
            return True
        if request is not None:
            raise PlanError(
                f"Task(tensor={{'{_module(name)}': '{request}'}}) asks to cut {length} elements of "
                f"{name} over tensor={self.size} ranks; at least one a rank is needed: "
                f"use tensor={max(1, length // groups)} or less, or 'replicate'"
            )
        self.result.small[name] = f"{length} outputs are too few for {self.size} ranks"
        return False

    # -- failures --

    def sources_of(self, value: ShardedValue) -> frozenset[str]:
        """The cut parameters that a sharded value comes from."""
        return value.sources or (frozenset() if self.axis.sequence else self._sources)

    def fail(self, value: ShardedValue, reason: str) -> None:
        for name in self.sources_of(value):
            self.result.failed.setdefault(name, reason)

    def note_view(self, value: ShardedValue, shape: tuple[int, ...]) -> None:
        """A view that the cut cannot follow: by more blocks (fused q, k, v) it might, or by fewer
        ranks (heads)."""
        at = next(
            (i for i, (a, b) in enumerate(zip(value.shape, shape, strict=False)) if a != b),
            len(shape),
        )
        new = shape[at:]
        for name in self.sources_of(value):
            layer = _module(name)
            attention = "att" in layer.lower()
            if (
                value.groups == 1
                and len(new) > 1
                and new[0] <= 8
                and (len(new) > 2 or not attention)
            ):
                blocks = ShardedValue(value.local, value.shard_dim, value.length, self.axis, new[0])
                if value.length % new[0] == 0 and cut_after_view(blocks, shape) is not None:
                    self.result.blocks[name] = new[0]
                    continue
            if attention and len(new) > 1:
                count = new[1] if len(new) > 2 and new[0] <= 4 else new[0]
                self.result.heads[name] = (count, layer.rpartition(".")[0] or layer)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def flat_values(value: Any) -> Iterator[Any]:
    """All values in nested lists, tuples and dicts."""
    if isinstance(value, list | tuple):
        for v in value:
            yield from flat_values(v)
    elif isinstance(value, dict):
        for v in value.values():
            yield from flat_values(v)
    else:
        yield value
