"""Data split: which samples each rank computes at each step.

An epoch is an order of indices, the same on every rank (it follows from seed and epoch). A step
uses the next `global_batch` of them; each rank computes a near-equal, contiguous range of that. So
the union over ranks is exactly one process's batch, every sample is used once per epoch without
padding or duplicates, and the position (epoch, offset) means the same for any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
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

    def step_samples(self, at: Position) -> StepSamples:
        total = min(self.global_batch, self.samples - at.offset)
        # First into micro-batches, then over ranks: every rank has the same number of them, and
        # the union of the ranks' k-th ones is the k-th of one process, as BatchNorm over ranks
        # needs it.
        rounds = max(1, math.ceil(math.ceil(total / self.size) / self.micro))
        micros = []
        for block in (rank_range(total, k, rounds) for k in range(rounds)):
            mine, start = rank_range(len(block), self.rank, self.size), at.offset + block.start
            micros.append(range(start + mine.start, start + mine.stop))
        end = at.offset + total
        after = replace(at, offset=end, steps=at.steps + 1)
        if end >= self.samples:
            after = Position(at.epoch + 1, 0, at.steps + 1)
        return StepSamples(at, tuple(micros), after)

    def steps_from(self, at: Position) -> Iterator[StepSamples]:
        while True:
            step = self.step_samples(at)
            yield step
            at = step.after

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.global_batch)


def _generator(seed: int, epoch: int) -> torch.Generator:
    # odd multipliers: distinct (seed, epoch) pairs give distinct generator seeds
    return torch.Generator().manual_seed((seed * 1_000_003 + epoch * 7_919) % (2**63))
