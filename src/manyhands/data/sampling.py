"""Sampling: the order, the batches and the dropped rest that a user's DataLoader asks for.

    shuffle=True                 the plan's split=shuffled
    shuffle=False                the plan's split=ordered
    any other sampler            its own order: each epoch is drawn once, and N ranks share it
    a batch sampler              its own batches: at each step every rank computes the next one
    drop_last=True               an incomplete last step of the epoch is left out

All ranks draw with the same random numbers, those of (seed, epoch), so that each knows the whole
order without an exchange. `agree` compares what they drew: a sampler that looks at its rank, or
draws from a source that nobody seeded, is refused.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from manyhands.errors import TaskError
from manyhands.split.data import epoch_seed

Agree = Callable[[int, str], bool]  # (epoch, digest of what this rank drew) -> the others' is equal
RandomState = tuple[Any, Any, Tensor]  # of python, numpy and torch
ENDLESS = 50  # times as many draws as there are samples: such a sampler never ends
OWN_LOADERS = (DataLoader.__iter__,)


@dataclass(frozen=True)
class Sampling:
    """What a DataLoader says about the order of its samples; other data says nothing."""

    sampler: Any = None  # draws indices in an order of its own
    batch_sampler: Any = None  # draws lists of indices
    in_order: bool = False  # shuffle=False
    drop_last: bool = False
    batch: int | None = None

    @property
    def own(self) -> Any:
        """The sampler or batch sampler that gives the order; None: the plan's split does."""
        return self.sampler if self.batch_sampler is None else self.batch_sampler


def sampling_of(loader: DataLoader[Any], what: str) -> Sampling:
    """How `loader` draws its samples, or an error where ranks cannot share it."""
    kind = type(loader).__name__
    if type(loader).__iter__ not in OWN_LOADERS and kind != "StatefulDataLoader":
        raise TaskError(
            f"{what} is a {kind}, which iterates in a way of its own that ranks cannot share; give "
            "a plain torch DataLoader, or the Dataset"
        )
    if loader.batch_sampler is None:
        raise TaskError(
            f"{what} is a DataLoader with batch_size=None, whose dataset gives whole batches; give "
            "single samples and a batch size, so that they can be divided over ranks"
        )
    if isinstance(loader.dataset, IterableDataset):
        return Sampling(drop_last=loader.drop_last, batch=loader.batch_size)
    if type(loader.batch_sampler) is not BatchSampler:
        return Sampling(batch_sampler=loader.batch_sampler)
    drawn: Any = loader.batch_sampler.sampler
    if isinstance(drawn, DistributedSampler) and drawn.num_replicas > 1:
        raise TaskError(
            f"{what} has a DistributedSampler, which would divide the data over ranks a second "
            "time; leave it out (shuffle=True), the plan divides the data"
        )
    given = loader.batch_sampler  # the loader's own sizes are unset where it was given
    common = {"drop_last": given.drop_last, "batch": given.batch_size}
    if isinstance(drawn, SequentialSampler):
        return Sampling(in_order=True, **common)  # type: ignore[arg-type]
    plain = type(drawn) is RandomSampler and drawn.generator is None and not drawn.replacement
    if plain and drawn.num_samples == len(loader.dataset):  # type: ignore[arg-type]
        return Sampling(**common)  # type: ignore[arg-type]
    return Sampling(sampler=drawn, **common)  # type: ignore[arg-type]


class SamplerDraws:
    """Orders drawn from a sampler or batch sampler, one draw an epoch, in the order of epochs, as
    one process would: a resumed run makes the draws of the epochs before it again."""

    def __init__(self, sampling: Sampling, samples: int, seed: int, agree: Agree):
        self._sampling, self._samples, self._seed, self._agree = sampling, samples, seed, agree
        self._drawn = 0  # epochs
        self._recent: dict[int, tuple[Tensor, list[int]]] = {}
        self._length: int | None = None

    def order(self, epoch: int) -> Tensor:
        """The indices of an epoch."""
        return self._draw(epoch)[0]

    def sizes(self, epoch: int) -> list[int]:
        """Of a batch sampler: how many samples each batch of an epoch has."""
        return self._draw(epoch)[1]

    def _draw(self, epoch: int) -> tuple[Tensor, list[int]]:
        while self._drawn <= epoch:
            drawn, sizes = self._one_epoch(self._drawn)
            self._recent = {k: v for k, v in self._recent.items() if k >= self._drawn - 1}
            self._recent[self._drawn] = drawn, sizes
            self._drawn += 1
        drawn, sizes = self._recent[epoch]
        digest = hashlib.sha256(drawn.numpy().tobytes() + str(sizes).encode()).hexdigest()
        if not self._agree(epoch, digest):
            raise TaskError(
                f"{self._name} gives another order on this rank than on the others: it looks at "
                "its rank, or draws from random numbers that nobody seeded; draw from torch, "
                "numpy or random, whose seeds are alike on all ranks, and let the plan divide the "
                "samples"
            )
        return drawn, sizes

    def _one_epoch(self, epoch: int) -> tuple[Tensor, list[int]]:
        own, by_batch = self._sampling.own, self._sampling.batch_sampler is not None
        for part in (own, getattr(own, "sampler", None)):
            set_epoch = getattr(part, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
        with _seeded(epoch_seed(self._seed, epoch)):
            batches = [_indices(b) for b in self._ended(own)] if by_batch else []
            drawn = list(itertools.chain(*batches)) if by_batch else _indices(self._ended(own))
        if not drawn:
            raise TaskError(f"{self._name} drew no sample in epoch {epoch + 1}; one is needed")
        if not by_batch and self._length not in (None, len(drawn)):
            raise TaskError(
                f"{self._name} drew {len(drawn)} samples in epoch {epoch + 1}, {self._length} "
                "before; epochs of equal length are needed: fix its number of samples"
            )
        self._length = len(drawn)
        order = torch.tensor(drawn, dtype=torch.long)
        if int(order.min()) < -self._samples or int(order.max()) >= self._samples:
            raise TaskError(
                f"{self._name} drew index {int(order.max())}, but the data set has "
                f"{self._samples} samples; indices 0 to {self._samples - 1} are needed"
            )
        return torch.where(order < 0, order + self._samples, order), list(map(len, batches))

    def _ended(self, own: Iterable[Any]) -> list[Any]:
        """What one iteration gives, unless it never ends."""
        limit = max(1_000_000, ENDLESS * self._samples)
        drawn = list(itertools.islice(iter(own), limit + 1))
        if len(drawn) > limit:
            raise TaskError(
                f"{self._name} has no end: {limit:,} draws from {self._samples} samples; draw one "
                "epoch at a time"
            )
        return drawn

    @property
    def _name(self) -> str:
        return f"the DataLoader's {type(self._sampling.own).__name__}"


def _indices(drawn: Iterable[Any]) -> list[int]:
    try:
        return [i.__index__() for i in drawn]
    except (AttributeError, TypeError):
        raise TaskError(
            "the DataLoader's sampler draws keys that are no whole numbers; a sampler of indices "
            "is needed"
        ) from None


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The same random numbers on every rank, inside; those of the training are as before, after."""
    with RandomNumbers(seed).drawn():
        yield


class RandomNumbers:
    """Random numbers of their own for python, numpy and torch, from a seed on."""

    def __init__(self, seed: int):
        self._seed = seed
        self._state: RandomState | None = None

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """What is drawn inside goes on with these numbers; those outside stay as they are."""
        before = _random_state()
        if self._state is None:
            random.seed(self._seed)
            np.random.seed(self._seed % 2**32)
            torch.default_generator.manual_seed(self._seed)  # of the CPU: those of GPUs stay
        else:
            _set_random_state(self._state)
        try:
            yield
        finally:
            self._state = _random_state()
            _set_random_state(before)


def _random_state() -> RandomState:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_random_state(state: RandomState) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
