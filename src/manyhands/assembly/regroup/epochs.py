"""Epochs of a process: from one group of ranks to the next, with the state that it has kept.

wait for an epoch that has a seat for this process
wait for its other members, and agree on the newest boundary that all have kept
connect; ranks without state get it from a peer
train, until the run ends, a rank is lost, or a planned epoch begins at a boundary
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from manyhands.assembly.rank_context import Options, RankContext, open_rank_context
from manyhands.assembly.regroup.handover import hand_over, parts_of
from manyhands.core import Plan, ProcessInfo
from manyhands.errors import PeerLost
from manyhands.exchange.interruption import Interruption
from manyhands.launch import environment
from manyhands.launch.elastic.epoch_follower import EpochFollower
from manyhands.launch.elastic.worker_replacements import tell
from manyhands.membership.rank_epochs import RankEpoch
from manyhands.recover.kept_rounds import Held, KeptRounds, KeptState, choose
from manyhands.trainer_parts import EpochChange

NEXT_S = 60.0  # after a loss: for the launcher to say how the run goes on

Train = Callable[[RankContext], dict[str, Any]]


@dataclass
class Regrouping:
    """What a rank context knows of the membership epoch that it was made for."""

    follower: EpochFollower
    epoch: RankEpoch
    kept: KeptRounds
    begin: KeptState | None = None  # where its trainer goes on; None: at the start of the run
    own: bool = True  # whether `begin` was kept by this rank
    rolled_back: int = 0  # rounds that this rank computes again
    since: float = field(default_factory=time.time)  # when the epoch before ended here


class Epochs:
    def __init__(self, plan: Plan, here: ProcessInfo, store: dist.Store, options: Options):
        member = environment.member()
        assert member is not None
        self.plan, self.here, self.store, self.options = plan, here, store, options
        self.follower = EpochFollower(member, here, store)
        self.kept = KeptRounds()
        self._round = 0  # that this rank had reached
        self._since = time.time()

    def run(self, note: dict[str, Any], train: Train) -> dict[str, Any]:
        """The result of the run; {}: this process was not needed any more."""
        number = 0
        self.follower.ready(note)
        try:
            while (epoch := self.follower.next(number)) is not None:
                number = epoch.number
                if (result := self._one(epoch, train)) is not None:
                    return result
            return {}
        finally:
            self.follower.close()

    def _one(self, epoch: RankEpoch, train: Train) -> dict[str, Any] | None:
        """Train in one epoch; None: it is over, and the run is not."""
        rank, size = epoch.members.index(self.follower.member), len(epoch.members)
        held = self.follower.all_here(epoch, self.kept.held())
        if held is None:
            return None
        environment.become(rank, size)
        process = dataclasses.replace(self.here, rank=rank, size=size)
        layout = dataclasses.replace(self.plan.layout, data=epoch.data)
        plan = dataclasses.replace(self.plan, layout=layout)
        store = dist.PrefixStore(f"epoch/{epoch.number}", self.store)
        interruption = Interruption()
        # others may have left for a later epoch already, also for a planned one
        self.follower.interrupt_by(interruption.set, epoch, planned=True)
        context: RankContext | None = None
        try:
            context = open_rank_context(plan, process, store, self.options, interruption)
            context.regrouping = self._begin(context, epoch, held)
            self.follower.interrupt_by(interruption.set, epoch)
            return train(context)
        except (PeerLost, EpochChange) as e:
            self._left(epoch, e)
            return None
        finally:
            if context is not None:
                self._round = context.group.round
            self.follower.interrupt_by(None, epoch)
            interruption.clear()
            if context is not None:
                context.close()

    def _begin(
        self,
        context: RankContext,
        epoch: RankEpoch,
        held: dict[int, Held],
    ) -> Regrouping:
        found = Regrouping(self.follower, epoch, self.kept, since=self._since)
        inner, part = parts_of(context).values()
        choice = choose([held[m] for m in epoch.members], inner)
        if choice is None:
            self.kept.start_anew(epoch.number, part)
            # all that was kept died, or a part of it: only a checkpoint is left
            resume = context.options.resume or epoch.number > 1
            context.options = dataclasses.replace(context.options, resume=resume)
            return found
        found.begin = hand_over(context, self.kept, choice)
        found.own = context.rank not in choice.sources
        round = choice.boundary[1]
        found.rolled_back = max(0, self._round - round) if found.own else 0
        self.kept.go_on(epoch.number, choice.boundary, part, found.begin)
        return found

    def _left(self, epoch: RankEpoch, why: PeerLost | EpochChange) -> None:
        """After a loss the launcher publishes another epoch; where it has seen no process end, it
        is asked to."""
        self._since = time.time()
        if isinstance(why, EpochChange):
            return
        deadline = time.monotonic() + NEXT_S
        asked = False
        while not self.follower.newer(epoch):
            if not asked and time.monotonic() > deadline - NEXT_S + 1.0:
                asked = True
                tell(self.store, f"epoch/{epoch.number}/broken/{self.follower.member}", str(why))
            if time.monotonic() > deadline:
                raise why
            time.sleep(0.01)
