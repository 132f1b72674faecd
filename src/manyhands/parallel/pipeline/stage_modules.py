"""Pipeline stages: a traced model cut into parts, each a module with the parameters it uses.

stages = cut(traced, balance_stages([c.seconds for c in measure(traced, inputs)], 4))
values = {}
for stage in stages:  # in a pipeline each is on its rank, and `values` are sent to the next
    values = stage.forward(inputs, values)
output = values["output"]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from manyhands.parallel.pipeline.stage_program import (
    StageModuleBuilder,
    StageProgram,
    refuse_shared_statistics,
    tied_parameters,
)
from manyhands.parallel.trace.program import (
    Input,
    TracedProgram,
    TraceNode,
    find_refs,
    ref_names,
)


@dataclass(frozen=True)
class Stage:
    """Stage `index` of `of` of a model. What `forward` returns goes to the next stage as it is.

    `module` holds the parameters and buffers that this stage uses, under their names in the whole
    model. A weight that is used under several names has the first of them, and `tied` says which
    stages hold it too: their gradients are to be summed. `module.train()` and `module.eval()` mean
    what they mean to the whole model.
    """

    module: nn.Module
    index: int
    of: int
    # which of the batch's inputs it reads; the others may be None
    inputs: tuple[int, ...]
    receives: tuple[str, ...]  # names of values from the stage before, in training
    sends: tuple[str, ...]  # names of values for the next stage, or ("output",)
    tied: dict[str, list[int]]  # name of a parameter -> all stages that hold it, this one too

    @property
    def last(self) -> bool:
        return self.index == self.of - 1

    def forward(self, inputs: tuple[Any, ...], values: dict[str, Any]) -> dict[str, Any]:
        """`inputs`: the batch's own, as the model gets them; `values`: what the stage before
        returned. Values are tensors and small non-tensors (ints, None, tuples of both). The last
        stage returns {"output": what the model returns}."""
        got: dict[str, Any] = self.module(inputs, values)
        return got


def cut(traced: TracedProgram, where: Sequence[int]) -> list[Stage]:
    """The stages that begin at the nodes `where` of `traced.nodes[True]`; the first begins at 0."""
    of = len(where) + 1
    programs: list[dict[bool, StageProgram]] = [{} for _ in range(of)]
    for mode, nodes in traced.nodes.items():
        begins = [0, *(where if mode else traced.in_evaluation(where)), len(nodes)]
        for k, program in enumerate(_programs(nodes, traced.output[mode], begins)):
            programs[k][mode] = program
    for mode, check in traced.size_guards.items():
        # one stage checks for all: the sizes are the same everywhere
        programs[0][mode] = replace(programs[0][mode], check=check)
    builder = StageModuleBuilder(traced.model)
    modules = [builder.build(p) for p in programs]
    refuse_shared_statistics(modules)
    stages = []
    for k, (module, tied) in enumerate(zip(modules, tied_parameters(modules), strict=True)):
        by_mode = programs[k].values()
        reads = {a.argument for p in by_mode for a in find_refs((p.nodes, p.output), Input)}
        trained = programs[k][True]
        stages.append(
            Stage(module, k, of, tuple(sorted(reads)), trained.receives, trained.sends, tied)
        )
        module.train(traced.model.training)
    return stages


def _programs(nodes: Sequence[TraceNode], output: Any, begins: Sequence[int]) -> list[StageProgram]:
    last_use, across = _last_use(nodes, output), values_across(nodes, output, begins[:-1])
    programs = []
    for k in range(len(begins) - 1):
        last = k == len(begins) - 2
        mine = [
            *_recomputed(nodes, output, begins[k], begins[k + 1], last),
            *nodes[begins[k] : begins[k + 1]],
        ]
        sends = ("output",) if last else across[k + 1]
        ends = {name: i for i, node in enumerate(mine) for name in (*ref_names(node), node.name)}
        drops: list[list[str]] = [[] for _ in mine]
        for name, i in ends.items():
            if name not in sends and not (last and last_use.get(name) == len(nodes)):
                drops[i].append(name)
        programs.append(
            StageProgram(
                tuple(mine), tuple(map(tuple, drops)), across[k], sends, output if last else None
            )
        )
    return programs


def _last_use(nodes: Sequence[TraceNode], output: Any) -> dict[str, int]:
    found = {node.name: i for i, node in enumerate(nodes)}
    for i, node in enumerate(nodes):
        found.update(dict.fromkeys(ref_names(node), i))
    found.update(dict.fromkeys(ref_names(output), len(nodes)))
    return found


def values_across(
    nodes: Sequence[TraceNode], output: Any, begins: Sequence[int]
) -> list[tuple[str, ...]]:
    """By cut: the names of values made before it and used after it, without those that later stages
    compute again."""
    last_use = _last_use(nodes, output)
    return [
        tuple(s.name for s in nodes[:begin] if last_use[s.name] >= begin and not s.recomputable)
        for begin in begins
    ]


def _recomputed(
    nodes: Sequence[TraceNode], output: Any, begin: int, end: int, last: bool
) -> list[TraceNode]:
    """The earlier nodes that a stage computes again rather than receives: masks and positions,
    which follow from the batch."""
    wanted = {name for node in nodes[begin:end] for name in ref_names(node)} | (
        {*ref_names(output)} if last else set()
    )
    made = []
    for node in reversed(nodes[:begin]):
        if node.recomputable and node.name in wanted:
            made.append(node)
            wanted.update(ref_names(node))
    return made[::-1]
