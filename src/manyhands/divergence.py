"""Divergence: losses and parameters that became NaN or infinite, and the errors that say so."""

from __future__ import annotations

from typing import Protocol

import torch

from manyhands.core import LoopReplica, Position
from manyhands.errors import Diverged, NotFinite
from manyhands.limits import Limits
from manyhands.trainer_parts import CheckpointWriter, LoopContext, MeteredGroup


class Training(Protocol):
    """What is needed of a trainer here."""

    context: LoopContext
    replica: LoopReplica
    limits: Limits
    checkpoints: CheckpointWriter
    round: int

    @property
    def group(self) -> MeteredGroup: ...
    @property
    def position(self) -> Position: ...


def diverged(trainer: Training, rounds: list[float]) -> None:
    """`rounds`: by rank, the first round whose loss was not finite; 0: none."""
    rank = min((r for r in range(len(rounds)) if rounds[r]), key=lambda r: rounds[r])
    trainer.checkpoints.last_good()  # rank 0 waits for a save under way; then all know the last
    trainer.group.barrier()
    raise Diverged(
        f"the loss of rank {rank} became NaN or infinite at round {int(rounds[rank])} "
        f"(epoch {trainer.limits.epochs_at(trainer.position):.2f}); {last_good(trainer)}; "
        "lower the learning rate, clip gradients (clip=1.0) or look at the data of that rank"
    )


def refuse_nan(trainer: Training) -> None:
    """A gradient can be NaN though the loss was finite; such a model is never saved."""
    found = [(~v.isfinite()).any().float() for v in trainer.replica.params.values()]
    bad = torch.stack([torch.zeros((), device=trainer.context.device), *found]).max().view(1)
    trainer.group.all_reduce({"bad": bad}, op="max").wait()
    if float(bad) > 0:
        raise Diverged(
            f"parameters became NaN or infinite by round {trainer.round} "
            f"(epoch {trainer.limits.epochs_at(trainer.position):.2f}), though the loss was "
            f"finite; {last_good(trainer)}; clip gradients (clip=1.0) "
            "or look for a division by zero in backward"
        )


def refused(trainer: Training, error: NotFinite, round: int) -> Diverged:
    return Diverged(f"rank {trainer.group.rank}, round {round}: {error}; {last_good(trainer)}")


def last_good(trainer: Training) -> str:
    good = trainer.checkpoints.last_good()
    return f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"
