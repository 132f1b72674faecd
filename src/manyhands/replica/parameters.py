"""Replica parameters: the protocol by which a replica reaches the flat vectors that it trains.

Two classes fulfil `ReplicaParameters`. `FlatParameters` holds the whole model on this rank. The
parameters of ZeRO hold this rank's slices of one replica that is spread over several ranks; they
exchange gradients themselves, in the window hooks. A replica calls the hooks of either; those of
`FlatParameters` do nothing.

    window    the micro-batches of one step:
              start_window, (before_backward, backward, after_backward)*, end_window
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.core import Tensors

Allocate = Callable[[int, torch.dtype], Tensor]


@dataclass(frozen=True)
class ParameterView:
    """One parameter, or this rank's slice of it, with its views of the flat vectors."""

    name: str
    parameter: nn.Parameter
    value: Tensor
    grad: Tensor
    vector: str  # key of the flat vector
    start: int  # first element in that vector


@dataclass(frozen=True)
class Bucket:
    """Gradient bucket: a run of neighbouring views whose gradients are exchanged together."""

    name: str
    views: tuple[int, ...]  # indices into ReplicaParameters.views
    grad: Tensor


@dataclass(frozen=True)
class ReplicaGroup:
    """The ranks over which one replica is split: a sum over them is a sum over the whole model."""

    sum: Callable[[Tensor], None]  # in place
    # of each view: 1 / how many ranks of the replica hold the same elements
    weights: Sequence[float]
    # tensors by the names of parameters -> those of the whole model, on the first rank
    gather: Callable[[Tensors], Tensors] = dict


class ReplicaParameters(Protocol):
    """Values and gradients of a replica, as flat vectors and as views of single parameters."""

    count: Tensor  # samples behind the gradient, then `used`
    views: list[ParameterView]
    buckets: list[Bucket]
    # whether the parameters have gradient hooks of their own; else the replica copies gradients
    # into `grads`
    collects_gradients: bool

    @property
    def values(self) -> Tensors: ...

    @property
    def grads(self) -> Tensors: ...

    @property
    def used(self) -> Tensor:
        """For each view, how many ranks used the parameter in this window."""
        ...

    @property
    def replica_group(self) -> ReplicaGroup | None:
        """The ranks that hold the slices of these vectors; None: this rank holds them whole."""
        ...

    def shapes(self) -> dict[str, list[tuple[slice, torch.Size]]]:
        """Slices and shapes of the parameters in each vector and in each bucket, by its name."""
        ...

    def holding(self, values: Tensors | None) -> AbstractContextManager[None]:
        """Hold other `values` inside the context; None: keep the current ones."""
        ...

    def start_window(self, overlap: bool) -> None:
        """Before the first forward pass of a step.

        `overlap`: exchange gradients while backward runs.
        """
        ...

    def before_backward(self, last: bool) -> None:
        """Before each micro-batch's backward pass; `last` of this step."""
        ...

    def after_backward(self, ran: bool) -> None:
        """After it; `ran`: this rank had samples."""
        ...

    def end_window(self, total: Tensor, count: int) -> tuple[Tensor, int, list[bool] | None]:
        """Loss sum, count and used parameters of the whole replica, summed over its ranks.

        None: nothing was exchanged, so this rank's own record of used parameters holds.
        """
        ...

    def agree_on_overflow(self, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
        """Make an overflow that one rank of the replica found an overflow of all of them."""
        ...

    def close(self) -> None:
        """Remove all hooks from the module."""
        ...
