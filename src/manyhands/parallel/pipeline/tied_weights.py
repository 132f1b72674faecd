"""Tied weights: parameters that stages on several ranks hold get the sum of their gradients.

Every rank adds the gradients in the order of ranks, so all copies get the same bits and stay equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import nn

from manyhands.core import Group


class TiedWeights:
    """`held`: the modules of this rank, each with the names of its tied parameters and the stages
    that hold them. Stage k is on rank k mod the group's size."""

    def __init__(self, held: Sequence[tuple[nn.Module, Mapping[str, Sequence[int]]]], group: Group):
        self._held, self._group = held, group

    @cached_property
    def _weights(self) -> list[tuple[nn.Parameter, list[int]]]:
        """Weights of this rank that other ranks hold too, and all ranks that do, in the same order
        everywhere."""
        found: dict[str, tuple[nn.Parameter, list[int]]] = {}
        for module, tied in self._held:
            own = dict(module.named_parameters(remove_duplicate=False)) if tied else {}
            for name, stages in tied.items():
                if len(ranks := sorted({s % self._group.size for s in stages})) > 1:
                    found[name] = (own[name], ranks)
        return [found[name] for name in sorted(found)]

    def sum(self) -> None:
        """Replace the gradients of the step by their sums over ranks. They must be of this step
        alone (the gradient window starts each without any), or sums would be summed again."""
        me, under_way = self._group.rank, []
        for weight, ranks in self._weights:
            own = torch.zeros(weight.numel() + 1, dtype=weight.dtype, device=weight.device)
            if weight.grad is not None:
                own[:-1].copy_(weight.grad.reshape(-1))
                own[-1] = 1  # the sum stays 0 where no rank has a gradient
            got = {r: torch.empty_like(own) for r in ranks if r != me}
            work = self._group.transfer(dict.fromkeys(got, own), got)
            under_way.append((weight, {**got, me: own}, ranks, work))
        for weight, by_rank, ranks, work in under_way:
            work.wait()
            total = by_rank[ranks[0]].clone()
            for r in ranks[1:]:
                total += by_rank[r]
            if total[-1]:
                weight.grad = total[:-1].view(weight.shape)
