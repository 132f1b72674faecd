"""Random split with a skeleton: which units of a network all ranks hold, and which one rank holds.

    I(u) = sum over edges e at u of |w_e| + c |g_e|
    S    = the q_s most important units of each layer, on all ranks
    R_k  = drawn from the rest of each layer by RNG(seed, draw, k);     rank k holds S and R_k

    a held unit is multiplied by 1 / P(held): 1 in S, (n - |S|) / |R_k| in R_k,
    so that in the mean the network is complete

A unit is an output of a layer whose readers are all known (`replica.units` finds them). Its edges
are a row of that layer, a column of each reader, and the parameters between them. An edge is held
where both of its ends are. Inputs and outputs of the network are no units: they are always held.

Paper: Sun et al. 2017 (arXiv:1709.09393).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.core import Tensors


@dataclass(frozen=True)
class UnitParameter:
    """A parameter in a flat vector, and which of its dimensions are units."""

    name: str
    vector: str
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    # (dimension, layer, consecutive elements of it for one unit)
    sides: tuple[tuple[int, int, int], ...]


class Units:
    """Units of a network in one vector, layer after layer; `sizes`: how many each layer has."""

    def __init__(self, sizes: Sequence[int], parameters: Sequence[UnitParameter]):
        self.sizes, self.parameters = tuple(sizes), tuple(parameters)
        self.total = sum(self.sizes)
        firsts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        self._layers = [
            slice(first, first + n) for first, n in zip(firsts, self.sizes, strict=True)
        ]

    # -- who holds what --

    def skeleton(self, scores: Tensor, share: float) -> Tensor:
        """The most important units of each layer, as a `share` of it; of equals the first."""
        chosen = torch.zeros(self.total, dtype=torch.bool)
        for layer, n in zip(self._layers, self.sizes, strict=True):
            best = scores[layer].cpu().argsort(descending=True, stable=True)[: round(share * n)]
            chosen[layer.start + best] = True
        return chosen

    def explorers(self, core: Tensor, share: float, seed: int, draw: int, ranks: int) -> Tensor:
        """(ranks, units): a `share` of each layer, drawn for each rank from units not in `core`.

        At least one where there is one: a layer of which nothing is held would cut the network."""
        drawn = torch.zeros(ranks, self.total, dtype=torch.bool)
        for rank in range(ranks):
            chance = _generator(seed, draw, rank)
            for layer, n in zip(self._layers, self.sizes, strict=True):
                rest = (~core[layer]).nonzero().flatten() + layer.start
                wanted = max(round(share * n), int(len(rest) == n or share > 0))
                drawn[rank, rest[torch.randperm(len(rest), generator=chance)[:wanted]]] = True
        return drawn

    def disjoint(self, core: Tensor, seed: int, draw: int, ranks: int) -> Tensor:
        """(ranks, units): all units not in `core`, each on one rank.

        A unit is on several ranks only where a layer has fewer units than there are ranks."""
        drawn = torch.zeros(ranks, self.total, dtype=torch.bool)
        chance = _generator(seed, draw, 0)
        for layer in self._layers:
            rest = (~core[layer]).nonzero().flatten() + layer.start
            mixed = rest[torch.randperm(len(rest), generator=chance)]
            for rank in range(ranks if len(mixed) else 0):
                mine = mixed[rank::ranks]
                drawn[rank, mine if len(mine) else mixed[rank % len(mixed)]] = True
        return drawn

    def scales(self, core: Tensor, explorers: Tensor) -> Tensor:
        """1 / P(held) of the units that each rank holds, 0 of the others."""
        scales = core.float() + torch.zeros(explorers.shape)
        for layer in self._layers:
            rest, mine = (~core[layer]).sum(), explorers[:, layer].sum(1, keepdim=True)
            scales[:, layer] += explorers[:, layer] * (rest / mine.clamp(min=1))
        return scales

    # -- from units to elements of flat vectors, and back --

    def sums(self, values: Tensors) -> Tensor:
        """By unit: the sum of |value| over its edges."""
        device = next(iter(values.values())).device
        total = torch.zeros(self.total, dtype=torch.float64, device=device)
        for p in self.parameters:
            view = _view(values[p.vector], p).abs()
            for dim, layer, repeat in p.sides:
                others = [d for d in range(view.ndim) if d != dim]
                along = view.sum(others, dtype=torch.float64) if others else view.double()
                total[self._layers[layer]] += along.view(-1, repeat).sum(1)
        return total

    def holders(self, held: Tensor, weights: Tensor, like: Tensors) -> Tensors:
        """By element: the sum of `weights` over the ranks that hold it.

        All ranks hold what is no edge of a unit."""
        found = {}
        for k, v in like.items():
            wide = torch.promote_types(v.dtype, torch.float32)
            found[k] = weights.to(v.device, wide).sum().expand(v.numel()).clone()
        for p in self.parameters:
            into = _view(found[p.vector], p)
            rows = held.to(into.device, into.dtype)
            ends = [
                rows[:, self._layers[layer]].repeat_interleave(repeat, 1)
                for _, layer, repeat in p.sides
            ]
            ends[0] = ends[0] * weights.to(into.device, into.dtype)[:, None]
            joint = ends[0].sum(0) if len(ends) == 1 else ends[0].T @ ends[1]
            shape = [1] * into.ndim
            for dim, *_ in p.sides:
                shape[dim] = into.shape[dim]
            into.copy_(joint.view(shape).expand(into.shape))
        return found

    def of_parameters(self, values: Tensors) -> Tensors:
        """Views of the parameters with units in flat vectors, by name."""
        return {p.name: _view(values[p.vector], p) for p in self.parameters}


def _view(vector: Tensor, parameter: UnitParameter) -> Tensor:
    return torch.as_strided(
        vector, parameter.shape, parameter.stride, vector.storage_offset() + parameter.start
    )


def _generator(seed: int, draw: int, rank: int) -> torch.Generator:
    # odd multipliers: distinct for any practical number of draws and ranks
    return torch.Generator().manual_seed(
        (seed * 1_000_003 + draw * 7_919 + rank * 104_729 + 1) % (2**63)
    )
