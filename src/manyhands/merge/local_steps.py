"""What several rules do alike: a block of local steps, the mean of where replicas went, what becomes of optimizer state, and
how hard an elastic centre may be pulled at."""

from collections.abc import Callable, Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from manyhands.core import (
    EXACT,
    Group,
    Replica,
    Store,
    Tensors,
)
from manyhands.errors import PlanError

Moments = Literal["keep", "average", "reset"]
BETA = 0.9  # of elastic averaging: what all replicas together pull at the centre with


def need(holds: bool, given: str, needed: str) -> None:
    """Refuse an option in the words of the plan; write the condition so that NaN fails it."""
    if not holds:
        raise PlanError(f"merge.{given}: {needed}")


def check_block(period: int, moments: str) -> None:
    need(
        period >= 1,
        f"period={period}",
        "at least 1 local step is needed between two merges; set merge.period=1 or more",
    )
    need(
        moments in get_args(Moments),
        f"moments={moments}",
        f"one of {', '.join(get_args(Moments))} is needed",
    )


def check_alpha(beta: float, alpha: float | None) -> None:
    need(0 < beta < 2, f"beta={beta}", "more than 0 and less than 2 is needed; 0.9 is usual")
    if alpha is not None:
        need(
            0 < alpha < 1,
            f"alpha={alpha}",
            "more than 0 and less than 2 / (ranks + 1) is needed; 0.9 / ranks is usual",
        )
        need(
            beta == BETA,
            f"beta={beta}",
            f"has no effect beside merge.alpha={alpha}; leave one of them out",
        )


def check_stable(beta: float, alpha: float | None, size: int, when: str = "") -> None:
    a, bound = alpha_of(beta, alpha, size), 2 / (size + 1)
    given = (
        f"alpha={a:g}" if alpha is not None else f"beta={beta:g}, so alpha = beta / {size} = {a:g}"
    )
    need(
        0 < a < bound,
        given,
        f"{when}the centre is stable for 0 < alpha < 2 / ({size} + 1) = {bound:g}; set merge.alpha={BETA / size:g}",
    )


def alpha_of(beta: float, alpha: float | None, size: int) -> float:
    """alpha, where it is not given beta / M."""
    return beta / size if alpha is None else alpha


def copies(values: Mapping[str, Tensor]) -> Tensors:
    return {k: v.detach().clone() for k, v in values.items()}


def local_steps(
    replica: Replica, period: int, before_step: Callable[[], None] = lambda: None
) -> tuple[Tensor, int]:
    """Up to `period` steps of this replica alone: the mean loss over their samples, and how many those were."""
    total, samples = torch.zeros((), device=replica.count.device), 0
    for _ in replica.steps(period):
        loss = replica.backward()
        total = total + loss * replica.own_count
        samples += replica.own_count
        before_step()
        replica.step()
    return total / max(samples, 1), samples


def average_updates(replica: Replica, link: Group, start: Tensors, samples: int) -> None:
    """x_i <- sum_j (n_j / n) (x_j - start): the mean update, with the same bits on every rank, where the parameters were.

    In place, because the link may reach the parameters' own memory without a copy. What travels is an update and not a model,
    so a wire may round it or send a part of it."""
    share = _share(replica, link, samples)
    for k, x in replica.params.items():
        x.sub_(start[k])
        if link.size > 1:
            x.mul_(share)
    link.all_reduce(replica.params).wait()


def settle_moments(replica: Replica, link: Group, how: Moments, samples: int) -> None:
    """What the optimizer remembers of its own path, once the path is left: kept, averaged like the parameters, or forgotten."""
    if how == "reset":
        replica.reset_moments()
    elif how == "average" and link.size > 1:
        share, moments = _share(replica, link, samples), replica.moments
        for m in moments.values():
            m.mul_(share)
        link.all_reduce({f"{EXACT}{k}": m for k, m in moments.items()}).wait()


def all_of(replica: Replica, link: Store) -> Tensors:
    """The model as it stands on the servers, with all that this rank pushed."""
    link.flush()
    return link.pull(replica.rows())


def _share(replica: Replica, link: Group, samples: int) -> Tensor:
    """n_i / sum_j n_j; 0 without samples. Asked for beforehand, so that what it weighs keeps the size of an update."""
    total = torch.tensor([samples], dtype=torch.float64, device=replica.count.device)
    link.all_reduce({"weight": total}).wait()
    return (samples / total.clamp(min=1.0))[0]
