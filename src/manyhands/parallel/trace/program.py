"""A model's forward pass as a list of steps, so that it can be cut between any two of them, without a change to the model.

The forward pass runs once on tensors that have shapes but no values (`compute/recorder`), with the sizes of the batch as symbols.
What it calls outside of its leaf modules is written down: torch functions, tensor methods, and calls of leaf modules, which stay
as they are. Leaves are blocks (the children of ModuleLists and Sequentials) and what is named; where that makes too few pieces,
the smallest modules. Python branches run as written; one that asks for a value in a tensor is refused with its place in the code.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher, get_close_matches
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from manyhands.errors import PlanError, TaskError
from manyhands.replica.leaf_modules import blocks, smallest


class Ref(NamedTuple):
    """In the arguments of a step: the value that the step of this name made."""

    name: str


class Input(NamedTuple):
    """In the arguments of a step: tensor `leaf` (in the order of torch's pytree) of the batch's input `argument`."""

    argument: int
    leaf: int = 0


class ParameterRef(NamedTuple):
    """In the arguments of a step: a parameter or buffer, by its (first) name in the whole model."""

    name: str


class Here(NamedTuple):
    """In the arguments of a step: the device that the stage runs on."""


@dataclass(frozen=True)
class Tree:
    """In the arguments of a step, or as what the model returns: a structure that torch's pytree knows, around `leaves`."""

    spec: Any
    leaves: tuple[Any, ...]

    def build(self, leaves: list[Any]) -> Any:
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class Formula:
    """In the arguments of a step: a number that follows from sizes, such as B * T."""

    text: str
    function: Callable[[Sequence[int]], Any] = field(compare=False)
    args: tuple[Any, ...]  # Input (see `dims`) and Ref
    dims: tuple[
        int | None, ...
    ]  # of which dimension of an argument the size is meant; None: the argument is a number
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
    """One call: of a leaf module (`target`: its path), of a function, or of a method (`target`: its name) of the first argument."""

    name: str
    op: str  # "module", "function" or "method"
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    grad: bool = True  # False: under no_grad
    line: str = ""  # file:line of the code that made the call
    again: bool = (
        False  # it follows from the batch and its sizes alone: cheaper to make again than to send
    )


@dataclass
class TracedProgram:
    """`steps[True]` is the forward pass in training, `steps[False]` in evaluation: often the same list."""

    model: nn.Module
    steps: dict[bool, list[TraceNode]]
    output: dict[
        bool, Any
    ]  # what the model returns: its own structure, with Ref, Input and Held in place of tensors
    together: list[tuple[int, int]] = field(
        default_factory=list
    )  # no cut may lie in i < cut <= j of these: j changes what i made
    check: dict[bool, Callable[[tuple[Any, ...]], None]] = field(
        default_factory=dict
    )  # raise where a batch would go another way

    @property
    def weighty(self) -> list[bool]:
        """Which steps use parameters that train, and no cut before them is forbidden: a stage needs one of them."""
        return [
            self._has_parameters(step) and self.cuttable(i)
            for i, step in enumerate(self.steps[True])
        ]

    def cuttable(self, i: int) -> bool:
        return not any(a < i <= b for a, b in self.together)

    def _has_parameters(self, step: TraceNode) -> bool:
        if step.op == "module" and any(
            p.requires_grad for p in self.model.get_submodule(step.target).parameters()
        ):
            return True
        held = [a.name for a in mentions((step.args, step.kwargs), ParameterRef)]
        used = [found(self.model, name) for name in held]
        return any(isinstance(p, nn.Parameter) and p.requires_grad for p in used)

    def in_evaluation(self, where: Sequence[int]) -> list[int]:
        """The same cuts in the steps of evaluation: before the first step that both have from there on."""
        train, test = ([(s.op, s.target) for s in self.steps[mode]] for mode in (True, False))
        if train == test:
            return list(where)
        blocks = SequenceMatcher(
            None, [str(s) for s in train], [str(s) for s in test], autojunk=False
        ).get_matching_blocks()
        made = []
        for cut in where:
            block = next(b for b in blocks if b.a + b.size > cut or not b.size)
            made.append(block.b + max(0, cut - block.a))
        return made

    def at(self, modules: Sequence[str], stages: int) -> list[int]:
        """Where the stages begin that begin at `modules`."""
        if len(modules) != stages - 1:
            raise PlanError(
                f"cut={','.join(modules)} names {len(modules)} modules at which a stage begins, but {stages} stages have "
                f"{stages - 1} beginnings after the first; name {stages - 1}"
            )
        made = []
        for name in modules:
            here = [
                i
                for i, s in enumerate(self.steps[True])
                if s.op == "module" and (s.target + ".").startswith(name + ".")
            ]
            if not here:
                raise PlanError(
                    f"cut={name}: the forward pass never calls {name}; name a module that it calls"
                )
            made.append(here[0])
        if made != sorted(set(made)) or 0 in made:
            order = [s.target for s in self.steps[True] if s.op == "module"]
            raise PlanError(
                f"cut={','.join(modules)} does not follow the order in which modules are called ({', '.join(order[:12])}); "
                "name each beginning once, in that order, and none at the very start"
            )
        for name, i in zip(modules, made, strict=True):
            if not self.cuttable(i):
                raise PlanError(
                    f"cut={name}: what goes into it is changed in place afterwards; cut before or after that"
                )
        return made


def trace(
    model: nn.Module,
    example: tuple[Any, ...],
    cut: Sequence[str] = (),
    call: Callable[..., Any] | None = None,
    pieces: int = 1,
) -> TracedProgram:
    """The steps of `model(*example)`, or of `call(model, *example)`. Modules named in `cut` are steps as wholes. Where the blocks
    do not make `pieces` steps with parameters, the blocks are opened. The model and its state stay as they were.

    To be called in the precision (autocast) in which the model is going to run."""
    from manyhands.parallel.trace.tracer import Untraceable, record

    check_names(model, cut)
    first: Untraceable | None = None
    for leaves in (blocks(model, cut), smallest(model, cut)):
        while True:
            try:
                made = record(model, example, leaves, call)
                break
            except Untraceable as failed:
                first = first or failed
                whole = failed.inside
                if (
                    failed.by_value
                    and whole
                    and whole not in leaves
                    and not any(n.startswith(whole + ".") for n in cut)
                ):
                    leaves = {n for n in leaves if not n.startswith(whole + ".")} | {
                        whole
                    }  # it looks at values: take it as one
                    continue
                if (chained := chain(model, example, cut, call)) is not None:
                    return chained
                raise TaskError(_untraceable(model, first, cut)) from first
        if sum(made.weighty) >= pieces:
            return made
    if first is not None:
        raise TaskError(_untraceable(model, first, cut)) from first
    return made


def check_names(model: nn.Module, cut: Sequence[str]) -> None:
    known = [name for name, _ in model.named_modules() if name]
    for name in cut:
        if name not in known:
            near = get_close_matches(name, known, 1, 0.5)
            said = (
                f"did you mean {near[0]}?"
                if near
                else f"it has {', '.join(known[:6]) or 'none'}{', ...' if known[6:] else ''}"
            )
            raise PlanError(f"cut={name}: the model has no such module; {said}")


def chain(
    model: nn.Module, example: tuple[Any, ...], cut: Sequence[str], call: Any
) -> TracedProgram | None:
    """The model as its children one after the other, where they are named to be cut at and that gives what the model gives."""
    children = [name for name, _ in model.named_children()]
    if not (isinstance(model, nn.Sequential) or cut) or call is not None or len(example) != 1:
        return None
    steps: list[TraceNode] = []
    for name in children:
        steps.append(
            TraceNode(
                f"value_{name}", "module", name, (Ref(steps[-1].name) if steps else Input(0),)
            )
        )
    if not steps:
        return None
    if not isinstance(model, nn.Sequential):
        modes = {m: m.training for m in model.modules()}
        model.eval()
        try:
            with torch.no_grad():
                value = example[0]
                for name in children:
                    value = model.get_submodule(name)(value)
                whole = model(*example)
            if not (
                isinstance(value, Tensor)
                and isinstance(whole, Tensor)
                and torch.equal(value, whole)
            ):
                return None
        except Exception:  # the children do not fit together: it is no chain
            return None
        finally:
            for part, mode in modes.items():
                part.training = mode
    last = Ref(steps[-1].name)
    together = [
        (max(i - 1, -1), i)
        for i, s in enumerate(steps)
        if getattr(model.get_submodule(s.target), "inplace", False)
    ]
    return TracedProgram(model, {True: steps, False: steps}, {True: last, False: last}, together)


def _untraceable(model: nn.Module, failed: Any, cut: Sequence[str]) -> str:
    offered = [
        name for name, child in model.named_children() if next(child.parameters(), None) is not None
    ]
    for name, child in model.named_children():  # a list cannot be called: its members can
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)) and name in offered:
            offered[offered.index(name) : offered.index(name) + 1] = [
                f"{name}.{n}" for n, _ in child.named_children()
            ]
    why = f"the forward pass of {type(model).__name__} cannot be cut into stages by itself: {failed}. Move that line into a module of its own"
    if cut:
        return f"{why}, inside of which no stage begins (cut={','.join(cut)})"
    named = f"cut={','.join(offered[1:4]) or '<modules>'}"
    return f"{why}, or name the modules at which stages begin, which then run as wholes: {named}"


def mentions(value: Any, kind: type, inside: bool = True) -> list[Any]:
    """All of a kind in the arguments of steps; `inside`: of formulas, too."""
    if isinstance(value, kind):
        return [value]
    if isinstance(value, TraceNode):
        return mentions((value.args, value.kwargs), kind, inside)
    if isinstance(value, Formula):
        return mentions(value.args, kind) if inside else []
    if isinstance(value, Tree):
        return mentions(value.leaves, kind, inside)
    if isinstance(value, dict):
        return [m for v in value.values() for m in mentions(v, kind, inside)]
    if isinstance(value, slice):
        return mentions((value.start, value.stop, value.step), kind, inside)
    if isinstance(value, (tuple, list)) and not isinstance(value, (Ref, Input, ParameterRef)):
        return [m for v in value for m in mentions(v, kind, inside)]
    return []


def names(value: Any) -> list[str]:
    return [ref.name for ref in mentions(value, Ref)]


def leaf(inputs: tuple[Any, ...], which: Input) -> Any:
    value = inputs[which.argument]
    return value if isinstance(value, Tensor) else pytree.tree_leaves(value)[which.leaf]


def tensors(value: Any) -> Iterator[Tensor]:
    return (t for t in pytree.tree_leaves(value) if isinstance(t, Tensor))


def run(root: nn.Module, step: TraceNode, inputs: tuple[Any, ...], known: dict[str, Any]) -> Any:
    args = tuple([resolve(root, a, inputs, known) for a in step.args])
    kwargs = {k: resolve(root, a, inputs, known) for k, a in step.kwargs.items()}
    if step.op == "module":
        call = found(root, step.target)
    elif step.op == "method":
        call, args = getattr(args[0], step.target), args[1:]
    else:
        call = step.target
    if step.grad:
        return call(*args, **kwargs)
    with torch.no_grad():
        return call(*args, **kwargs)


def resolve(root: nn.Module, value: Any, inputs: tuple[Any, ...], known: dict[str, Any]) -> Any:
    """An argument as the step wrote it down, with the values of this run in it."""
    kind = type(value)
    if kind is Ref:
        return known[value.name]
    if kind is Input:
        return leaf(inputs, value)
    if kind is ParameterRef:
        return found(root, value.name)
    if kind is Formula:
        return value.at([resolve(root, a, inputs, known) for a in value.args])
    if kind is Here:
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


def found(root: nn.Module, path: str) -> Any:
    at: Any = root
    for name in path.split("."):
        at = getattr(at, name)
    return at


def without_unused(steps: list[TraceNode], output: Any) -> list[TraceNode]:
    """Without what was made for nothing: parts of structures, and what could be made again."""
    used, kept = set(names(output)), []
    for step in reversed(steps):
        taken_out = step.target is operator.getitem and not step.line  # of a structure, by us
        if (taken_out or step.again) and step.name not in used:
            continue
        used.update(names((step.args, step.kwargs)))
        kept.append(step)
    return kept[::-1]
