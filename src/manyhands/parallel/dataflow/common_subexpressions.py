"""Common subexpression elimination in a traced model.

Nodes that compute what an earlier node has computed are left out.
Only nodes that are known to do nothing but compute: none that draws random numbers, changes a value
in place, keeps a state or has hooks. Gradients stay right, since all users of either result now use
the one.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import nn

from manyhands.parallel.trace.leaf_modules import PLAIN
from manyhands.parallel.trace.program import (
    Formula,
    Input,
    ParameterRef,
    Ref,
    StageDevice,
    TracedProgram,
    TraceNode,
    Tree,
    find_refs,
    ref_names,
)
from manyhands.split.graph import common_calls

CHANCE = (
    "rand",
    "normal",
    "bernoulli",
    "multinomial",
    "poisson",
    "dropout",
    "uniform",
    "empty",
    "exponential",
    "attention",
    "rrelu",
    "gumbel",
    "embedding",
)
CHANGES = (
    "batch_norm",
    "instance_norm",
    "setattr",
    "setitem",
    "index_put",
    "iadd",
    "isub",
    "imul",
    "idiv",
    "itruediv",
)
# modules that do nothing but compute: two calls with the same arguments give the same
STATELESS = (
    nn.Linear,
    nn.Bilinear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.Embedding,
    nn.Identity,
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Softmax,
    nn.LogSoftmax,
    nn.ELU,
    nn.LeakyReLU,
    nn.Softplus,
    nn.Flatten,
    nn.Unflatten,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
)


def without_common_subexpressions(traced: TracedProgram) -> TracedProgram:
    """`traced` without nodes that compute what an earlier node has computed."""
    nodes = traced.nodes[True]
    keys = _calls(traced, True)
    alike = [(s.op, s.target) for s in nodes] == [(s.op, s.target) for s in traced.nodes[False]]
    if alike:  # left out in both modes or in none, so that both keep the same nodes
        keys = [
            (None if a is None or b is None else (a, b), t)
            for (a, t), (b, _) in zip(keys, _calls(traced, False), strict=True)
        ]
    first = common_calls(keys)
    gone = {i for i, f in enumerate(first) if f != i}
    if not gone:
        return traced
    made = dict(traced.nodes)
    for mode in (True, False) if alike else (True,):
        old = traced.nodes[mode]
        now = {old[i].name: old[first[i]].name for i in gone}
        made[mode] = [
            replace(s, args=_renamed(s.args, now), kwargs=_renamed(s.kwargs, now))
            for i, s in enumerate(old)
            if i not in gone
        ]
    at = {i: k for k, i in enumerate(i for i in range(len(nodes)) if i not in gone)}
    return replace(
        traced, nodes=made, inseparable=[(at.get(a, -1), at[b]) for a, b in traced.inseparable]
    )


def _calls(traced: TracedProgram, mode: bool) -> list[tuple[Hashable | None, list[int]]]:
    """By node: a key of what it computes, None where it may not be left out; and the nodes whose
    results it uses."""
    nodes, states = traced.nodes[mode], changed_in_forward(traced)
    at = {s.name: i for i, s in enumerate(nodes)}
    # values that are changed in place before or after, and outputs, which the loss may change
    apart = {i for a, b in traced.inseparable for i in range(max(a, 0), b + 1)} | {
        at[n] for n in ref_names(traced.output[mode])
    }
    reads: set[int] = set()  # nodes that read a state, which may change before the next read
    calls: list[tuple[Hashable | None, list[int]]] = []
    for i, s in enumerate(nodes):
        uses = [at[n] for n in ref_names(s)]
        if any(h.name in states for h in find_refs(s, ParameterRef)) or not reads.isdisjoint(uses):
            reads.add(i)
        does: Hashable | None = None
        if i not in apart and i not in reads and _pure(traced.model, s):
            with suppress(TypeError):
                hash(key := (s.op, s.target, s.grad, _key(s.args), _key(s.kwargs)))
                does = key
        calls.append((does, uses))
    return calls


def _pure(model: nn.Module, node: TraceNode) -> bool:
    if node.op == "module":
        part = model.get_submodule(node.target)
        hooks = part._forward_hooks or part._forward_pre_hooks or part._backward_hooks
        changes = getattr(part, "inplace", False) or getattr(part, "max_norm", None) is not None
        return (
            type(part) in STATELESS
            and not hooks
            and not changes
            and next(part.buffers(), None) is None
        )
    return not _changes(node) and not any(word in _called(node) for word in CHANCE)


def _called(node: TraceNode) -> str:
    return (
        node.target
        if isinstance(node.target, str)
        else str(getattr(node.target, "__name__", node.target))
    )


def _changes(node: TraceNode) -> bool:
    """Whether it may change its arguments, by its name."""
    name = _called(node)
    return (
        (name.endswith("_") and not name.endswith("__"))
        or "out" in node.kwargs
        or any(word in name for word in CHANGES)
    )


def changed_in_forward(traced: TracedProgram) -> set[str]:
    """Parameters and buffers, by name, that the forward pass may change."""
    nodes = [s for mode in traced.nodes.values() for s in mode]
    found = {
        h.name
        for s in nodes
        if s.op != "module" and _changes(s)
        for h in find_refs(s, ParameterRef)
    }
    for path in {s.target for s in nodes if s.op == "module"}:
        found |= {f"{path}.{name}" for name, _ in traced.model.get_submodule(path).named_buffers()}
    return found


def _key(value: Any) -> Hashable:
    """Equal where arguments are equal; the nodes that they refer to are compared elsewhere."""
    kind = type(value)
    if kind is Ref:
        return "ref"
    if kind in (Input, ParameterRef, StageDevice):
        return kind, value
    if kind is Formula:
        return kind, value.text, value.dims, tuple(_key(a) for a in value.args)
    if kind is Tree:
        return kind, repr(value.spec), tuple(_key(a) for a in value.leaves)
    if kind in (tuple, list):
        return kind, tuple(_key(a) for a in value)
    if kind is dict:
        return kind, tuple((k, _key(v)) for k, v in value.items())
    if kind is slice:
        return kind, _key(value.start), _key(value.stop), _key(value.step)
    if isinstance(value, PLAIN):
        # 1, 1.0 and True are not the same argument
        return kind, repr(value) if kind is float else value
    raise TypeError


def _renamed(value: Any, now: dict[str, str]) -> Any:
    kind = type(value)
    if kind is Ref:
        return Ref(now.get(value.name, value.name))
    if kind is Formula:
        return replace(value, args=_renamed(value.args, now))
    if kind is Tree:
        return replace(value, leaves=_renamed(value.leaves, now))
    if kind in (tuple, list):
        return kind([_renamed(a, now) for a in value])
    if kind is dict:
        return {k: _renamed(a, now) for k, a in value.items()}
    return (
        slice(*(_renamed(a, now) for a in (value.start, value.stop, value.step)))
        if kind is slice
        else value
    )
