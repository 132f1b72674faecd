"""Node costs: seconds and bytes of every node of a traced model, measured on one batch.

One rank measures and decides the cut for all: times differ from rank to rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from manyhands.parallel.pipeline.stage_modules import values_across
from manyhands.parallel.trace.program import (
    ParameterRef,
    TracedProgram,
    TraceNode,
    attribute_at,
    find_refs,
    ref_names,
    run_node,
    tensors,
)


class NodeCost(NamedTuple):
    """What a node costs a micro-batch, and what a cut before it would cost."""

    seconds: float  # forward and backward
    kept_bytes: int  # activations that backward needs and no earlier node has kept already
    parameter_bytes: int  # of parameters that no earlier node has used
    crossing_bytes: float  # of the values that would have to be sent; inf: there may be no cut


def measure(
    traced: TracedProgram,
    example: tuple[Any, ...],
    repeats: int = 5,
    clock: Callable[[], float] = perf_counter,
) -> list[NodeCost]:
    """Run each node of training, forward and backward, on `example`, `repeats` times after a first
    time. The shortest time counts, since other work on the machine only adds. Parameters, buffers,
    gradients and random numbers stay as they were."""
    model, nodes = traced.model, traced.nodes[True]
    buffers = [(b, b.clone()) for b in model.buffers()]
    device = next(t.device for t in (*tensors(example), *model.parameters()))
    seconds = [inf] * len(nodes)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        # all nodes in turn, not one node several times: a burst of other work then hits no node
        # each time
        for turn in range(repeats + 1):
            known, kept, times = _measured(traced, example, device, clock)
            seconds = [min(pair) for pair in zip(seconds, times, strict=True)] if turn else seconds
    for buffer, value in buffers:
        buffer.detach().copy_(value)
    used: set[int] = set()
    costs = []
    across = values_across(nodes, traced.output[True], range(len(nodes)))
    for i, node in enumerate(nodes):
        fresh = {id(p): p.nbytes for p in _weights(model, node) if id(p) not in used}
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
    """One run of all nodes: their values, the bytes that each keeps for its backward pass, and its
    seconds of both passes."""
    model, changes = traced.model, {j for _, j in traced.inseparable}
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    known: dict[str, Any] = {}
    seen = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *tensors(example))}
    kept, times = [], []
    for i, node in enumerate(traced.nodes[True]):
        given = {n: _detached(known[n], i in changes) for n in ref_names(node)}
        needs = [t for t in (*tensors(given), *_weights(model, node)) if t.requires_grad]
        saved: dict[int, int] = {}

        def keep(t: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        wait()
        begun = clock()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            got = run_node(model, node, example, given)
        outs = [t for t in tensors(got) if t.requires_grad]
        if outs and needs:
            torch.autograd.grad(outs, needs, [torch.ones_like(t) for t in outs], allow_unused=True)
        wait()
        times.append(clock() - begun)
        known[node.name] = got
        kept.append(sum(size for at, size in saved.items() if at not in seen))
        seen |= saved.keys()
    return known, kept, times


def _detached(value: Any, copied: bool) -> Any:
    """The same values, with no graph behind them."""

    def one(t: Tensor) -> Tensor:
        t = t.detach().requires_grad_(t.requires_grad)
        return t.clone() if copied else t

    return torch.utils._pytree.tree_map_only(Tensor, one, value)


def _weights(model: nn.Module, node: TraceNode) -> Iterator[nn.Parameter]:
    if node.op == "module":
        yield from model.get_submodule(node.target).parameters()
    for held in find_refs(node, ParameterRef):
        if isinstance(tensor := attribute_at(model, held.name), nn.Parameter):
            yield tensor
