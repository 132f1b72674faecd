"""Blocks: the parts of a model whose parameters are gathered together while the part runs.

Blocks are what people write in a ModuleList or Sequential. Parameters that belong to no block, or
to several (tied weights), are the root's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from manyhands.parallel.zero.spans import Named, Span, span

# autocast computes these in the short type, whatever the weight's own type: gathering the weight in
# that type changes no bit
MATRIX_LAYERS = (nn.Linear, nn.modules.conv._ConvNd)


@dataclass(eq=False)
class Block:
    """A module of the model and the spans of its parameters."""

    name: str
    module: nn.Module
    spans: list[Span]
    gathered: bool = False
    uses: int = 0  # forward passes whose backward pass is still to come
    in_backward: bool = False


def find_blocks(module: nn.Module, least_bytes: int) -> list[tuple[str, nn.Module]]:
    """The modules that are blocks: children of lists, and others at the top of at least
    `least_bytes`."""
    found: list[tuple[str, nn.Module]] = []

    def look(prefix: str, parent: nn.Module) -> None:
        for name, child in parent.named_children():
            path = f"{prefix}{name}"
            if not any(True for _ in child.parameters()):
                continue
            listed = isinstance(parent, nn.ModuleList | nn.Sequential | nn.ModuleDict)
            holds_list = any(isinstance(m, nn.ModuleList | nn.Sequential) for m in child.modules())
            if isinstance(child, nn.ModuleList | nn.ModuleDict) or (holds_list and not listed):
                look(f"{path}.", child)
            elif listed or sum(p.nbytes for p in child.parameters()) >= least_bytes:
                found.append((path, child))

    look("", module)
    return found


def blocks(
    module: nn.Module,
    indices: dict[int, int],
    gather_dtype: torch.dtype | None,
    least_bytes: int,
    rank: int,
    size: int,
) -> list[Block]:
    """The root first. `indices` numbers the parameters that train, by identity; frozen ones have
    spans of their own. `gather_dtype`: of float32 weights that only matrix layers use."""
    names = {id(p): n for n, p in module.named_parameters()}
    named = dict(module.named_parameters())
    used_by: dict[int, list[int]] = {}  # parameter -> the blocks that have it
    chosen = find_blocks(module, least_bytes)
    for b, (_, block) in enumerate(chosen):
        for p in block.parameters():
            used_by.setdefault(id(p), []).append(b)
    inside = {id(block) for _, block in chosen}
    outside = {
        id(p) for m in _outside(module, inside) for p in m._parameters.values() if p is not None
    }
    owner = {i: b[0] for i, b in used_by.items() if len(b) == 1 and i not in outside}
    in_matrices = _in_matrices(module) if gather_dtype is not None else set()
    found = []
    for b, (name, block) in [(-1, ("", module)), *enumerate(chosen)]:
        mine = [p for p in named.values() if owner.get(id(p), -1) == b]
        kinds: dict[tuple[bool, torch.dtype, torch.dtype], list[Named]] = {}
        for p in mine:
            short = id(p) in in_matrices and p.dtype == torch.float32
            gathered = gather_dtype if short and gather_dtype is not None else p.dtype
            kinds.setdefault((p.requires_grad, p.dtype, gathered), []).append(
                (indices.get(id(p), -1), names[id(p)], p)
            )
        spans = [
            span(f"{name}:{i}", some, kind[2], rank, size)
            for i, (kind, some) in enumerate(kinds.items())
        ]
        if spans or b < 0:
            found.append(Block(name, block, spans))
    return found


def _outside(module: nn.Module, inside: set[int]) -> Iterator[nn.Module]:
    if id(module) in inside:
        return
    yield module
    for child in module.children():
        yield from _outside(child, inside)


def _in_matrices(module: nn.Module) -> set[int]:
    """Parameters that only matrix layers have."""
    yes = {
        id(p)
        for m in module.modules()
        if isinstance(m, MATRIX_LAYERS)
        for p in m._parameters.values()
        if p is not None
    }
    no = {
        id(p)
        for m in module.modules()
        if not isinstance(m, MATRIX_LAYERS)
        for p in m._parameters.values()
        if p is not None
    }
    return yes - no
