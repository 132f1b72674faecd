"""Steps due: how many steps of a schedule have been reached, by the position of the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from manyhands.assembly.data import Feed, claiming_word, shares_steps
from manyhands.assembly.rank_context import RankContext
from manyhands.assembly.resume import Start
from manyhands.core import Plan


@dataclass(frozen=True)
class StepsDue:
    """Of a replica's schedule."""

    at: Callable[[], int] | None = None  # how many are due now; None: one after each step
    made: int = 0  # before
    by_epoch: bool = False
    most: int | None = None  # of a schedule that was told the total; None: no end


def steps_due(
    context: RankContext, begin: Start, feed: Feed, by: str, total: int | None
) -> StepsDue:
    size, at = context.data_parallel_size, begin.position
    regrouping = context.regrouping
    goes_on = begin.saved is not None or (regrouping is not None and regrouping.begin is not None)
    if by == "step":
        made = at.steps // (size if feed.claims else 1)
        return StepsDue(_by_step(begin.plan, feed, size), made if goes_on else 0, most=total)
    if by == "epoch":
        made = at.epoch if goes_on else 0
        return StepsDue(_by_epoch(feed), made, by_epoch=True, most=total)
    return StepsDue(lambda: 0)  # an evaluation steps it


def _by_step(plan: Plan, feed: Feed, size: int) -> Callable[[], int] | None:
    limits, batches, claims = feed.limits, feed.batches, feed.claims
    if claims is not None and shares_steps(plan):
        return lambda: claims.latest.steps // size
    if claiming_word(plan) and claims is None:
        # ranks that claim parts of steps, maybe only for a while: by the step of the run
        return lambda: (limits.claims.latest if limits.claims else batches.position).steps
    return None


def _by_epoch(feed: Feed) -> Callable[[], int]:
    """Epochs that are over, also in the middle of a block of local steps."""
    limits, batches = feed.limits, feed.batches
    return lambda: (limits.claims.latest if limits.claims else batches.position).epoch
