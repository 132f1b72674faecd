"""Merged model: for a while the replica holds the one model that all replicas stand for.

    shown        what callbacks average or have kept (EMA), where there is such a model
    consensus    of the strategy, where replicas differ
    itself       where they are equal

Rows on servers and parameters in common are what all ranks have made of them, until all are
through.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from manyhands.callbacks.model_copy import held
from manyhands.callbacks.shown_model import ShownModel
from manyhands.core import LoopReplica, Tensors
from manyhands.trainer_parts import (
    ActiveStrategy,
    Evaluator,
    LoopContext,
    MeteredGroup,
    PushedTables,
)


class MergingTrainer(Protocol):
    """What is needed of a trainer here."""

    context: LoopContext
    active: ActiveStrategy
    replica: LoopReplica
    evaluator: Evaluator
    tables: PushedTables | None
    shown: ShownModel

    @property
    def group(self) -> MeteredGroup: ...
    def flush_pushes(self) -> None: ...


@contextmanager
def merged(trainer: MergingTrainer) -> Iterator[None]:
    """Every rank calls it."""
    _push_barrier(trainer)
    trainer.shown.advance(trainer)
    with _holding(trainer):
        yield
    _push_barrier(trainer)


def consensus(trainer: MergingTrainer) -> Tensors | None:
    """The model that all replicas stand for; None: each holds it."""
    model = trainer.active.consensus(trainer.replica, trainer.context.data_group)
    if model is None and trainer.replica.in_block:  # asked for in the middle of local steps
        model = {k: v.clone() for k, v in trainer.replica.params.items()}
        trainer.context.data_group.all_reduce(model, op="mean").wait()
    return model


def _holding(trainer: MergingTrainer) -> Any:
    trainer.evaluator.average_buffers()
    if (copy := trainer.shown.copy) is not None:
        return held(copy, trainer.replica, trainer.group)
    return trainer.replica.holding(consensus(trainer))


def _push_barrier(trainer: MergingTrainer) -> None:
    trainer.flush_pushes()
    if trainer.tables is not None or trainer.active.strategy.shares_parameters:
        trainer.group.barrier()
