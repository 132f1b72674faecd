"""Split backward: first the gradients of the inputs, later those of the weights.

Another stage waits for the gradients of the inputs; no stage waits for those of the weights.

    y = f(x, w)      now: dx = dy . df/dx        later: dw = dy . df/dw

The first part runs the graph from the outputs to the inputs only. Where the path of a weight leaves
that path, at a *fork*, the gradient that arrives there is kept. The second part runs from the forks
to the weights, and runs no node of the first part again:

    y <- fork <- ... <- fork <- x
           \\ w2          \\ w1

A weight may have several forks (it is used twice) and a fork several weights (a Linear's weight and
bias): weights and forks that are connected run together. There the path from one fork of a weight
to its next one runs again, and the kept gradient replaces the one that arrives, which would count
twice. A weight may also reach an output past all inputs: then its path starts at that output.

Paper: Qi et al. 2023 (zero bubble, arXiv:2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Grads = tuple[Tensor | None, ...]


class WeightBackward:
    """The second part: one call adds the gradients of the weights to their `.grad`."""

    def __init__(
        self, groups: list[tuple[list[Tensor], list[GradientEdge], list[Tensor], dict[Node, Grads]]]
    ):
        self._groups = groups

    def __call__(self) -> None:
        for weights, edges, grads, kept in self._groups:
            hooks = (
                [node.register_prehook(_replace(given)) for node, given in kept.items()]
                if len(kept) > 1
                else []
            )
            try:
                # retain: groups may run through the same nodes; the graph is freed with this object
                torch.autograd.backward(edges, grads, retain_graph=True, inputs=weights)
            finally:
                for hook in hooks:
                    hook.remove()
        self._groups = []


def backward_inputs(
    outputs: Sequence[GradientEdge],
    grads: Sequence[Tensor],
    inputs: Sequence[GradientEdge],
    weights: Iterable[Tensor],
) -> tuple[Grads, WeightBackward]:
    """The gradients of `inputs`, and the second part, for the `weights`."""
    after = _reversed([edge.node for edge in outputs])
    toward = _above([edge.node for edge in inputs if edge.node in after], after)
    roots = {edge.node for edge in outputs}
    leaves = {get_gradient_edge(w).node: w for w in weights if w.requires_grad}
    reached = {node: _forks(node, after, toward, roots) for node in leaves if node in after}
    kept: dict[Node, Grads] = {}
    hooks = [
        node.register_prehook(_keep(kept, node))
        for node in {n for forks, _ in reached.values() for n in forks}
    ]
    try:
        got = torch.autograd.grad(outputs, inputs, grads, retain_graph=True, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    groups = []
    for nodes in _connected({node: forks | starts for node, (forks, starts) in reached.items()}):
        forks = {n: kept[n] for node in nodes for n in reached[node][0] if n in kept}
        starts = {n for node in nodes for n in reached[node][1]}
        edges = [
            (GradientEdge(n, i), g)
            for n, given in forks.items()
            for i, g in enumerate(given)
            if g is not None
        ]
        edges += [(edge, g) for edge, g in zip(outputs, grads, strict=True) if edge.node in starts]
        if edges:
            groups.append(
                ([leaves[n] for n in nodes], [e for e, _ in edges], [g for _, g in edges], forks)
            )
    return got, WeightBackward(groups)


def _reversed(roots: Sequence[Node]) -> dict[Node, set[Node]]:
    """Every node below `roots`, with the nodes whose gradients flow into it."""
    after: dict[Node, set[Node]] = {node: set() for node in roots}
    todo = list(after)
    while todo:
        node = todo.pop()
        for below, _ in node.next_functions:
            if below is not None:
                if below not in after:
                    after[below] = set()
                    todo.append(below)
                after[below].add(node)
    return after


def _above(nodes: Iterable[Node], after: dict[Node, set[Node]]) -> set[Node]:
    """`nodes` and all nodes from which gradients flow into them."""
    found = set(nodes)
    todo = list(found)
    while todo:
        more = after[todo.pop()] - found
        found |= more
        todo += more
    return found


def _forks(
    leaf: Node, after: dict[Node, set[Node]], toward: set[Node], roots: set[Node]
) -> tuple[frozenset[Node], frozenset[Node]]:
    """The nodes where paths to `leaf` leave those toward the inputs; and the outputs whose paths to
    `leaf` never were on those."""
    seen, todo, forks = {leaf}, [leaf], set()
    while todo:
        for node in after[todo.pop()] - seen:
            seen.add(node)
            if node in toward:
                forks.add(node)
            else:
                todo.append(node)
    return frozenset(forks), frozenset((seen - toward) & roots)


def _connected(begins: dict[Node, frozenset[Node]]) -> list[list[Node]]:
    """Leaves in groups that share a node at which their paths begin, directly or over other
    leaves."""
    group_of: dict[Node, list[Node]] = {}  # by node at which a path begins
    groups: dict[int, list[Node]] = {}
    for leaf, mine in begins.items():
        joined = [leaf]
        for old in {id(g): g for node in mine if (g := group_of.get(node)) is not None}.values():
            joined += old
            del groups[id(old)]
        groups[id(joined)] = joined
        for other in joined:
            for node in begins[other]:
                group_of[node] = joined
    return list(groups.values())


def _keep(kept: dict[Node, Grads], node: Node) -> Callable[[Any], None]:
    def hook(grads: Grads) -> None:
        kept[node] = tuple(grads)

    return hook


def _replace(given: Grads) -> Callable[[Any], Grads]:
    return lambda grads: given
