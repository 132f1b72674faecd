"""Local steps: a block of steps without exchange, the mean update after it, and optimizer state."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from manyhands.core import EXACT, Group, Replica, Tensors
from manyhands.merge.building_blocks.options import Moments


def copies(values: Mapping[str, Tensor]) -> Tensors:
    return {k: v.detach().clone() for k, v in values.items()}


def local_steps(
    replica: Replica, period: int, before_step: Callable[[], None] = lambda: None
) -> tuple[Tensor, int]:
    """Up to `period` steps of this replica alone; the mean loss and the samples behind it."""
    total, samples = torch.zeros((), device=replica.count.device), 0
    for _ in replica.steps(period):
        loss = replica.backward()
        total = total + loss * replica.own_count
        samples += replica.own_count
        before_step()
        replica.step()
    return total / max(samples, 1), samples


def average_updates(replica: Replica, group: Group, start: Tensors, samples: int) -> None:
    """x_i <- sum_j (n_j / n) (x_j - start): leaves the mean update in `params`, equal on all ranks.

    In place, because a group may reduce the parameters' own memory without a copy. Updates are
    sent instead of models, so that compression may round them or send a part of them.
    """
    share = _share(replica, group, samples)
    for k, x in replica.params.items():
        x.sub_(start[k])
        if group.size > 1:
            x.mul_(share)
    group.all_reduce(replica.params).wait()


def settle_moments(replica: Replica, group: Group, how: Moments, samples: int) -> None:
    """After a merge: keep the optimizer's state, average it like the parameters, or reset it."""
    if how == "reset":
        replica.reset_moments()
    elif how == "average" and group.size > 1:
        share, moments = _share(replica, group, samples), replica.moments
        for m in moments.values():
            m.mul_(share)
        group.all_reduce({f"{EXACT}{k}": m for k, m in moments.items()}).wait()


def _share(replica: Replica, group: Group, samples: int) -> Tensor:
    """n_i / sum_j n_j; 0 without samples.

    Computed before the values are sent, so that a weighted value keeps the size of an update.
    """
    total = torch.tensor([samples], dtype=torch.float64, device=replica.count.device)
    group.all_reduce({"weight": total}).wait()
    return (samples / total.clamp(min=1.0))[0]
