"""Tied weights: the gradients of one step, summed over the ranks that hold a weight."""

from __future__ import annotations

import torch
from torch import nn

from manyhands.core import Group
from manyhands.exchange.inproc import World
from manyhands.parallel.pipeline.tied_weights import TiedWeights


def test_each_step_sums_its_own_gradients_over_the_ranks_that_hold_the_weight() -> None:
    def main(group: Group) -> list[list[float]]:
        module = nn.Linear(2, 1, bias=False)
        tied = TiedWeights([(module, {"weight": [0, 2]} if group.rank != 1 else {})], group)
        found = []
        for step in (1, 2):  # as the gradient window does: without a gradient at first
            module.weight.grad = torch.full((1, 2), float(10**step * (group.rank + 1)))
            tied.sum()
            found.append(module.weight.grad.view(-1).tolist())
        return found

    both = [[40.0, 40.0], [400.0, 400.0]]
    assert World(3).run(main) == [both, [[20.0, 20.0], [200.0, 200.0]], both]
