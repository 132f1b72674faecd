"""Replica wrapper: forwards every member of the replica protocols to the replica inside.

Subclasses override what they change: `CapturedReplica`, `StudentReplica`, `ThinnedReplica`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from torch import Tensor

from manyhands.core import LineSearch, OnReady, Tensors
from manyhands.replica.module import ModuleReplica
from manyhands.replica.parameters import ReplicaGroup, ReplicaParameters
from manyhands.replica.several_optimizers.named_losses import NamedLosses

if TYPE_CHECKING:
    from manyhands.core import (
        CommonReplica,
        GradientReplica,
        LoopReplica,
        PartialStepReplica,
        ServedReplica,
        Student,
    )
    from manyhands.replica.distillation import StudentReplica
    from manyhands.replica.thinned import ThinnedStudent


class ReplicaWrapper:
    """`inner` may be a wrapper too; `module_replica` is the innermost one."""

    def __init__(self, inner: ModuleReplica | ReplicaWrapper):
        self.inner = inner
        self.module_replica: ModuleReplica = (
            inner.module_replica if isinstance(inner, ReplicaWrapper) else inner
        )

    @property
    def flat(self) -> ReplicaParameters:
        return self.module_replica.flat

    @property
    def replica_group(self) -> ReplicaGroup | None:
        return self.module_replica.replica_group

    # -- Replica --

    @property
    def params(self) -> Tensors:
        return self.inner.params

    @property
    def count(self) -> Tensor:
        return self.inner.count

    @property
    def own_count(self) -> int:
        return self.inner.own_count

    @property
    def lr(self) -> float:
        return self.inner.lr

    @property
    def moments(self) -> Tensors:
        return self.inner.moments

    def reset_moments(self) -> None:
        self.inner.reset_moments()

    def steps(self, most: int) -> Iterator[int]:
        return self.inner.steps(most)

    def backward(self, on_ready: OnReady | None = None) -> Tensor:
        return self.inner.backward(on_ready)

    def step(self) -> None:
        self.inner.step()

    # -- GradientReplica --

    @property
    def grads(self) -> Tensors:
        return self.inner.grads

    @property
    def scale(self) -> Tensor:
        return self.inner.scale

    # -- PartialStepReplica --

    @property
    def updates_slice(self) -> bool:
        return self.inner.updates_slice

    def square_norm(self) -> Tensor | None:
        return self.inner.square_norm()

    @property
    def line_search(self) -> LineSearch | None:
        return self.inner.line_search

    # -- CommonReplica --

    @property
    def in_common(self) -> bool:
        return self.inner.in_common

    # -- ServedReplica --

    def gradient(self) -> Tensors:
        return self.inner.gradient()

    def stepped(self) -> None:
        self.inner.stepped()

    # -- LoopReplica --

    @property
    def closing(self) -> bool:
        return self.inner.closing

    @closing.setter
    def closing(self, closing: bool) -> None:
        self.inner.closing = closing

    @property
    def losses(self) -> NamedLosses:
        return self.inner.losses

    def batch_over(self) -> bool:
        return self.inner.batch_over()

    @property
    def in_block(self) -> bool:
        return self.inner.in_block

    def load(self, values: Tensors) -> None:
        self.inner.load(values)

    def holding(self, values: Tensors | None) -> AbstractContextManager[None]:
        return self.inner.holding(values)


if TYPE_CHECKING:

    def _has_all_protocols(
        replica: ModuleReplica | ReplicaWrapper, student: StudentReplica | ThinnedStudent
    ) -> tuple[
        GradientReplica, PartialStepReplica, CommonReplica, ServedReplica, LoopReplica, Student
    ]:
        """Only for mypy: every replica here fulfils the protocols of `core`."""
        return replica, replica, replica, replica, replica, student
