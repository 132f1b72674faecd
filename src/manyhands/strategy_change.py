"""Change of strategy: from one merge strategy of a run to the next, at a round that all ranks know.

All replicas go on from their consensus, with the mean of their optimizers' moments.
"""

from __future__ import annotations

from typing import Protocol

from manyhands.core import LoopReplica
from manyhands.trainer_parts import ActiveStrategy, LoopContext, StrategyChange


class ChangingTrainer(Protocol):
    """What is needed of a trainer here."""

    context: LoopContext
    active: ActiveStrategy
    replica: LoopReplica
    change: StrategyChange | None

    def known(self) -> dict[str, float]: ...
    def share_status(self) -> None: ...
    def notice(self, text: str) -> None: ...


def change_when_due(trainer: ChangingTrainer) -> None:
    change = trainer.change
    if change is not None and change.at.reached(trainer.known()):
        _change(trainer, change)


def _change(trainer: ChangingTrainer, change: StrategyChange) -> None:
    group = trainer.context.data_group
    model = trainer.active.consensus(trainer.replica, group)
    if model is not None:
        trainer.replica.load(model)
    if not trainer.active.strategy.replicas_agree:
        group.all_reduce(trainer.replica.moments, op="mean").wait()
    trainer.share_status()  # what was measured under the old strategy is read before it goes
    trainer.active, trainer.change = change.make(), None
    trainer.notice(f"{trainer.active.name} from here on: {change.at} is reached")
