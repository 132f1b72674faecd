"""What the gossip rules share: tensors that travel to some ranks while this one goes on, and the mean that comes of it.

    x_i <- x_i - (1 - W_ii) q_i + sum_j W_ij q_j          q: what was sent, as all its readers read it

Without a wire q is x, and this is the mean by W. With one that rounds, what one rank gains another still loses: the sum of all x is
the same as before.
"""

from collections.abc import Callable

import torch

from manyhands.core import EXACT, Group, Replica, Tensors, Work
from manyhands.merge.building_blocks.local_steps import copies
from manyhands.merge.building_blocks.options import Moments
from manyhands.merge.building_blocks.topology import Turn

Mix = Callable[[], None]


def send(group: Group, turn: Turn, values: Tensors) -> Mix:
    """Give `values` as they are now to this turn's takers; `mix` waits for the givers' and mixes all in."""
    sent = copies(values)  # a loop of one's own may change parameters while they travel
    weights = {group.rank: turn.own - 1.0, **dict(turn.givers)}
    inbox = {
        r: {k: torch.empty(x.shape, dtype=x.dtype, device=x.device) for k, x in values.items()}
        for r in weights
    }
    works: list[Work] = []
    for k, x in sent.items():
        give = dict.fromkeys((group.rank, *turn.takers), x)
        works.append(group.transfer(give, {r: theirs[k] for r, theirs in inbox.items()}, k))

    def mix() -> None:
        for work in works:
            work.wait()
        for r, weight in weights.items():
            for k, x in values.items():
                x.add_(inbox[r][k], alpha=weight)

    return mix


def exchange(replica: Replica, group: Group, turn: Turn, moments: Moments) -> Mix:
    """Send the parameters, and what the optimizer remembers where that is to be averaged; a second `mix` does nothing."""
    remembered = (
        {f"{EXACT}{k}": m for k, m in replica.moments.items()} if moments == "average" else {}
    )
    mix = send(group, turn, {**replica.params, **remembered})
    pending = [mix]

    def once() -> None:
        while pending:
            pending.pop()()
            if moments == "reset":
                replica.reset_moments()

    return once


def mean_of_all(replica: Replica, group: Group) -> Tensors:
    mean = copies(replica.params)
    group.all_reduce(mean, op="mean").wait()
    return mean
