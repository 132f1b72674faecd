"""Model copy: parameters and buffers of a model, kept beside the one that trains.

Ranks of a host may share one copy of the parameters, so a swap is made by all ranks together, with
barriers: each writes the same values, while no rank reads or trains.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from manyhands.core import Group, LoopReplica, Tensors
from manyhands.errors import TaskError


@dataclass
class ModelCopy:
    """Copy of a model."""

    params: Tensors  # the replica's flat vectors
    buffers: Tensors = field(default_factory=dict)  # by name; without: those of the model


def refuse_apart(run: Any, what: str) -> None:
    """Refuse `what`, which copies a model, where no rank has the whole of it in its memory."""
    trainer = run.trainer
    instead = "leave it out (best=... keeps the best checkpoint under every plan)"
    if trainer.context.splits_model:
        raise TaskError(
            f"the callback {what} copies the whole model, which shard=, tensor= and pipe= split "
            f"over ranks; use data= alone, or {instead}"
        )
    if trainer.tables is not None:
        raise TaskError(
            f"the callback {what} copies the model of this rank, but parameters or rows of mh."
            f"Embedding are on servers, or in tables; use merge=all_reduce or local_sgd, or "
            f"{instead}"
        )


@contextmanager
def held(copy: ModelCopy, replica: LoopReplica, group: Group) -> Iterator[None]:
    """The replica holds the parameters of a copy inside; every rank calls it."""
    own = {k: v.clone() for k, v in replica.params.items()}
    write(copy.params, replica, group)
    try:
        yield
    finally:
        write(own, replica, group)


@torch.no_grad()
def write(params: Tensors, replica: LoopReplica, group: Group) -> None:
    """Copy parameters into those of the replica; every rank calls it, with the same values."""
    group.barrier()
    replica.load(params)
    group.barrier()
