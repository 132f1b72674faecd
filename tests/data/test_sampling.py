"""A DataLoader's sampler, batch sampler and drop_last are honoured, or refused with a sentence."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from manyhands.data.sampling import SamplerDraws, sampling_of
from manyhands.data.sources import DatasetSource, TensorSource, source
from manyhands.errors import TaskError

N = 10
ROWS = TensorDataset(torch.arange(N))
CPU = torch.device("cpu")


def loader(**given: Any) -> DataLoader[Any]:
    return DataLoader(ROWS, **{"batch_size": 4, **given})


def draws(own: Any, agree: Any = lambda epoch, digest: True, seed: int = 0) -> SamplerDraws:
    by_batch = {"batch_sampler": own} if isinstance(own, Buckets) else {"sampler": own}
    made = DataLoader(ROWS, **by_batch)  # type: ignore[arg-type]
    return SamplerDraws(sampling_of(made, "train"), N, seed, agree)


class Buckets(Sampler[list[int]]):
    """Batches of uneven sizes, other ones in every epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(N).tolist()
        cut = 3 + self.epoch % 2
        return iter([order[:cut], order[cut : cut + 1], order[cut + 1 :]])


@pytest.mark.parametrize(
    ("given", "own", "in_order", "drop_last"),
    [
        ({"shuffle": True}, None, False, False),
        ({"shuffle": False}, None, True, False),
        ({"shuffle": True, "drop_last": True}, None, False, True),
        ({"shuffle": True, "generator": torch.Generator()}, RandomSampler, False, False),
        ({"sampler": RandomSampler(ROWS, replacement=True)}, RandomSampler, False, False),
        ({"sampler": RandomSampler(ROWS, num_samples=3)}, RandomSampler, False, False),
        ({"sampler": WeightedRandomSampler([1.0] * N, N)}, WeightedRandomSampler, False, False),
        ({"batch_sampler": Buckets(), "batch_size": 1}, Buckets, False, False),
    ],
)
def test_what_a_loader_asks_for(given: Any, own: Any, in_order: bool, drop_last: bool) -> None:
    found = sampling_of(loader(**given), "train")
    assert (None if found.own is None else type(found.own)) is own
    assert (found.in_order, found.drop_last) == (in_order, drop_last)


def test_every_epoch_is_drawn_anew_from_the_seed_and_leaves_random_numbers_alone() -> None:
    before = torch.get_rng_state(), random.getstate()
    one, other = (draws(WeightedRandomSampler([1.0] * N, 30)) for _ in range(2))
    first = [one.order(e).tolist() for e in range(3)]
    assert first[0] != first[1] and len(first[0]) == 30
    assert other.order(2).tolist() == first[2], "a resumed run draws what it would have drawn"
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert draws(WeightedRandomSampler([1.0] * N, 30), seed=1).order(0).tolist() != first[0]


def test_a_generator_of_the_samplers_own_goes_on_from_epoch_to_epoch_also_after_a_resume() -> None:
    def made() -> SamplerDraws:
        return draws(RandomSampler(ROWS, generator=torch.Generator().manual_seed(5)))

    sampler = RandomSampler(ROWS, generator=torch.Generator().manual_seed(5))
    expected = [list(sampler) for _ in range(3)]
    assert [made().order(e).tolist() for e in range(3)] == expected


def test_batches_of_a_batch_sampler_may_differ_from_epoch_to_epoch() -> None:
    made = draws(Buckets())
    assert made.sizes(0) == [3, 1, 6] and made.sizes(1) == [4, 1, 5]
    assert sorted(made.order(1).tolist()) == list(range(N))


def test_a_sampler_that_gives_another_order_on_another_rank_is_refused() -> None:
    said: dict[int, str] = {}

    def agree(epoch: int, digest: str) -> bool:
        return said.setdefault(epoch, digest) == digest

    class Unseeded(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(random.SystemRandom().sample(range(N), N))

    draws(Unseeded(), agree).order(0)
    with pytest.raises(TaskError, match=r"Unseeded gives another order on this rank than on"):
        for _ in range(9):  # one in 10! draws is equal
            draws(Unseeded(), agree).order(0)


@pytest.mark.parametrize(
    ("drawn", "says"),
    [
        (itertools.count, "has no end"),
        (lambda: iter([]), "drew no sample in epoch 1"),
        (lambda: iter([3, N]), f"drew index {N}, but the data set has {N} samples"),
        (lambda: iter(["a"]), "keys that are no whole numbers"),
    ],
)
def test_samplers_that_no_rank_could_share_are_refused(drawn: Any, says: str) -> None:
    class Odd(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return (i % N if drawn is itertools.count else i for i in drawn())

    with pytest.raises(TaskError, match=says):
        draws(Odd()).order(0)


def test_epochs_of_another_length_are_refused() -> None:
    class Growing(Sampler[int]):
        length = 2

        def __iter__(self) -> Iterator[int]:
            self.length += 1
            return iter(range(self.length))

    made = draws(Growing())
    made.order(0)
    with pytest.raises(TaskError, match="drew 4 samples in epoch 2, 3 before"):
        made.order(1)


def test_loaders_that_ranks_cannot_share_are_refused() -> None:
    class Own(DataLoader[Any]):
        def __iter__(self) -> Any:
            return iter([1])

    with pytest.raises(TaskError, match="is a Own, which iterates in a way of its own"):
        sampling_of(Own(ROWS), "Task.train")
    with pytest.raises(TaskError, match="batch_size=None"):
        sampling_of(loader(batch_size=None), "Task.train")
    twice = DistributedSampler(ROWS, num_replicas=2, rank=1)
    with pytest.raises(TaskError, match="DistributedSampler, which would divide the data"):
        sampling_of(loader(sampler=twice), "Task.train")


def test_a_tensor_dataset_with_code_of_its_own_keeps_it() -> None:
    class Shifted(TensorDataset):
        def __getitem__(self, i: Any) -> tuple[Tensor, ...]:
            return tuple(t + 100 for t in super().__getitem__(i))

    assert isinstance(source(ROWS, CPU, "t"), TensorSource)
    shifted = source(Shifted(torch.arange(N)), CPU, "t")
    assert isinstance(shifted, DatasetSource)
    assert shifted.fetch(torch.tensor([1]))[0].tolist() == [101]
    collated = source(loader(collate_fn=lambda rows: "mine"), CPU, "t")
    assert isinstance(collated, DatasetSource) and collated.fetch(torch.tensor([1])) == "mine"


def test_a_batch_sampler_of_torchs_own_is_a_sampler_with_a_batch_size() -> None:
    given = BatchSampler(SequentialSampler(ROWS), 4, True)
    found = sampling_of(DataLoader(ROWS, batch_sampler=given), "t")
    assert found.batch_sampler is None and found.in_order
