"""Replica parameters: the protocol by which a replica reaches the flat vectors that it trains.

Two classes fulfil `ReplicaParameters`. `FlatParameters` holds the whole model on this rank. The
parameters of ZeRO hold this rank's slices of one replica that is spread over several ranks; they
exchange gradients themselves, in the window hooks. A replica calls the hooks of either; those of
`FlatParameters` do nothing.

    window    the micro-batches of one step:
              start_window, (before_backward, backward, after_backward)*, end_window

`ParameterStorage` keeps parameters in the flat vectors. `p.data = ...`, `vector_to_parameters` or
`lstm.flatten_parameters()` give a parameter other memory: from then on the model would run with
weights that nobody trains. New values are taken over; what cannot be taken over is refused.
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
from manyhands.errors import TaskError

Allocate = Callable[[int, torch.dtype], Tensor]
DO = "change values in place (p.data.copy_(...), load_state_dict without assign=True)"


@dataclass(frozen=True)
class ParameterView:
    """One parameter, or this rank's slice of it, with its views of the flat vectors."""

    name: str
    parameter: nn.Parameter
    value: Tensor
    grad: Tensor
    vector: str  # key of the flat vector
    start: int  # first element in that vector
    optimizer: str | None = None  # the name of the one that steps it, where there are several


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
    def in_common(self) -> bool:
        """Whether each rank of a host steps the same values, in memory that they share."""
        ...

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

    def take_back(self) -> None:
        """Where user code gave a parameter other memory, take its values over, or refuse it."""
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


@dataclass(frozen=True)
class _Place:
    """Where a parameter lay at the start: in memory, and in the modules that use it."""

    name: str
    parameter: nn.Parameter
    value: Tensor  # its view of a flat vector
    pointer: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    uses: tuple[tuple[dict[str, nn.Parameter | None], str], ...]

    def is_kept(self) -> bool:
        p = self.parameter
        for held, key in self.uses:  # no generator: this runs twice a step for each parameter
            if held.get(key) is not p:
                return False
        return (
            p.data_ptr() == self.pointer
            and p.dtype == self.dtype
            and p.shape == self.shape
            and p.stride() == self.stride
        )


class ParameterStorage:
    """The parameters of a module, each with the `value` in which it lies. `why_fixed`: why other
    memory cannot be taken over; "": it can."""

    def __init__(
        self,
        module: nn.Module,
        named: Sequence[tuple[str, nn.Parameter, Tensor]],
        why_fixed: str = "",
    ):
        uses: dict[int, list[tuple[dict[str, nn.Parameter | None], str]]] = {}
        for part in module.modules():
            for key, p in part._parameters.items():
                uses.setdefault(id(p), []).append((part._parameters, key))
        self._why_fixed = why_fixed
        self._places = [
            _Place(
                name,
                p,
                value,
                value.data_ptr(),
                value.shape,
                value.stride(),
                value.dtype,
                tuple(uses.get(id(p), ())),
            )
            for name, p, value in named
        ]

    def take_back(self) -> None:
        """Make every parameter a view of its flat vector again, with the values it holds now."""
        for place in self._places:
            if not place.is_kept():
                self._restore(place)

    def _restore(self, place: _Place) -> None:
        p, value = place.parameter, place.value
        if any(held.get(key) is not p for held, key in place.uses):
            raise TaskError(
                f"the parameter {place.name} was replaced by another after the start, which the "
                f"optimizer does not know; {DO}, or replace it before the start"
            )
        if (p.dtype, p.shape, p.device) != (value.dtype, value.shape, value.device):
            raise TaskError(
                f"the parameter {place.name} became {_kind(p)} after the start, but the run trains "
                f"it as {_kind(value)}; {DO}, or convert the model before the start"
            )
        if self._why_fixed:
            raise TaskError(
                f"the parameter {place.name} was given other memory after the start (p.data = ..., "
                f"vector_to_parameters), but {self._why_fixed}; {DO}"
            )
        value.copy_(p.data.clone())  # it may be another view of the same memory (p.data.T)
        p.data = value


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device}"
