"""Line search step: a replica's optimizer step that evaluates its batch again at other parameters.

    F(x) = sum_i n_i loss_i(x) / sum_i n_i      over the ranks i, each on its part of the batch
    grad F(x)                                   merged by the strategy, as in any other step

The strategy gives `evaluate`, which computes and merges both at the present parameters. Every
evaluation of a step sees the same samples in the same micro-batches (the batches are rewound), with
the same random numbers and the same buffers to begin with: dropout drops the same units, and
BatchNorm's running statistics move once a step, by the parameters that were taken. All ranks see
the same sums, so they take the same decisions.

Where a step takes all samples of the data set, the next one has the same loss: it goes on from the
gradient at which this one ended. Not where an evaluation draws random numbers or changes a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from manyhands.core import Tensors
from manyhands.errors import TaskError
from manyhands.replica import state
from manyhands.replica.lbfgs.lbfgs import LBFGS, NOISE_EPS
from manyhands.replica.module import ModuleReplica

REPEATED = 100 * NOISE_EPS  # how far two losses of one batch may be apart, in the same units


class RewoundBatches(Protocol):
    """Batches of which a step can be had more than once (`data.batches.IndexedBatches`)."""

    @property
    def total(self) -> int: ...
    def rewind(self) -> None: ...
    def pass_over(self) -> None: ...
    def peek(self) -> tuple[int, bool]: ...


class LineSearchStep:
    """The step of a replica whose optimizer is `LBFGS`.

    `complete`: samples of the data set, if a step of so many has all of them; 0: it never has.
    `agree(flag)`: whether the flag holds on every rank. `drew()`: whether the gradient's own code
    has drawn random numbers and put them back since it was asked last.
    """

    def __init__(
        self,
        replica: ModuleReplica,
        stages: list[nn.Module],
        batches: RewoundBatches,
        complete: int,
        agree: Callable[[bool], bool],
        drew: Callable[[], bool],
    ):
        assert isinstance(replica.optimizer, LBFGS)
        self._replica, self._optimizer, self._batches = replica, replica.optimizer, batches
        self._stages, self._complete = stages, complete
        self._agree, self._drew = agree, drew
        self._repeats = False  # whether two evaluations of one batch were found to be alike

    def __call__(self, evaluate: Callable[[], Tensor]) -> Tensor:
        """One iteration; returns the mean loss at its start, over all ranks."""
        replica, optimizer, batches = self._replica, self._optimizer, self._batches
        batches.peek()
        complete = self._complete > 0 and batches.total == self._complete
        continued = complete and self._agree(optimizer.can_continue())
        if continued:
            batches.pass_over()
        first = Surroundings(self._stages, replica.device)
        evaluations = 0
        sums = replica.optimizer_step.reduction == "sum"

        def loss_and_gradient() -> float:
            nonlocal evaluations
            if evaluations or continued:
                batches.rewind()
                first.restore()
            evaluations += 1
            _ = replica.params  # says that they may have been moved: copies are gathered anew
            mean = float(evaluate())
            grads = replica.window.place(replica.update)
            replica.optimizer_step.normalise(grads, replica.unmerged_count())
            return mean * float(replica.count[0]) if sums else mean

        before = None if continued or self._repeats else loss_and_gradient()
        start = optimizer.step(loss_and_gradient, continued)
        if before is not None:
            self._check_repeats(before, start)
        changed = first.changed() or self._drew()
        if not (complete and self._agree(not changed)):
            optimizer.forget()
        replica.optimizer_step.next_rate()
        if sums:
            start /= max(1.0, float(replica.count[0]))
        return torch.tensor(start, dtype=torch.float64, device=replica.device)

    def _check_repeats(self, one: float, two: float) -> None:
        """A search compares losses of one batch: they must not depend on anything else."""
        eps = torch.finfo(next(iter(self._replica.params.values())).dtype).eps
        if abs(one - two) > REPEATED * eps * max(1.0, abs(one)):
            raise TaskError(
                f"two evaluations of one batch at the same parameters gave the losses {one:.9g} "
                f"and {two:.9g}, but the line search of LBFGS compares losses: something draws "
                "random numbers that are not torch's, numpy's or Python's own (a generator in the "
                "data set?), or the model keeps state outside its buffers; remove it, or use "
                "another optimizer"
            )
        self._repeats = True


class Surroundings:
    """What an evaluation may change beside parameters: random numbers and buffers, as they are
    now."""

    def __init__(self, modules: list[nn.Module], device: torch.device):
        self._device = device
        self._rng: Tensors = state.rng_state(device)
        self._buffers = [
            (owner, name, buffer, buffer.clone()) for owner, name, buffer in _buffers(modules)
        ]

    def changed(self) -> bool:
        now = state.rng_state(self._device)
        drawn = any(not torch.equal(now[k], v) for k, v in self._rng.items())
        return drawn or any(
            owner[name] is not buffer or not torch.equal(buffer, value)
            for owner, name, buffer, value in self._buffers
        )

    def restore(self) -> None:
        state.load_rng(self._rng, self._device)
        for owner, name, buffer, value in self._buffers:
            owner[name] = buffer
            # by value: BatchNorm's kernels leave the version of its statistics as it was
            if not torch.equal(buffer, value):
                with torch.no_grad():
                    buffer.copy_(value)


def _buffers(modules: list[nn.Module]) -> Iterator[tuple[dict[str, Tensor | None], str, Tensor]]:
    for part in (part for module in modules for part in module.modules()):
        for name, buffer in part._buffers.items():
            if buffer is not None:
                yield part._buffers, name, buffer
