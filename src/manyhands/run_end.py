"""End of a run: the model that it leaves, and its last checkpoint."""

from __future__ import annotations

from typing import Protocol

import torch

from manyhands import divergence
from manyhands.callbacks.shown_model import ShownModel
from manyhands.errors import CheckpointError, PeerLost
from manyhands.trainer_parts import Evaluator, Milestones


class EndingTrainer(divergence.Training, Protocol):
    """What is needed of a trainer here."""

    done: Milestones
    metrics: dict[str, float]
    evaluator: Evaluator
    shown: ShownModel

    def checkpoint(self) -> None: ...


def save_last(trainer: EndingTrainer, cut: bool) -> None:
    """A run whose last state is not on disk has failed, though its training has not. `cut`: by a
    signal; who resumes it goes on from the last model, not the best."""
    best = None if cut else trainer.shown.end()  # of a callback that has kept it
    if best is not None:
        trainer.metrics = best
        trainer.done.saved = -1  # the checkpoint of this round, if there is one, has another model
        trainer.done.evaluated = trainer.round
    if trainer.limits.save_every is not None and trainer.done.saved != trainer.round:
        trainer.checkpoint()
    _check_saved(trainer)


def _check_saved(trainer: EndingTrainer) -> None:
    why = trainer.checkpoints.last_failure()
    failed = torch.tensor([float(bool(why))], device=trainer.context.device)
    trainer.group.all_reduce({"failed": failed}, op="max").wait()
    if trainer.checkpoints.writer_lost():  # it died before the file was complete
        trainer.checkpoint()
        return _check_saved(trainer)
    text = f"training ended at round {trainer.round}, but its last checkpoint could not be saved"
    if why:
        raise CheckpointError(
            f"{text} ({why}); {divergence.last_good(trainer)}; make room and --resume"
        )
    if failed:  # another rank knows the reason; the launcher reports that one
        raise PeerLost(text)


def leave_shown(trainer: EndingTrainer) -> None:
    """The replica holds the model that was shown, from here on."""
    trainer.shown.leave(trainer.replica, trainer.evaluator, trainer.group)
