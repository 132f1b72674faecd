"""Round marks: a callback that tells the watcher of every round's end, and of this rank's batches.

Its `on_round` is in the path of every round, so it is attribute writes and one look at the clock.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from manyhands.assembly.culprits.balance import Balance
from manyhands.assembly.data import Feed
from manyhands.assembly.rank_context import RankContext
from manyhands.assembly.spec import TrainingSpec
from manyhands.data.batches import IndexedBatches
from manyhands.task import Callback


def watching(context: RankContext, spec: TrainingSpec, feed: Feed) -> tuple[Callback, ...]:
    """The callbacks by which a run is watched, where others could wait for this rank."""
    if context.watcher is None:
        return ()
    context.watcher.own.batches = feed.batches
    # a loop of the user's may evaluate, draw or write among its steps
    context.watcher.own.patient = context.plan.compile or spec.task is None
    if feed.shares is None:
        return (RoundMarks(context),)
    assert isinstance(feed.indexed, IndexedBatches)
    return RoundMarks(context), Balance(context, feed.shares, feed.indexed)


class RoundMarks(Callback):
    def __init__(self, context: RankContext):
        self._context = context

    def on_round(self, run: Any, round: int, loss: Tensor) -> None:
        group = self._context.group
        group.activity.end_round(round, group.totals.seconds)
