"""Traced program: a model's forward pass as a list of calls, which can be cut between any two.

    node      one call: a torch function, a tensor method, or a leaf module as a whole
    Ref       argument of a node: the value that an earlier node returned
    Input     argument of a node: a tensor of the batch
    Formula   argument of a node: a number computed from sizes of the batch, such as B * T

The tracer writes a program, `trace_model` chooses its leaf modules, and stages and graph segments
run parts of it with `run_node`. This module imports none of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from manyhands.errors import PlanError


class Ref(NamedTuple):
    """In a node's arguments: the value that the node of this name returned."""

    name: str


class Input(NamedTuple):
    """In a node's arguments: tensor `leaf` (in pytree order) of the batch's input `argument`."""

    argument: int
    leaf: int = 0


class ParameterRef(NamedTuple):
    """In a node's arguments: a parameter or buffer, by its first name in the whole model."""

    name: str


class StageDevice(NamedTuple):
    """In a node's arguments: the device of the stage that runs the node."""


@dataclass(frozen=True)
class Tree:
    """In a node's arguments, or as the model's output: a pytree structure around `leaves`."""

    spec: Any
    leaves: tuple[Any, ...]

    def build(self, leaves: list[Any]) -> Any:
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class Formula:
    """In a node's arguments: a number computed from sizes, such as B * T."""

    text: str
    function: Callable[[Sequence[int]], Any] = field(compare=False)
    args: tuple[Any, ...]  # Input and Ref
    dims: tuple[int | None, ...]  # by argument: the dimension whose size counts; None: a number
    _known: dict[tuple[int, ...], Any] = field(default_factory=dict, compare=False, repr=False)

    def at(self, args: Sequence[Any]) -> Any:
        sizes = tuple(
            int(a) if d is None else a.shape[d] for a, d in zip(args, self.dims, strict=True)
        )
        if sizes not in self._known:
            self._known[sizes] = self.function(sizes)
        return self._known[sizes]


@dataclass(frozen=True)
class TraceNode:
    """Node of a traced program: one call.

    op          target
    module      path of a leaf module
    function    the function itself
    method      name of a method of the first argument
    """

    name: str
    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    grad: bool = True  # False: under no_grad
    line: str = ""  # file:line of the code that made the call
    # depends on the batch and its sizes alone: computing it again costs less than sending it
    recomputable: bool = False


@dataclass
class TracedProgram:
    """Traced program of a model: `nodes[True]` in training, `nodes[False]` in evaluation."""

    model: nn.Module
    nodes: dict[bool, list[TraceNode]]
    # what the model returns: its own structure, with Ref, Input and ParameterRef for tensors
    output: dict[bool, Any]
    # pairs (i, j): node j changes in place what node i made, so no cut may be at i < cut <= j
    inseparable: list[tuple[int, int]] = field(default_factory=list)
    # raise where a batch would take another path through the model
    size_guards: dict[bool, Callable[[tuple[Any, ...]], None]] = field(default_factory=dict)

    @property
    def trainable(self) -> list[bool]:
        """By node: it uses parameters that train, and a stage may begin at it.

        Each stage needs one such node.
        """
        return [
            self.trains_parameters(node) and self.cuttable(i)
            for i, node in enumerate(self.nodes[True])
        ]

    def cuttable(self, i: int) -> bool:
        """Whether a stage may begin at node `i`."""
        return not any(a < i <= b for a, b in self.inseparable)

    def trains_parameters(self, node: TraceNode) -> bool:
        if node.op == "module" and any(
            p.requires_grad for p in self.model.get_submodule(node.target).parameters()
        ):
            return True
        names = [ref.name for ref in find_refs((node.args, node.kwargs), ParameterRef)]
        used = [attribute_at(self.model, name) for name in names]
        return any(isinstance(p, nn.Parameter) and p.requires_grad for p in used)

    def in_evaluation(self, cuts: Sequence[int]) -> list[int]:
        """The same cuts in the nodes of evaluation: before the first node that both modes have
        from there on."""
        train, test = ([(n.op, n.target) for n in self.nodes[mode]] for mode in (True, False))
        if train == test:
            return list(cuts)
        blocks = SequenceMatcher(
            None, [str(n) for n in train], [str(n) for n in test], autojunk=False
        ).get_matching_blocks()
        made = []
        for cut in cuts:
            block = next(b for b in blocks if b.a + b.size > cut or not b.size)
            made.append(block.b + max(0, cut - block.a))
        return made

    def cuts_at(self, modules: Sequence[str], stages: int) -> list[int]:
        """The nodes at which stages begin, given the modules at which they begin."""
        if len(modules) != stages - 1:
            raise PlanError(
                f"cut={','.join(modules)} names {len(modules)} modules at which a stage begins, "
                f"but {stages} stages have {stages - 1} beginnings after the first; "
                f"name {stages - 1}"
            )
        made = []
        for name in modules:
            calls = [
                i
                for i, n in enumerate(self.nodes[True])
                if n.op == "module" and (n.target + ".").startswith(name + ".")
            ]
            if not calls:
                raise PlanError(
                    f"cut={name}: the forward pass never calls {name}; name a module that it calls"
                )
            made.append(calls[0])
        if made != sorted(set(made)) or 0 in made:
            order = [n.target for n in self.nodes[True] if n.op == "module"]
            raise PlanError(
                f"cut={','.join(modules)} does not follow the order in which modules are called "
                f"({', '.join(order[:12])}); name each beginning once, in that order, and none at "
                "the very start"
            )
        for name, i in zip(modules, made, strict=True):
            if not self.cuttable(i):
                raise PlanError(
                    f"cut={name}: what goes into it is changed in place afterwards; "
                    "cut before or after that"
                )
        return made


# -- arguments of nodes --


def find_refs(value: Any, kind: type, inside: bool = True) -> list[Any]:
    """All instances of `kind` in the arguments of nodes; `inside`: in formulas, too."""
    if isinstance(value, kind):
        return [value]
    if isinstance(value, TraceNode):
        return find_refs((value.args, value.kwargs), kind, inside)
    if isinstance(value, Formula):
        return find_refs(value.args, kind) if inside else []
    if isinstance(value, Tree):
        return find_refs(value.leaves, kind, inside)
    if isinstance(value, dict):
        return [m for v in value.values() for m in find_refs(v, kind, inside)]
    if isinstance(value, slice):
        return find_refs((value.start, value.stop, value.step), kind, inside)
    if isinstance(value, (tuple, list)) and not isinstance(value, (Ref, Input, ParameterRef)):
        return [m for v in value for m in find_refs(v, kind, inside)]
    return []


def ref_names(value: Any) -> list[str]:
    """The names of all nodes whose values the arguments use."""
    return [ref.name for ref in find_refs(value, Ref)]


def input_leaf(inputs: tuple[Any, ...], which: Input) -> Any:
    value = inputs[which.argument]
    return value if isinstance(value, Tensor) else pytree.tree_leaves(value)[which.leaf]


def tensors(value: Any) -> Iterator[Tensor]:
    return (t for t in pytree.tree_leaves(value) if isinstance(t, Tensor))


def attribute_at(root: nn.Module, path: str) -> Any:
    """The module, parameter or buffer at a dotted path."""
    at: Any = root
    for name in path.split("."):
        at = getattr(at, name)
    return at


# -- running nodes --


def run_node(
    root: nn.Module, node: TraceNode, inputs: tuple[Any, ...], known: dict[str, Any]
) -> Any:
    """Call what the node calls. `known` has the values of earlier nodes by name."""
    args = tuple([resolve(root, a, inputs, known) for a in node.args])
    kwargs = {k: resolve(root, a, inputs, known) for k, a in node.kwargs.items()}
    if node.op == "module":
        call = attribute_at(root, node.target)
    elif node.op == "method":
        call, args = getattr(args[0], node.target), args[1:]
    else:
        call = node.target
    if node.grad:
        return call(*args, **kwargs)
    with torch.no_grad():
        return call(*args, **kwargs)


def resolve(root: nn.Module, value: Any, inputs: tuple[Any, ...], known: dict[str, Any]) -> Any:
    """An argument of a node with the values of this run in place of references."""
    kind = type(value)
    if kind is Ref:
        return known[value.name]
    if kind is Input:
        return input_leaf(inputs, value)
    if kind is ParameterRef:
        return attribute_at(root, value.name)
    if kind is Formula:
        return value.at([resolve(root, a, inputs, known) for a in value.args])
    if kind is StageDevice:
        return next(
            t.device for t in (*tensors((inputs, known)), *root.parameters(), *root.buffers())
        )
    if kind is Tree:
        return value.build([resolve(root, a, inputs, known) for a in value.leaves])
    if kind is tuple or kind is list:
        return kind([resolve(root, a, inputs, known) for a in value])
    if kind is dict:
        return {k: resolve(root, a, inputs, known) for k, a in value.items()}
    if kind is slice:
        return slice(
            *(resolve(root, a, inputs, known) for a in (value.start, value.stop, value.step))
        )
    return value


def without_unused(nodes: list[TraceNode], output: Any) -> list[TraceNode]:
    """Without nodes that nobody needs: items taken out of structures, and recomputable nodes."""
    used, kept = set(ref_names(output)), []
    for node in reversed(nodes):
        # the tracer adds these itself, to name the items of a structure
        is_item = node.target is operator.getitem and not node.line
        if (is_item or node.recomputable) and node.name not in used:
            continue
        used.update(ref_names((node.args, node.kwargs)))
        kept.append(node)
    return kept[::-1]
