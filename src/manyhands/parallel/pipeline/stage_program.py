"""Stage program: the traced nodes that one rank runs, and the module with their parameters.

Pipeline stages and the segments of a dataflow graph are both stage programs. Their modules hold
parameters and leaf modules at the paths that these have in the whole model, so that names in
checkpoints stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from manyhands.errors import PlanError
from manyhands.parallel.trace.program import (
    ParameterRef,
    TraceNode,
    attribute_at,
    find_refs,
    resolve,
    run_node,
)


@dataclass(frozen=True)
class StageProgram:
    """Nodes to run in one mode; after each, the values that no later node needs are dropped."""

    nodes: tuple[TraceNode, ...]
    drops: tuple[tuple[str, ...], ...]
    receives: tuple[str, ...]  # names of values from other ranks
    sends: tuple[str, ...]  # names of values for other ranks, or ("output",)
    output: Any  # of the last stage: what the model returns; None elsewhere
    # raises where a batch would run other nodes than those that were traced
    check: Callable[[tuple[Any, ...]], None] | None = None


class StageModule(nn.Module):
    """Parameters and leaf modules at their paths in the whole model, and the programs that use
    them, by mode."""

    def __init__(self, programs: dict[bool, StageProgram]):
        super().__init__()
        self._programs = programs

    def forward(self, inputs: tuple[Any, ...], values: dict[str, Any]) -> dict[str, Any]:
        program = self._programs[self.training]
        if program.check is not None:
            program.check(inputs)
        known = {name: values[name] for name in program.receives}
        for node, drops in zip(program.nodes, program.drops, strict=True):
            known[node.name] = run_node(self, node, inputs, known)
            for name in drops:
                del known[name]
        if program.sends == ("output",):
            return {"output": resolve(self, program.output, inputs, known)}
        return {name: known[name] for name in program.sends}


class StageModuleBuilder:
    """Puts what a program uses into a module, in the order of the whole model, so that
    `named_parameters` gives a tied weight its first name."""

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

    def build(self, programs: dict[bool, StageProgram]) -> StageModule:
        leaves = {s.target for p in programs.values() for s in p.nodes if s.op == "module"}
        held = {
            a.name for p in programs.values() for a in find_refs((p.nodes, p.output), ParameterRef)
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


def refuse_shared_statistics(modules: Sequence[nn.Module]) -> None:
    """Refuse BatchNorm modules that two stages update: the running statistics of each would see
    half of the batches."""
    seen: dict[int, int] = {}
    for k, module in enumerate(modules):
        for name, part in module.named_modules():
            if (
                isinstance(part, nn.modules.batchnorm._BatchNorm)
                and seen.setdefault(id(part), k) != k
            ):
                raise PlanError(
                    f"{name} keeps running statistics and is used in stages {seen[id(part)]} and "
                    f"{k}; a cut may not run between two uses of it: name the modules at which "
                    "stages begin (cut=...), or use fewer stages"
                )


def tied_parameters(modules: Sequence[nn.Module]) -> list[dict[str, list[int]]]:
    """By module: the names of its parameters that other modules hold too -> the indices of all that
    do."""
    names = [{name for name, _ in m.named_parameters()} for m in modules]
    holders = [
        {name: [i for i, other in enumerate(names) if name in other] for name in sorted(mine)}
        for mine in names
    ]
    return [{name: among for name, among in h.items() if len(among) > 1} for h in holders]
