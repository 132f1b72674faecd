"""What the gossip rules share: tensors that travel to some ranks while this one goes on, and the mean that comes of it.

x_i <- W_ii x_i + sum_j W_ij x_j
"""

from collections.abc import Callable

import torch

from manyhands.core import EXACT, Group, Replica, Tensors, Work
from manyhands.merge.parts import Moments, copies
from manyhands.merge.topology import Turn

Mix = Callable[[], None]


def send(link: Group, turn: Turn, values: Tensors) -> Mix:
    """Give `values` to this turn's takers. They must not change before `mix`, which waits for the givers' and mixes all in."""
    inbox = [{k: torch.empty(x.shape, dtype=x.dtype, device=x.device) for k, x in values.items()} for _ in turn.givers]
    works: list[Work] = []
    for k, x in values.items():
        give = dict.fromkeys(turn.takers, x.detach().contiguous())
        works.append(link.transfer(give, {j: theirs[k] for (j, _), theirs in zip(turn.givers, inbox, strict=True)}, k))

    def mix() -> None:
        for work in works:
            work.wait()
        for k, x in values.items():
            if turn.givers:
                _weigh(x, turn, [theirs[k] for theirs in inbox])

    return mix


def exchange(replica: Replica, link: Group, turn: Turn, moments: Moments) -> Mix:
    """Send the parameters, and what the optimizer remembers where that is to be averaged; a second `mix` does nothing."""
    remembered = {f"{EXACT}{k}": m for k, m in replica.moments.items()} if moments == "average" else {}
    mix = send(link, turn, {**replica.params, **remembered})
    pending = [mix]

    def once() -> None:
        while pending:
            pending.pop()()
            if moments == "reset":
                replica.reset_moments()

    return once


def mean_of_all(replica: Replica, link: Group) -> Tensors:
    mean = copies(replica.params)
    link.all_reduce(mean, op="mean").wait()
    return mean


def _weigh(x: torch.Tensor, turn: Turn, theirs: list[torch.Tensor]) -> None:
    weights = [weight for _, weight in turn.givers]
    if turn.own == 0.5 and weights == [0.5]:
        x.add_(theirs[0]).mul_(0.5)  # the same bits at both ends of a pair: what one gains the other loses
        return
    x.mul_(turn.own)
    for weight, value in zip(weights, theirs, strict=True):
        x.add_(value, alpha=weight)
