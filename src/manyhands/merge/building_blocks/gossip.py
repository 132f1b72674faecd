"""Gossip exchange: values sent to some ranks while this one computes, then mixed by weights.

    x_i <- x_i - (1 - W_ii) q_i + sum_j W_ij q_j      q: what was sent, as all its readers decode it

Without compression q is x, and this is the mean by W. With one that rounds, what one rank gains
another still loses: the sum of all x keeps its value.
"""

from collections.abc import Callable

import torch

from manyhands.core import EXACT, Group, Replica, Tensors, Work
from manyhands.merge.building_blocks.local_steps import copies
from manyhands.merge.building_blocks.options import Moments
from manyhands.merge.building_blocks.topology import Turn

Mix = Callable[[], None]


def send(group: Group, turn: Turn, values: Tensors) -> Mix:
    """Send `values` as they are now to the recipients; the returned `mix` waits and mixes."""
    sent = copies(values)  # a user's own loop may change parameters while they are sent
    weights = {group.rank: turn.own - 1.0, **dict(turn.senders)}
    inbox = {
        r: {k: torch.empty(x.shape, dtype=x.dtype, device=x.device) for k, x in values.items()}
        for r in weights
    }
    works: list[Work] = []
    for k, x in sent.items():
        give = dict.fromkeys((group.rank, *turn.recipients), x)
        works.append(group.transfer(give, {r: theirs[k] for r, theirs in inbox.items()}, k))

    def mix() -> None:
        for work in works:
            work.wait()
        for r, weight in weights.items():
            for k, x in values.items():
                x.add_(inbox[r][k], alpha=weight)

    return mix


def exchange(replica: Replica, group: Group, turn: Turn, moments: Moments) -> Mix:
    """Send the parameters and, to be averaged, the optimizer state; a second `mix` does nothing."""
    averaged = replica.moments if moments == "average" else {}
    mix = send(group, turn, {**replica.params, **{f"{EXACT}{k}": m for k, m in averaged.items()}})
    pending = [mix]

    def once() -> None:
        while pending:
            pending.pop()()
            if moments == "reset":
                replica.reset_moments()

    return once


def mean_of_all(replica: Replica, group: Group) -> Tensors:
    """The mean of all replicas, which gossip strategies evaluate and save."""
    mean = copies(replica.params)
    group.all_reduce(mean, op="mean").wait()
    return mean
