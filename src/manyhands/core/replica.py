"""Replica: one copy of the model, as strategies and the training loop see it.

    Replica               what every strategy may use
    GradientReplica       + gradients, for strategies that read or change them
    PartialStepReplica    + a step that updates only this rank's slice, or searches along a line:
                          for `all_reduce`
    CommonReplica         + parameters that all ranks of a host have in common, for `hogwild`
    ServedReplica         + a gradient for the server, which makes the step
    Student               + distillation, for `ensemble`
    LoopReplica           + what the training loop needs

`replica.module.ModuleReplica` implements all of them but `Student`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from manyhands.records import Tensors

OnReady = Callable[[Tensors], None]  # gets one finished bucket of the gradient, by its name
# makes a step with `evaluate`, which computes and merges the gradient at the present parameters and
# returns the mean loss of all ranks' samples; returns that at the start of the step
LineSearch = Callable[[Callable[[], Tensor]], Tensor]


class Replica(Protocol):
    """One copy of the model with its optimizer and its part of the data.

    It knows no other replica. Every strategy may use what is here. A replica spread over several
    ranks (tensor=, pipe=, shard=) looks the same. `step` without any samples changes nothing, so
    ranks may take steps of their own however uneven their data.
    """

    @property
    def params(self) -> Tensors:
        """All parameters, as few long vectors; a strategy changes them in place."""
        ...

    @property
    def count(self) -> Tensor:
        """Element 0: samples behind the gradient. Others: how many ranks used each parameter."""
        ...

    @property
    def own_count(self) -> int:
        """Samples of this rank behind the last loss, before any merge."""
        ...

    @property
    def lr(self) -> float:
        """Learning rate of the optimizer's first parameter group, now."""
        ...

    @property
    def moments(self) -> Tensors:
        """Optimizer state of a parameter's shape (momentum, Adam's averages), to change in place.

        The names are the same on every rank.
        """
        ...

    def reset_moments(self) -> None:
        """Drop all optimizer state, so that the next step starts from none."""
        ...

    def steps(self, most: int) -> Iterator[int]:
        """0, 1, ... for a block of at most `most` local steps.

        A block ends early where the run ends, on the same step on every rank.
        """
        ...

    def backward(self, on_ready: OnReady | None = None) -> Tensor:
        """Take the next batch, run forward and backward; returns the mean loss.

        `on_ready` gets each bucket of the gradient as soon as it is final, in the same order on
        every rank, and may all-reduce it in place.
        """
        ...

    def step(self) -> None:
        """One step of optimizer and schedule, by the gradient sum divided by `count[0]`."""
        ...


class GradientReplica(Replica, Protocol):
    """A replica for strategies that read or change the gradient between `backward` and `step`.

        grads = scale * mean gradient of the count[0] samples

    Up to a factor that is the same on all ranks, `grads` is a SUM over samples. Summing `grads` and
    `count` over ranks and then calling `step`, which divides once, gives the gradient of the union
    of all batches, however uneven they are.
    """

    @property
    def grads(self) -> Tensors:
        """The gradient, in vectors like `params`."""
        ...

    @property
    def scale(self) -> Tensor:
        """What to multiply a term by before adding it to `grads`."""
        ...


class PartialStepReplica(Replica, Protocol):
    """A replica whose `step` may update only the slice of `params` that this rank owns, and whose
    optimizer may evaluate a batch several times."""

    @property
    def updates_slice(self) -> bool:
        """Whether it does; the strategy then gathers `params` after `step`."""
        ...

    def square_norm(self) -> Tensor | None:
        """Squared gradient norm of the owned slice, to be summed over ranks before `step`.

        None where `step` does not clip or updates everything.
        """
        ...

    @property
    def line_search(self) -> LineSearch | None:
        """Makes the step where the optimizer evaluates a batch several times; None: `step` does."""
        ...


class CommonReplica(Replica, Protocol):
    """A replica whose `params` may be one vector in memory that all ranks of a host share."""

    @property
    def in_common(self) -> bool:
        """Whether they are; a `step` of one rank then changes the parameters of all."""
        ...


class ServedReplica(Replica, Protocol):
    """A replica for strategies over a `Store`, where the server makes the optimizer step."""

    def gradient(self) -> Tensors:
        """Mean gradient of the last batch, clipped as `step` would clip it."""
        ...

    def stepped(self) -> None:
        """Note that the server made this step: only the learning-rate schedule goes on."""
        ...


class Student(Replica, Protocol):
    """A replica that can also learn from the outputs of other models (distillation)."""

    def distil(self, teachers: Sequence[Tensors], weight: float, share: float) -> Tensor:
        """As `backward`, with the teachers' mean output beside the labels.

        `teachers` are `params` of other models. For a `share` of the samples the loss is `weight`
        times its own plus (1 - weight) times the distance from the teachers' mean output.
        """
        ...


class ByName(Protocol):
    """Means by the name of an optimizer, since the last exchange of status."""

    means: dict[str, float]  # over all ranks, as of the last `read`

    def take(self) -> Tensor:
        """Sums of this rank since the last call, to be summed over ranks for `read`."""
        ...

    def read(self, sums: Sequence[float]) -> None: ...


class LoopReplica(Replica, Protocol):
    """What the training loop needs of a replica beside what strategies need."""

    closing: bool  # the run is over: further steps only end a block and do not move the schedule

    @property
    def in_block(self) -> bool:
        """Whether a strategy is between two steps of `steps`."""
        ...

    @property
    def losses(self) -> ByName:
        """The mean loss of each optimizer, where several step apart."""
        ...

    def batch_over(self) -> bool:
        """After a round: whether the last batch has no further optimizer step. Where optimizers are
        named it may have several, each a round of a strategy that merges every step; a block of
        local steps always takes them all. The same on every rank."""
        ...

    def load(self, values: Tensors) -> None:
        """Copy `values` into `params`."""
        ...

    def holding(self, values: Tensors | None) -> AbstractContextManager[None]:
        """Have `values` as `params` inside the `with` block; None: keep the own ones."""
        ...
