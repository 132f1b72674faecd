"""Traces a model: chooses its leaf modules, runs the tracer, and explains what cannot be traced.

    trace(model, example)      1. leaf modules are blocks (children of ModuleLists and Sequentials)
                               2. where that makes too few stages: the smallest modules
                               3. where the tracer fails: the children as a chain, or a TaskError

The forward pass runs once on tensors that have shapes but no values, with the sizes of the batch
as symbols. Python branches run as written. A branch that depends on a value in a tensor makes its
module a leaf module; where that is impossible, the error names the line of code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from manyhands.errors import PlanError, TaskError
from manyhands.parallel.trace.isolation import restored
from manyhands.parallel.trace.leaf_modules import blocks, smallest
from manyhands.parallel.trace.program import (
    Input,
    Ref,
    TracedProgram,
    TraceNode,
)
from manyhands.parallel.trace.source_location import Untraceable
from manyhands.parallel.trace.symbolic_sizes import hold, other_sizes, resized, two_rows
from manyhands.parallel.trace.tracer import Tracer
from manyhands.replica.deferred.unmade import make_parameters


def trace(
    model: nn.Module,
    example: tuple[Any, ...],
    cut: Sequence[str] = (),
    call: Callable[..., Any] | None = None,
    pieces: int = 1,
) -> TracedProgram:
    """The traced program of `model(*example)`, or of `call(model, *example)`.

    Modules named in `cut` are leaf modules. Where blocks do not make `pieces` nodes with
    parameters, the blocks are opened. The model and its state stay as they were.

    Call it in the precision (autocast) in which the model is going to run."""
    check_names(model, cut)
    first: Untraceable | None = None
    may_chain = call is None and len(example) == 1
    for leaves in (blocks(model, cut), smallest(model, cut)):
        while True:
            try:
                made = trace_modes(model, example, leaves, call)
                break
            except Untraceable as failed:
                first = first or failed
                inner = failed.inside
                if (
                    failed.by_value
                    and inner
                    and inner not in leaves
                    and not any(n.startswith(inner + ".") for n in cut)
                ):  # this module depends on values: make it a leaf module
                    leaves = {n for n in leaves if not n.startswith(inner + ".")} | {inner}
                    continue
                if (chained := chain(model, example, cut, call)) is not None:
                    return chained
                raise TaskError(_untraceable(model, first, cut, may_chain)) from first
        if sum(made.trainable) >= pieces:
            return made
    if first is not None:
        raise TaskError(_untraceable(model, first, cut, may_chain)) from first
    return made


def check_names(model: nn.Module, cut: Sequence[str]) -> None:
    """Raise where `cut` names a module that the model does not have."""
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


# -- one set of leaf modules --


def trace_modes(
    model: nn.Module, example: tuple[Any, ...], leaves: set[str], call: Callable[..., Any] | None
) -> TracedProgram:
    """Both modes of the model, with the modules at the paths `leaves` as nodes.

    Raises Untraceable."""
    example = pytree.tree_map_only(Tensor, two_rows, example)
    runs = {mode: _trace_mode(model, mode, example, leaves, call) for mode in (True, False)}
    guards: dict[bool, Callable[[tuple[Any, ...]], None]] = {}
    for mode, made in runs.items():
        _forget_harmless_guards(made, partial(_trace_mode, model, mode, leaves=leaves, call=call))
        guards[mode] = made.size_guard(example)
    at = {node.name: i for i, node in enumerate(runs[True].nodes)}
    inseparable = [(at.get(a, -1), at[b]) for a, b in runs[True].writer.inseparable]
    return TracedProgram(
        model,
        {m: r.nodes for m, r in runs.items()},
        {m: r.output for m, r in runs.items()},
        inseparable,
        guards,
    )


def _trace_mode(
    model: nn.Module, mode: bool, example: tuple[Any, ...], leaves: set[str], call: Any
) -> Tracer:
    with restored(model):
        if model.training != mode:
            model.train(mode)
        made = Tracer(model)
        made.run(example, leaves, call)
    return made


def _forget_harmless_guards(first: Tracer, again: Callable[[tuple[Any, ...]], Tracer]) -> None:
    """Drop the size guards of torch's own code that do not change the program.

    Such a guard is dropped where the tracer writes the same nodes, with the same formulas, for
    sizes that violate it. The guards that are left refuse a batch, since a size that follows from
    them may be a constant in some node."""
    needed = first.needed()
    for sizes in other_sizes(
        first.sizes.hints,
        {s for s, (_, dim) in first.writer.symbols.items() if dim == 0},
        lambda: first.sizes.taken,
    ):
        if hold(needed, sizes) and not hold(first.sizes.taken, sizes):
            try:
                other = again(resized(first.example, first.writer.input_shapes(), sizes))
            except Untraceable:
                continue
            if repr((other.nodes, other.output)) == repr((first.nodes, first.output)):
                first.sizes.taken = {
                    g: at for g, at in first.sizes.taken.items() if hold([g], sizes)
                }


# -- where the tracer fails --


def chain(
    model: nn.Module, example: tuple[Any, ...], cut: Sequence[str], call: Any
) -> TracedProgram | None:
    """The model as a chain of its children, where `cut` names some of them and the chain returns
    what the model returns; None: it does not."""
    children = [name for name, _ in model.named_children()]
    if not (isinstance(model, nn.Sequential) or cut) or call is not None or len(example) != 1:
        return None
    nodes: list[TraceNode] = []
    for name in children:
        given = Ref(nodes[-1].name) if nodes else Input(0)
        nodes.append(TraceNode(f"value_{name}", "module", name, (given,)))
    if not nodes:
        return None
    if not isinstance(model, nn.Sequential) and not _is_chain(model, children, example):
        return None
    last = Ref(nodes[-1].name)
    inseparable = [
        (max(i - 1, -1), i)
        for i, n in enumerate(nodes)
        if getattr(model.get_submodule(n.target), "inplace", False)
    ]
    return TracedProgram(model, {True: nodes, False: nodes}, {True: last, False: last}, inseparable)


def _is_chain(model: nn.Module, children: Sequence[str], example: tuple[Any, ...]) -> bool:
    modes = {m: m.training for m in model.modules()}
    make_parameters(model.parameters())  # outputs are compared
    model.eval()
    try:
        with torch.no_grad():
            value = example[0]
            for name in children:
                value = model.get_submodule(name)(value)
            output = model(*example)
        return (
            isinstance(value, Tensor) and isinstance(output, Tensor) and torch.equal(value, output)
        )
    except Exception:  # the children do not fit together: it is no chain
        return False
    finally:
        for module, mode in modes.items():
            module.training = mode


def _untraceable(model: nn.Module, failed: Untraceable, cut: Sequence[str], may_chain: bool) -> str:
    inside = f" in its module {failed.inside}" if failed.inside else ""
    why = (
        f"the forward pass of {type(model).__name__} cannot be cut into stages by itself: "
        f"{failed}{inside}. Move that line into a module of its own that takes and returns tensors"
    )
    if cut:
        return f"{why}, inside of which no stage begins (cut={','.join(cut)})"
    # a module that depends on values was tried as a whole already; code of the model's own forward
    # pass is in no module
    if may_chain or (failed.inside and not failed.by_value):
        named = f"cut={','.join(_callable_children(model)[1:4]) or '<modules>'}"
        return (
            f"{why}, or name the modules at which stages begin, which then run as wholes: {named}"
        )
    return f"{why}, or use shard= or tensor= instead of pipe=, which run the forward pass as it is"


def _callable_children(model: nn.Module) -> list[str]:
    """Names of the children that have parameters; of a list, which cannot be called, its members'.

    A container that has a forward pass of its own can be called."""
    names = []
    for name, child in model.named_children():
        if next(child.parameters(), None) is None:
            continue
        if type(child).forward is nn.Module.forward:
            names += [f"{name}.{n}" for n, _ in child.named_children()]
        else:
            names.append(name)
    return names
