"""The stages of a pipeline: a traced model cut into parts, each a module with the parameters it uses under their own names.

stages = cut(traced, contiguous([c.seconds for c in measure(traced, inputs)], 4))
values = {}
for stage in stages:                      # in a pipeline: each on its rank, with `values` sent from one to the next
    values = stage.forward(inputs, values)
output = values["output"]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from manyhands.errors import PlanError
from manyhands.parallel.trace.program import (
    Input,
    ParameterRef,
    TracedProgram,
    TraceNode,
    attribute_at,
    find_refs,
    ref_names,
    resolve,
    run_node,
    tensors,
)


@dataclass(frozen=True)
class Stage:
    """Part `index` of `of` of a model. What `forward` returns goes to the next stage as it is.

    `module` holds the parameters and buffers that this part uses, under their names in the whole model. A weight that is used
    under several names stands under the first of them, and `tied` says which stages hold it too: their gradients are to be summed.
    `module.train()` and `module.eval()` mean what they mean to the whole model.
    """

    module: nn.Module
    index: int
    of: int
    inputs: tuple[
        int, ...
    ]  # which of the batch's inputs it reads; it may be given None in place of the others
    takes: tuple[str, ...]  # names of values from the stage before, in training
    gives: tuple[str, ...]  # names of values for the next, or ("output",)
    tied: dict[
        str, list[int]
    ]  # name of a parameter -> all stages that hold it, this one among them

    @property
    def last(self) -> bool:
        return self.index == self.of - 1

    def forward(self, inputs: tuple[Any, ...], values: dict[str, Any]) -> dict[str, Any]:
        """`inputs`: the batch's own, as the model gets them; `values`: what the stage before returned. Tensors, and small
        non-tensors (ints, None, tuples of both) are among the values; the last stage returns {"output": what the model returns}."""
        got: dict[str, Any] = self.module(inputs, values)
        return got


class NodeCost(NamedTuple):
    """What one step costs a micro-batch, and what a cut before it would."""

    seconds: float  # forward and backward
    kept_bytes: int  # activations that the backward pass needs and no earlier step has kept already
    parameter_bytes: int  # of parameters that no earlier step has used
    crossing_bytes: float  # of the values that would have to be sent; inf: there may be no cut


@dataclass(frozen=True)
class Program:
    """What a stage does in one mode: steps, after each of which values that nobody needs any more are let go."""

    steps: tuple[TraceNode, ...]
    drops: tuple[tuple[str, ...], ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    output: Any  # of the last stage: what the model returns; None elsewhere
    check: Callable[[tuple[Any, ...]], None] | None = (
        None  # raises where a batch would take another way through the model
    )


class StageModule(nn.Module):
    """Holders of parameters and leaf modules, at their paths in the whole model, and what to do with them."""

    def __init__(self, programs: dict[bool, Program]):
        super().__init__()
        self._programs = programs

    def forward(self, inputs: tuple[Any, ...], values: dict[str, Any]) -> dict[str, Any]:
        program = self._programs[self.training]
        if program.check is not None:
            program.check(inputs)
        known = {name: values[name] for name in program.takes}
        for step, drops in zip(program.steps, program.drops, strict=True):
            known[step.name] = run_node(self, step, inputs, known)
            for name in drops:
                del known[name]
        if program.gives == ("output",):
            return {"output": resolve(self, program.output, inputs, known)}
        return {name: known[name] for name in program.gives}


def cut(traced: TracedProgram, where: Sequence[int]) -> list[Stage]:
    """The stages that begin at the steps `where` of `traced.nodes[True]` (the first begins at 0), as `contiguous` gives them."""
    of = len(where) + 1
    programs: list[dict[bool, Program]] = [{} for _ in range(of)]
    for mode, steps in traced.nodes.items():
        edges = [0, *(where if mode else traced.in_evaluation(where)), len(steps)]
        for k, program in enumerate(_programs(steps, traced.output[mode], edges)):
            programs[k][mode] = program
    for (
        mode,
        check,
    ) in traced.size_guards.items():  # one stage asks for all: the sizes are the same everywhere
        programs[0][mode] = replace(programs[0][mode], check=check)
    held = _Holding(traced.model)
    modules = [held.module(p) for p in programs]
    holds = [{name for name, _ in m.named_parameters()} for m in modules]
    _refuse_shared_statistics(modules)
    made = []
    for k, (module, by_mode) in enumerate(zip(modules, programs, strict=True)):
        tied = {
            name: [i for i, other in enumerate(holds) if name in other] for name in sorted(holds[k])
        }
        reads = {
            a.argument for p in by_mode.values() for a in find_refs((p.steps, p.output), Input)
        }
        made.append(
            Stage(
                module, k, of, tuple(sorted(reads)), by_mode[True].takes, by_mode[True].gives,
                {name: among for name, among in tied.items() if len(among) > 1},
            )
        )  # fmt: skip
        module.train(traced.model.training)
    return made


def _programs(steps: Sequence[TraceNode], output: Any, edges: Sequence[int]) -> list[Program]:
    last_use, across = _last_use(steps, output), _across(steps, output, edges[:-1])
    programs = []
    for k in range(len(edges) - 1):
        last = k == len(edges) - 2
        mine = [
            *_again(steps, output, edges[k], edges[k + 1], last),
            *steps[edges[k] : edges[k + 1]],
        ]
        gives = ("output",) if last else across[k + 1]
        ends = {name: i for i, step in enumerate(mine) for name in (*ref_names(step), step.name)}
        drops: list[list[str]] = [[] for _ in mine]
        for name, i in ends.items():
            if name not in gives and not (last and last_use.get(name) == len(steps)):
                drops[i].append(name)
        programs.append(
            Program(
                tuple(mine), tuple(map(tuple, drops)), across[k], gives, output if last else None
            )
        )
    return programs


def _last_use(steps: Sequence[TraceNode], output: Any) -> dict[str, int]:
    found = {step.name: i for i, step in enumerate(steps)}
    for i, step in enumerate(steps):
        found.update(dict.fromkeys(ref_names(step), i))
    found.update(dict.fromkeys(ref_names(output), len(steps)))
    return found


def _across(steps: Sequence[TraceNode], output: Any, edges: Sequence[int]) -> list[tuple[str, ...]]:
    """The names of values made before an edge and used after it, without those that the next stages make again for themselves."""
    last_use = _last_use(steps, output)
    return [
        tuple(s.name for s in steps[:edge] if last_use[s.name] >= edge and not s.recomputable)
        for edge in edges
    ]


def _again(
    steps: Sequence[TraceNode], output: Any, begin: int, end: int, last: bool
) -> list[TraceNode]:
    """What a stage needs of earlier steps that are made again rather than sent: masks and positions, which follow from the batch."""
    wanted = {name for step in steps[begin:end] for name in ref_names(step)} | (
        {*ref_names(output)} if last else set()
    )
    made = []
    for step in reversed(steps[:begin]):
        if step.recomputable and step.name in wanted:
            made.append(step)
            wanted.update(ref_names(step))
    return made[::-1]


class _Holding:
    """Puts what a program uses into a module of its own, in the order of the whole model, so that of all names of a tied weight
    the first is the one that `named_parameters` gives."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.at = {
            path: i for i, (path, _) in enumerate(model.named_modules(remove_duplicate=False))
        }
        tensors = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        self.order = {name: i for i, (name, _) in enumerate(tensors)}
        self.first: dict[int, str] = {}
        for name, tensor in tensors:
            self.first.setdefault(id(tensor), name)

    def module(self, programs: dict[bool, Program]) -> StageModule:
        leaves = {s.target for p in programs.values() for s in p.steps if s.op == "module"}
        held = {
            a.name for p in programs.values() for a in find_refs((p.steps, p.output), ParameterRef)
        }
        for path in leaves:
            part = self.model.get_submodule(path)
            for _, tensor in [*part.named_parameters(), *part.named_buffers()]:
                name = self.first.get(id(tensor), "")
                if name and not name.startswith(path + "."):
                    held.add(name)
        own = {name for name in held if not any(name.startswith(path + ".") for path in leaves)}
        leaves = {
            path for path in leaves if not any(path.startswith(other + ".") for other in leaves)
        }
        made = StageModule(programs)
        for path in sorted(
            leaves | {name.rpartition(".")[0] for name in own}, key=self.at.__getitem__
        ):
            if path in leaves:
                _holder(made, path.rpartition(".")[0])._modules[path.rpartition(".")[2]] = (
                    self.model.get_submodule(path)
                )
                continue
            holder = _holder(made, path)
            for name in sorted(
                (n for n in own if n.rpartition(".")[0] == path), key=self.order.__getitem__
            ):
                short, tensor = name.rpartition(".")[2], attribute_at(self.model, name)
                if isinstance(tensor, nn.Parameter):
                    holder._parameters[short] = tensor
                else:
                    keep = short not in self.model.get_submodule(path)._non_persistent_buffers_set
                    holder.register_buffer(short, tensor, persistent=keep)
        return made


def _holder(root: nn.Module, path: str) -> nn.Module:
    at = root
    for name in path.split(".") if path else []:
        if at._modules.get(name) is None:
            at._modules[name] = nn.Module()
        at = at._modules[name]  # type: ignore[assignment]
    return at


def _refuse_shared_statistics(modules: Sequence[nn.Module]) -> None:
    """Running statistics that two stages update would part ways: each would see half of the batches."""
    seen: dict[int, int] = {}
    for k, module in enumerate(modules):
        for name, part in module.named_modules():
            if (
                isinstance(part, nn.modules.batchnorm._BatchNorm)
                and seen.setdefault(id(part), k) != k
            ):
                raise PlanError(
                    f"{name} keeps running statistics and is used in stages {seen[id(part)]} and {k}; a cut may not run between two "
                    f"uses of it: name the modules at which stages begin (cut=...), or use fewer stages"
                )


def measure(
    traced: TracedProgram,
    example: tuple[Any, ...],
    repeats: int = 5,
    clock: Callable[[], float] = perf_counter,
) -> list[NodeCost]:
    """Run each step of training, forward and back, on `example`, `repeats` times after a first; the quickest time counts, since
    what else goes on in a machine only adds. Parameters, buffers, gradients and random numbers stay as they were.
    Ranks measure differently: one of them decides for all."""
    model, steps = traced.model, traced.nodes[True]
    buffers = [(b, b.clone()) for b in model.buffers()]
    device = next(t.device for t in (*tensors(example), *model.parameters()))
    seconds = [inf] * len(steps)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        for turn in range(
            repeats + 1
        ):  # all steps in turn, not one at a time: a burst of other work then hits no step each time
            known, kept, times = _measured(traced, example, device, clock)
            seconds = [min(pair) for pair in zip(seconds, times, strict=True)] if turn else seconds
    for buffer, value in buffers:
        buffer.detach().copy_(value)
    used: set[int] = set()
    costs = []
    across = _across(steps, traced.output[True], range(len(steps)))
    for i, step in enumerate(steps):
        fresh = {id(p): p.nbytes for p in _weights(model, step) if id(p) not in used}
        used |= fresh.keys()
        crossing = (
            sum(t.nbytes for n in across[i] for t in tensors(known[n]))
            if traced.cuttable(i)
            else inf
        )
        costs.append(NodeCost(seconds[i], kept[i], sum(fresh.values()), crossing))
    return costs


def _measured(
    traced: TracedProgram,
    example: tuple[Any, ...],
    device: torch.device,
    clock: Callable[[], float],
) -> tuple[dict[str, Any], list[int], list[float]]:
    """One run of all steps: their values, the bytes that each keeps for its way back, and how long it takes there and back."""
    model, changes = traced.model, {j for _, j in traced.inseparable}
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    known: dict[str, Any] = {}
    seen = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *tensors(example))}
    kept, times = [], []
    for i, step in enumerate(traced.nodes[True]):
        given = {n: _apart(known[n], i in changes) for n in ref_names(step)}
        needs = [t for t in (*tensors(given), *_weights(model, step)) if t.requires_grad]
        saved: dict[int, int] = {}

        def keep(t: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        wait()
        begun = clock()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            got = run_node(model, step, example, given)
        outs = [t for t in tensors(got) if t.requires_grad]
        if outs and needs:
            torch.autograd.grad(outs, needs, [torch.ones_like(t) for t in outs], allow_unused=True)
        wait()
        times.append(clock() - begun)
        known[step.name] = got
        kept.append(sum(size for at, size in saved.items() if at not in seen))
        seen |= saved.keys()
    return known, kept, times


def _apart(value: Any, copied: bool) -> Any:
    """The same values, as if they had come from elsewhere."""

    def one(t: Tensor) -> Tensor:
        t = t.detach().requires_grad_(t.requires_grad)
        return t.clone() if copied else t

    return torch.utils._pytree.tree_map_only(Tensor, one, value)


def _weights(model: nn.Module, step: TraceNode) -> Iterator[nn.Parameter]:
    if step.op == "module":
        yield from model.get_submodule(step.target).parameters()
    for held in find_refs(step, ParameterRef):
        if isinstance(tensor := attribute_at(model, held.name), nn.Parameter):
            yield tensor
