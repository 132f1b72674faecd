"""Boundaries of rounds: where a rank keeps its state, and leaves for the next membership epoch.

A boundary is kept so often that copying takes about half a hundredth of the time, and not more
often than status is exchanged. Rank 0 says when; the status exchange makes all ranks do it at
the same round.
"""

from __future__ import annotations

import time
from typing import Any

from manyhands.assembly.checkpointing import Checkpointing
from manyhands.assembly.rank_context import RankContext
from manyhands.assembly.regroup.handover import copy_to_next
from manyhands.assembly.regroup.rank_copy import RankCopy
from manyhands.core import Event
from manyhands.launch.elastic.epoch_follower import EpochFollower
from manyhands.membership.rank_epochs import RankEpoch
from manyhands.plan import words
from manyhands.recover.kept_rounds import KeptRounds
from manyhands.train import Trainer
from manyhands.trainer_parts import EpochChange

SHARE = 0.005  # of the time, for copies


class Boundaries:
    """Of one trainer, in one membership epoch."""

    def __init__(self, copy: RankCopy, kept: KeptRounds, follower: EpochFollower, epoch: RankEpoch):
        self._copy, self._kept, self._follower, self._epoch = copy, kept, follower, epoch
        layout = copy.checkpointing.plan.layout
        self._only_replica = layout.data == 1 and layout.size > 1
        self._kept_at, self._cost_s = time.perf_counter(), 0.0

    def pending(self) -> bool:
        """Whether this rank knows of a next epoch."""
        return self._follower.newer(self._epoch)

    def wants_to_keep(self) -> bool:
        return time.perf_counter() - self._kept_at > self._cost_s / SHARE

    def keep(self, round: int) -> None:
        if any(kept == round for _, kept in self._kept.states):
            return  # where the epoch began
        started = time.perf_counter()
        boundary = (self._epoch.number, round)
        self._kept.keep(boundary, *self._copy.read())
        if self._only_replica:
            copy_to_next(self._copy.checkpointing.context, self._kept, boundary)
        self._kept_at = time.perf_counter()
        self._cost_s = self._kept_at - started

    def leave(self, round: int) -> None:
        """All ranks are at this boundary, and know that a next epoch is there."""
        self.keep(round)
        raise EpochChange(f"epoch {self._epoch.number} ends after round {round}")


def follow_epochs(trainer: Trainer, checkpointing: Checkpointing, regrouping: Any) -> bool:
    """Let `trainer` keep boundaries and leave for other epochs. Whether it goes on from one."""
    copy = RankCopy(trainer, checkpointing)
    epoch, begin = regrouping.epoch, regrouping.begin
    if begin is not None:
        copy.write(begin, regrouping.own)
        saved = trainer.done.saved
        if saved > 0 and not checkpointing.context.checkpoints.path(saved).exists():
            trainer.done.saved = -1  # the rank that wrote it died before it was complete
    trainer.boundaries = Boundaries(copy, regrouping.kept, regrouping.follower, epoch)
    if epoch.last:
        trainer.end_here()
    return begin is not None


def announce_regrouped(context: RankContext, round: int) -> None:
    """The run goes on with other ranks than before: who, from where, and how long it stood."""
    regrouping = context.regrouping
    if not context.leads:
        return
    seconds = time.time() - regrouping.since
    again = regrouping.rolled_back
    why = f"{regrouping.epoch.why}; " if regrouping.epoch.why else ""
    text = (
        f"{why}{words.layout_line(context.plan.layout)} from round {round} on "
        f"(epoch {regrouping.epoch.number} of the ranks"
        + (f"; {again} round{'s' * (again != 1)} computed again" if again else "")
        + f"; {seconds:.2f} s)"
    )
    event = Event(time.time() - seconds, 0, round, "regroup", seconds, value=text)
    context.recorder.emit(event)
    context.recorder.flush()
