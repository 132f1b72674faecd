"""Balance: straggler=rebalance gives each rank samples by its speed, step for step the same sum.

    own_i    seconds a round of rank i, without waiting, since the last look
    w_i      <-  w_i (median(own) / own_i)^gain,  scaled to a mean of 1, within [LEAST, MOST]

About every five seconds, at a round that all ranks know, they exchange `own` and the first step
that none of them has begun to load; from that step on all split alike, by the same weights. The
gradient stays exact: ranks sum gradients and samples, and divide once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from manyhands.assembly.rank_context import RankContext
from manyhands.core import Event
from manyhands.data.batches import IndexedBatches
from manyhands.split.data import ShareSchedule, share_range
from manyhands.task import Callback

EVERY_S = 5.0
FIRST_ROUNDS = 8
GAIN = 0.7  # damped: part of a round does not depend on the number of samples
WITHIN = 1.15  # slowest over fastest: then they are balanced
LEAST, MOST = 0.125, 2.0  # of an equal share; MOST: what a rank's memory must hold


def balanced(weights: Sequence[float], own_s: Sequence[float]) -> list[float] | None:
    """New weights; None: they are good as they are, or a rank is not known."""
    if min(own_s) <= 0 or max(own_s) <= WITHIN * min(own_s):
        return None
    middle = statistics.median_low(own_s)
    raised = [w * (middle / s) ** GAIN for w, s in zip(weights, own_s, strict=True)]
    for _ in range(4):  # what the bounds cut off goes to the others
        mean = sum(raised) / len(raised)
        raised = [min(MOST, max(LEAST, w / mean)) for w in raised]
    return raised


class Balance(Callback):
    """Called on every rank at the end of every round, after `RoundMarks`."""

    def __init__(self, context: RankContext, shares: ShareSchedule, batches: IndexedBatches):
        self._context, self._shares, self._batches = context, shares, batches
        self._weights = [1.0] * context.data_parallel_size
        self._next: int | None = None
        self._mark = (0, 0.0, 0.0)

    def on_round(self, run: Any, round: int, loss: Tensor) -> None:
        if self._next is None:
            self._next = round + FIRST_ROUNDS
        if round >= self._next:
            self._look(round)

    def _look(self, round: int) -> None:
        context, activity = self._context, self._context.group.activity
        before = self._mark
        self._mark = activity.rounds, activity.rounds_s, activity.waited_s
        rounds, seconds, waited = (now - then for now, then in zip(self._mark, before, strict=True))
        told = torch.zeros(context.data_parallel_size + 2, dtype=torch.float64)
        if rounds:
            told[context.data_parallel_rank] = (seconds - waited) / rounds
        told[-2] = self._batches.drawn
        if context.rank == 0:
            told[-1] = max(1, min(10_000, int(EVERY_S * rounds / max(seconds, 1e-9))))
        told = told.to(context.device)
        context.group.all_reduce({"balance": told}, op="max").wait()
        *own, step, interval = told.tolist()
        self._next = round + int(interval)
        weights = balanced(self._weights, own)
        if weights is not None:
            self._weights = weights
            self._shares.change(int(step), weights)
            self._report(round)

    def _report(self, round: int) -> None:
        if self._context.leads:
            total, ranks = self._batches.total, range(len(self._weights))
            samples = {str(r): float(len(share_range(total, r, self._weights))) for r in ranks}
            event = Event(time.time(), self._context.rank, round, "rebalance", value=samples)
            self._context.recorder.emit(event)
