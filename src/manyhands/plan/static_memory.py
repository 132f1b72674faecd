"""Static memory: parameters, buffers and the state of optimizer and strategy, from shapes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.core import Replica, Strategy
from manyhands.plan.memory_timeline import Cuts, Stages, blocks
from manyhands.split.shard_spec import ShardSpec

# one kernel updates in place: the step needs no more memory
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def guess_stages(module: nn.Module, pipe: int) -> Stages:
    """Stages by size: the parameters in their order, in `pipe` runs of about equal size."""
    sizes = {n: p.nbytes for n, p in module.named_parameters()}
    total, before = max(1, sum(sizes.values())), 0
    found: list[set[str]] = [set() for _ in range(pipe)]
    for name, nbytes in sizes.items():
        found[min(pipe - 1, (before + nbytes // 2) * pipe // total)].add(name)
        before += nbytes
    return tuple(map(frozenset, found))


def guess_cuts(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Tensor-parallel cuts by shape: parameter -> (dim, groups).

    Layers that widen are cut by their outputs, those that narrow by their inputs; of equal ones in
    a module the last is cut by its inputs. Embeddings are cut by their rows. All others
    (convolutions, norms) stay whole.
    """
    found: dict[str, tuple[int, int]] = {}
    for path, layer in module.named_modules():
        start = f"{path}." if path else ""
        if isinstance(layer, nn.MultiheadAttention) and layer.in_proj_weight is not None:
            found |= {
                f"{start}in_proj_weight": (0, 3),
                f"{start}in_proj_bias": (0, 3),
                f"{start}out_proj.weight": (1, 1),
            }
            continue
        if isinstance(layer, nn.Embedding):
            found[f"{start}weight"] = (0, 1)
        pairs = [(n, c) for n, c in layer.named_children() if isinstance(c, nn.Linear)]
        for i, (name, linear) in enumerate(pairs):
            narrows = linear.in_features > linear.out_features or (
                linear.in_features == linear.out_features and i == len(pairs) - 1 > 0
            )
            found[f"{start}{name}.weight"] = (1, 1) if narrows else (0, 1)
            if not narrows:
                found[f"{start}{name}.bias"] = (0, 1)
    known = dict(module.named_parameters())
    return {n: cut for n, cut in found.items() if n in known}


def optimizer_bytes(
    module: nn.Module, optimizer: Optimizer
) -> tuple[dict[str, int], int, tuple[str, ...]]:
    """(optimizer state by parameter, bytes that its step needs besides, notes on assumptions)."""
    names = {id(p): n for n, p in module.named_parameters()}
    held = [
        [p for p in g["params"] if p.requires_grad and id(p) in names]
        for g in optimizer.param_groups
    ]
    room = (
        0
        if type(optimizer) in FUSED
        else 2 * max((p.nbytes for group in held for p in group), default=0)
    )
    known_vectors = getattr(optimizer, "state_vectors", 0), getattr(optimizer, "work_vectors", 0)
    if any(known_vectors):  # it says so itself, as LBFGS does
        sizes = {names[id(p)]: p.nbytes for group in held for p in group}
        kept, work = known_vectors
        return {n: kept * nbytes for n, nbytes in sizes.items()}, work * sum(sizes.values()), ()
    found: dict[str, int] = {}
    for number, group in enumerate(held):
        known: dict[Any, int] = {}  # parameters of one shape are alike
        for p in group:
            key = (p.shape, p.dtype)
            if key not in known:
                try:
                    known[key] = _state_bytes(optimizer, number, torch.empty_like(p, device="meta"))
                except Exception:  # it needs values
                    try:
                        known[key] = _state_bytes(optimizer, number, torch.zeros_like(p))
                    except Exception:
                        note = (
                            f"{type(optimizer).__name__} cannot be tried: "
                            "two numbers a parameter are assumed for its state"
                        )
                        return (
                            {names[id(p)]: 2 * p.nbytes for group in held for p in group},
                            0,
                            (note,),
                        )
            found[names[id(p)]] = known[key]
    return found, room, ()


def _state_bytes(optimizer: Optimizer, group: int, values: Tensor) -> int:
    """Bytes of the optimizer's state for one parameter after one step."""
    p = nn.Parameter(values)
    p.grad = torch.zeros_like(p)
    memo = {
        id(x): nn.Parameter(torch.empty(0)) for g in optimizer.param_groups for x in g["params"]
    }
    twin = copy.deepcopy(optimizer, dict(memo) | {id(optimizer.state): type(optimizer.state)(dict)})
    # the plain version runs on meta tensors
    plain: dict[str, Any] = {
        k: False for k in ("fused", "foreach", "capturable") if k in twin.param_groups[group]
    }
    twin.param_groups = [{**twin.param_groups[group], **plain, "params": [p]}]
    type(optimizer).step(twin)  # not twin.step: a schedule may have wrapped it
    return sum(v.nbytes for v in twin.state.get(p, {}).values() if isinstance(v, Tensor))


def strategy_bytes(strategy: Strategy[Any, Any], trained: Mapping[torch.dtype, int]) -> int:
    """Bytes of a merge strategy's state, by the trained numbers of each dtype."""
    vectors = {
        str(dtype): torch.empty(n, dtype=dtype, device="meta") for dtype, n in trained.items()
    }
    try:
        state = strategy.init(
            cast(Replica, SimpleNamespace(params=vectors, grads=vectors, lr=0.1, moments={}))
        )
    except Exception:
        return 0  # it needs more than shapes
    return sum(v.nbytes for v in state.values())


def tensor_share(name: str, tensor: Tensor, cuts: Cuts, size: int) -> float:
    """The share of a parameter that a rank of the tensor group holds."""
    if name not in cuts or size == 1:
        return 1.0
    dim, groups = cuts[name]
    spec = ShardSpec(name, tuple(tensor.shape), dim, size, 0, groups)
    return spec.local_shape[dim] / max(1, tensor.shape[dim])


def buffer_bytes(module: nn.Module, names: frozenset[str]) -> int:
    """Bytes of the buffers of the layers that own `names`.

    Buffers of layers without parameters may be on any rank, so they are counted.
    """
    owners = {n.rpartition(".")[0] for n in names}
    others = {n.rpartition(".")[0] for n, _ in module.named_parameters()} - owners
    return sum(b.nbytes for n, b in module.named_buffers() if n.rpartition(".")[0] not in others)


def unit_bytes(module: nn.Module, names: frozenset[str], sizes: Mapping[str, int]) -> list[int]:
    """Bytes of the blocks that are gathered and freed as one, and of all other parameters."""
    ids = {id(p): n for n, p in module.named_parameters()}
    of_blocks = [{ids[id(p)] for p in block.parameters()} & names for block in blocks(module)]
    rest = names - frozenset().union(*of_blocks)
    return [sum(sizes[n] for n in unit) for unit in (*of_blocks, rest) if unit] or [0]
