"""Data split: which samples each rank computes at each step.

An epoch is an order of indices, the same on every rank (it follows from seed and epoch). A step
uses the next `global_batch` of them; each rank computes a near-equal, contiguous range of that. So
the union over ranks is exactly one process's batch, every sample is used once per epoch without
padding or duplicates, and the position (epoch, offset) means the same for any number of ranks.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from manyhands.core import Position

Order = Callable[[int, int, int], Tensor]  # (samples, seed, epoch) -> the indices of that epoch


def shuffled(samples: int, seed: int, epoch: int) -> Tensor:
    """Without replacement: a fresh permutation each epoch."""
    return torch.randperm(samples, generator=_generator(seed, epoch))


def sampled(samples: int, seed: int, epoch: int) -> Tensor:
    """With replacement: as many independent draws as there are samples."""
    return torch.randint(samples, (samples,), generator=_generator(seed, epoch))


def ordered(samples: int, seed: int, epoch: int) -> Tensor:
    """As stored: what streams and evaluation use."""
    return torch.arange(samples)


# by_feature: samples are shuffled, and each rank has some of the columns (`split.features`)
SPLITS: dict[str, Order] = {
    "shuffled": shuffled,
    "sampled": sampled,
    "ordered": ordered,
    "by_feature": shuffled,
}


def rank_range(total: int, rank: int, size: int) -> range:
    """The near-equal contiguous range of `range(total)` that `rank` owns; the first ranks own one
    element more where `total` does not divide."""
    base, extra = divmod(total, size)
    start = rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))


def share_range(total: int, rank: int, weights: Sequence[float]) -> range:
    """The contiguous range of `range(total)` that `rank` owns where ranks own by weight: each at
    least one element where there are enough, and the rest in proportion."""
    size, whole = len(weights), math.fsum(weights)
    if total < size:
        return rank_range(total, rank, size)

    def start(r: int) -> int:
        before = math.fsum(weights[:r]) / whole  # exactly 1.0 for r = size
        return r + math.floor((total - size) * before + 0.5)

    return range(start(rank), start(rank + 1))


class ShareSchedule:
    """Weights of ranks that change at known steps. A step's weights do not depend on when it is
    asked for: loaders that read early and the loop that comes after them split it alike."""

    def __init__(self) -> None:
        self._changes: list[tuple[int, tuple[float, ...]]] = []

    def change(self, step: int, weights: Sequence[float]) -> None:
        """From `step` on, which nobody has asked for yet."""
        self._changes = [(s, w) for s, w in self._changes if s < step]
        self._changes.append((step, tuple(weights)))

    def at(self, step: int) -> tuple[float, ...] | None:
        """None: all alike."""
        return next((w for s, w in reversed(self._changes) if s <= step), None)


@dataclass(frozen=True)
class StepSamples:
    """One rank's samples of one step: offsets into the epoch's order, in micro-batches."""

    position: Position  # before this step
    micros: tuple[range, ...]  # never empty: a rank without data has one empty range
    after: Position


@dataclass(frozen=True)
class DataSplit:
    """Data split: the offsets of the epoch's order that this rank computes at every step."""

    samples: int
    global_batch: int
    micro: int  # samples of a micro-batch at the most
    rank: int
    size: int
    shares: ShareSchedule | None = None  # None: near-equal ranges

    def step_samples(self, at: Position) -> StepSamples:
        total = self.total(at)
        weights = None if self.shares is None else self.shares.at(at.steps)
        # First into micro-batches, then over ranks: every rank has the same number of them, and
        # the union of the ranks' k-th ones is the k-th of one process, as BatchNorm over ranks
        # needs it.
        rounds = max(1, math.ceil(math.ceil(total / self.size) / self.micro))
        micros = []
        for block in (rank_range(total, k, rounds) for k in range(rounds)):
            mine, start = self._range(len(block), weights), at.offset + block.start
            micros.append(range(start + mine.start, start + mine.stop))
        end = at.offset + total
        after = replace(at, offset=end, steps=at.steps + 1)
        if end >= self.samples:
            after = Position(at.epoch + 1, 0, at.steps + 1)
        return StepSamples(at, tuple(micros), after)

    def _range(self, total: int, weights: Sequence[float] | None) -> range:
        if weights is None:
            return rank_range(total, self.rank, self.size)
        return share_range(total, self.rank, weights)

    def steps_from(self, at: Position) -> Iterator[StepSamples]:
        while True:
            step = self.step_samples(at)
            yield step
            at = step.after

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.global_batch)

    def total(self, at: Position) -> int:
        """Samples of a step over all ranks."""
        return min(self.global_batch, self.samples - at.offset)


@dataclass(frozen=True)
class BatchSplit:
    """Data split by the batches of a batch sampler: at each step rank r computes the r-th of the
    next `size` batches; `accumulate` times so many for micro-batches that add up to a step.

    `union`: this one rank computes the batches of so many ranks as one (`verify`). A rank without
    a batch at the end of an epoch has empty micro-batches.
    """

    sizes: Callable[[int], Sequence[int]]  # epoch -> samples of each batch
    rank: int
    size: int
    accumulate: int = 1
    micros: int = 1  # pieces of one batch
    union: int = 1

    @property
    def samples(self) -> int:
        """Of the first epoch: a batch sampler may give more or fewer in another."""
        return sum(self.sizes(0))

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.sizes(0)) // self._batches)

    @property
    def _batches(self) -> int:
        """Of one step, over all ranks."""
        return self.accumulate * self.size * self.union

    def total(self, at: Position) -> int:
        _, starts, first = self._where(at)
        return starts[min(first + self._batches, len(starts) - 1)] - starts[first]

    def step_samples(self, at: Position) -> StepSamples:
        number, starts, first = self._where(at)
        micros = []
        for turn in range(self.accumulate):
            mine = first + (turn * self.size + self.rank) * self.union
            start, stop = (starts[min(i, number)] for i in (mine, mine + self.union))
            pieces = (rank_range(stop - start, k, self.micros) for k in range(self.micros))
            micros += [range(start + p.start, start + p.stop) for p in pieces]
        last = first + self._batches >= number
        end = starts[min(first + self._batches, number)]
        after = replace(at, offset=end, steps=at.steps + 1)
        return StepSamples(
            at, tuple(micros), Position(at.epoch + 1, 0, at.steps + 1) if last else after
        )

    def steps_from(self, at: Position) -> Iterator[StepSamples]:
        while True:
            step = self.step_samples(at)
            yield step
            at = step.after

    def _where(self, at: Position) -> tuple[int, list[int], int]:
        """Number of the epoch's batches, where each begins, and which of them is next."""
        starts = [0, *itertools.accumulate(self.sizes(at.epoch))]
        return len(starts) - 1, starts, bisect.bisect_left(starts, at.offset)


def epoch_seed(seed: int, epoch: int) -> int:
    """Odd multipliers: distinct (seed, epoch) pairs give distinct seeds of generators."""
    return (seed * 1_000_003 + epoch * 7_919) % (2**63)


def _generator(seed: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(epoch_seed(seed, epoch))
