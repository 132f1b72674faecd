"""Streams over ranks: all ranks read the same samples, or the stream is refused."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from manyhands.core import Position
from manyhands.data.batches import StreamedBatches
from manyhands.data.row_digest import row_digest
from manyhands.data.sources import StreamSource
from manyhands.errors import TaskError
from manyhands.split.data import DataSplit, StepSamples

N = 23
START = Position()


def streamed(
    data: Any, rank: int, size: int, at: Position = START, batch: int = 3, **options: Any
) -> StreamedBatches:
    def keep(n: int) -> StepSamples:
        return DataSplit(n, n, batch, rank, size).step_samples(START)

    stream = StreamSource(data, torch.device("cpu"))
    return StreamedBatches(stream, keep, batch * size, at, **options)


def read(batches: StreamedBatches, epochs: int = 1) -> list[Any]:
    """What a rank gets to the end of `epochs`."""
    got = []
    while batches.position.epoch < epochs:
        batch = batches.next()
        if batch.count:
            got.append(batch.values)
    return got


class Drawn(IterableDataset[dict[str, Any]]):
    """Samples in an order that is drawn as they are read, with noise."""

    def __init__(self, numbers: Callable[[], Any] = lambda: random):
        self.numbers = numbers

    def __iter__(self) -> Iterator[dict[str, Any]]:
        waiting = list(range(N))
        while waiting:
            i = waiting.pop(self.numbers().randrange(len(waiting)))
            yield {"i": i, "noise": torch.rand(2) + np.random.rand(), "name": f"line {i}"}


class Compared:
    """Ranks of one process that compare what they read; each has random numbers of its own."""

    def __init__(self) -> None:
        self.said: dict[Position, str] = {}

    def agree(self, at: Position, digest: str) -> bool:
        return self.said.setdefault(at, digest) == digest

    def read(self, data: Any, rank: int) -> list[Any]:
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        return read(streamed(data, rank, 2, agree=self.agree), epochs=2)


def test_a_stream_that_divides_itself_over_ranks_is_refused() -> None:
    class Divided(IterableDataset[int]):
        def __init__(self, rank: int):
            self.rank = rank

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.rank, N, 2))

    ranks = Compared()
    ranks.read(Divided(0), 0)
    with pytest.raises(
        TaskError,
        match=r"the training stream gives other samples on this rank than on the others in epoch "
        r"1, but every rank reads the whole stream .* \(RANK, WORLD_SIZE\).* do not divide it in "
        r"the dataset, the run does that",
    ):
        ranks.read(Divided(1), 1)


def test_a_stream_of_unseeded_random_numbers_is_refused() -> None:
    ranks = Compared()
    ranks.read(Drawn(random.SystemRandom), 0)
    with pytest.raises(TaskError, match="or draws from random numbers that nobody seeded"):
        ranks.read(Drawn(random.SystemRandom), 1)


def test_a_stream_that_draws_its_order_is_shared_and_leaves_random_numbers_alone() -> None:
    ranks = Compared()
    got = [ranks.read(Drawn(), rank) for rank in range(2)]
    assert set(ranks.said) == {Position(0, 0, 0), Position(1, 0, 4)}, "once an epoch"
    seen = [int(i) for rank in got for values in rank for i in values["i"]]
    assert sorted(seen) == sorted([*range(N), *range(N)]), "no sample is lost or used twice"
    torch.manual_seed(1)
    after, here = torch.rand(1), random.Random(1).random()
    ranks.read(Drawn(), 1)
    assert torch.equal(torch.rand(1), after) and random.random() == here
    one = read(streamed(Drawn(), 0, 1, batch=6))
    assert torch.equal(one[0]["i"][:3], got[0][0]["i"]), "as one process reads it"
    assert torch.equal(one[0]["noise"][3:], got[1][0]["noise"])
    assert read(streamed(Drawn(), 0, 1, seed=1))[0]["i"].tolist() != one[0]["i"].tolist()[:3]


def test_a_resumed_stream_draws_what_it_would_have_drawn() -> None:
    whole = streamed(Drawn(), 0, 1)
    for _ in range(2):
        whole.next()
    rest = streamed(Drawn(), 0, 1, whole.position)
    assert torch.equal(rest.next().values["noise"], whole.next().values["noise"])


@dataclasses.dataclass
class Pair:
    x: Any


class Opaque:
    pass


def test_the_digest_of_rows_follows_their_values_and_not_their_objects() -> None:
    rows: list[Any] = [
        torch.tensor([1.0, 2.0]),
        torch.tensor([1.0, 3.0]),
        torch.tensor([[1.0, 2.0]]),
        torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        torch.tensor(1.0),
        torch.zeros(0),
        torch.zeros(2).to_sparse(),
        np.array([1, 2]),
        np.array(["a", None], dtype=object),
        np.array(["b", None], dtype=object),
        np.float32(1),
        {"a": 1, "b": ("c", None)},
        {"a": 1, "b": ("d", None)},
        [1, [2]],
        [[1], 2],
        Pair([1]),
        Pair([2]),
        b"text",
        Opaque(),
    ]
    digests = [row_digest([row]) for row in rows]
    assert len(set(digests)) == len(rows)
    assert [row_digest([copy.deepcopy(row)]) for row in rows] == digests
